--- @include "lib/owners"
--- @include "lib/check"
--- @include "lib/queue"
-- M id exclude: back into the queue at the old place, not on these replicas, without paying twice.
-- ticket position wait_ms | grant replica, where it moved before | gone

local function add_excluded(call, names)
  local merged = {}
  for _, name in ipairs(call.exclude) do merged[#merged + 1] = name end
  for _, name in ipairs(names) do
    if not placement.contains(merged, name) then merged[#merged + 1] = name end
  end
  table.sort(merged)
  call.exclude = merged
end

local function unhold_excluded(id, call)
  for _, name in ipairs(call.exclude) do
    if books.replicas[name] and books.replicas[name].held_for == id then queue.unhold(id) end
  end
end

function move.check(op)
  check.length(op, 3)
  check.id(op)
  check.name_list(op, 3)
end

function move.run(owner, id, exclude)
  local call = owners.mine(owner, id)
  if not call or call.state == 'displaced' then return {'gone'} end
  -- A late copy of the batch: the call runs elsewhere already.
  if call.state ~= 'queued' and not placement.contains(exclude, call.replica) then return {'grant', call.replica} end
  add_excluded(call, exclude)
  if call.state == 'queued' then
    unhold_excluded(id, call)
    rows.store(records.calls, id, call)
    books.meta.dirty = 1
  else
    reserve.vacate(id, call)
    reserve.correct(call, -call.charged)
    queue.join(id, call)
    call.charged, call.prefilling, call.replica, call.attempt = 0, 0, '', call.attempt + 1
    rows.store(records.calls, id, call)
  end
  return {'ticket', flows.line(call.lane, call.class).waiting, drain.FIRST_APPOINTMENT_MS}
end
