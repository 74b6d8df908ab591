--- @include "lib/owners"
-- F id: the prompt is computed, its share of the prefill budget is given back.  ok | gone
local function command_first_token(owner, id)
  local call = mine(owner, id)
  if not call or call.state == 'queued' then return {'gone'} end
  claim(id, call)
  if call.prefilling > 0 then
    local replica = replicas[call.replica]
    replica.prefill = replica.prefill - call.prefilling
    store_replica(call.replica)
    call.prefilling = 0
    store(calls, id, call)
    meta.dirty = 1
  end
  return {'ok'}
end
