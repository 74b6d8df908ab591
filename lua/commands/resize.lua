--- @include "lib/owners"
--- @include "lib/check"
-- Z id held base path: what a running call holds from now on, and its path; absolute, so that carrying it out twice
-- changes nothing.  Waiters, holds and the limit do not stop it.  ok | over blocks: that much is above the limit now |
-- gone

function resize.check(op)
  check.length(op, 5)
  check.id(op)
  check.path(op, 3)
end

function resize.run(owner, id, held, base, path)
  local call = owners.mine(owner, id)
  if not owners.holds(call) then return {'gone'} end
  reserve.claim(id, call)
  local over = reserve.recount(id, call, held, base, path)
  if over > 0 then return {'over', over} end
  return {'ok'}
end
