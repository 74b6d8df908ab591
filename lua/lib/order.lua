--- @include "lib/reserve"
--- @include "lib/queue"
--- @include "lib/holds"
-- The order of the queue (docs/ledger.md): tickets become unclaimed reservations until nothing fits.
local LOOKAHEAD, CREDIT_SCALE = 8, 1000

local lines -- lane -> {class, share, row} of each class, highest first: the rows stay the same while a script runs

local function lines_of(lane)
  local found = lines[lane]
  if not found then
    found = {}
    for i, class in ipairs(books.config.classes) do
      found[i] = {class = class, share = books.config.shares[class], row = flows.line(lane, class)}
    end
    lines[lane] = found
  end
  return found
end

-- The unparked flows of one class, in fair order: their members of ORDER.
local function first_flows(lane, class)
  local line = lane .. ':' .. class
  local members = fronts.first(line, LOOKAHEAD)
  books.horizon[line] = members[LOOKAHEAD]
  return members
end

-- The first call of a flow, given by its member of ORDER, where no warm ones wait in its class.
local function head_of(lane, class, member)
  local flow = lane .. ':' .. class .. ':' .. zsets.last_part(member)
  local id = zsets.last_part(zsets.with_prefix(zsets.QUEUE, flow, 1)[1])
  return id, rows.fetch(records.calls, id)
end

-- Of the first flows of a class the heads of one part, their ids.
local function heads(lane, class, warm)
  local ids, members = {}, first_flows(lane, warm and queue.warm_class(class) or class)
  for i = 1, math.min(LOOKAHEAD, #members) do
    ids[i] = queue.head(lane .. ':' .. class .. ':' .. zsets.last_part(members[i]), warm)
  end
  rows.prefetch(records.calls, ids)
  return ids
end

-- The ids of the heads of a class in which warm calls wait, in the order of their turns: those that have waited long
-- enough, the warm ones, the others.
local function mixed_heads(lane, class)
  local cold, warm, first, others = heads(lane, class, false), heads(lane, class, true), {}, {}
  if #warm == 0 then return cold end
  for _, id in ipairs(cold) do
    local list = holds.is_due(rows.fetch(records.calls, id)) and first or others
    list[#list + 1] = id
  end
  for _, id in ipairs(warm) do first[#first + 1] = id end
  for _, id in ipairs(others) do first[#first + 1] = id end
  return first
end

-- A function that gives the heads of a class one by one, in the order of their turns: id and call, nil after the last.
local function heads_in_turn(lane, class)
  local i = 0
  if flows.line(lane, class).warm > 0 then
    local ids = mixed_heads(lane, class)
    return function()
      i = i + 1
      if ids[i] then return ids[i], rows.fetch(records.calls, ids[i]) end
    end
  end
  local members = first_flows(lane, class)
  return function()
    i = i + 1
    if i <= LOOKAHEAD and members[i] then return head_of(lane, class, members[i]) end
  end
end

-- Credit for a block that goes before its turn: all but what the block itself earns, so that a class with a share of
-- 100 thousandths has a tenth of all blocks, not an eleventh.
function order.price(class)
  return CREDIT_SCALE - books.config.shares[class]
end

-- Highest class first, except that the lowest class whose credit covers its head goes before all.
local function class_order(lane)
  local classes, favoured, all = {}, nil, lines_of(lane)
  for i = #all, 1, -1 do
    local class, row = all[i].class, all[i].row
    if row.waiting > 0 then
      table.insert(classes, 1, class)
      if not favoured and all[i].share > 0 and row.credit > 0 then
        local _, head = heads_in_turn(lane, class)()
        if head and row.credit >= order.price(class) * head.blocks then favoured = class end
      end
    end
  end
  if not favoured then return classes, nil end
  local result = {favoured}
  for _, class in ipairs(classes) do
    if class ~= favoured then result[#result + 1] = class end
  end
  return result, favoured
end

-- Every lower class that waits earns its share of the blocks that went before it.
local function earn(call)
  local lower = false
  for _, line in ipairs(lines_of(call.lane)) do
    if lower and line.row.waiting > 0 and line.share > 0 then
      line.row.credit = line.row.credit + call.blocks * line.share
      rows.store(records.lines, call.lane .. ':' .. line.class, line.row)
    end
    lower = lower or line.class == call.class
  end
end

local function grant(id, call, replica, by_credit)
  books.work = books.work - 1
  if by_credit then
    local line = flows.line(call.lane, call.class)
    line.credit = line.credit - order.price(call.class) * call.blocks
    rows.store(records.lines, call.lane .. ':' .. call.class, line)
  end
  reserve.pay(call)
  queue.leave(id, call)
  prefixes.share(call, replica)
  reserve.take(id, call, replica, 'unclaimed')
  earn(call)
  books.wakes[call.owner] = true
end

local function give_up_hold(id, call, replica)
  if placement.could_use(call, replica) then return false end
  queue.unhold(id)
  books.work = books.work - 1
  return true
end

-- A head that was passed too often gets the roomiest replica it may use to itself; it keeps at most one, and none in a
-- pool of which its key holds its part by now.
local function hold(id, call)
  if call.passed < books.config.overtake_blocks then return false end
  local free
  for _, replica in pairs(books.replicas) do
    if replica.held_for == id then return give_up_hold(id, call, replica) end
    if replica.held_for == '' and placement.could_use(call, replica)
      and (not free or placement.roomier(replica, free)) then free = replica end
  end
  if not free then return false end
  free.held_for = id
  books.holds = books.holds + 1
  books.store_replica(free)
  books.work = books.work - 1
  return true
end

-- One grant, parking or hold in this lane; false when nothing can be done.
local function advance(lane)
  if books.stuck[lane] == books.room + books.moves then return false end
  local head
  local classes, favoured = class_order(lane)
  for _, class in ipairs(classes) do
    for id, call in heads_in_turn(lane, class) do
      if placement.capped(call) then
        queue.park(id, call)
        return true
      end
      local replica = placement.place(id, call)
      if replica then
        grant(id, call, replica, favoured == class)
        return true
      end
      if not head then
        head = id
        local row = rows.fetch(records.lanes, lane)
        row.blocked = id
        rows.store(records.lanes, lane, row)
        if hold(id, call) then return true end
      end
    end
  end
  books.stuck[lane] = books.room + books.moves
  return false
end

local function lane_waits(lane)
  for _, line in ipairs(lines_of(lane)) do
    if line.row.waiting > 0 then return true end
  end
  return false
end

-- Grant until nothing fits or the script's work is used up.
function order.run()
  local progress = true
  lines = {}
  while progress do
    progress = false
    for _, lane in ipairs(books.config.lanes) do
      while lane_waits(lane) do
        if books.work <= 0 then
          books.meta.dirty = 1
          return
        end
        if not advance(lane) then break end
        progress = true
      end
    end
  end
end
