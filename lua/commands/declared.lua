--- @include "lib/owners"
--- @include "lib/check"
-- Y: the owner has re-declared everything.  open | closed ms

function declared.check(op)
  check.length(op, 1)
end

function declared.run(owner)
  local session = rows.fetch(records.sessions, owner)
  session.declared = books.meta.epoch
  rows.store(records.sessions, owner, session)
  owners.open_gate()
  if books.meta.opens_at == 0 then return {'open'} end
  return {'closed', books.meta.opens_at - books.meta.clock}
end
