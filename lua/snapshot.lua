-- One key's content, in pages.  args: number of the key (docs/ledger.md), cursor ('0' = first page), page size.
-- Reply: {next cursor ('0' = no more), epoch, clock, item, value, item, value...}; hash records come as stored.
local SCANS = {hash = 'HSCAN', zset = 'ZSCAN'}

function snapshot.run(keys, args)
  local index, cursor, size = tonumber(args[1]), args[2], args[3]
  local meta = redis.call('HMGET', keys[1], 'epoch', 'clock')
  local scan = SCANS[redis.call('TYPE', keys[index]).ok]
  local reply = {'0', meta[1] or '0', meta[2] or '0'}
  if not scan then return reply end
  local scanned = redis.call(scan, keys[index], cursor, 'COUNT', size)
  reply[1] = scanned[1]
  for _, item in ipairs(scanned[2]) do reply[#reply + 1] = item end
  return reply
end
