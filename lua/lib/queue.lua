--- @include "lib/flows"
--- @include "lib/fronts"
--- @include "lib/quotas"
--- @include "lib/places"
--- @include "lib/holds"
-- Tickets and parking: every index of the queue is written here and nowhere else.
-- A flow has two parts, its warm calls (holds.lua) and the others, each with a head and a member of ORDER of its own.
local SLICE, ARRIVALS = 16, 1000000000000
local WARM_PART, COLD_PART = '0', '1' -- before the arrival number of a member of QUEUE

local function order_member(call, flow, class)
  return string.format('%s:%s:%016d:%s', call.lane, class, flow.tag, call.key)
end

local function part_of(call)
  return holds.is_warm(call) and WARM_PART or COLD_PART
end

local function queue_member(id, call)
  return string.format('%s:%s:%s:%s%012d:%s', call.lane, call.class, call.key, part_of(call), call.arrival, id)
end

-- The member of the first call of a flow's part, or nil.
local function first_of(name, part)
  return zsets.first_with(zsets.QUEUE, name .. ':' .. part)
end

-- The first warm call of a flow that has some, or the first other one: its id.
function queue.head(name, warm)
  return zsets.last_part(first_of(name, warm and WARM_PART or COLD_PART))
end

-- Under which ORDER has the flows of a class with warm calls: no name is empty.
function queue.warm_class(class)
  return ':' .. class
end

-- Whether nobody waits in the part of the flow to which the call belongs.
local function is_part_empty(call, flow)
  if holds.is_warm(call) then return flow.warm == 0 end
  return flow.blocks == flow.warm
end

local function parked_member(call)
  return call.key .. ':' .. call.lane .. ':' .. call.class
end

local function backlog_member(call, blocks)
  return string.format('%s:%s:%012d:%s', call.lane, call.class, blocks, call.key)
end

-- Since when somebody waits in the lane for the replicas; who waits for its own key's cap does not say what they can do.
local function note_since(call, clock)
  local lane = rows.fetch(records.lanes, call.lane)
  if (clock >= 0) == (lane.since >= 0) then return end
  lane.since = clock
  rows.store(records.lanes, call.lane, lane)
end

local function note_last(call)
  if not fronts.waits(call.lane) then note_since(call, -1) end
end

-- One call more or less waits in the flow.
local function count_waiting(call, flow, line, direction)
  local before = flow.blocks
  flow.waiting, flow.blocks = flow.waiting + direction, before + direction * call.blocks
  line.waiting, line.blocks = line.waiting + direction, line.blocks + direction * call.blocks
  if holds.is_warm(call) then
    flow.warm, line.warm = flow.warm + direction * call.blocks, line.warm + direction * call.blocks
  end
  if before > 0 then books.backlog[backlog_member(call, before)] = false end
  if flow.blocks > 0 then books.backlog[backlog_member(call, flow.blocks)] = true end
end

local function add_part(call, flow, class)
  local member, horizon = order_member(call, flow, class), books.horizon[call.lane .. ':' .. class]
  fronts.add(call.lane, class, member)
  note_since(call, books.meta.clock)
  if not horizon or member < horizon then books.moves = books.moves + 1 end
end

local function take_part(call, flow, class)
  fronts.take(call.lane, class, order_member(call, flow, class))
  books.moves = books.moves + 1
end

-- change: add_part or take_part, with each part in which somebody waits.
local function change_order(call, flow, change)
  if flow.blocks > flow.warm then change(call, flow, call.class) end
  if flow.warm > 0 then change(call, flow, queue.warm_class(call.class)) end
end

-- The part of the call alone.
local function class_of_part(call)
  return holds.is_warm(call) and queue.warm_class(call.class) or call.class
end

-- The flow of a call that waits gets another tag.
function queue.reorder(call, flow, tag)
  change_order(call, flow, take_part)
  flow.tag = tag
  change_order(call, flow, add_part)
end

-- The tag of a flow that begins to wait: behind nobody's, unless it took more than others lately.
function queue.entry(call)
  local flow, line = rows.fetch(records.flows, flows.name_of(call)), flows.line(call.lane, call.class)
  if flow.tag > line.virtual then return flow.tag end
  return math.min(line.virtual, flows.first_tag(call, line.virtual))
