--- @include "lib/owners"
-- H count sum: compare the owner's digest with ours.  A replayed batch has changed the set already and tells nothing.
-- same | differs
local replayed = false
local function command_heartbeat(owner, count, sum)
  local session = fetch(sessions, owner)
  if replayed or (session.count == count and session.sum == sum) then return {'same'} end
  return {'differs'}
end
