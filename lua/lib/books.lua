--- @include "lib/records"
--- @include "lib/rows"
--- @include "lib/zsets"
--- @include "lib/fronts"
--- @include "lib/elastic"
-- The content of one fleet's keys while a script runs, and the ledger clock.
local LAYOUT, WORK = 7, 32

local meta_key -- of the fleet
local pools -- name -> rows of its replicas
local limits -- name of a pool -> sum of the limits of its replicas that are up
local run -- of the server process that this library is loaded in

-- What stays true from one run to the next, of any fleet and whatever else writes to the store: what a text says.
local last_config = {packed = nil, config = nil}
local last_rows = {} -- name of a replica -> {packed, row}
local whole = false -- the last run went to its end: these are what their texts say

-- Nothing of the last run is left.  keys, the same in every script: docs/ledger.md has the table.
function books.begin(keys)
  if not whole then last_rows = {} end
  meta_key, whole, pools, limits = keys[1], false, nil, {}
  records.open(keys)
  zsets.open(keys)
  fronts.begin()
  books.replicas = records.replicas.known -- name -> row, all of them
  books.changed = {} -- scalars of the fleet that seldom change, as arguments of HSET
  books.work = WORK -- units left of what one script does: a grant, parking, hold or expiry is one
  books.rehearsed = false -- this script has played the order forward
  books.waiting = 0 -- calls in the queue, of all lanes
  books.parked = nil -- flows that are parked, at most, where it is known
  books.places = 0 -- remembered
  books.replayed = false -- this batch was executed before
  books.owned, books.outbox, books.backlog, books.deadlines = {}, {}, {}, {} -- to write in these zsets
  books.hold_ends = {} -- to write in that zset, too
  books.soft = false -- some replica has soft holds
  books.wakes = {} -- owners with new grants
  books.holds = 0 -- replicas that are held for a call, at most
  books.room = 0 -- rises when a replica has more room or is no longer held: until then what did not fit does not fit
  books.turns = 0 -- rises when nodes come or go, or have holders or none, or when a replica has another cache: what a call
    -- may share is another then
  books.gains, books.gains_at = {}, 0 -- segments -> what calls that begin with them share (prefixes.gains), at that turn
  books.moves = 0 -- rises when anything else changes that decides who starts next
  books.horizon = {} -- line -> last member of ORDER that a dispatch looks at; what comes after it decides nothing
  books.stuck = {} -- lane -> room + moves when nothing could be done in it
  books.unfit = {} -- call -> room when it found no place
  books.bounds = {} -- pool -> most blocks free on a replica of it (all, on an idle one) when somebody found no place
  books.bounds_room = 0 -- room when they were taken
end

-- The packed settings, false where this store was never configured; an error where another layout is in use.
function books.read_meta()
  local values = redis.call('HMGET', meta_key, 'config', 'layout', 'run', 'epoch', 'policy', 'clock', 'wall', 'opens_after',
    'opens_at', 'arrivals', 'dirty', 'skipped', 'recheck', 'rests',
    'shut')
  if values[2] and tonumber(values[2]) ~= LAYOUT then
    error({err = 'LAYOUT the store holds layout ' .. values[2] .. ', this kvgate uses ' .. LAYOUT})
  end
  for i = 4, 12 do values[i] = tonumber(values[i] or 0) end
  books.meta = {run = values[3], epoch = values[4], policy = values[5], clock = values[6], wall = values[7],
    opens_after = values[8], opens_at = values[9], arrivals = values[10], dirty = values[11], skipped = values[12],
    recheck = values[13] or '', rests = values[14] or '', shut = values[15] == '1'}
  return values[1]
end

-- The first settings of a fleet: its clock starts now.
function books.start()
  books.meta.wall = -1
  books.set('layout', LAYOUT)
end

