--- @include "lib/dispatch"
-- Leases, ticket deadlines and the gate that a new epoch closes.
local SLICE, OUTBOX_MAX = 32, 64

local function renew_lease(owner)
  redis.call('ZADD', OWNERS, meta.clock + config.lease_ms, owner)
end

-- Fence every owner whose lease is over and give a slice of their calls back; true = some are left.
local function reap()
  local lost = redis.call('ZRANGEBYSCORE', OWNERS, '-inf', meta.clock)
  for _, owner in ipairs(lost) do erase(sessions, owner) end
  local left = SLICE
  for _, owner in ipairs(lost) do
    local members = with_prefix(OWNED, owner, left + 1)
    for i = 1, math.min(left, #members) do
      local id = last_part(members[i])
      give_back(id, fetch(calls, id))
    end
    if #members > left then return true end
    left = left - #members
    redis.call('ZREM', OWNERS, owner)
  end
  return false
end

local function expire()
  local late = redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', meta.clock, 'LIMIT', 0, SLICE + 1)
  for i = 1, math.min(SLICE, #late) do
    work = work - 1
    withdraw(late[i], fetch(calls, late[i]))
  end
  return #late > SLICE
end

local function all_declared()
  local owners = redis.call('ZRANGE', OWNERS, 0, -1)
  for _, owner in ipairs(owners) do
    local session = fetch(sessions, owner)
    if not session or session.declared ~= meta.epoch then return false end
  end
  return #owners > 0
end

local function open_gate()
  if meta.opens_at == 0 then return end
  if meta.clock >= meta.opens_at or (meta.clock >= meta.opens_after and all_declared()) then
    meta.opens_at = 0
  end
end

-- The caller's own unclaimed grants: id, replica, id, replica...
local function outbox_of(owner)
  local told = {}
  for _, member in ipairs(with_prefix(OUTBOX, owner, OUTBOX_MAX)) do
    local id = last_part(member)
    told[#told + 1] = id
    told[#told + 1] = fetch(calls, id).replica
  end
  return told
end

-- The owner's call of that id, or nil.
local function mine(owner, id)
  local call = fetch(calls, id)
  if call and call.owner == owner then return call end
  return nil
end

-- Whether a living owner other than this one has the id; what a fenced one left is given back.
local function foreign(owner, id)
  local call = fetch(calls, id)
  if not call or call.owner == owner then return false end
  if fetch(sessions, call.owner) then return true end
  give_back(id, call)
  return false
end
