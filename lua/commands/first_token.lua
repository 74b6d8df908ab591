--- @include "lib/owners"
--- @include "lib/check"
-- F id: the prompt is computed, its share of the prefill budget is given back.  ok | gone

function first_token.check(op)
  check.length(op, 2)
  check.id(op)
end

function first_token.run(owner, id)
  local call = owners.mine(owner, id)
  if not owners.holds(call) then return {'gone'} end
  reserve.claim(id, call)
  if call.prefilling > 0 then
    local replica = books.replicas[call.replica]
    replica.prefill = replica.prefill - call.prefilling
    books.store_replica(replica)
    books.room = books.room + 1
    call.prefilling = 0
    rows.store(records.calls, id, call)
    books.meta.dirty = 1
  end
  return {'ok'}
end
