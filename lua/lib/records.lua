-- Records are cmsgpack arrays with the fields below, by position.  A row is read once, changed in memory, and written
-- back by flush() at the end of the script, however many ops touched it.
local REPLICA = {'pool', 'limit', 'usable', 'sequences_max', 'prefill_max', 'used', 'sequences', 'prefill', 'state',
  'held_for'}
local CALL = {'state', 'owner', 'replica', 'key', 'class', 'lane', 'blocks', 'sequences', 'prefill', 'prefilling',
  'cost', 'deadline', 'arrival', 'passed', 'attempt', 'charged', 'exclude', 'prefer', 'charge'}
local KEY = {'weight', 'blocks_max', 'requests_max', 'blocks', 'calls'}
local FLOW = {'tag', 'waiting', 'blocks', 'weight', 'parked'}
local SESSION = {'batch', 'told', 'declared', 'count', 'sum'}
local LINE = {'virtual', 'waiting', 'blocks', 'weights', 'credit'} -- one class of one lane
local LANE = {'blocked', 'book'}
local DRAIN = {'start', 'current', 'previous', 'last'}

local function record_table(key, fields, prefix)
  return {key = key, fields = fields, prefix = prefix or '', rows = {}, touched = {}}
end

local function decode(fields, packed)
  local values, row = cmsgpack.unpack(packed), {}
  for i = 1, #fields do row[fields[i]] = values[i] end
  return row
end

local function encode(fields, row)
  local values = {}
  for i = 1, #fields do values[i] = row[fields[i]] end
  return cmsgpack.pack(values)
end

local function fetch(records, id)
  local row = records.rows[id]
  if row == nil then
    local packed = redis.call('HGET', records.key, records.prefix .. id)
    row = packed and decode(records.fields, packed) or false
    records.rows[id] = row
  end
  return row
end

local function store(records, id, row)
  records.rows[id] = row
  records.touched[id] = true
end

local function erase(records, id)
  store(records, id, false)
end

local function flush(records)
  local sets, dels = {}, {}
  for id in pairs(records.touched) do
    local row = records.rows[id]
    if row then
      sets[#sets + 1] = records.prefix .. id
      sets[#sets + 1] = encode(records.fields, row)
    else
      dels[#dels + 1] = records.prefix .. id
    end
  end
  if #sets > 0 then redis.call('HSET', records.key, unpack(sets)) end
  if #dels > 0 then redis.call('HDEL', records.key, unpack(dels)) end
  records.touched = {}
end
