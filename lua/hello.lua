-- A new incarnation of a worker process: its session and its lease.
-- args: now, owner.  Reply: {'ok', epoch, clock, policy, run id} | {'unconfigured'}
-- The run id tells the caller whether the store is the one that it knew: if not, its data may be lost.
--- @include "lib/owners"

function hello.run(keys, args)
  local now, owner = args[1], args[2]
  books.begin(keys)
  local config = books.read_meta()
  if not config then return {'unconfigured'} end
  books.open(config, now)
  local meta = books.meta
  owners.renew_lease(owner)
  rows.store(records.sessions, owner, {batch = 0, told = meta.epoch, declared = 0, count = 0, sum = 0})
  books.write('')
  return {'ok', meta.epoch, meta.clock, meta.policy, meta.run}
end
