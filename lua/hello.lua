#!lua flags=allow-oom
-- A new incarnation of a worker process: its session and its lease.
-- ARGV: now, owner.  Reply: {'ok', epoch, clock, policy, run id} | {'unconfigured'}
-- The run id tells the caller whether the store is the one that it knew: if not, its data may be lost.
--- @include "lib/owners"
local NOW, OWNER = ARGV[1], ARGV[2]

local config = books.read_meta()
if not config then return {'unconfigured'} end
books.open(config, NOW)
local meta = books.meta
owners.renew_lease(OWNER)
rows.store(records.sessions, OWNER, {batch = 0, told = meta.epoch, declared = 0, count = 0, sum = 0})
books.write('')
return {'ok', meta.epoch, meta.clock, meta.policy, meta.run}
