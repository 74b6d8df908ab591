--- @include "lib/owners"
--- @include "lib/check"
--- @include "lib/queue"
-- S id used cost: give back from any state.  used: blocks really used, cost: block-seconds really held, -1 = unknown.
-- withdrawn | released | settled | gone

function settle.check(op)
  check.length(op, 4)
  check.id(op)
  check.integers(op, 3, 4, -1)
end

function settle.run(owner, id, _, cost)
  local call = owners.mine(owner, id)
  if not call then return {'gone'} end
  if call.state == 'queued' then
    queue.withdraw(id, call)
    return {'withdrawn'}
  end
  if call.state == 'unclaimed' then
    reserve.release(id, call, true)
    return {'released'}
  end
  reserve.release(id, call, false)
  if cost >= 0 and call.charged > 0 then reserve.true_up(call, cost) end
  return {'settled'}
end
