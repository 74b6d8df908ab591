#!lua flags=no-writes,allow-oom
-- One owner's calls, in pages by id.  ARGV: owner, the last id of the page before ('' = first page), page size.
-- Reply: {id, state, replica, id, state, replica...}
--- @include "lib/records"
--- @include "lib/rows"
local OWNED, CALLS = KEYS[11], KEYS[3]
local OWNER, AFTER, SIZE = ARGV[1], ARGV[2], tonumber(ARGV[3])

local from = AFTER == '' and '[' .. OWNER .. ':' or '(' .. OWNER .. ':' .. AFTER
local listed = {}
for _, member in ipairs(redis.call('ZRANGEBYLEX', OWNED, from, '(' .. OWNER .. ';', 'LIMIT', 0, SIZE)) do
  local id = string.match(member, '([^:]+)$')
  local call = rows.read(records.calls, redis.call('HGET', CALLS, id))
  listed[#listed + 1] = id
  listed[#listed + 1] = call.state
  listed[#listed + 1] = call.replica
end
return listed
