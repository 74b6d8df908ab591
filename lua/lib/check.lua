--- @include "lib/elastic"
-- An op is checked whole before it writes anything: a number that is no integer within 2^53 must never reach the books.
-- An argument of another type fails where it is compared; op[1] is the op's letter, argument i is op[i + 1].
local INTEGER_MAX, QUOTA_BUCKETS, FORECAST_ENDS, FORECAST_REACH_MS = 9007199254740992, 6, 32, 3600000
local SEGMENTS_MAX = 4

local function refuse(i, kind)
  error('argument ' .. i - 1 .. ' is not ' .. kind, 0)
end

-- least: where the last ones need not be there.
function check.length(op, length, least)
  if #op > length or #op < (least or length) then
    error(length - 1 .. ' arguments expected, not ' .. #op - 1, 0)
  end
end

function check.id(op)
  local id = op[2]
  if not (id > '') or #id ~= 10 or not tonumber(id, 16) then refuse(2, 'an id') end
end

function check.names(op, first, last)
  for i = first, last do
    local name = op[i]
    if not (name > '') or string.find(name, ':', 1, true) then refuse(i, 'a name') end
  end
end

function check.integers(op, first, last, least)
  for i = first, last do
    local number = op[i]
    if not (number >= least and number < INTEGER_MAX and number % 1 == 0) then
      refuse(i, 'an integer of at least ' .. least)
    end
  end
end

-- 8 bytes in hexadecimal, or ''.
function check.hashes(op, first, last)
  for i = first, last do
    local hash = op[i]
    if hash ~= '' and (#hash ~= 16 or string.find(hash, '[^0-9a-f]')) then refuse(i, 'a hash') end
  end
end

function check.name_list(op, i)
  if type(op[i]) ~= 'table' then refuse(i, 'a list') end
  check.names(op[i], 1, #op[i])
end

-- Blocks held from now on (-1 = all), the size that the path is made for, and the path, '' = charged in full.
function check.path(op, first)
  local held, base, path = op[first], op[first + 1], op[first + 2]
  check.integers(op, first, first, -1)
  check.integers(op, first + 1, first + 1, 0)
  if type(path) ~= 'string' or (path ~= '' and #path ~= elastic.PATH_BYTES) then refuse(first + 2, 'a path') end
  if held == 0 then refuse(first, 'at least one block') end
  if path ~= '' and base == 0 then refuse(first + 1, 'a size') end
end

-- A segment: its id, and a number of blocks.
local function segment(pair, i)
  if type(pair) ~= 'table' or #pair ~= 2 or type(pair[1]) ~= 'string' or #pair[1] ~= 32
    or string.find(pair[1], '[^0-9a-f]') then refuse(i, 'a list of segments') end
  check.integers(pair, 2, 2, 1)
end

-- Block size, segments of less than so many blocks, and of a call that is declared again number of the cache, how many
-- are in nodes, and 1 where it is past its first token; also how many of its blocks are not in its path; or nothing.
function check.prefix(op, i, blocks)
  local prefix, sum = op[i], 0
  if prefix == '' then return end
  if type(prefix) ~= 'table' then refuse(i, 'a list') end
  if #prefix == 0 then return end
  local segments = prefix[2]
  check.integers(prefix, 1, 1, 1)
  if type(segments) ~= 'table' or #segments == 0 or #segments > SEGMENTS_MAX then refuse(i, 'a list of segments') end
  local seen = {}
  for _, pair in ipairs(segments) do
    segment(pair, i)
    if seen[pair[1]] then refuse(i, 'a list of different segments') end
    seen[pair[1]] = true
    sum = sum + pair[2]
  end
  if sum >= blocks then refuse(i, 'a part of the demand') end
  if #prefix == 2 then return end
  check.integers(prefix, 3, 5, 0)
  if prefix[6] then check.integers(prefix, 6, 6, 0) end
  if (prefix[6] or 0) > sum then refuse(i, 'a part of its segments') end
  if prefix[4] > #segments or prefix[5] > 1 or (prefix[4] > 0 and prefix[3] == 0) then refuse(i, 'a part of its segments') end
end

-- The block size where a call may come to have segments; or nothing.
function check.block_size(op, i)
  if type(op[i]) ~= 'table' or #op[i] > 1 then refuse(i, 'a list') end
  check.integers(op[i], 1, #op[i], 1)
end

function check.flag(op, i)
  if op[i] ~= 0 and op[i] ~= 1 then refuse(i, '0 or 1') end
end

local function lists(op, i, size)
  if type(op[i]) ~= 'table' or #op[i] % size ~= 0 then refuse(i, 'a list of ' .. size .. ' values each') end
end

local function bucket(list, i)
  check.integers(list, i, i, 0)
  if list[i] >= QUOTA_BUCKETS then refuse(i, 'a bucket') end
end

-- Milliseconds, replica, blocks.
function check.ends(op, i)
  lists(op, i, 3)
  if #op[i] > 3 * FORECAST_ENDS then refuse(i, 'a list so short') end
  for k = 1, #op[i], 3 do
    check.integers(op[i], k, k, 0)
    if op[i][k] > FORECAST_REACH_MS then refuse(i, 'a list of what is so near') end
    check.names(op[i], k + 1, k + 1)
    check.integers(op[i], k + 2, k + 2, 1)
  end
end

-- Bucket, microseconds, microseconds that it holds.
function check.charge(op, i)
  lists(op, i, 3)
  for k = 1, #op[i], 3 do
    bucket(op[i], k)
    check.integers(op[i], k + 1, k + 2, 0)
  end
end

-- Bucket, microseconds that may be negative.
function check.corrections(op, i)
  lists(op, i, 2)
  for k = 1, #op[i], 2 do
    bucket(op[i], k)
    check.integers(op[i], k + 1, k + 1, -INTEGER_MAX)
  end
end
