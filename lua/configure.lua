#!lua flags=allow-oom
-- The operator's settings of a fleet, or one replica's state as a gateway sees it.
-- ARGV: now, prefix of the wake channels, then
--   'fleet', config, replicas: cmsgpack of {lease_ms, heartbeat_ms, overtake_blocks, {{lane, {pool...}}...},
--     {{class, share in thousandths}...}} and of {{name, pool, limit, usable, sequences_max, prefill_max}...};
--     limit -1 = unknown: what the store has is kept
--   'replica', name, 1 or 0: it answers, or it does not
-- Reply: {'ok', epoch, clock, policy} | {'unconfigured'}
--- @include "lib/owners"
local NOW, WAKE, KIND = ARGV[1], ARGV[2], ARGV[3]

-- No new placements; a call that a hold was for looks elsewhere.
local function take_down(name, state)
  local replica = replicas[name]
  if replica.state ~= 'removed' then replica.state = state end
  replica.held_for = ''
  store_replica(name)
  meta.dirty = 1
end

local function configure_replica(name, pool, limit, usable, sequences_max, prefill_max)
  local replica = replicas[name]
  local state = limit < 0 and 'down' or 'up'
  if not replica then
    replica = {pool = pool, limit = 0, usable = 0, sequences_max = 0, prefill_max = 0, used = 0, sequences = 0,
      prefill = 0, state = state, held_for = ''}
    replicas[name] = replica
  end
  replica.pool = pool
  if replica.state == 'removed' then replica.state = state end
  if limit >= 0 then
    replica.limit, replica.usable = limit, usable
    replica.sequences_max, replica.prefill_max = sequences_max, prefill_max
  end
  store_replica(name)
  meta.dirty = 1
end

local function configure_fleet(packed_replicas)
  local known = {}
  for _, wanted in ipairs(cmsgpack.unpack(packed_replicas)) do
    known[wanted[1]] = true
    configure_replica(unpack(wanted))
  end
  for name in pairs(replicas) do
    if not known[name] then take_down(name, 'removed') end
  end
  forget_removed()
end

local function observe_replica(name, up)
  local replica = replicas[name]
  if not replica or replica.state == 'removed' then return end
  if not up then return take_down(name, 'down') end
  replica.state = 'up'
  store_replica(name)
  meta.dirty = 1
end

local packed_config = read_meta()
if KIND == 'fleet' then
  if packed_config ~= ARGV[4] or redis.call('HGET', META, 'wanted') ~= ARGV[5] then
    redis.call('HSET', META, 'config', ARGV[4], 'wanted', ARGV[5])
    meta.policy = meta.policy + 1
  end
  if not packed_config then meta.wall = -1 end
  packed_config = ARGV[4]
end
if not packed_config then return {'unconfigured'} end
config = read_config(packed_config)
open_books(time_of(NOW))
if KIND == 'fleet' then configure_fleet(ARGV[5]) else observe_replica(ARGV[4], ARGV[5] == '1') end
close_books(WAKE)
return {'ok', meta.epoch, meta.clock, meta.policy}
