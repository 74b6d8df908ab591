-- What the gateways of a fleet learn of how far its estimates are off.  Not admission state: losing it costs accuracy.
-- KEYS: counts
--   counts  `kind:bin` -> calls whose engine reported that much more, or less, than was estimated
local FIELDS_MAX, CALLS_MAX = 20000, 4000

local function halve(key, kind)
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, #kind + 1) == kind .. ':' then
      local half = math.floor(tonumber(fields[i + 1]) / 2)
      if half == 0 then redis.call('HDEL', key, fields[i]) else redis.call('HSET', key, fields[i], half) end
    end
  end
end

-- Add what one gateway has seen.  args: kind, bin, calls, kind, bin, calls...
-- Reply: {field, calls...}: all that is known.  Of a kind that was seen CALLS_MAX times all counts half from then on.
function factors.share(keys, args)
  local key, seen = keys[1], {}
  for i = 1, #args, 3 do
    local field = args[i] .. ':' .. args[i + 1]
    if redis.call('HLEN', key) < FIELDS_MAX or redis.call('HEXISTS', key, field) == 1 then
      redis.call('HINCRBY', key, field, args[i + 2])
      seen[args[i]] = true
    end
  end
  local totals, fields = {}, redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local kind = string.match(fields[i], '^(.*):')
    if kind and seen[kind] then totals[kind] = (totals[kind] or 0) + tonumber(fields[i + 1]) end
  end
  local changed = false
  for kind, total in pairs(totals) do
    if total > CALLS_MAX then
      halve(key, kind)
      changed = true
    end
  end
  return changed and redis.call('HGETALL', key) or fields
end
