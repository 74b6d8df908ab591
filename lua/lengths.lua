-- What the gateways of a fleet learn of how much its calls write.  Not admission state: losing it costs room, no safety.
-- KEYS: lengths
--   lengths  kind -> `entries exits deficit variance`: entries and exits of each bucket, in halves, by commas
-- `core/lengths.py` says what the numbers mean.
local BUCKETS, PRIOR, ENTRIES_MAX, HAZARD_MAX = 26, 8, 1000, 0.98
local SURPRISE_DECAY, SURPRISE_SIGMAS, SURPRISE_LEFT = 0.99, 4, 10
local KINDS_MAX = 128

local function numbers(text)
  local found = {}
  for number in string.gmatch(text or '', '[^,]+') do found[#found + 1] = tonumber(number) end
  return found
end

-- A row that is none, or of another number of buckets, is begun anew.
local function read_row(key, kind)
  local text = redis.call('HGET', key, kind) or ''
  local entries, exits, deficit, variance = string.match(text, '^(%S+) (%S+) (%S+) (%S+)$')
  local row = {entries = numbers(entries), exits = numbers(exits)}
  row.deficit, row.variance = tonumber(deficit), tonumber(variance)
  if #row.entries == BUCKETS and #row.exits == BUCKETS and row.deficit and row.variance then return row end
  row = {entries = {}, exits = {}, deficit = 0, variance = 0}
  for i = 1, BUCKETS do row.entries[i], row.exits[i] = 0, 0 end
  return row
end

local function write_row(key, kind, row)
  local counts = table.concat(row.entries, ',') .. ' ' .. table.concat(row.exits, ',')
  redis.call('HSET', key, kind, string.format('%s %.9g %.9g', counts, row.deficit, row.variance))
end

-- Whether fewer calls end, by what was known until now, than can be chance.  Then nearly all of it is forgotten.
local function surprised(row, entered, left)
  for i = 1, BUCKETS do
    local ended = (left[i] or 0) / 2
    local passed = ended + math.max(entered[i + 1] or 0, 0) / 2
    if passed > 0 then
      local hazard = math.min(row.exits[i] / (row.entries[i] + PRIOR * 2), HAZARD_MAX)
      local kept = SURPRISE_DECAY ^ passed
      row.deficit = row.deficit * kept + passed * hazard - ended
      row.variance = row.variance * kept + passed * hazard * (1 - hazard)
      if row.deficit > SURPRISE_SIGMAS * math.sqrt(row.variance) + 1 then return true end
    end
  end
  return false
end

local function forget(row)
  for i = 1, BUCKETS do
    row.entries[i] = math.floor(row.entries[i] / SURPRISE_LEFT)
    row.exits[i] = math.floor(row.exits[i] / SURPRISE_LEFT)
  end
  row.deficit, row.variance = 0, 0
end

-- What changes counts half from then on.
local function add(row, entered, left)
  for i = 1, BUCKETS do
    row.entries[i] = math.max(row.entries[i] + (entered[i] or 0), 0)
    row.exits[i] = math.max(row.exits[i] + (left[i] or 0), 0)
    if row.entries[i] > ENTRIES_MAX * 2 then
      row.entries[i], row.exits[i] = math.floor(row.entries[i] / 2), math.floor(row.exits[i] / 2)
    end
  end
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
      if surprised(row, news.entered, news.left) then
        surprises[#surprises + 1] = news.kind
        forget(row)
      end
      add(row, news.entered, news.left)
      write_row(key, news.kind, row)
    end
  end
  return {surprises, redis.call('HGETALL', key)}
end
