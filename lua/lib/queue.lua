--- @include "lib/books"
-- Tickets, flows and parking: every index of the queue is written here and nowhere else.
local function flow_name(call)
  return call.lane .. ':' .. call.class .. ':' .. call.key
end

local function line_name(call)
  return call.lane .. ':' .. call.class
end

local function flow_of(call)
  return fetch(flows, flow_name(call)) or {tag = 0, waiting = 0, blocks = 0, weight = 0, parked = 0}
end

local function line_of(lane, class)
  return fetch(lines, lane .. ':' .. class) or {virtual = 0, waiting = 0, blocks = 0, weights = 0, credit = 0}
end

local function lane_of(lane)
  return fetch(lane_rows, lane) or {blocked = '', book = 0}
end

local function key_of(name)
  return fetch(keys, name) or {weight = 1, blocks_max = -1, requests_max = -1, blocks = 0, calls = 0}
end

local function order_member(call, flow)
  return string.format('%s:%s:%016d:%s', call.lane, call.class, flow.tag, call.key)
end

local function queue_member(id, call)
  return string.format('%s:%s:%s:%012d:%s', call.lane, call.class, call.key, call.arrival, id)
end

local function parked_member(call)
  return call.key .. ':' .. call.lane .. ':' .. call.class
end

-- All members of a zset of equal scores that begin with prefix and a colon.
local function with_prefix(zset, prefix, limit)
  return redis.call('ZRANGEBYLEX', zset, '[' .. prefix .. ':', '(' .. prefix .. ';', 'LIMIT', 0, limit)
end

local function last_part(member)
  return string.match(member, '([^:]+)$')
end

-- A flow that nobody waits in and that is not ahead of its line says nothing.
local function keep_flow(call, flow)
  if flow.waiting == 0 and flow.tag <= line_of(call.lane, call.class).virtual then
    erase(flows, flow_name(call))
  else
    store(flows, flow_name(call), flow)
  end
end

local function set_tag(call, flow, tag)
  local ordered = flow.waiting > 0 and flow.parked == 0
  if ordered then redis.call('ZREM', ORDER, order_member(call, flow)) end
  flow.tag = tag
  if ordered then redis.call('ZADD', ORDER, 0, order_member(call, flow)) end
  keep_flow(call, flow)
end

local function join(id, call)
  local flow, line = flow_of(call), line_of(call.lane, call.class)
  call.state = 'queued'
  store(calls, id, call)
  if flow.waiting == 0 then
    flow.weight = key_of(call.key).weight
    line.weights = line.weights + flow.weight
    redis.call('ZADD', ORDER, 0, order_member(call, flow))
    meta.dirty = 1
  end
  flow.waiting, flow.blocks = flow.waiting + 1, flow.blocks + call.blocks
  line.waiting, line.blocks = line.waiting + 1, line.blocks + call.blocks
  store(flows, flow_name(call), flow)
  store(lines, line_name(call), line)
  redis.call('ZADD', QUEUE, 0, queue_member(id, call))
  redis.call('ZADD', DEADLINES, call.deadline, id)
end

local function park(call)
  local flow = flow_of(call)
  redis.call('ZREM', ORDER, order_member(call, flow))
  redis.call('ZADD', PARKED, 0, parked_member(call))
  flow.parked = 1
  store(flows, flow_name(call), flow)
  work = work - 1
end

local function unpark(call, flow)
  if flow.parked == 0 then return end
  redis.call('ZREM', PARKED, parked_member(call))
  redis.call('ZADD', ORDER, 0, order_member(call, flow))
  flow.parked = 0
  store(flows, flow_name(call), flow)
  work = work - 1
  meta.dirty = 1
end

local function unpark_key(key)
  for _, member in ipairs(with_prefix(PARKED, key, -1)) do
    local lane, class = string.match(member, '^[^:]+:([^:]+):([^:]+)$')
    local place = {lane = lane, class = class, key = key}
    unpark(place, flow_of(place))
  end
end

local function unhold(id)
  for name, replica in pairs(replicas) do
    if replica.held_for == id then
      replica.held_for = ''
      store_replica(name)
    end
  end
end

-- The call stops to be queued; what it leaves behind in the order.
local function leave(id, call)
  local flow, line, lane = flow_of(call), line_of(call.lane, call.class), lane_of(call.lane)
  redis.call('ZREM', QUEUE, queue_member(id, call))
  redis.call('ZREM', DEADLINES, id)
  unhold(id)
  if lane.blocked == id then
    lane.blocked = ''
    store(lane_rows, call.lane, lane)
  end
  line.waiting, line.blocks = line.waiting - 1, line.blocks - call.blocks
  if line.waiting == 0 then line.credit = 0 end
  if flow.waiting == 1 then
    redis.call('ZREM', ORDER, order_member(call, flow))
    redis.call('ZREM', PARKED, parked_member(call))
    line.weights = line.weights - flow.weight
    flow.weight, flow.parked = 0, 0
  end
  store(lines, line_name(call), line)
  flow.waiting, flow.blocks = flow.waiting - 1, flow.blocks - call.blocks
  if flow.waiting > 0 then unpark(call, flow) end
  keep_flow(call, flow)
  meta.dirty = 1
end

local function forget_call(id, call)
  erase(calls, id)
  redis.call('ZREM', OWNED, call.owner .. ':' .. id)
end

local function withdraw(id, call)
  leave(id, call)
  forget_call(id, call)
end

local function set_policy(name, weight, blocks_max, requests_max)
  local key = key_of(name)
  local changed = key.blocks_max ~= blocks_max or key.requests_max ~= requests_max
  key.weight, key.blocks_max, key.requests_max = weight, blocks_max, requests_max
  store(keys, name, key)
  if changed then unpark_key(name) end
end
