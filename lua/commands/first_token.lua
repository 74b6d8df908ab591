--- @include "lib/owners"
--- @include "lib/check"
-- F id: the prompt is computed: its share of the prefill budget is given back, and others may share what it begins with.
-- ok, and of a call that asks to share how many of its segments it does now | gone

function first_token.check(op)
  check.length(op, 2)
  check.id(op)
end

function first_token.run(owner, id)
  local call = owners.mine(owner, id)
  if not owners.holds(call) then return {'gone'} end
  reserve.claim(id, call)
  if call.prefilling > 0 then reserve.end_prefill(id, call) end
  if not prefixes.any(call) then return {'ok'} end
  reserve.compute(id, call)
  return {'ok', prefixes.joined(call)}
end
