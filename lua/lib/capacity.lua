--- @include "lib/books"
-- What a replica may take, as its engine has taught: docs/ledger.md.

local function lower(configured, learned)
  if learned < 0 then return configured end
  return math.min(configured, learned)
end

-- Its limits are the lower of what is configured and what was learned; true when one has changed.
local function apply(replica, row)
  local limit, sequences_max = lower(row.limit, row.limit_learned), lower(row.sequences_max, row.sequences_learned)
  local prefill_max = lower(row.prefill_max, row.prefill_learned)
  local changed = limit ~= replica.limit or sequences_max ~= replica.sequences_max
    or prefill_max ~= replica.prefill_max
  replica.limit, replica.sequences_max, replica.prefill_max = limit, sequences_max, prefill_max
  return changed
end

-- Its limits are as configured just now.
function capacity.keep_learned(replica)
  local row = rows.fetch(records.capacities, replica.name)
  if not row then return end
  row.limit, row.sequences_max, row.prefill_max = replica.limit, replica.sequences_max, replica.prefill_max
  rows.store(records.capacities, replica.name, row)
  apply(replica, row)
end

local function renew(row, replica)
  row.lease_end = books.meta.clock + books.config.lease_ms
  rows.store(records.capacities, replica.name, row)
end

-- The row, whose scraper this one is now if nobody else was.
function capacity.take(scraper, replica)
  local row = rows.fetch(records.capacities, replica.name) or {limit = replica.limit,
    sequences_max = replica.sequences_max, prefill_max = replica.prefill_max, limit_learned = -1,
    sequences_learned = -1, prefill_learned = -1, scraper = '', lease_end = 0, number = 0, told = ''}
  if row.lease_end <= books.meta.clock then row.scraper = scraper end
  if row.scraper == scraper then renew(row, replica) end
  return row
end

-- True when a limit has changed.
function capacity.learn(replica, row, number, limit, sequences, prefill, told)
  row.limit_learned, row.sequences_learned, row.prefill_learned = limit, sequences, prefill
  row.number, row.told = number, told
  renew(row, replica)
  if not apply(replica, row) then return false end
  books.place_replica(replica.name, replica)
  return true
end

function capacity.seat(scraper, replica, row)
  return {'seat', books.meta.clock, row.scraper == scraper and 1 or 0, row.lease_end - books.meta.clock, row.number,
    {replica.used, replica.sequences, replica.prefill}, {row.limit, row.sequences_max, row.prefill_max}, row.told}
end
