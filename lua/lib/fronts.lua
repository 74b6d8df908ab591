--- @include "lib/zsets"
-- The fair order while a script runs: the first flows of each line, read together, and what is to be written.
local READ = 16 -- twice what a dispatch looks at: each grant may take one away

local known -- line -> {members = the first of ORDER, sorted; last = the last that was read, nil where these are all}
local changes -- member of ORDER -> true to add it, false to remove it
local some -- lane -> true where it is known to have a member

function fronts.begin()
  known, changes, some = {}, {}, {}
end

function fronts.write()
  zsets.write(zsets.ORDER, changes)
end

-- The first members of the line, `count` of them at least where there are so many; changes with the order.
function fronts.first(line, count)
  local front = known[line]
  if front and (#front.members >= count or not front.last) then return front.members end
  fronts.write()
  local members = zsets.with_prefix(zsets.ORDER, line, READ)
  known[line] = {members = members, last = members[READ]}
  return members
end

-- Whether any flow of the lane is in the order.
function fronts.waits(lane)
  if some[lane] then return true end
  fronts.write()
  some[lane] = #zsets.with_prefix(zsets.ORDER, lane, 1) > 0
  return some[lane]
end

function fronts.add(lane, class, member)
  changes[member], some[lane] = true, true
  local front = known[lane .. ':' .. class]
  if not front or (front.last and member > front.last) then return end
  local place = #front.members
  while place > 0 and front.members[place] > member do place = place - 1 end
  table.insert(front.members, place + 1, member)
end

function fronts.take(lane, class, member)
  changes[member], some[lane] = false, nil
  local front = known[lane .. ':' .. class]
  for place, other in ipairs(front and front.members or {}) do
    if other == member then
      table.remove(front.members, place)
      return
    end
  end
end
