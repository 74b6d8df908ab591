--- @include "lib/reserve"
--- @include "lib/queue"
--- @include "lib/places"
--- @include "lib/rests"
--- @include "lib/holds"
-- Leases, ticket deadlines and the gate that a new epoch closes.
local SLICE, OUTBOX_MAX = 16, 64

function owners.renew_lease(owner)
  redis.call('ZADD', zsets.OWNERS, books.meta.clock + books.config.lease_ms, owner)
end

local function forget(owner)
  rows.erase(records.sessions, owner)
  rows.erase(records.forecasts, owner)
  rests.forget(owner)
end

-- Fence every owner whose lease is over and give a slice of their calls back; true = some are left.
function owners.reap()
  local lost = redis.call('ZRANGEBYSCORE', zsets.OWNERS, '-inf', books.meta.clock)
  for _, owner in ipairs(lost) do forget(owner) end
  local left = SLICE
  for _, owner in ipairs(lost) do
    local members = zsets.with_prefix(zsets.OWNED, owner, left + 1)
    for i = 1, math.min(left, #members) do
      local id = zsets.last_part(members[i])
      reserve.give_back(id, rows.fetch(records.calls, id))
    end
    if #members > left then return true end
    left = left - #members
    redis.call('ZREM', zsets.OWNERS, owner)
  end
  return false
end

local function expire_tickets()
  if books.waiting == 0 then return false end
  zsets.write(zsets.DEADLINES, books.deadlines)
  local late = redis.call('ZRANGEBYSCORE', zsets.DEADLINES, '-inf', books.meta.clock, 'LIMIT', 0, SLICE + 1)
  for i = 1, math.min(SLICE, #late) do
    books.work = books.work - 1
    queue.withdraw(late[i], rows.fetch(records.calls, late[i]), '')
  end
  return #late > SLICE
end

-- Tickets, remembered places and soft holds whose time is over; true = some are left.
function owners.expire()
  local more = expire_tickets()
  more = places.expire() or more
  return holds.expire() or more
end

local function all_declared()
  local known = redis.call('ZRANGE', zsets.OWNERS, 0, -1)
  for _, owner in ipairs(known) do
    local session = rows.fetch(records.sessions, owner)
    if not session or session.declared ~= books.meta.epoch then return false end
  end
  return #known > 0
end

function owners.open_gate()
  if books.meta.opens_at == 0 then return end
  if books.meta.clock >= books.meta.opens_at or (books.meta.clock >= books.meta.opens_after and all_declared()) then
    books.set('opens_at', 0)
  end
end

-- The caller's own unclaimed grants: id and place of each (prefixes.told).
function owners.outbox(owner)
  local told = {}
  for _, member in ipairs(zsets.with_prefix(zsets.OUTBOX, owner, OUTBOX_MAX)) do
    local id = zsets.last_part(member)
    told[#told + 1] = id
    told[#told + 1] = prefixes.told(rows.fetch(records.calls, id))
  end
  return told
end

-- The owner's call of that id, or nil.
function owners.mine(owner, id)
  local call = rows.fetch(records.calls, id)
  if call and call.owner == owner then return call end
  return nil
end

-- Whether the call has a place on a replica.
function owners.holds(call)
  return call and (call.state == 'unclaimed' or call.state == 'reserved')
end

-- Whether a living owner other than this one has the id; what a fenced one left is given back.
function owners.foreign(owner, id)
  local call = rows.fetch(records.calls, id)
  if not call or call.owner == owner then return false end
  if rows.fetch(records.sessions, call.owner) then return true end
  reserve.give_back(id, call)
  return false
end
