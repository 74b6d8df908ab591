-- The zsets of one fleet; docs/ledger.md says what their members are.

function zsets.open(keys)
  zsets.QUEUE, zsets.ORDER, zsets.PARKED, zsets.OWNERS = keys[4], keys[5], keys[8], keys[9]
  zsets.OWNED, zsets.OUTBOX, zsets.DEADLINES, zsets.BACKLOG = keys[11], keys[12], keys[13], keys[16]
  zsets.PLACES, zsets.PLACE_ENDS, zsets.HOLD_ENDS = keys[17], keys[18], keys[21]
end

-- The first members, of equal scores, that begin with prefix and a colon; limit -1 = all.
function zsets.with_prefix(zset, prefix, limit)
  return redis.call('ZRANGEBYLEX', zset, '[' .. prefix .. ':', '(' .. prefix .. ';', 'LIMIT', 0, limit)
end

-- The first member, of equal scores, that begins with prefix, or nil.
function zsets.first_with(zset, prefix)
  return redis.call('ZRANGEBYLEX', zset, '[' .. prefix, '(' .. prefix .. ';', 'LIMIT', 0, 1)[1]
end

-- The nth such member, or nil.
function zsets.nth_with_prefix(zset, prefix, n)
  return redis.call('ZRANGEBYLEX', zset, '[' .. prefix .. ':', '(' .. prefix .. ';', 'LIMIT', n - 1, 1)[1]
end

-- The last such member, or nil.
function zsets.last_with_prefix(zset, prefix)
  return redis.call('ZREVRANGEBYLEX', zset, '(' .. prefix .. ';', '[' .. prefix .. ':', 'LIMIT', 0, 1)[1]
end

function zsets.last_part(member)
  return string.match(member, '^.*:(.*)$') -- linear: from the end back to the last colon
end

-- Write members at once, and forget that they were to be; members: member -> its score, true for 0, false to remove it.
function zsets.write(zset, members)
  if next(members) == nil then return end
  local added, removed = {}, {}
  for member, score in pairs(members) do
    if score then
      added[#added + 1] = score == true and 0 or score
      added[#added + 1] = member
    else
      removed[#removed + 1] = member
    end
    members[member] = nil
  end
  if #added > 0 then redis.call('ZADD', zset, unpack(added)) end
  if #removed > 0 then redis.call('ZREM', zset, unpack(removed)) end
end
