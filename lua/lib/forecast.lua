--- @include "lib/placement"
--- @include "lib/queue"
--- @include "lib/order"
--- @include "lib/elastic"
--- @include "lib/holds"
-- When a call that has to wait gets its place: the order played forward over the ends of running calls that owners
-- foresee.  Others start, or leave in vain, as in the books, except that no prefill is given back, that no key reaches a
-- cap, and that nobody comes.
local LOOKAHEAD, TAG_SCALE = 8, 64
local FORECAST_ENDS, FORECAST_WAITING, FORECAST_MARGIN_PERCENT = 32, 32, 15
local FORECAST_PLAYED, PLACES_MAX = 64, 65536

-- The ends of all owners: how far all of them have told, and the fields each in a list of its own.
local function read_ends()
  local known = redis.call('ZRANGE', zsets.OWNERS, 0, -1)
  local reach, dues, replicas, blocks = math.huge, {}, {}, {}
  rows.prefetch(records.forecasts, known)
  for _, owner in ipairs(known) do
    local row = rows.fetch(records.forecasts, owner)
    local ends = row and row.ends or {}
    if #ends == 3 * FORECAST_ENDS then reach = math.min(reach, ends[#ends - 2]) end
    for i = 1, #ends, 3 do
      local n = #dues + 1
      dues[n], replicas[n], blocks[n] = ends[i], ends[i + 1], ends[i + 2]
    end
  end
  return {reach = reach, dues = dues, replicas = replicas, blocks = blocks}
end

