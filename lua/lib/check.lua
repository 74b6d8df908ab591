--- @include "lib/books"
-- An op is checked whole before it writes anything: a number that is no integer within 2^53 must never reach the books.
local INTEGER_MAX = 9007199254740992

local function is_integer(value, least)
  return type(value) == 'number' and value >= least and value < INTEGER_MAX and value % 1 == 0
end

local function is_name(value)
  return type(value) == 'string' and value ~= '' and not string.find(value, ':', 1, true)
end

local function is_list_of(test)
  return function(value)
    if type(value) ~= 'table' then return false end
    for i = 1, #value do
      if not test(value[i], 0) then return false end
    end
    return true
  end
end

local KINDS = {
  id = function(value) return type(value) == 'string' and #value == 10 and tonumber(value, 16) ~= nil end,
  name = is_name,
  blocks = function(value) return is_integer(value, 1) end,
  count = function(value) return is_integer(value, 1) end,
  size = function(value) return is_integer(value, 0) end,
  cap = function(value) return is_integer(value, -1) end,
  names = is_list_of(is_name),
  numbers = is_list_of(is_integer),
}

local function check_arguments(arguments, kinds)
  local i = 0
  for kind in string.gmatch(kinds, '%a+') do
    i = i + 1
    if not KINDS[kind](arguments[i]) then error('argument ' .. i .. ' is not a ' .. kind, 0) end
  end
  if #arguments ~= i then error(i .. ' arguments expected, not ' .. #arguments, 0) end
end
