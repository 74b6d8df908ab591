--- @include "lib/owners"
-- Y: the owner has re-declared everything.  open | closed ms
local function command_declared(owner)
  local session = fetch(sessions, owner)
  session.declared = meta.epoch
  store(sessions, owner, session)
  open_gate()
  if meta.opens_at == 0 then return {'open'} end
  return {'closed', meta.opens_at - meta.clock}
end
