--- @include "lib/reserve"
-- The order of the queue (docs/ledger.md): tickets become unclaimed reservations until nothing fits.
local LOOKAHEAD, CREDIT_SCALE = 8, 1000

-- The unparked flows of one class, in fair order: their keys.
local function flow_keys(lane, class)
  local names = {}
  for i, member in ipairs(with_prefix(ORDER, lane .. ':' .. class, LOOKAHEAD)) do names[i] = last_part(member) end
  return names
end

local function head_of(lane, class, key)
  local id = last_part(with_prefix(QUEUE, lane .. ':' .. class .. ':' .. key, 1)[1])
  return id, fetch(calls, id)
end

-- Highest class first, except that the lowest class whose credit covers its head goes before all.
local function class_order(lane)
  local order, favoured = {}, nil
  for i = #config.classes, 1, -1 do
    local class = config.classes[i]
    local line = line_of(lane, class)
    if line.waiting > 0 then
      table.insert(order, 1, class)
      local first = not favoured and config.shares[class] > 0 and line.credit > 0 and flow_keys(lane, class)[1]
      if first then
        local _, head = head_of(lane, class, first)
        if line.credit >= CREDIT_SCALE * head.blocks then favoured = class end
      end
    end
  end
  if not favoured then return order, nil end
  local result = {favoured}
  for _, class in ipairs(order) do
    if class ~= favoured then result[#result + 1] = class end
  end
  return result, favoured
end

-- Every lower class that waits earns its share of the blocks that went before it.
local function earn(call)
  local lower = false
  for _, class in ipairs(config.classes) do
    local line = lower and line_of(call.lane, class)
    if line and line.waiting > 0 and config.shares[class] > 0 then
      line.credit = line.credit + call.blocks * config.shares[class]
      store(lines, call.lane .. ':' .. class, line)
    end
    lower = lower or class == call.class
  end
end

local function grant(id, call, name, by_credit)
  work = work - 1
  if by_credit then
    local line = line_of(call.lane, call.class)
    line.credit = line.credit - CREDIT_SCALE * call.blocks
    store(lines, line_name(call), line)
  end
  pay(call)
  leave(id, call)
  reserve(id, call, name, 'unclaimed')
  earn(call)
  wakes[call.owner] = true
end

-- A head that was passed too often gets the roomiest replica it may use to itself; it keeps at most one.
local function hold(id, call)
  if call.passed < config.overtake_blocks then return false end
  local free
  for name, replica in pairs(replicas) do
    if replica.held_for == id then return false end
    if replica.held_for == '' and could_use(call, name, replica) and roomier(name, free) then free = name end
  end
  if not free then return false end
  replicas[free].held_for = id
  store_replica(free)
  work = work - 1
  return true
end

-- One grant, parking or hold in this lane; false when nothing can be done.
local function advance(lane)
  local head
  local classes, favoured = class_order(lane)
  for _, class in ipairs(classes) do
    for _, key in ipairs(flow_keys(lane, class)) do
      local id, call = head_of(lane, class, key)
      if capped(call) then
        park(call)
        return true
      end
      local name = place(id, call)
      if name then
        grant(id, call, name, favoured == class)
        return true
      end
      if not head then
        head = id
        local row = lane_of(lane)
        row.blocked = id
        store(lane_rows, lane, row)
        if hold(id, call) then return true end
      end
    end
  end
  return false
end

local function lane_waits(lane)
  for _, class in ipairs(config.classes) do
    if line_of(lane, class).waiting > 0 then return true end
  end
  return false
end

-- Doing it again at once changes nothing, so it is skipped while nothing changed.
local function dispatch()
  if meta.dirty == 0 or meta.opens_at > 0 then return end
  meta.dirty = 0
  local progress = true
  while progress do
    progress = false
    for _, lane in ipairs(config.lanes) do
      while lane_waits(lane) do
        if work <= 0 then
          meta.dirty = 1
          return
        end
        if not advance(lane) then break end
        progress = true
      end
    end
  end
end

-- When no call is left nobody is ahead of anybody: the fair order starts anew.
local function forget_order()
  if redis.call('EXISTS', calls.key) == 1 then return end
  redis.call('DEL', flows.key)
  flows.rows = {}
  for _, lane in ipairs(config.lanes) do
    for _, class in ipairs(config.classes) do
      local line = fetch(lines, lane .. ':' .. class)
      if line and (line.virtual > 0 or line.credit > 0) then
        line.virtual, line.credit = 0, 0
        store(lines, lane .. ':' .. class, line)
      end
    end
  end
  flush(lines)
end

local function close_books(wake_prefix)
  dispatch()
  write_books(wake_prefix)
  forget_order()
end
