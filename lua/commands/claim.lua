--- @include "lib/owners"
--- @include "lib/appointments"
--- @include "lib/check"
--- @include "lib/queue"
-- K id: claim a grant found in the outbox.  grant place | ticket position wait_ms | gone | refused code knob measured
-- limit retry_ms

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
  if call.state == 'displaced' then
    queue.forget_displaced(id, call)
    return {'refused', 'queue_full', 'displaced', 0, 0, appointments.wait_told(call)}
  end
  reserve.claim(id, call)
  return {'grant', prefixes.told(call)}
end
