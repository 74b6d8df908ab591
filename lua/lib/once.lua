--- @include "lib/rows"
-- Calls under an `Idempotency-Key`: while one lives, no other call is admitted under the same.

-- nil = it is the first.
function once.refuse(call)
  local first = call.once ~= '' and rows.fetch(records.once, call.once)
  if not first then return nil end
  local same = rows.fetch(records.calls, first.id).fingerprint == call.fingerprint
  return {'refused', same and 'duplicate_in_progress' or 'idempotency_key_reused', 'once', 0, 0, 0}
end

function once.claim(id, call)
  if call.once ~= '' then rows.store(records.once, call.once, {id = id}) end
end

function once.forget(call)
  if call.once ~= '' then rows.erase(records.once, call.once) end
end
