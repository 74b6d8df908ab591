--- @include "lib/queue"
-- How fast a lane drains, and when a refused call should come back.
local DRAIN_WINDOW_MS, DRAIN_SETTLING_MS, FIRST_APPOINTMENT_MS = 10000, 1000, 1000
local APPOINTMENT_MAX_MS = 60000

-- Blocks given back per window, now: a sliding window of two halves.
local function drain_of(drain)
  local age = meta.clock - drain.start
  if age >= 2 * DRAIN_WINDOW_MS then return 0 end
  if age >= DRAIN_WINDOW_MS then
    return math.floor(drain.current * (2 * DRAIN_WINDOW_MS - age) / DRAIN_WINDOW_MS)
  end
  if drain.previous < 0 then
    return math.floor(drain.current * DRAIN_WINDOW_MS / math.max(age, DRAIN_SETTLING_MS))
  end
  return drain.current + math.floor(drain.previous * (DRAIN_WINDOW_MS - age) / DRAIN_WINDOW_MS)
end

local function drained(pool, blocks)
  local drain = fetch(drains, pool) or {start = meta.clock, current = 0, previous = -1, last = 0}
  local age = meta.clock - drain.start
  if age >= DRAIN_WINDOW_MS then
    local adjacent = age < 2 * DRAIN_WINDOW_MS
    drain.previous = adjacent and drain.current or -1
    drain.start = adjacent and drain.start + DRAIN_WINDOW_MS or meta.clock
    drain.current = 0
  end
  drain.current = drain.current + blocks
  drain.last = drain_of(drain)
  store(drains, pool, drain)
end

local function lane_drain(lane)
  local total = 0
  for _, pool in ipairs(config.pools[lane]) do
    local drain = fetch(drains, pool)
    if drain then
      local now = drain_of(drain)
      total = total + (now > 0 and now or drain.last)
    end
  end
  return total
end

-- Milliseconds until the work ahead of this call, which is not counted as waiting yet, has drained.
local function predicted_wait(call, drain)
  local ahead = 0
  for _, class in ipairs(config.classes) do
    if class == call.class then break end
    ahead = ahead + line_of(call.lane, class).blocks
  end
  local line, flow = line_of(call.lane, call.class), flow_of(call)
  local weight, weights = flow.weight, line.weights
  if flow.waiting == 0 then
    weight = key_of(call.key).weight
    weights = weights + weight
  end
  local own = call.blocks + flow.blocks
  local ahead_in_class = math.min(call.blocks + line.blocks, ceil_div(own * weights, weight))
  return math.floor((ahead + ahead_in_class) * DRAIN_WINDOW_MS / drain)
end

local function wait_told(call)
  local drain = lane_drain(call.lane)
  if drain == 0 then return FIRST_APPOINTMENT_MS end
  return predicted_wait(call, drain)
end

-- Milliseconds until a refused call should come back; it takes a place in the lane's book.
local function appointment(call)
  local drain = lane_drain(call.lane)
  if drain == 0 then return FIRST_APPOINTMENT_MS end
  local lane = lane_of(call.lane)
  local earliest = meta.clock + predicted_wait(call, drain)
  local due = math.max(lane.book, earliest) + math.floor(call.blocks * DRAIN_WINDOW_MS / drain)
  lane.book = math.min(due, meta.clock + APPOINTMENT_MAX_MS)
  store(lane_rows, call.lane, lane)
  return lane.book - meta.clock
end
