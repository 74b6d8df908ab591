-- One owner's calls, in pages by id.  args: owner, the last id of the page before ('' = first page), page size.
-- Reply: {id, state, replica, id, state, replica...}
--- @include "lib/records"
--- @include "lib/rows"
--- @include "lib/zsets"

function page.run(keys, args)
  local owner, after, size = args[1], args[2], tonumber(args[3])
  records.open(keys)
  zsets.open(keys)
  local from = after == '' and '[' .. owner .. ':' or '(' .. owner .. ':' .. after
  local listed = {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', zsets.OWNED, from, '(' .. owner .. ';', 'LIMIT', 0, size)) do
    local id = zsets.last_part(member)
    local call = rows.fetch(records.calls, id)
    listed[#listed + 1] = id
    listed[#listed + 1] = call.state
    listed[#listed + 1] = call.replica
  end
  return listed
end