end

-- A call that comes back to the head of its part takes what was held for the one behind: that one's turn is later now,
-- and on a replica that is held for it nothing would start meanwhile.
local function unhold_behind(id, call, name)
  local first = first_of(name, part_of(call))
  if first and queue_member(id, call) < first then queue.unhold(zsets.last_part(first)) end
end

-- returns: in a place that was remembered.
function queue.join(id, call, returns)
  local name = flows.name_of(call)
  local flow, line = rows.fetch(records.flows, name), flows.line(call.lane, call.class)
  call.state = 'queued'
  rows.store(records.calls, id, call)
  if flow.waiting > 0 and books.holds > 0 then unhold_behind(id, call, name) end
  local first = is_part_empty(call, flow)
  if flow.waiting == 0 then
    local tag = queue.entry(call)
    flow.tag = returns and flow.resume >= 0 and math.min(tag, flow.resume) or tag
    if flow.tag < tag then flow.later, flow.returned = tag, books.meta.arrivals end
    flow.resume = -1
    flow.weight = rows.fetch(records.keys, call.key).weight
    line.weights = line.weights + flow.weight
  end
  if first then
    if flow.parked == 0 then add_part(call, flow, class_of_part(call)) end
    books.meta.dirty = 1
  end
  count_waiting(call, flow, line, 1)
  rows.store(records.flows, name, flow)
  rows.store(records.lines, call.lane .. ':' .. call.class, line)
  redis.call('ZADD', zsets.QUEUE, 0, queue_member(id, call))
  books.deadlines[id] = call.deadline
  books.waiting = books.waiting + 1
end

-- A replica that is held for the first of a part.
local function unhold_first(name, part)
  local first = first_of(name, part)
  if first then queue.unhold(zsets.last_part(first)) end
end

-- Out of the order, until its key has room; a replica that was held for it is free for others meanwhile.
function queue.park(id, call)
  queue.unhold(id)
  local name = flows.name_of(call)
  local flow = rows.fetch(records.flows, name)
  if books.holds > 0 and flow.warm > 0 then
    unhold_first(name, WARM_PART)
    unhold_first(name, COLD_PART)
  end
  change_order(call, flow, take_part)
  note_last(call)
  redis.call('ZADD', zsets.PARKED, 0, parked_member(call))
  books.parked = nil
  flow.parked = 1
  rows.store(records.flows, name, flow)
  books.work = books.work - 1
end

function queue.unpark(call, name, flow)
  if flow.parked == 0 then return end
  redis.call('ZREM', zsets.PARKED, parked_member(call))
  change_order(call, flow, add_part)
  flow.parked = 0
  rows.store(records.flows, name, flow)
  books.work = books.work - 1
  books.meta.dirty = 1
end

-- What a member of PARKED says of the calls of its flow.
local function place_of(member)
  local key, lane, class = string.match(member, '^([^:]+):([^:]+):([^:]+)$')
  return {key = key, lane = lane, class = class}
end

local function unpark_place(place)
  local name = flows.name_of(place)
  queue.unpark(place, name, rows.fetch(records.flows, name))
end

function queue.unpark_key(key)
  books.parked = books.parked or redis.call('ZCARD', zsets.PARKED)
  if books.parked == 0 then return end
  for _, member in ipairs(zsets.with_prefix(zsets.PARKED, key, -1)) do unpark_place(place_of(member)) end
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

-- A pool may have a higher limit: who is parked for a part of it may be within that now.
function queue.recheck_parked()
  if redis.call('ZCARD', zsets.PARKED) > 0 then books.set('recheck', '-') end
end

