--- @include "lib/books"
--- @include "lib/prefixes"
--- @include "lib/holds"
-- Calls that are charged by what they may hold later, and whether a replica takes one more: gateway/core/elastic.py has
-- the rule.  A path has POINTS integers, TILTS for each horizon; packed, 4 bytes each, highest first.
local POINTS, TILTS, SCALE, SUM_MAX = 33, 3, 64, 4294967295
local TILT_1, TILT_2, TILT_3 = 12, 50, 240
local HORIZON_TOKENS, ALONE = {32, 128, 256, 512, 768, 1024, 2048, 3072, 4096, 8192, 12288}, 3
local NARROWED_MAX = 1048576
local NEAR = 5 -- horizons, the first
local RARE, FAR_RARE = 6.907755278982137, 4.422848629194137 -- ln(1 / EPS), ln(1 / FAR_EPS)
local HORIZON = 'I4I4I4' -- string.rep is not there yet when the library is loaded
local FORMAT = '>' .. HORIZON .. HORIZON .. HORIZON .. HORIZON .. HORIZON .. HORIZON .. HORIZON .. HORIZON .. HORIZON
  .. HORIZON .. HORIZON
elastic.PATH_BYTES = 4 * POINTS

local function points_of(packed)
  if packed ~= '' then return {struct.unpack(FORMAT, packed)} end
  local none = {}
  for i = 1, POINTS do none[i] = 0 end
  return none
end

-- Unpacked once, and of a replica whose row did not change once in several scripts.
local function points(row, packed)
  row.points = row.points or points_of(packed)
  return row.points
end

-- Whether the call is charged by its path there; sums of paths for different sizes would say nothing.
function elastic.is_by_path(call, replica)
  return call.path ~= '' and call.promised == 0 and replica.mode ~= 'guaranteed'
    and (replica.elastic == 0 or replica.base == call.base)
end

-- What the call is to hold from now on, held -1 = all of its blocks, and its path.  Without one it is charged in full.
function elastic.want(call, held, base, path)
  call.points, call.narrowed, call.path = nil, nil, path
  if path == '' then
    call.asked, call.base = call.blocks, 0
  else
    call.asked, call.base = held < 0 and call.blocks or held, base
  end
end

-- Blocks that the call would hold there at first.
function elastic.blocks(call, replica)
  return elastic.is_by_path(call, replica) and call.asked or call.blocks
end

-- The least that it would hold anywhere.
function elastic.least(call)
  return math.min(call.asked, call.blocks)
end

-- Most blocks of the path that the call has at the horizon of point i, or at the next one where it stands for that too.
local function most_blocks(call, path, i)
  local number, most = (i - 1) / TILTS + 1, call.blocks
  local tokens = HORIZON_TOKENS[number <= ALONE and path[i + TILTS] > 0 and number or number + 1]
  if tokens then most = math.min(most, call.asked + math.ceil(tokens / prefixes.block_size(call))) end
  return math.max(most - prefixes.net(call), math.ceil(math.max(path[i], path[i + 1], path[i + 2]) / SCALE), 1)
end

-- A path where so many blocks more are counted elsewhere: of each point the part that is left of all blocks.
local function narrow(call, path, more)
  local changed = {}
  for i = 1, POINTS, TILTS do
    local most = most_blocks(call, path, i)
    local left = math.max(most - more, 0)
    for at = i, i + TILTS - 1 do
      changed[at] = most > NARROWED_MAX and path[at] or math.ceil(path[at] * left / most)
    end
  end
  return changed
end

-- Or where so many are not: all that is left of the call has them.
local function widen(path, blocks)
  local changed = {}
  for i = 1, POINTS do changed[i] = path[i] > 0 and path[i] + blocks * SCALE or 0 end
  return changed
end

-- The call's path where it shares so many blocks; once for each number.
local function path_of(call, shared)
  local path, more = points(call, call.path), shared - prefixes.net(call)
  if more == 0 then return path end
  call.narrowed = call.narrowed or {}
  call.narrowed[more] = call.narrowed[more] or (more > 0 and narrow(call, path, more) or widen(path, -more))
  return call.narrowed[more]
end

-- `ln(1 / eps) / theta` of a tilt, rounded up.
local function margin(base, tilt, rare)
  return math.ceil(SCALE * rare * base / tilt)
end

-- What the points of each tilt may add up to at most.
local function rooms(room, base, rare)
  return room - margin(base, TILT_1, rare), room - margin(base, TILT_2, rare), room - margin(base, TILT_3, rare)
end

-- Whether what the calls there will hold stays below the limit that it has (holds.lua) with this one, which shares so many
-- blocks, in all likelihood.
function elastic.bound_holds(call, replica, shared)
  local room, path, base = SCALE * (holds.limit(call, replica) - replica.assured), nil, replica.base
  if elastic.is_by_path(call, replica) then
    path, base = path_of(call, shared), call.base
  else
    room = room - SCALE * (call.blocks - shared)
  end
  local first, second, third = rooms(room, base, RARE)
  local sums = points(replica, replica.sums)
  for i = 1, POINTS, TILTS do
    if i == NEAR * TILTS + 1 then first, second, third = rooms(room, base, FAR_RARE) end
    local a, b, c = sums[i], sums[i + 1], sums[i + 2]
    if path then a, b, c = a + path[i], b + path[i + 1], c + path[i + 2] end
    if a > first and b > second and c > third then return false end
  end
  return true
end

-- For what it would hold now beside what it shares, and in all likelihood for what all calls there will hold later.
function elastic.has_blocks(call, replica, shared)
  local limit = holds.limit(call, replica)
  return replica.used == 0 or (replica.used + math.max(elastic.blocks(call, replica) - shared, 0) <= limit
    and (replica.full + call.blocks - shared <= limit or elastic.bound_holds(call, replica, shared)))
end

-- The sums with the call's path, or without it (direction -1); nil where one is more than the record holds.
local function added(call, replica, direction)
  local sums, path, changed = points(replica, replica.sums), path_of(call, prefixes.shared(call)), {}
  for i = 1, POINTS do
    local sum = sums[i] + direction * path[i]
    if sum > SUM_MAX then return nil end
    changed[i] = sum
  end
  return changed
end

-- Put its own blocks on the replica: by its path where that can be, else all that it may ever need.
function elastic.count(call, replica)
  local sums = elastic.is_by_path(call, replica) and added(call, replica, 1)
  local own = prefixes.own(call)
  call.elastic, call.held = sums and 1 or 0, sums and math.max(call.asked - prefixes.shared(call), 0) or own
  replica.used, replica.full = replica.used + call.held, replica.full + own
  if sums then
    replica.elastic, replica.base = replica.elastic + 1, call.base
    replica.points, replica.sums = sums, nil
  else
    replica.assured = replica.assured + own
  end
end

-- Take off exactly what was put there.
function elastic.uncount(call, replica)
  local own = prefixes.own(call)
  replica.used, replica.full = replica.used - call.held, replica.full - own
  if call.elastic == 0 then
    replica.assured = replica.assured - own
  elseif replica.elastic > 1 then
    replica.elastic = replica.elastic - 1
    replica.points, replica.sums = added(call, replica, -1), nil
  else
    replica.elastic, replica.base = 0, 0
    replica.points, replica.sums = nil, ''
  end
  call.elastic, call.held = 0, 0
end

-- Before the row is written: its sums are packed once a script, however many calls changed them.
function elastic.seal(replica)
  if not replica.sums then replica.sums = struct.pack(FORMAT, unpack(replica.points, 1, POINTS)) end
end
