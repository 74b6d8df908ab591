--- @include "lib/owners"
-- M id exclude: back into the queue at the old place, not on these replicas, without paying twice.
-- ticket position wait_ms | gone

local function add_excluded(call, names)
  local merged = {}
  for _, name in ipairs(call.exclude) do merged[#merged + 1] = name end
  for _, name in ipairs(names) do
    if not contains(merged, name) then merged[#merged + 1] = name end
  end
  table.sort(merged)
  call.exclude = merged
end

local function command_move(owner, id, exclude)
  local call = mine(owner, id)
  if not call then return {'gone'} end
  add_excluded(call, exclude)
  if call.state == 'queued' then
    for _, name in ipairs(call.exclude) do
      if replicas[name] and replicas[name].held_for == id then unhold(id) end
    end
    store(calls, id, call)
    meta.dirty = 1
  else
    vacate(id, call)
    join(id, call)
    correct(call, -call.charged)
    call.charged, call.prefilling, call.replica, call.attempt = 0, 0, '', call.attempt + 1
    store(calls, id, call)
  end
  return {'ticket', line_of(call.lane, call.class).waiting, FIRST_APPOINTMENT_MS}
end
