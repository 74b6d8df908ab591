--- @include "lib/owners"
-- K id: claim a grant found in the outbox.  grant replica | ticket position wait_ms | gone
local function command_claim(owner, id)
  local call = mine(owner, id)
  if not call then return {'gone'} end
  if call.state == 'queued' then
    return {'ticket', line_of(call.lane, call.class).waiting, FIRST_APPOINTMENT_MS}
  end
  claim(id, call)
  return {'grant', call.replica}
end
