#!lua flags=no-writes,allow-oom
-- One key's content, in pages.  ARGV: number of the key (docs/ledger.md), cursor ('0' = first page), page size.
-- Reply: {next cursor ('0' = no more), epoch, clock, item, value, item, value...}; hash records come as stored.
local SCANS = {hash = 'HSCAN', zset = 'ZSCAN'}
local INDEX, CURSOR, SIZE = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'clock')
local scan = SCANS[redis.call('TYPE', KEYS[INDEX]).ok]
local reply = {'0', meta[1] or '0', meta[2] or '0'}
if not scan then return reply end
local page = redis.call(scan, KEYS[INDEX], CURSOR, 'COUNT', SIZE)
reply[1] = page[1]
for _, item in ipairs(page[2]) do reply[#reply + 1] = item end
return reply
