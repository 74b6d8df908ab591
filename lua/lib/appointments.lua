--- @include "lib/flows"
--- @include "lib/drain"
--- @include "lib/forecast"
--- @include "lib/holds"
-- When a waiting call may hope to start and a refused one should come back.
local APPOINTMENT_MAX_MS, SHARE_SCALE = 60000, 1000

local function lane_drain(lane)
  local total = 0
  for _, pool in ipairs(books.config.pools[lane]) do
    local row = rows.fetch(records.drains, pool)
    if row then
      local now = drain.now(row)
      total = total + (now > 0 and now or row.last)
    end
  end
  return total
end

-- Blocks that are held softly, of which warm calls will take most.
local function held_softly(lane)
  local held = 0
  if not books.soft then return held end
  for _, pool in ipairs(books.config.pools[lane]) do
    for _, replica in ipairs(books.pool(pool)) do held = held + holds.counted(replica) end
  end
  return held
end

-- Milliseconds until the work ahead of this call, which is not counted as waiting yet, has drained.  Ahead of a warm one
-- are warm ones alone in its class, ahead of others also those that are likely to come.
local function predicted_wait(call, rate)
  local ahead = 0
  for _, class in ipairs(books.config.classes) do
    if class == call.class then break end
    ahead = ahead + flows.line(call.lane, class).blocks
  end
  local line, flow = flows.line(call.lane, call.class), rows.fetch(records.flows, flows.name_of(call))
  local is_warm = holds.is_warm(call)
  local weight, weights = flow.weight, line.weights
  if flow.waiting == 0 then
    weight = rows.fetch(records.keys, call.key).weight
    weights = weights + weight
  end
  local own = call.blocks + (is_warm and flow.warm or flow.blocks)
  local in_class = call.blocks + (is_warm and line.warm or line.blocks)
  local ahead_in_class = math.min(in_class, books.ceil_div(own * weights, weight))
  local share = books.config.shares[call.class]
  -- Of all blocks that go its class has a share: no more than the rest goes before it.
  if share > 0 then ahead = math.min(ahead, books.ceil_div(ahead_in_class * (SHARE_SCALE - share), share)) end
  if not is_warm then ahead = ahead + held_softly(call.lane) end
  return math.floor((ahead + ahead_in_class) * drain.WINDOW_MS / rate)
end

-- Somebody has waited all the time in which the drain was measured: before that it is what calls needed, not what the
-- replicas can do.
local function drain_is_known(lane)
  local since = rows.fetch(records.lanes, lane).since
  return since >= 0 and books.meta.clock - since >= drain.WINDOW_MS
end

-- Until it is known at least what is given back if all that run take as long as this call is expected to.
local function likely_drain(call)
  local rate = lane_drain(call.lane)
  if rate == 0 or drain_is_known(call.lane) then return rate end
  local full = 0
  for _, pool in ipairs(books.config.pools[call.lane]) do
    for _, replica in ipairs(books.pool(pool)) do full = full + replica.full end
  end
  return math.max(rate, math.floor(full * call.blocks * drain.WINDOW_MS / (math.max(call.cost, 1) * 1000)))
end

local function drained_wait(call)
  local rate = drain_is_known(call.lane) and lane_drain(call.lane) or 0
  return rate > 0 and predicted_wait(call, rate) or -1
end

-- -1 while nobody can say; of one call the same in one script.
function appointments.expected_wait(call)
  call.expected_ms = call.expected_ms or forecast.wait(call) or drained_wait(call)
  return call.expected_ms
end

function appointments.wait_told(call)
  local rate = likely_drain(call)
  return rate > 0 and predicted_wait(call, rate) or drain.FIRST_APPOINTMENT_MS
end

-- Somebody was asked to come back, and has not been due yet.
function appointments.any(lane)
  return rows.fetch(records.lanes, lane).book > books.meta.clock
end

-- Milliseconds until a refused call should come back; it takes a place in the lane's book.
function appointments.book(call)
  local rate = likely_drain(call)
  if rate == 0 then return drain.FIRST_APPOINTMENT_MS end
  local lane = rows.fetch(records.lanes, call.lane)
  local earliest = books.meta.clock + predicted_wait(call, rate)
  local due = math.max(lane.book, earliest) + math.floor(call.blocks * drain.WINDOW_MS / rate)
  lane.book = math.min(due, books.meta.clock + APPOINTMENT_MAX_MS)
  rows.store(records.lanes, call.lane, lane)
  return lane.book - books.meta.clock
end
