--- @include "lib/owners"
--- @include "lib/check"
-- H count sum: compare the owner's digest with ours.  A replayed batch has changed the set already and tells nothing.
-- same | differs

function heartbeat.check(op)
  check.length(op, 3)
  check.integers(op, 2, 3, 0)
end

function heartbeat.run(owner, count, sum)
  local session = rows.fetch(records.sessions, owner)
  if books.replayed or (session.count == count and session.sum == sum) then return {'same'} end
  return {'differs'}
end