-- Change a scalar other than the four that every script writes.
function books.set(name, value)
  books.meta[name] = value
  books.changed[#books.changed + 1] = name
  books.changed[#books.changed + 1] = value
end

-- packed: {lease_ms, heartbeat_ms, overtake_blocks, {{lane, pools}...}, {{class, share}...}}.
local function config_of(packed)
  local values = cmsgpack.unpack(packed)
  local lanes, pools_of, classes, shares = {}, {}, {}, {}
  for i, lane in ipairs(values[4]) do
    lanes[i] = lane[1]
    pools_of[lane[1]] = lane[2]
  end
  for i, class in ipairs(values[5]) do
    classes[i] = class[1]
    shares[class[1]] = class[2]
  end
  return {lease_ms = values[1], heartbeat_ms = values[2], overtake_blocks = values[3], lanes = lanes,
    pools = pools_of, classes = classes, shares = shares}
end

-- lease_ms, heartbeat_ms, overtake_blocks, lanes, classes, pools (lane -> pools), shares.
local function read_config(packed)
  if packed ~= last_config.packed then last_config = {packed = packed, config = config_of(packed)} end
  books.config = last_config.config
end

local function read_replica(name, packed)
  local last = last_rows[name]
  if not last or last.packed ~= packed then
    last = {packed = packed, row = rows.read(records.replicas, packed)}
    last.row.name = name
    last_rows[name] = last
  end
  return last.row
end

local function read_replicas()
  local flat = redis.call('HGETALL', records.replicas.hash)
  for i = 1, #flat, 2 do
    local replica = read_replica(flat[i], flat[i + 1])
    books.replicas[replica.name] = replica
    if replica.held_for ~= '' then books.holds = books.holds + 1 end
    if replica.holds > 0 then books.soft = true end
  end
end

-- The replicas of a pool, in no order.
function books.pool(name)
  if not pools then
    pools = {}
    for _, replica in pairs(books.replicas) do
      local pool = pools[replica.pool] or {}
      pools[replica.pool] = pool
      pool[#pool + 1] = replica
    end
  end
  return pools[name] or {}
end

-- What the replicas of a pool that are up may hand out together.
function books.limit_of(pool)
  local limit = limits[pool]
  if limit then return limit end
  limit = 0
  for _, replica in ipairs(books.pool(pool)) do
    if replica.state == 'up' then limit = limit + replica.limit end
  end
  limits[pool] = limit
  return limit
end

function books.store_replica(replica)
  records.replicas.touched[replica.name] = true
end

-- Of which nothing is known yet.
function books.new_replica(name, pool)
  return {name = name, pool = pool, limit = 0, usable = 0, sequences_usable = 0, sequences_max = 0, prefill_max = 0,
    used = 0, sequences = 0, prefill = 0, state = 'removed', held_for = '', mode = 'guaranteed', full = 0, assured = 0,
    elastic = 0, base = 0, sums = '', shared = 0, cache = 0, distrusted = 0, soft = 0, holds = 0, soft_end = 0,
    history = 0}
end

-- A replica came, changed its pool, or went (nil).
function books.place_replica(name, replica)
  if not replica then rows.erase(records.capacities, name) end
  books.replicas[name] = replica
  records.replicas.touched[name] = replica ~= nil
  pools, limits = nil, {}
end

local function time_of(argument)
  if argument ~= '' then return tonumber(argument) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Of the server process that runs this script.
local function own_run()
  local info = redis.call('INFO', 'server')
  local _, before = string.find(info, 'run_id:', 1, true)
  return string.match(info, '^%w+', before + 1)
end

-- The store is another process than before: what it holds may be old or nothing.
local function new_epoch()
  books.set('run', run)
  books.set('epoch', books.meta.epoch + 1)
  local owners = redis.call('ZRANGE', zsets.OWNERS, 0, -1)
  local lease_end = books.meta.clock + books.config.lease_ms
  for _, owner in ipairs(owners) do redis.call('ZADD', zsets.OWNERS, lease_end, owner) end
  books.set('opens_after', books.meta.clock + (#owners > 0 and 0 or 2 * books.config.heartbeat_ms))
  books.set('opens_at', lease_end)
end

-- now: ms, '' = the server's TIME.  The clock advances by at most two heartbeats, so that a pause of the store ends
-- nobody's lease.
function books.open(packed_config, now)
  read_config(packed_config)
  now = time_of(now)
  local meta, longest = books.meta, 2 * books.config.heartbeat_ms
  local passed = meta.wall >= 0 and now - meta.wall or 0
  meta.clock = meta.clock + math.min(math.max(passed, 0), longest)
  if passed > longest then books.set('skipped', meta.skipped + passed - longest) end
  meta.wall = now
  read_replicas()
  books.waiting = redis.call('ZCARD', zsets.QUEUE)
  books.places = redis.call('ZCARD', zsets.PLACES)
  run = run or own_run()
  if run ~= meta.run then new_epoch() end
end

-- When no call is left nobody is ahead of anybody: the fair order starts anew.
local function forget_order()
  redis.call('DEL', records.flows.hash)
  records.flows.touched = {}
  for _, lane in ipairs(books.config.lanes) do
    for _, class in ipairs(books.config.classes) do
      local name = lane .. ':' .. class
      local line = rows.fetch(records.lines, name)
      if line.virtual > 0 or line.credit > 0 then
        line.virtual, line.credit = 0, 0
        rows.store(records.lines, name, line)
      end
    end
  end
end

local function write_meta()
  local meta = books.meta
  local sets = {'clock', meta.clock, 'wall', meta.wall, 'arrivals', meta.arrivals, 'dirty', meta.dirty}
  for _, argument in ipairs(books.changed) do sets[#sets + 1] = argument end
  rows.collect(records.lines, sets)
  rows.collect(records.lanes, sets)
  rows.collect(records.drains, sets)
  local dels = {}
  rows.collect(records.capacities, sets, dels)
  redis.call('HSET', meta_key, unpack(sets))
  for _, name in ipairs(dels) do redis.call('HDEL', meta_key, 'capacity:' .. name) end
end

-- What these rows say now is not what they were read from.
local function forget_touched()
  for name in pairs(records.replicas.touched) do last_rows[name] = nil end
end

-- wake_prefix: of the channels that wake owners up.
function books.write(wake_prefix)
  local erased = rows.write(records.calls)
  if erased and redis.call('EXISTS', records.calls.hash) == 0 then forget_order() end
  for name, kept in pairs(records.replicas.touched) do
    if kept then elastic.seal(books.replicas[name]) end
  end
  rows.write(records.replicas)
  rows.write(records.flows)
  rows.write(records.keys)
  rows.write(records.sessions)
  rows.write(records.forecasts)
  rows.write(records.once)
  rows.write(records.nodes)
  rows.write(records.holds)
  zsets.write(zsets.HOLD_ENDS, books.hold_ends)
  zsets.write(zsets.OWNED, books.owned)
  zsets.write(zsets.OUTBOX, books.outbox)
  zsets.write(zsets.DEADLINES, books.deadlines)
  fronts.write()
  zsets.write(zsets.BACKLOG, books.backlog)
  write_meta()
  -- A user without the right to publish costs a heartbeat, not the books.
  for owner in pairs(books.wakes) do redis.pcall('PUBLISH', wake_prefix .. owner, '') end
  forget_touched()
  whole = true
end

function books.ceil_div(numerator, denominator)
  return math.ceil(numerator / denominator)
end
