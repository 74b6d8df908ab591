--- @include "lib/appointments"
-- Where a call fits, and taking and giving back its blocks, sequences and prefill tokens.
local TAG_SCALE, DIGEST_MODULUS = 64, 281474976710656

local function contains(list, item)
  for _, each in ipairs(list) do
    if each == item then return true end
  end
  return false
end

-- Whether the call can run there at all, however busy it is now.
local function could_use(call, name, replica)
  return replica.state == 'up' and contains(config.pools[call.lane] or {}, replica.pool)
    and not contains(call.exclude, name) and call.blocks <= replica.usable
    and call.sequences <= replica.sequences_max
end

local function fits(id, call, name, replica)
  return could_use(call, name, replica)
    and (replica.held_for == '' or replica.held_for == id)
    and (replica.used + call.blocks <= replica.limit or replica.used == 0)
    and replica.sequences + call.sequences <= replica.sequences_max
    and (replica.prefill + call.prefill <= replica.prefill_max or replica.prefill == 0)
end

local function roomier(name, other)
  if other == nil then return true end
  local free = replicas[name].limit - replicas[name].used
  local other_free = replicas[other].limit - replicas[other].used
  return free > other_free or (free == other_free and name < other)
end

local function percent(name)
  return math.floor(replicas[name].used * 100 / math.max(replicas[name].limit, 1))
end

-- The first pool of the lane with room; there a preferred replica unless it is 10 % fuller; most free blocks.
local function place(id, call)
  for _, pool in ipairs(config.pools[call.lane]) do
    local emptiest, warm
    for name, replica in pairs(replicas) do
      if replica.pool == pool and fits(id, call, name, replica) and roomier(name, emptiest) then emptiest = name end
    end
    for _, name in ipairs(emptiest and call.prefer or {}) do
      local replica = replicas[name]
      if replica and replica.pool == pool and fits(id, call, name, replica) and roomier(name, warm)
        and percent(name) <= percent(emptiest) + 10 then warm = name end
    end
    if emptiest then return warm or emptiest end
  end
  return nil
end

local function capped(call)
  local key = key_of(call.key)
  return (key.blocks_max >= 0 and key.blocks + call.blocks > key.blocks_max)
    or (key.requests_max >= 0 and key.calls + 1 > key.requests_max)
end

-- The digest of an owner's claimed reservations; direction is 1 or -1.
local function count_claimed(id, call, direction)
  local session = fetch(sessions, call.owner)
  if not session then return end
  session.count = session.count + direction
  session.sum = (session.sum + direction * tonumber(id, 16)) % DIGEST_MODULUS
  store(sessions, call.owner, session)
end

-- Start-time fair queueing: the flow's tag moves on by the call's cost over the key's weight.
local function pay(call)
  local flow, line = flow_of(call), line_of(call.lane, call.class)
  line.virtual = math.max(line.virtual, flow.tag)
  store(lines, line_name(call), line)
  call.charged = ceil_div(call.cost * TAG_SCALE, key_of(call.key).weight)
  set_tag(call, flow, line.virtual + call.charged)
end

-- Move the flow's tag by what was charged too much or too little.
local function correct(call, units)
  local flow = flow_of(call)
  local tag = math.max(line_of(call.lane, call.class).virtual, flow.tag)
  set_tag(call, flow, math.max(0, tag + units))
end

-- Every blocked head that this grant passes remembers how many blocks went by.
local function count_passed(id, call, name)
  for _, lane in ipairs(config.lanes) do
    local head_id = lane_of(lane).blocked
    if head_id ~= '' and head_id ~= id then
      local head = fetch(calls, head_id)
      if head and could_use(head, name, replicas[name]) then
        head.passed = head.passed + call.blocks
        store(calls, head_id, head)
      end
    end
  end
end

-- state: 'unclaimed' or 'reserved'.
local function reserve(id, call, name, state)
  local replica, key = replicas[name], key_of(call.key)
  replica.used = replica.used + call.blocks
  replica.sequences = replica.sequences + call.sequences
  replica.prefill = replica.prefill + call.prefill
  store_replica(name)
  key.blocks, key.calls = key.blocks + call.blocks, key.calls + 1
  store(keys, call.key, key)
  call.prefilling, call.replica, call.state = call.prefill, name, state
  store(calls, id, call)
  redis.call('ZADD', OWNED, 0, call.owner .. ':' .. id)
  if state == 'reserved' then
    count_claimed(id, call, 1)
  else
    redis.call('ZADD', OUTBOX, 0, call.owner .. ':' .. id)
  end
  count_passed(id, call, name)
end

local function claim(id, call)
  if call.state ~= 'unclaimed' then return end
  call.state = 'reserved'
  store(calls, id, call)
  redis.call('ZREM', OUTBOX, call.owner .. ':' .. id)
  count_claimed(id, call, 1)
end

local function forget_removed()
  for name, replica in pairs(replicas) do
    if replica.state == 'removed' and replica.sequences == 0 then
      replicas[name] = nil
      erase(replica_rows, name)
    end
  end
end

-- Take a reservation off its replica, its key and its owner's digest.
local function vacate(id, call)
  local replica, key = replicas[call.replica], key_of(call.key)
  replica.used = replica.used - call.blocks
  replica.sequences = replica.sequences - call.sequences
  replica.prefill = replica.prefill - call.prefilling
  store_replica(call.replica)
  key.blocks, key.calls = key.blocks - call.blocks, key.calls - 1
  store(keys, call.key, key)
  if call.state == 'reserved' then
    count_claimed(id, call, -1)
  else
    redis.call('ZREM', OUTBOX, call.owner .. ':' .. id)
  end
  unpark_key(call.key)
  drained(replica.pool, call.blocks)
  forget_removed()
  meta.dirty = 1
end

local function release(id, call, refund)
  vacate(id, call)
  forget_call(id, call)
  if refund then correct(call, -call.charged) end
end

-- The owner is gone: what never ran is refunded, for what ran the charge stays.
local function give_back(id, call)
  work = work - 1
  if call.state == 'queued' then return withdraw(id, call) end
  release(id, call, call.state == 'unclaimed')
end
