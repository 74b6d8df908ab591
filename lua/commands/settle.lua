--- @include "lib/owners"
--- @include "lib/check"
--- @include "lib/queue"
--- @include "lib/quotas"
--- @include "lib/holds"
-- S id used cost corrections fingerprint name: give back from any state.  used: blocks really used, cost: block-seconds
-- really held, -1 = unknown.  corrections, of a call that ran: bucket of a rate quota, microseconds charged too little
-- (negative: too much).  fingerprint: the place of a call that still waits is remembered under it, '' = it is not.  name,
-- which may be left out: of the conversation, whose blocks are held softly, '' = they are not.
-- withdrawn | released | settled | gone

function settle.check(op)
  check.length(op, 7, 6)
  check.id(op)
  check.integers(op, 3, 4, -1)
  check.corrections(op, 5)
  check.hashes(op, 6, #op) -- fingerprint, name
end

-- A running call has ended.
local function finish(id, call, used, name)
  local replica, shared = books.replicas[call.replica], prefixes.shared(call)
  local before = replica.shared
  reserve.release(id, call, false)
  local kept = shared - (before - replica.shared) -- of its nodes those that others are in
  if used >= 0 then holds.ended(name, replica, math.min(used, call.blocks), kept) end
end

function settle.run(owner, id, used, cost, corrections, fingerprint, name)
  local call = owners.mine(owner, id)
  if not call then return {'gone'} end
  if call.state == 'queued' then
    queue.withdraw(id, call, fingerprint)
    return {'withdrawn'}
  end
  if call.state == 'displaced' then
    queue.forget_displaced(id, call)
    return {'withdrawn'}
  end
  if call.state == 'unclaimed' then
    reserve.release(id, call, true)
    return {'released'}
  end
  finish(id, call, used, name or '')
  if #call.charge > 0 then quotas.change(call.key, corrections) end
  if cost >= 0 and call.charged > 0 then reserve.true_up(call, cost) end
  return {'settled'}
end
