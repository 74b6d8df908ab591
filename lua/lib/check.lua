-- An op is checked whole before it writes anything: a number that is no integer within 2^53 must never reach the books.
-- An argument of another type fails where it is compared; op[1] is the op's letter, argument i is op[i + 1].
local INTEGER_MAX = 9007199254740992

local function refuse(i, kind)
  error('argument ' .. i - 1 .. ' is not ' .. kind, 0)
end

function check.length(op, length)
  if #op ~= length then error(length - 1 .. ' arguments expected, not ' .. #op - 1, 0) end
end

function check.id(op)
  local id = op[2]
  if not (id > '') or #id ~= 10 or not tonumber(id, 16) then refuse(2, 'an id') end
end

function check.names(op, first, last)
  for i = first, last do
    local name = op[i]
    if not (name > '') or string.find(name, ':', 1, true) then refuse(i, 'a name') end
  end
end

function check.integers(op, first, last, least)
  for i = first, last do
    local number = op[i]
    if not (number >= least and number < INTEGER_MAX and number % 1 == 0) then
      refuse(i, 'an integer of at least ' .. least)
    end
  end
end

function check.name_list(op, i)
  if type(op[i]) ~= 'table' then refuse(i, 'a list') end
  check.names(op[i], 1, #op[i])
end

function check.integer_list(op, i)
  if type(op[i]) ~= 'table' then refuse(i, 'a list') end
  check.integers(op[i], 1, #op[i], 0)
end