-- Put back into the order, of the next parked flows, those of keys that have shares of pools.
function queue.recheck_slice()
  local from = books.meta.recheck
  if from == '' or books.work <= 0 then return end
  local members = redis.call('ZRANGEBYLEX', zsets.PARKED, from, '+', 'LIMIT', 0, SLICE + 1)
  for i = 1, math.min(SLICE, #members) do
    local place = place_of(members[i])
    if rows.fetch(records.keys, place.key).pool_share >= 0 then unpark_place(place) end
  end
  books.set('recheck', #members > SLICE and '(' .. members[SLICE] or '')
end

-- The call was the last one of its flow.
local function end_flow(call, flow, line)
  if flow.parked == 1 then
    redis.call('ZREM', zsets.PARKED, parked_member(call))
  else
    note_last(call)
  end
  line.weights = line.weights - flow.weight
  flow.weight, flow.parked, flow.owed, flow.later, flow.returned = 0, 0, 0, -1, 0
  if places.any(flows.name_of(call)) then flow.resume = flows.standing(flow, line) end
end

-- The arrival number of the first of a part.
local function arrival_of(name, part)
  local first = first_of(name, part)
  return first and tonumber(string.match(first, ':(%d+):[^:]+$')) % ARRIVALS or math.huge
end

-- Who came after a return stands where it would without: a place makes good one call's absence.
local function end_return(call, name, flow)
  if flow.later < 0 then return end
  if math.min(arrival_of(name, WARM_PART), arrival_of(name, COLD_PART)) <= flow.returned then return end
  local tag = math.max(flow.tag, flow.later)
  flow.later, flow.returned = -1, 0
  if flow.parked == 0 and tag > flow.tag then queue.reorder(call, flow, tag) else flow.tag = tag end
end

-- The call stops to be queued; what it leaves behind in the order.
function queue.leave(id, call)
  local name = flows.name_of(call)
  local flow, line = rows.fetch(records.flows, name), flows.line(call.lane, call.class)
  books.moves = books.moves + 1
  redis.call('ZREM', zsets.QUEUE, queue_member(id, call))
  books.deadlines[id] = false
  books.waiting = books.waiting - 1
  queue.unhold(id)
  local lane = rows.fetch(records.lanes, call.lane)
  if lane.blocked == id then
    lane.blocked = ''
    rows.store(records.lanes, call.lane, lane)
  end
  count_waiting(call, flow, line, -1)
  if flow.parked == 0 and is_part_empty(call, flow) then take_part(call, flow, class_of_part(call)) end
  if line.waiting == 0 then line.credit = 0 end
  if flow.waiting == 0 then end_flow(call, flow, line) end
  rows.store(records.lines, call.lane .. ':' .. call.class, line)
  if flow.waiting > 0 then
    end_return(call, name, flow)
    queue.unpark(call, name, flow)
  end
  flows.keep_flow(name, flow, line)
  books.meta.dirty = 1
end

-- fingerprint: its place is remembered under it, unless it is ''.
function queue.withdraw(id, call, fingerprint)
  if fingerprint ~= '' then places.remember(call, fingerprint) end
  queue.leave(id, call)
  flows.forget_call(id, call)
  quotas.refund(call)
end

-- The newest call of a key that waits there, of the warm ones only where there are no others.
local function newest(lane, class, key)
  return zsets.last_part(zsets.last_with_prefix(zsets.QUEUE, lane .. ':' .. class .. ':' .. key))
end

local function is_held_for(id)
  if books.holds == 0 then return false end
  for _, replica in pairs(books.replicas) do
    if replica.held_for == id then return true end
  end
  return false
end

-- The key of the flow with the most blocks waiting, if they are more than the call's own flow would have.  Nobody goes
-- for whom a replica was emptied: that would have been in vain, and a large call would never start.
function queue.crowder(call)
  zsets.write(zsets.BACKLOG, books.backlog)
  local member = zsets.last_with_prefix(zsets.BACKLOG, call.lane .. ':' .. call.class)
  if not member then return nil end
  local blocks, key = string.match(member, ':(%d+):([^:]+)$')
  local own = rows.fetch(records.flows, flows.name_of(call)).blocks
  if own + call.blocks >= tonumber(blocks) or is_held_for(newest(call.lane, call.class, key)) then return nil end
  return key
end

-- The newest call of the key makes room for a newcomer; its owner is told, and settles it.
function queue.displace(lane, class, key)
  local id = newest(lane, class, key)
  local call = rows.fetch(records.calls, id)
  queue.leave(id, call)
  quotas.refund(call)
  call.state, call.charge = 'displaced', {}
  rows.store(records.calls, id, call)
  books.outbox[call.owner .. ':' .. id] = true
  books.wakes[call.owner] = true
end

function queue.forget_displaced(id, call)
  books.outbox[call.owner .. ':' .. id] = false
  flows.forget_call(id, call)
end
