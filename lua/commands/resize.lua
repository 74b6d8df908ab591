--- @include "lib/owners"
--- @include "lib/check"
-- Z id held base path net: what a running call holds from now on, with what it shares, and its path, without `net` blocks
-- of that; absolute, so that carrying it out twice changes nothing, nor what it comes to share before or after.  Waiters,
-- holds and the limit do not stop it.
-- ok | over blocks: that much is above the limit now | gone

function resize.check(op)
  check.length(op, 6)
  check.id(op)
  check.path(op, 3)
  check.integers(op, 6, 6, 0) -- net
end

function resize.run(owner, id, held, base, path, net)
  local call = owners.mine(owner, id)
  if not owners.holds(call) then return {'gone'} end
  reserve.claim(id, call)
  local over = reserve.recount(id, call, held, base, path, net)
  if over > 0 then return {'over', over} end
  return {'ok'}
end
