--- @include "lib/placement"
--- @include "lib/queue"
--- @include "lib/quotas"
--- @include "lib/prefixes"
--- @include "lib/holds"
-- Taking and giving back blocks, sequences and prefill tokens, and what a call pays for them in the fair order.
local TAG_SCALE, DIGEST_MODULUS = 64, 281474976710656

-- The digest of an owner's claimed reservations; direction is 1 or -1.
local function count_claimed(id, call, direction)
  local session = rows.fetch(records.sessions, call.owner)
  if not session then return end
  session.count = session.count + direction
  session.sum = (session.sum + direction * tonumber(id, 16)) % DIGEST_MODULUS
  rows.store(records.sessions, call.owner, session)
end

-- Start-time fair queueing: the flow's tag moves on by the call's cost over the key's weight.
function reserve.pay(call)
  local name = flows.name_of(call)
  local flow, line = rows.fetch(records.flows, name), flows.line(call.lane, call.class)
  local start = flows.standing(flow, line)
  if start > line.virtual then
    line.virtual = start
    rows.store(records.lines, call.lane .. ':' .. call.class, line)
  end
  call.charged = books.ceil_div(call.cost * TAG_SCALE, rows.fetch(records.keys, call.key).weight)
  flows.delay(flow, call.charged)
  flows.set_tag(call, name, flow, line, start + flows.after_owed(flow, call.charged))
end

-- Move the flow's tag by what was charged too much or too little.
function reserve.correct(call, units)
  local name = flows.name_of(call)
  local flow, line = rows.fetch(records.flows, name), flows.line(call.lane, call.class)
  local before = flows.standing(flow, line)
  local tag = math.max(0, before + units)
  if units > 0 then
    tag = before + flows.after_owed(flow, units)
    flows.delay(flow, units)
  elseif flow.waiting > 0 then
    tag = math.max(before + units, math.min(before, flows.first_tag(call, before) + 1))
    flow.owed = flow.owed + tag - before - units
  end
  flows.set_tag(call, name, flow, line, tag)
end

-- cost: block-seconds really held.
function reserve.true_up(call, cost)
  reserve.correct(call, books.ceil_div((cost - call.cost) * TAG_SCALE, rows.fetch(records.keys, call.key).weight))
end

-- Whether it lets the call go before it, so that being passed counts for nothing.
local function yields(head, call)
  return holds.is_warm(call) and head.yields_until > books.meta.clock
end

-- Every blocked head that this grant passes remembers how many blocks went by.
local function count_passed(id, call, replica)
  if books.waiting == 0 then return end
  for _, lane in ipairs(books.config.lanes) do
    local head_id = rows.fetch(records.lanes, lane).blocked
    if head_id ~= '' and head_id ~= id then
      local head = rows.fetch(records.calls, head_id)
      if head and placement.could_use(head, replica) and not yields(head, call) then
        local before = head.passed
        head.passed = before + call.blocks
        rows.store(records.calls, head_id, head)
        local due = before < books.config.overtake_blocks and head.passed >= books.config.overtake_blocks
        -- No dispatch has placed this one; the head is due a replica to itself.
        if due and call.state == 'reserved' then books.meta.dirty = 1 end
      end
    end
  end
end

