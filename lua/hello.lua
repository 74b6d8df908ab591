#!lua flags=allow-oom
-- A new incarnation of a worker process: its session and its lease.
-- ARGV: now, owner.  Reply: {'ok', epoch, clock, policy, run id} | {'unconfigured'}
-- The run id tells the caller whether the store is the one that it knew: if not, its data may be lost.
--- @include "lib/owners"
local NOW, OWNER = ARGV[1], ARGV[2]

local packed_config = read_meta()
if not packed_config then return {'unconfigured'} end
config = read_config(packed_config)
open_books(time_of(NOW))
renew_lease(OWNER)
store(sessions, OWNER, {batch = 0, told = meta.epoch, declared = 0, count = 0, sum = 0})
write_books('')
return {'ok', meta.epoch, meta.clock, meta.policy, meta.run}
