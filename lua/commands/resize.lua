--- @include "lib/owners"
-- Z id blocks: a running call grows or shrinks; waiters and holds do not stop it, the limit does.  ok | no_room | gone
local function command_resize(owner, id, blocks)
  local call = mine(owner, id)
  if not call or call.state == 'queued' then return {'gone'} end
  local replica, key = replicas[call.replica], key_of(call.key)
  local growth = blocks - call.blocks
  if growth > 0 and replica.used + growth > replica.limit then return {'no_room'} end
  claim(id, call)
  call.blocks = blocks
  store(calls, id, call)
  replica.used = replica.used + growth
  store_replica(call.replica)
  key.blocks = key.blocks + growth
  store(keys, call.key, key)
  if growth < 0 then
    unpark_key(call.key)
    drained(replica.pool, -growth)
    meta.dirty = 1
  end
  return {'ok'}
end