-- A pool's figure among those of a key, which are of pools where it holds something.
local function changed_pools(pools, pool, more)
  local changed, found = {}, false
  for i = 1, #pools, 2 do
    local held = pools[i + 1]
    if pools[i] == pool then held, found = held + more, true end
    if held ~= 0 then
      changed[#changed + 1] = pools[i]
      changed[#changed + 1] = held
    end
  end
  if not found then
    changed[#changed + 1] = pool
    changed[#changed + 1] = more
  end
  return changed
end

-- The call's key holds more blocks and calls, or fewer.
function reserve.count_held(call, blocks, calls)
  local key = rows.fetch(records.keys, call.key)
  key.blocks, key.calls = key.blocks + blocks, key.calls + calls
  key.pools = changed_pools(key.pools, call.pool, blocks)
  rows.store(records.keys, call.key, key)
end

-- state: 'unclaimed' or 'reserved'.  Its prefix says which nodes it is in.
function reserve.take(id, call, replica, state)
  call.prefilling, call.replica, call.pool, call.state = call.prefill, replica.name, replica.pool, state
  if prefixes.any(call) then
    prefixes.enter(id, call, replica)
    call.prefilling = prefixes.prefilling(call)
  end
  elastic.count(call, replica)
  replica.sequences = replica.sequences + call.sequences
  replica.prefill = replica.prefill + call.prefilling
  books.store_replica(replica)
  holds.finish(call.past)
  reserve.count_held(call, call.blocks, 1)
  rows.store(records.calls, id, call)
  books.moves = books.moves + 1
  if state == 'reserved' then
    books.owned[call.owner .. ':' .. id] = true -- an unclaimed one waited, and is there already
    count_claimed(id, call, 1)
  else
    books.outbox[call.owner .. ':' .. id] = true
  end
  count_passed(id, call, replica)
end

function reserve.claim(id, call)
  if call.state ~= 'unclaimed' then return end
  call.state = 'reserved'
  rows.store(records.calls, id, call)
  books.outbox[call.owner .. ':' .. id] = false
  count_claimed(id, call, 1)
end

-- Its prompt is computed: its share of the prefill budget is given back.
function reserve.end_prefill(id, call)
  local replica = books.replicas[call.replica]
  replica.prefill = replica.prefill - call.prefilling
  books.store_replica(replica)
  books.room = books.room + 1
  call.prefilling = 0
  rows.store(records.calls, id, call)
  books.meta.dirty = 1
end

-- And others may share what it begins with, where it says so.
function reserve.compute(id, call)
  prefixes.compute(id, call, books.replicas[call.replica])
  rows.store(records.calls, id, call)
end

-- A running call holds another number of blocks from now on, and has a path without `net` of them: how many the replica
-- has above its limit then, where it has grown.
function reserve.recount(id, call, held, base, path, net)
  if path == '' and call.path == '' then return 0 end -- it is charged in full, as before
  local replica, held_before, elastic_before = books.replicas[call.replica], call.held, call.elastic
  elastic.uncount(call, replica)
  prefixes.set_net(call, net)
  elastic.want(call, held, base, path)
  elastic.count(call, replica)
  rows.store(records.calls, id, call)
  books.store_replica(replica)
  if elastic_before + call.elastic > 0 then
    -- A waiter may fit where a path has become lower.
    books.room = books.room + 1
    books.meta.dirty = 1
  end
  return call.held > held_before and math.max(replica.used - replica.limit, 0) or 0
end

local function take_off(call, replica)
  elastic.uncount(call, replica)
  prefixes.leave(call, replica)
  replica.sequences = replica.sequences - call.sequences
  replica.prefill = replica.prefill - call.prefilling
  books.store_replica(replica)
  books.room = books.room + 1
  if replica.state == 'removed' and replica.sequences == 0 then books.place_replica(replica.name, nil) end
end

-- Take a reservation off its replica, its key and its owner's digest.
function reserve.vacate(id, call)
  local replica = books.replicas[call.replica]
  take_off(call, replica)
  reserve.count_held(call, -call.blocks, -1)
  call.pool = ''
  if call.state == 'reserved' then
    count_claimed(id, call, -1)
  else
    books.outbox[call.owner .. ':' .. id] = false
  end
  flows.unpark_key(call.key)
  drain.add(replica.pool, call.blocks)
  books.meta.dirty = 1
end

function reserve.release(id, call, refund)
  reserve.vacate(id, call)
  flows.forget_call(id, call)
  if not refund then return end
  reserve.correct(call, -call.charged)
  quotas.refund(call)
end

-- The owner is gone: what never ran is refunded, for what ran the charge stays.
function reserve.give_back(id, call)
  books.work = books.work - 1
  if call.state == 'queued' then return queue.withdraw(id, call, '') end
  if call.state == 'displaced' then return queue.forget_displaced(id, call) end
  reserve.release(id, call, call.state == 'unclaimed')
end
