--- @include "lib/books"
--- @include "lib/zsets"
-- Soft holds: the blocks of a conversation whose last answer ended a moment ago, and which is likely to go on
-- (gateway/core/holds.py).  They are reserved for nobody and are no part of `used`: calls that go on with no such
-- conversation count them, a part of the limit at most, and who goes on with one (a warm call) does not.
-- A hold is a record by its name, and a member `replica:end:name` of HOLD_ENDS; a replica's row has their sum and number,
-- and a time before which none of them ends, 0 where there are none.
local HOLD_MS, HOLDS_MAX, HOLDS_ENDED, HOLD_PART, YIELD_MS = 10000, 4096, 64, 2, 30000
local HISTORIES, HISTORY_WEIGHT = 10, 64
holds.WARM = -1 -- in the place of `yields_until`
local CHUNK = 1000 -- arguments of one command: a script's stack takes 8,000

local function member_of(name, hold)
  return string.format('%s:%013d:%s', hold.replica, hold.due, name)
end

-- The hold of that name, or nil.
function holds.find(name)
  if name == '' or not books.soft then return nil end
  return rows.fetch(records.holds, name) or nil
end

-- Of a call that comes now: the clock until which it lets warm calls go before it, or that it is one.
function holds.yields(past)
  return holds.find(past) and holds.WARM or books.meta.clock + YIELD_MS
end

function holds.is_warm(call)
  return call.yields_until == holds.WARM
end

-- Whether it goes before warm ones: it has waited long enough.
function holds.is_due(call)
  return call.yields_until ~= holds.WARM and call.yields_until <= books.meta.clock
end

-- What others than warm calls leave of a replica's limit.
function holds.counted(replica)
  return math.min(replica.soft, math.floor(replica.limit / HOLD_PART))
end

-- Blocks that the replica has for a call like this one.
function holds.limit(call, replica)
  if replica.soft == 0 or call.yields_until == holds.WARM then return replica.limit end
  return replica.limit - holds.counted(replica)
end

local function take_off(name, hold)
  local replica = books.replicas[hold.replica]
  replica.soft, replica.holds = replica.soft - hold.blocks, replica.holds - 1
  if replica.holds == 0 then replica.soft_end = 0 end
  books.store_replica(replica)
  rows.erase(records.holds, name)
  books.hold_ends[member_of(name, hold)] = false
  books.room = books.room + 1
  books.meta.dirty = 1
end

-- The conversation goes on, or its hold makes room.
function holds.finish(name)
  local hold = holds.find(name)
  if hold then take_off(name, hold) end
end

local function members(replica, most)
  zsets.write(zsets.HOLD_ENDS, books.hold_ends)
  return zsets.with_prefix(zsets.HOLD_ENDS, replica.name, most)
end

local function keep(name, replica, blocks)
  holds.finish(name)
  if replica.holds >= HOLDS_MAX then holds.finish(zsets.last_part(members(replica, 1)[1])) end
  local hold = {replica = replica.name, blocks = blocks, due = books.meta.clock + HOLD_MS}
  rows.store(records.holds, name, hold)
  books.hold_ends[member_of(name, hold)] = true
  books.soft = true
  replica.soft, replica.holds = replica.soft + blocks, replica.holds + 1
  if replica.soft_end == 0 then replica.soft_end = hold.due end
  books.store_replica(replica)
end

-- An answer has ended there that used so many blocks, of which others hold `kept` in nodes; name '' = nobody will go on
-- with it.  The average is of all that end there, in parts of HISTORY_WEIGHT.
function holds.ended(name, replica, blocks, kept)
  if replica.state == 'removed' then return end
  blocks = math.max(blocks - kept, 1)
  local before = replica.history
  replica.history = before == 0 and blocks * HISTORY_WEIGHT or before + blocks - math.floor(before / HISTORY_WEIGHT)
  books.store_replica(replica)
  if name == '' or replica.state ~= 'up' or replica.cache == 0 then return end
  if replica.limit * HISTORY_WEIGHT >= HISTORIES * replica.history then keep(name, replica, blocks) end
end

-- Nothing of it is in the replica's cache any more, or nobody is sent there.
function holds.drop(replica)
  if replica.holds == 0 then return end
  local found = members(replica, -1)
  for first = 1, #found, CHUNK do
    local names, last = {}, math.min(first + CHUNK - 1, #found)
    for i = first, last do
      local name = zsets.last_part(found[i])
      names[#names + 1] = name
      records.holds.known[name], records.holds.touched[name] = false, nil
    end
    redis.call('ZREM', zsets.HOLD_ENDS, unpack(found, first, last))
    redis.call('HDEL', records.holds.hash, unpack(names))
  end
  replica.soft, replica.holds, replica.soft_end = 0, 0, 0
  books.store_replica(replica)
  books.room = books.room + 1
  books.meta.dirty = 1
end

local function due_replicas()
  local names = {}
  for name, replica in pairs(books.replicas) do
    if replica.soft_end > 0 and replica.soft_end <= books.meta.clock then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end

-- So many at most; how many it were.
local function expire_on(replica, most)
  local found, names = members(replica, most + 1), {}
  for i = 1, #found do
    local due, name = string.match(found[i], ':(%d+):([^:]+)$')
    if i > most or tonumber(due) > books.meta.clock then
      replica.soft_end = tonumber(due)
      books.store_replica(replica)
      break
    end
    names[i] = name
  end
  rows.prefetch(records.holds, names)
  for _, name in ipairs(names) do holds.finish(name) end
  return #names
end

-- Those whose time is over; true = some are left.
function holds.expire()
  if not books.soft then return false end
  local left = HOLDS_ENDED
  for _, name in ipairs(due_replicas()) do
    if left > 0 then left = left - expire_on(books.replicas[name], left) end
  end
  return #due_replicas() > 0
end