-- With the places in these lists of those that lie ahead, in order.  To sort tables by a function would cost several
-- times as much as numbers: each is the time from now, and below it the place.
local function ends_ahead()
  local ends, numbers, now = read_ends(), {}, books.meta.clock
  for i, due in ipairs(ends.dues) do
    if due > now and due <= ends.reach then numbers[#numbers + 1] = (due - now) * PLACES_MAX + i end
  end
  table.sort(numbers)
  ends.numbers = numbers
  return ends
end

local function by_turn(flow, other)
  return flow.tag < other.tag or (flow.tag == other.tag and flow.key < other.key)
end

local function new_flow(call, tag, owed)
  return {lane = call.lane, class = call.class, key = call.key, tag = tag, owed = owed, ids = {}, calls = {}}
end

local function add(flow, id, call)
  flow.ids[#flow.ids + 1], flow.calls[#flow.calls + 1] = id, call
end

-- Name of a flow -> it with its calls, of all that wait and are not parked; and the blocks of the smallest and the first
-- deadline.
local function waiting_flows()
  local ids, names, found, least, soonest = {}, {}, {}, math.huge, math.huge
  for i, member in ipairs(redis.call('ZRANGE', zsets.QUEUE, 0, -1)) do
    names[i], ids[i] = string.match(member, '^(.*):%d+:([^:]+)$')
  end
  rows.prefetch(records.calls, ids)
  rows.prefetch(records.flows, names)
  for i, name in ipairs(names) do
    local row, call = rows.fetch(records.flows, name), rows.fetch(records.calls, ids[i])
    if row.parked == 0 then
      found[name] = found[name] or new_flow(call, row.tag, row.owed)
      add(found[name], ids[i], call)
      least, soonest = math.min(least, call.blocks), math.min(soonest, call.deadline)
    end
  end
  return found, least, soonest
end

-- The flows of one class of a lane in the order of their turns.
local function line_of(lane, class, waiting)
  local line = {class = class, share = books.config.shares[class], credit = flows.line(lane, class).credit, flows = {}}
  for _, flow in pairs(waiting) do
    if flow.lane == lane and flow.class == class then table.insert(line.flows, flow) end
  end
  table.sort(line.flows, by_turn)
  return line
end

-- The queue with one call more.  lanes: lane -> the lines of its classes, highest first; free, seats: blocks and sequences
-- on replicas where some came back; gone: ids of calls that wait no more; least: blocks of the smallest call; soonest: the first deadline.
local function rehearsal_with(call)
  local waiting, least, soonest = waiting_flows()
  local name, lanes = flows.name_of(call), {}
  waiting[name] = waiting[name] or new_flow(call, queue.entry(call), 0)
  add(waiting[name], '', call)
  for _, lane in ipairs(books.config.lanes) do
    lanes[lane] = {}
    for i, class in ipairs(books.config.classes) do lanes[lane][i] = line_of(lane, class, waiting) end
  end
  return {lanes = lanes, free = {}, seats = {}, gone = {}, least = math.min(least, call.blocks), soonest = soonest}
end

-- One of its calls does not wait any more; nor does the flow, if that was the last.
local function take(play, line, flow, i)
  play.gone[table.remove(flow.ids, i)] = true
  table.remove(flow.calls, i)
  if #flow.calls > 0 then return end
  for k, other in ipairs(line.flows) do
    if other == flow then return table.remove(line.flows, k) end
  end
end

-- The lowest class whose credit covers its head.
local function favoured(lines)
  for i = #lines, 1, -1 do
    local line = lines[i]
    local first = line.flows[1]
    if line.share > 0 and first and line.credit >= order.price(line.class) * first.calls[1].blocks then return line end
  end
  return nil
end

local function fits(id, call, replica, play)
  local held_for = replica.held_for
  return call.blocks <= play.free[replica.name] and call.sequences <= play.seats[replica.name] and (held_for == '' or held_for == id or play.gone[held_for])
    and placement.could_use(call, replica)
end

-- The flow of the line whose head starts on the replica.
local function taker_in(line, replica, play)
  for i = 1, math.min(LOOKAHEAD, #line.flows) do
    local flow = line.flows[i]
    if fits(flow.ids[1], flow.calls[1], replica, play) then return flow end
  end
  return nil
end

-- Who starts on the replica now: the flow, its line, the lines of its lane, and whether it goes before its turn.
local function next_on(replica, play)
  for _, lane in ipairs(books.config.lanes) do
    local lines = play.lanes[lane]
    local first = favoured(lines)
    local flow = first and taker_in(first, replica, play)
    if flow then return flow, first, lines, true end
    for _, line in ipairs(lines) do
      flow = line ~= first and taker_in(line, replica, play)
      if flow then return flow, line, lines, false end
    end
  end
  return nil
end

-- Who goes before its turn pays, and every lower class that waits earns its share.
local function pass_credit(call, line, lines, before_turn)
  if before_turn then line.credit = line.credit - order.price(line.class) * call.blocks end
  local lower = false
  for _, other in ipairs(lines) do
    if lower and other.share > 0 and #other.flows > 0 then other.credit = other.credit + call.blocks * other.share end
    lower = lower or other == line
  end
end

-- The call that starts on the replica now, or nil.
local function start_next(replica, play)
  local flow, line, lines, before_turn = next_on(replica, play)
  if not flow then return nil end
  local call = flow.calls[1]
  local units = books.ceil_div(call.cost * TAG_SCALE, rows.fetch(records.keys, call.key).weight)
  play.free[replica.name] = play.free[replica.name] - call.blocks
  play.seats[replica.name] = play.seats[replica.name] - call.sequences
  flow.tag = flow.tag + flows.after_owed(flow, units)
  take(play, line, flow, 1)
  table.sort(line.flows, by_turn)
  pass_credit(call, line, lines, before_turn)
  return call
end

-- All whose time is over by then leave, but for the call itself.
local function expire(call, due, play)
  for _, lines in pairs(play.lanes) do
    for _, line in ipairs(lines) do
      for k = #line.flows, 1, -1 do
        local flow = line.flows[k]
        for i = #flow.calls, 1, -1 do
          if flow.calls[i] ~= call and flow.calls[i].deadline <= due then take(play, line, flow, i) end
        end
      end
    end
  end
end

-- Whether the call starts when so many blocks come back on the replica then, and one sequence: owners do not tell how
-- many, and few calls have more.
local function starts_at(call, due, replica, blocks, play)
  if not replica then return false end
  local free = (play.free[replica.name] or replica.limit - replica.used) + blocks
  play.free[replica.name] = free
  play.seats[replica.name] = (play.seats[replica.name] or replica.sequences_max - replica.sequences) + 1
  if free < play.least then return false end
  if due >= play.soonest then expire(call, due, play) end
  local started
  repeat
    started = start_next(replica, play)
    if started == call then return true end
  until not started
  return false
end

-- When the call starts, nil where that is not foreseen.
local function start_of(call, ends)
  local play = rehearsal_with(call)
  for i = 1, math.min(#ends.numbers, FORECAST_PLAYED) do
    local at = ends.numbers[i] % PLACES_MAX
    local due, replica = ends.dues[at], books.replicas[ends.replicas[at]]
    if starts_at(call, due, replica, ends.blocks[at], play) then return due end
  end
  return nil
end

-- Where calls are charged by their paths, or share, or some are held softly, an end does not say how much fits then.
local function is_uncertain(lane)
  for _, pool in ipairs(books.config.pools[lane]) do
    for _, replica in ipairs(books.pool(pool)) do
      if replica.elastic > 0 or replica.shared > 0 or replica.soft > 0 then return true end
    end
  end
  return false
end

-- Whether warm calls wait, or the call is one: it does not stand in the fair order that is played.
local function is_out_of_order(call)
  if holds.is_warm(call) then return true end
  for _, lane in ipairs(books.waiting > 0 and books.config.lanes or {}) do
    for _, class in ipairs(books.config.classes) do
      if flows.line(lane, class).warm > 0 then return true end
    end
  end
  return false
end

-- Milliseconds until this call, which is not counted as waiting yet, starts; nil where owners have not told enough, or
-- so many wait that an average will do.  Once a script: the bound of its time is shared with all its ops.
function forecast.wait(call)
  if books.meta.opens_at > 0 or books.waiting >= FORECAST_WAITING or books.rehearsed then return nil end
  local flow = rows.fetch(records.flows, flows.name_of(call))
  if flow.parked == 1 or placement.capped(call) then return nil end
  local first = flow.waiting == 0 or (holds.is_warm(call) and flow.warm == 0)
  if first and placement.place('', call) then return 0 end
  if is_uncertain(call.lane) or is_out_of_order(call) then return nil end
  books.rehearsed = true
  local due = start_of(call, ends_ahead())
  return due and math.floor((due - books.meta.clock) * (100 + FORECAST_MARGIN_PERCENT) / 100)
end
