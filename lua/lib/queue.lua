--- @include "lib/flows"
--- @include "lib/quotas"
-- Tickets and parking: every index of the queue is written here and nowhere else.

local function order_member(call, flow)
  return string.format('%s:%s:%016d:%s', call.lane, call.class, flow.tag, call.key)
end

local function queue_member(id, call)
  return string.format('%s:%s:%s:%012d:%s', call.lane, call.class, call.key, call.arrival, id)
end

local function parked_member(call)
  return call.key .. ':' .. call.lane .. ':' .. call.class
end

local function add_to_order(call, flow)
  local member, horizon = order_member(call, flow), books.horizon[call.lane .. ':' .. call.class]
  redis.call('ZADD', zsets.ORDER, 0, member)
  if not horizon or member < horizon then books.moves = books.moves + 1 end
end

local function take_from_order(call, flow)
  redis.call('ZREM', zsets.ORDER, order_member(call, flow))
  books.moves = books.moves + 1
end

-- The flow of a call that waits gets another tag.
function queue.reorder(call, flow, tag)
  take_from_order(call, flow)
  flow.tag = tag
  add_to_order(call, flow)
end

function queue.join(id, call)
  local name = flows.name_of(call)
  local flow, line = rows.fetch(records.flows, name), flows.line(call.lane, call.class)
  call.state = 'queued'
  rows.store(records.calls, id, call)
  if flow.waiting == 0 then
    flow.weight = rows.fetch(records.keys, call.key).weight
    line.weights = line.weights + flow.weight
    add_to_order(call, flow)
    books.meta.dirty = 1
  end
  flow.waiting, flow.blocks = flow.waiting + 1, flow.blocks + call.blocks
  line.waiting, line.blocks = line.waiting + 1, line.blocks + call.blocks
  rows.store(records.flows, name, flow)
  rows.store(records.lines, call.lane .. ':' .. call.class, line)
  redis.call('ZADD', zsets.QUEUE, 0, queue_member(id, call))
  redis.call('ZADD', zsets.DEADLINES, call.deadline, id)
  books.waiting = books.waiting + 1
end

function queue.park(call)
  local name = flows.name_of(call)
  local flow = rows.fetch(records.flows, name)
  take_from_order(call, flow)
  redis.call('ZADD', zsets.PARKED, 0, parked_member(call))
  flow.parked = 1
  rows.store(records.flows, name, flow)
  books.work = books.work - 1
end

function queue.unpark(call, name, flow)
  if flow.parked == 0 then return end
  redis.call('ZREM', zsets.PARKED, parked_member(call))
  add_to_order(call, flow)
  flow.parked = 0
  rows.store(records.flows, name, flow)
  books.work = books.work - 1
  books.meta.dirty = 1
end

function queue.unpark_key(key)
  for _, member in ipairs(zsets.with_prefix(zsets.PARKED, key, -1)) do
    local lane, class = string.match(member, '^[^:]+:([^:]+):([^:]+)$')
    local place = {lane = lane, class = class, key = key}
    local name = flows.name_of(place)
    queue.unpark(place, name, rows.fetch(records.flows, name))
  end
end

function queue.unhold(id)
  if books.holds == 0 then return end
  for _, replica in pairs(books.replicas) do
    if replica.held_for == id then
      replica.held_for = ''
      books.holds = books.holds - 1
      books.store_replica(replica)
      books.room = books.room + 1
    end
  end
end

-- The call was the last one of its flow.
local function end_flow(call, flow, line)
  if flow.parked == 1 then
    redis.call('ZREM', zsets.PARKED, parked_member(call))
  else
    take_from_order(call, flow)
  end
  line.weights = line.weights - flow.weight
  flow.weight, flow.parked = 0, 0
end

-- The call stops to be queued; what it leaves behind in the order.
function queue.leave(id, call)
  local name = flows.name_of(call)
  local flow, line = rows.fetch(records.flows, name), flows.line(call.lane, call.class)
  books.moves = books.moves + 1
  redis.call('ZREM', zsets.QUEUE, queue_member(id, call))
  redis.call('ZREM', zsets.DEADLINES, id)
  books.waiting = books.waiting - 1
  queue.unhold(id)
  local lane = rows.fetch(records.lanes, call.lane)
  if lane.blocked == id then
    lane.blocked = ''
    rows.store(records.lanes, call.lane, lane)
  end
  line.waiting, line.blocks = line.waiting - 1, line.blocks - call.blocks
  if line.waiting == 0 then line.credit = 0 end
  if flow.waiting == 1 then end_flow(call, flow, line) end
  rows.store(records.lines, call.lane .. ':' .. call.class, line)
  flow.waiting, flow.blocks = flow.waiting - 1, flow.blocks - call.blocks
  if flow.waiting > 0 then queue.unpark(call, name, flow) end
  flows.keep_flow(name, flow, line)
  books.meta.dirty = 1
end

function queue.withdraw(id, call)
  queue.leave(id, call)
  flows.forget_call(id, call)
  quotas.refund(call)
end
