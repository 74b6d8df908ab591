-- The operator's settings of a fleet, or one replica's state as a gateway sees it.
-- args: now, prefix of the wake channels, then
--   'fleet', config, replicas: cmsgpack of {lease_ms, heartbeat_ms, overtake_blocks, {{lane, {pool...}}...},
--     {{class, share in thousandths}...}} and of {{name, pool, limit, usable, sequences_max, prefill_max}...};
--     limit -1 = unknown: what the store has is kept
--   'replica', name, 1 or 0: it answers, or it does not
-- Reply: {'ok', epoch, clock, policy} | {'unconfigured'}
--- @include "lib/dispatch"
--- @include "lib/queue"

-- No new placements; a call that a hold was for looks elsewhere.
local function take_down(replica, state)
  if replica.state ~= 'removed' then replica.state = state end
  replica.held_for = ''
  books.store_replica(replica)
  books.meta.dirty = 1
end

local function configure_replica(name, pool, limit, usable, sequences_max, prefill_max)
  local replica = books.replicas[name]
  local state = limit < 0 and 'down' or 'up'
  if not replica then
    replica = {name = name, pool = pool, limit = 0, usable = 0, sequences_max = 0, prefill_max = 0, used = 0,
      sequences = 0, prefill = 0, state = state, held_for = ''}
  end
  replica.pool = pool
  if replica.state == 'removed' then replica.state = state end
  if limit >= 0 then
    replica.limit, replica.usable = limit, usable
    replica.sequences_max, replica.prefill_max = sequences_max, prefill_max
  end
  books.place_replica(name, replica)
  books.meta.dirty = 1
end

local function forget_removed()
  for name, replica in pairs(books.replicas) do
    if replica.state == 'removed' and replica.sequences == 0 then books.place_replica(name, nil) end
  end
end

local function configure_fleet(packed_replicas)
  local known = {}
  for _, wanted in ipairs(cmsgpack.unpack(packed_replicas)) do
    known[wanted[1]] = true
    configure_replica(unpack(wanted))
  end
  for name, replica in pairs(books.replicas) do
    if not known[name] then take_down(replica, 'removed') end
  end
  forget_removed()
  queue.recheck_parked()
end

local function observe_replica(name, up)
  local replica = books.replicas[name]
  if not replica or replica.state == 'removed' then return end
  if not up then return take_down(replica, 'down') end
  if replica.state ~= 'up' then queue.recheck_parked() end
  replica.state = 'up'
  books.store_replica(replica)
  books.meta.dirty = 1
end

-- What the operator wants, as it came; another one than before is a new policy.
local function adopt(known_config, packed_config, packed_replicas, known_replicas)
  if not known_config then books.start() end
  if packed_config == known_config and packed_replicas == known_replicas then return end
  books.set('config', packed_config)
  books.set('wanted', packed_replicas)
  books.set('policy', books.meta.policy + 1)
end

function configure.run(keys, args)
  local now, wake, kind = args[1], args[2], args[3]
  books.begin(keys)
  local config = books.read_meta()
  if not config and kind ~= 'fleet' then return {'unconfigured'} end
  if kind == 'fleet' then
    adopt(config, args[4], args[5], redis.call('HGET', keys[1], 'wanted'))
    config = args[4]
  end
  books.open(config, now)
  if kind == 'fleet' then configure_fleet(args[5]) else observe_replica(args[4], args[5] == '1') end
  dispatch.run()
  books.write(wake)
  return {'ok', books.meta.epoch, books.meta.clock, books.meta.policy}
end
