--- @include "lib/records"
-- The content of one fleet's keys while a script runs, and the ledger clock.
-- KEYS, the same in every script: docs/ledger.md has the table.
local META, QUEUE, ORDER, PARKED, OWNERS, OWNED, OUTBOX, DEADLINES =
  KEYS[1], KEYS[4], KEYS[5], KEYS[8], KEYS[9], KEYS[11], KEYS[12], KEYS[13]
local LAYOUT, WORK = 1, 64

local replica_rows = record_table(KEYS[2], REPLICA)
local calls = record_table(KEYS[3], CALL)
local flows = record_table(KEYS[6], FLOW)
local keys = record_table(KEYS[7], KEY)
local sessions = record_table(KEYS[10], SESSION)
local lines = record_table(META, LINE, 'line:')
local lane_rows = record_table(META, LANE, 'lane:')
local drains = record_table(META, DRAIN, 'drain:')

local replicas -- name -> row, all of them
local config -- {lease_ms, heartbeat_ms, overtake_blocks, lanes = {name...}, pools = {lane -> pools}, classes, shares}
local meta -- epoch, policy, clock, wall, opens_after, opens_at, arrivals, dirty (integers), run
local work = WORK -- units left of what one script does: a grant, parking, hold or expiry is one
local wakes = {} -- owners with new grants
local META_FIELDS = {'epoch', 'policy', 'clock', 'wall', 'opens_after', 'opens_at', 'arrivals', 'dirty', 'run'}

local function read_config(packed)
  local values = cmsgpack.unpack(packed)
  local parsed = {lease_ms = values[1], heartbeat_ms = values[2], overtake_blocks = values[3], lanes = {}, pools = {},
    classes = {}, shares = {}}
  for i, lane in ipairs(values[4]) do
    parsed.lanes[i] = lane[1]
    parsed.pools[lane[1]] = lane[2]
  end
  for i, class in ipairs(values[5]) do
    parsed.classes[i] = class[1]
    parsed.shares[class[1]] = class[2]
  end
  return parsed
end

local function read_replicas()
  replicas = {}
  local all = redis.call('HGETALL', replica_rows.key)
  for i = 1, #all, 2 do
    replicas[all[i]] = decode(REPLICA, all[i + 1])
    replica_rows.rows[all[i]] = replicas[all[i]]
  end
end

local function store_replica(name)
  store(replica_rows, name, replicas[name])
end

-- The books' scalars; nil where this store was never configured, an error where another layout is in use.
local function read_meta()
  local values = redis.call('HMGET', META, 'layout', 'config', unpack(META_FIELDS))
  if values[1] and tonumber(values[1]) ~= LAYOUT then
    error({err = 'LAYOUT the store holds layout ' .. values[1] .. ', this kvgate uses ' .. LAYOUT})
  end
  meta = {}
  for i, field in ipairs(META_FIELDS) do meta[field] = values[i + 2] or '0' end
  for _, field in ipairs(META_FIELDS) do
    if field ~= 'run' then meta[field] = tonumber(meta[field]) end
  end
  if not values[2] then return nil end
  return values[2]
end

local function time_of(argument)
  if argument ~= '' then return tonumber(argument) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The store is another process than before: what it holds may be old or nothing.
local function new_epoch(run)
  meta.run = run
  meta.epoch = meta.epoch + 1
  local owners = redis.call('ZRANGE', OWNERS, 0, -1)
  for _, owner in ipairs(owners) do redis.call('ZADD', OWNERS, meta.clock + config.lease_ms, owner) end
  meta.opens_after = meta.clock + (#owners > 0 and 0 or 2 * config.heartbeat_ms)
  meta.opens_at = meta.clock + config.lease_ms
end

-- Advance the clock by at most two heartbeats, so that a pause of the store ends nobody's lease.
local function open_books(now)
  local passed = meta.wall >= 0 and now - meta.wall or 0
  meta.clock = meta.clock + math.min(math.max(passed, 0), 2 * config.heartbeat_ms)
  meta.wall = now
  read_replicas()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  if run ~= meta.run then new_epoch(run) end
end

local function write_books(wake_prefix)
  for _, records in ipairs({replica_rows, calls, flows, keys, sessions, lines, lane_rows, drains}) do flush(records) end
  local scalars = {'layout', LAYOUT}
  for _, field in ipairs(META_FIELDS) do
    scalars[#scalars + 1] = field
    scalars[#scalars + 1] = meta[field]
  end
  redis.call('HSET', META, unpack(scalars))
  -- A user without the right to publish costs a heartbeat, not the books.
  for owner in pairs(wakes) do redis.pcall('PUBLISH', wake_prefix .. owner, '') end
end

local function ceil_div(numerator, denominator)
  return math.ceil(numerator / denominator)
end
