-- What the gateways of a fleet learn of how much its calls write.  Not admission state: losing it costs room, no safety.
-- KEYS: lengths
--   lengths  kind -> `entries exits missing variance`: entries and exits of each bucket, in halves, by commas
-- `core/lengths.py` says what the numbers mean.
local BUCKETS, PRIOR, HALF, ENTRIES_MAX, HAZARD_MAX = 26, 2, 2, 1000, 0.98
local SURPRISE_DECAY, SURPRISE_SIGMAS, SURPRISE_ENDS, SURPRISE_LEFT = 0.98, 3.5, 4, 10
local KINDS_MAX = 128

local function numbers(text)
  local found = {}
  for number in string.gmatch(text or '', '[^,]+') do found[#found + 1] = tonumber(number) end
  return found
end

-- A row that is none, or of another number of buckets, is begun anew.
local function read_row(key, kind)
  local text = redis.call('HGET', key, kind) or ''
  local entries, exits, missing, variance = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
  local row = {entries = numbers(entries), exits = numbers(exits)}
  row.missing, row.variance = tonumber(missing), tonumber(variance)
  if #row.entries == BUCKETS and #row.exits == BUCKETS and row.missing and row.variance then return row end
  row = {entries = {}, exits = {}, missing = 0, variance = 0}
  for i = 1, BUCKETS do row.entries[i], row.exits[i] = 0, 0 end
  return row
end

local function write_row(key, kind, row)
  local counts = table.concat(row.entries, ',') .. ' ' .. table.concat(row.exits, ',')
  redis.call('HSET', key, kind, string.format('%s %.12g %.12g', counts, row.missing, row.variance))
end

-- So many calls left a bucket, of which so many ended there, where the part `hazard` was expected to.
local function observe(row, calls, ended, hazard)
  local expected, weight = calls * hazard, 1
  local fading = -expected * math.log(SURPRISE_DECAY)
  if fading > 1e-6 then weight = (1 - math.exp(-fading)) / fading end
  row.missing = row.missing * math.exp(-fading) + weight * (expected - ended)
  row.variance = row.variance * math.exp(-fading) + weight * expected * (1 - hazard)
end

local function divide(row, bucket, by)
  row.entries[bucket], row.exits[bucket] = math.floor(row.entries[bucket] / by), math.floor(row.exits[bucket] / by)
end

-- `core/lengths.py` has it as `merge`.  Whether fewer calls ended, by what was known until now, than can be chance:
-- then nearly all of it is forgotten.
local function merge(row, entered, left)
  for i = 1, BUCKETS - 1 do
    local ended = left[i] or 0
    local hazard = math.min(row.exits[i] / (row.entries[i] + PRIOR * HALF), HAZARD_MAX)
    observe(row, (ended + math.max(entered[i + 1] or 0, 0)) / HALF, ended / HALF, hazard)
  end
  local surprised = row.missing > SURPRISE_SIGMAS * math.sqrt(row.variance) + SURPRISE_ENDS
  if surprised then
    for i = 1, BUCKETS do divide(row, i, SURPRISE_LEFT) end
    row.missing, row.variance = 0, 0
  end
  for i = 1, BUCKETS do
    row.entries[i] = math.max(row.entries[i] + (entered[i] or 0), 0)
    row.exits[i] = math.max(row.exits[i] + (left[i] or 0), 0)
  end
  for i = 1, BUCKETS do
    if entered[i] and row.entries[i] > ENTRIES_MAX * HALF then divide(row, i, 2) end
  end
  return surprised
end

-- By kind what one gateway has seen: {kind, {entered by bucket}, {left by bucket}}, in the order in which they came.
local function read_news(args)
  local news, by_kind = {}, {}
  for i = 1, #args, 4 do
    local kind, bucket = args[i], tonumber(args[i + 1]) + 1
    if not by_kind[kind] then
      by_kind[kind] = {kind = kind, entered = {}, left = {}}
      news[#news + 1] = by_kind[kind]
    end
    by_kind[kind].entered[bucket], by_kind[kind].left[bucket] = tonumber(args[i + 2]), tonumber(args[i + 3])
  end
  return news
end

-- Add what one gateway has seen.  args: kind, bucket (from 0), entered, left (in halves), kind, bucket...
-- Reply: {{kind...}, {kind, row...}}: those that were a surprise, and all that is known.
function lengths.share(keys, args)
  local key, surprises = keys[1], {}
  for _, news in ipairs(read_news(args)) do
    if redis.call('HLEN', key) < KINDS_MAX or redis.call('HEXISTS', key, news.kind) == 1 then
      local row = read_row(key, news.kind)
      if merge(row, news.entered, news.left) then surprises[#surprises + 1] = news.kind end
      write_row(key, news.kind, row)
    end
  end
  return {surprises, redis.call('HGETALL', key)}
end
