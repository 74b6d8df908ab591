--- @include "lib/owners"
--- @include "lib/check"
--- @include "lib/rests"
-- H count sum ends: compare the owner's digest with ours.  A replayed batch has changed the set already and tells
-- nothing.  ends, of the owner's running calls the next that it foresees, in order: ms from now, replica, blocks...
-- same | differs, then the replicas that drain

function heartbeat.check(op)
  check.length(op, 4)
  check.integers(op, 2, 3, 0)
  check.ends(op, 4)
end

local function keep(owner, ends)
  for i = 1, #ends, 3 do ends[i] = ends[i] + books.meta.clock end
  if #ends > 0 then
    rows.store(records.forecasts, owner, {ends = ends})
  elseif rows.fetch(records.forecasts, owner) then
    rows.erase(records.forecasts, owner)
  end
end

function heartbeat.run(owner, count, sum, ends)
  keep(owner, ends)
  local session = rows.fetch(records.sessions, owner)
  local same = books.replayed or (session.count == count and session.sum == sum)
  return {same and 'same' or 'differs', unpack(rests.draining())}
end
