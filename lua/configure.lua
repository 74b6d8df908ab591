-- The operator's settings of a fleet, one replica's state as a gateway sees it, who wants it to get no new calls, or what
-- its engine has taught.
-- args: now, prefix of the wake channels, then
--   'fleet', config, replicas: cmsgpack of {lease_ms, heartbeat_ms, overtake_blocks, {{lane, {pool...}}...},
--     {{class, share in thousandths}...}} and of {{name, pool, limit, usable, sequences_max, prefill_max, mode}...};
--     limit -1 = unknown: what the store has is kept
--   'replica', name, 1 or 0: it answers, or it does not
--   'rest', teller, name, why: it gets no new calls, as far as the teller ('operator', or an owner) is concerned;
--     why '' = it may
--   'shut', 1 or 0: the fleet takes no new calls, or does
--   'seat', scraper, name: a gateway offers to read the metrics of its engine
--   'learn', scraper, name, number, limit, sequences, prefill, told, cache: what the reader has learned, -1 = as
--     configured, and the number of the engine's prefix cache, 0 = none
--   'distrust', name, cache: nothing more is shared there while the engine has that cache
-- Reply: {'ok', epoch, clock, policy}, with 'unknown' or 'fenced' in the place of 'ok' where there is no such replica or
--   owner and nothing was done | {'unconfigured'}; of the last two
--   {'seat', clock, 1 or 0: it is the scraper's, ms that it lasts, number, held, configured, told} | {'unknown'} |
--   {'late'}; held and configured: {limit, sequences, prefill}
--- @include "lib/capacity"
--- @include "lib/dispatch"
--- @include "lib/queue"
--- @include "lib/rests"
--- @include "lib/prefixes"
--- @include "lib/holds"
local OPERATOR = 'operator'

-- No new placements; a call that a hold was for looks elsewhere.
local function take_down(replica, state)
  if replica.state ~= 'removed' then replica.state = state end
  holds.drop(replica)
  replica.held_for = ''
  books.store_replica(replica)
  books.meta.dirty = 1
end

local function configure_replica(name, pool, limit, usable, sequences_max, prefill_max, mode)
  local replica = books.replicas[name] or books.new_replica(name, pool)
  replica.pool, replica.mode = pool, mode
  if replica.state == 'removed' then
    if limit < 0 then replica.state = 'down' else rests.let_answer(replica) end
  end
  if limit >= 0 then
    replica.limit, replica.usable = limit, usable
    replica.sequences_usable, replica.sequences_max, replica.prefill_max = sequences_max, sequences_max, prefill_max
    capacity.keep_learned(replica)
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
  if up then rests.let_answer(replica) else take_down(replica, 'down') end
end

-- The status of the reply.
local function rest_replica(teller, name, why)
  local replica = books.replicas[name]
  if teller ~= OPERATOR and not rows.fetch(records.sessions, teller) then return 'fenced' end
  if why ~= '' and (not replica or replica.state == 'removed') then return 'unknown' end
  rests.set(teller, name, why)
  return 'ok'
end

-- The status of the reply.  A word about another cache than is known there is late: it would undo one about this cache.
local function distrust(name, cache)
  local replica = books.replicas[name]
  if not replica then return 'unknown' end
  local known = replica.cache > 0 and replica.cache or replica.distrusted
  if known > 0 and known ~= cache then return 'ok' end
  replica.distrusted = cache
  books.store_replica(replica)
  prefixes.set_cache(replica, replica.cache)
  return 'ok'
end

-- What is not the fleet's settings: the status of the reply.
local function change(kind, first, second, third)
  if kind == 'distrust' then return distrust(first, tonumber(second)) end
  if kind == 'rest' then return rest_replica(first, second, third) end
  if kind == 'shut' then books.set('shut', first) else observe_replica(first, second == '1') end
  return 'ok'
end

-- What the operator wants, as it came; another one than before is a new policy.
local function adopt(known_config, packed_config, packed_replicas, known_replicas)
  if not known_config then books.start() end
  if packed_config == known_config and packed_replicas == known_replicas then return end
  books.set('config', packed_config)
  books.set('wanted', packed_replicas)
  books.set('policy', books.meta.policy + 1)
end

local function offer_seat(scraper, name)
  local replica = books.replicas[name]
  if not replica or replica.state == 'removed' then return {'unknown'} end
  return capacity.seat(scraper, replica, capacity.take(scraper, replica))
end

local function learn(scraper, name, number, cache, ...)
  local replica = books.replicas[name]
  local row = replica and rows.fetch(records.capacities, name)
  if not row or replica.state == 'removed' then return {'unknown'} end
  if row.scraper ~= scraper or number <= row.number then return {'late'} end
  if capacity.learn(replica, row, number, ...) then
    queue.recheck_parked()
    books.meta.dirty = 1
  end
  prefixes.set_cache(replica, cache)
  dispatch.run()
  return capacity.seat(scraper, replica, row)
end

-- Of whoever reads metrics, with a reply of its own.
local function converse(args)
  if args[3] == 'seat' then return offer_seat(args[4], args[5]) end
  return learn(args[4], args[5], tonumber(args[6]), tonumber(args[11]), tonumber(args[7]), tonumber(args[8]),
    tonumber(args[9]), args[10])
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
  if kind == 'seat' or kind == 'learn' then
    local reply = converse(args)
    books.write(wake)
    return reply
  end
  local status = 'ok'
  if kind == 'fleet' then configure_fleet(args[5]) else status = change(kind, args[4], args[5], args[6]) end
  dispatch.run()
  books.write(wake)
  return {status, books.meta.epoch, books.meta.clock, books.meta.policy}
end
