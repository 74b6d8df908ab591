-- The keys that the gateways of a store share, and whose calls they were told to end.  Not of a fleet: three keys.
-- KEYS: state, entries, cuts.
--   state    version (one more with each change), mark (of the last change) and cut (of the last cut): random
--   entries  name -> entry, as JSON
--   cuts     `id:revoked:name` or `id:cut:name`, by microseconds of TIME: the last CUTS_MAX
local CUTS_MAX = 1000

local function micros()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function read_state(state)
  local row = redis.call('HMGET', state, 'version', 'mark', 'cut')
  return tonumber(row[1] or 0), row[2] or '', row[3] or ''
end

local function add_cut(keys, id, kind, name)
  redis.call('ZADD', keys[3], micros(), id .. ':' .. kind .. ':' .. name)
  redis.call('HSET', keys[1], 'cut', id)
  local spare = redis.call('ZCARD', keys[3]) - CUTS_MAX
  if spare <= 0 then return end
  for _, member in ipairs(redis.call('ZRANGE', keys[3], 0, spare - 1)) do redis.call('ZREM', keys[3], member) end
end

-- What is new.  args: the mark ('*' = entries are of no interest) and the cut that the caller knows.
-- Reply: {version, mark, cut, micros, {name, entry...}, {cut, micros...}}; what the caller knows is left empty.
function callers.follow(keys, args)
  local version, mark, cut = read_state(keys[1])
  local entries, cuts = {}, {}
  if mark ~= args[1] and args[1] ~= '*' then entries = redis.call('HGETALL', keys[2]) end
  if cut ~= args[2] then cuts = redis.call('ZRANGE', keys[3], 0, -1, 'WITHSCORES') end
  return {version, mark, cut, micros(), entries, cuts}
end

-- One entry, put in or taken out.  args: the mark that the caller knows, the new one, name, entry ('' = none),
-- id of a cut of its calls ('' = they go on).
-- Reply: 1, or 0 and nothing was done where somebody else was quicker.
function callers.change(keys, args)
  local known, mark, name, entry, cut = unpack(args)
  local version, now = read_state(keys[1])
  if now ~= known then return 0 end
  if entry == '' then redis.call('HDEL', keys[2], name) else redis.call('HSET', keys[2], name, entry) end
  redis.call('HSET', keys[1], 'version', version + 1, 'mark', mark)
  if cut ~= '' then add_cut(keys, cut, 'revoked', name) end
  return 1
end

-- What a store that lost its data had.  args: version, mark, name, entry, name, entry...
-- Reply: 1, or 0 and nothing was done where the store has that version or a later one.
function callers.restore(keys, args)
  local version, mark = tonumber(args[1]), args[2]
  if read_state(keys[1]) >= version then return 0 end
  redis.call('DEL', keys[2])
  for i = 3, #args, 2 do redis.call('HSET', keys[2], args[i], args[i + 1]) end
  redis.call('HSET', keys[1], 'version', version, 'mark', mark)
  return 1
end

-- The calls of a name that run or wait now are to end.  args: id, name.  Reply: 1.
function callers.cut(keys, args)
  add_cut(keys, args[1], 'cut', args[2])
  return 1
end
