--- @include "lib/owners"
--- @include "lib/check"
-- K id: claim a grant found in the outbox.  grant replica | ticket position wait_ms | gone

function claim.check(op)
  check.length(op, 2)
  check.id(op)
end

function claim.run(owner, id)
  local call = owners.mine(owner, id)
  if not call then return {'gone'} end
  if call.state == 'queued' then
    return {'ticket', flows.line(call.lane, call.class).waiting, drain.FIRST_APPOINTMENT_MS}
  end
  reserve.claim(id, call)
  return {'grant', call.replica}
end
