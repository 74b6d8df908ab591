--- @include "lib/owners"
-- S id used cost: give back from any state.  used: blocks really used, cost: block-seconds really held, -1 = unknown.
-- withdrawn | released | settled | gone
local function command_settle(owner, id, _, cost)
  local call = mine(owner, id)
  if not call then return {'gone'} end
  if call.state == 'queued' then
    withdraw(id, call)
    return {'withdrawn'}
  end
  if call.state == 'unclaimed' then
    release(id, call, true)
    return {'released'}
  end
  release(id, call, false)
  if cost >= 0 and call.charged > 0 then
    correct(call, ceil_div((cost - call.cost) * TAG_SCALE, key_of(call.key).weight))
  end
  return {'settled'}
end
