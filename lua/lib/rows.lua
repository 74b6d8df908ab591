-- The rows of one kind of record (records.lua): each is read once, changed in memory, and written once at the end of
-- the script, however many ops touched it.  known: id -> row, or false where there is none; touched: id -> true to
-- write it, false to delete it.
local FIELDS_MAX = 32

function rows.read(set, packed)
  return set.read(cmsgpack.unpack_limit(packed, FIELDS_MAX, #set.header))
end

-- The row of a record or its absence (false): blank, or false where the kind has no blank.
local function row_of(set, packed)
  if packed then return rows.read(set, packed) end
  return set.blank and set.read(nil, unpack(set.blank)) or false
end

function rows.fetch(set, id)
  local row = set.known[id]
  if row == nil then
    row = row_of(set, redis.call('HGET', set.hash, set.prefix and set.prefix .. id or id))
    set.known[id] = row
  end
  return row
end

-- Read several at once, for fetch; only where there is no prefix.
function rows.prefetch(set, ids)
  if #ids == 0 then return end
  local found = redis.call('HMGET', set.hash, unpack(ids))
  for i, id in ipairs(ids) do
    if set.known[id] == nil then set.known[id] = row_of(set, found[i]) end
  end
end

function rows.store(set, id, row)
  set.known[id] = row
  set.touched[id] = true
end

function rows.erase(set, id)
  set.known[id] = row_of(set, false)
  set.touched[id] = false
end

-- Add what was touched to the arguments of HSET and HDEL.
function rows.collect(set, sets, dels)
  local n = #sets
  for id, kept in pairs(set.touched) do
    if kept then
      sets[n + 1] = set.prefix and set.prefix .. id or id
      sets[n + 2] = set.header .. cmsgpack.pack(set.write(set.known[id]))
      n = n + 2
    else
      dels[#dels + 1] = id
    end
  end
end

-- True when a row was erased.
function rows.write(set)
  if next(set.touched) == nil then return false end
  local sets, dels = {}, {}
  rows.collect(set, sets, dels)
  if #sets > 0 then redis.call('HSET', set.hash, unpack(sets)) end
  if #dels > 0 then redis.call('HDEL', set.hash, unpack(dels)) end
  return #dels > 0
end
