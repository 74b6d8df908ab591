--- @include "lib/books"
--- @include "lib/queue"
--- @include "lib/once"
-- Flows and their tags in the fair order, and the policies of keys.

function flows.name_of(call)
  local name = call.flow
  if not name then
    name = call.lane .. ':' .. call.class .. ':' .. call.key
    call.flow = name -- made once a script, and not written
  end
  return name
end

function flows.line(lane, class)
  return rows.fetch(records.lines, lane .. ':' .. class)
end

-- A flow that nobody waits in or returns to, and that is not ahead of its line, says nothing.
function flows.keep_flow(name, flow, line)
  if flow.waiting == 0 and flow.resume < 0 and flow.tag <= line.virtual then
    rows.erase(records.flows, name)
  else
    rows.store(records.flows, name, flow)
  end
end

function flows.set_tag(call, name, flow, line, tag)
  if flow.waiting > 0 and flow.parked == 0 and tag ~= flow.tag then
    queue.reorder(call, flow, tag)
  else
    flow.tag = tag
  end
  flows.keep_flow(name, flow, line)
end

-- Its tag. A flow that waits may be behind its line's time; one that does not saves nothing up.
function flows.standing(flow, line)
  if flow.waiting > 0 then return flow.tag end
  return math.max(line.virtual, flow.tag)
end

-- The first tag of the flows other than the call's among the first of a class, nil where there are none.
local function other_tag(call, class)
  local members = fronts.first(call.lane .. ':' .. class, 2)
  for i = 1, math.min(2, #members) do
    local tag, key = string.match(members[i], ':(%d+):([^:]+)$')
    if key ~= call.key then return tonumber(tag) end
  end
  return nil
end

-- The first tag of the other flows that wait in the call's line.
function flows.first_tag(call, otherwise)
  local tag, line = other_tag(call, call.class), flows.line(call.lane, call.class)
  local warm = line.warm > 0 and other_tag(call, queue.warm_class(call.class)) or nil
  if tag and warm then return math.min(tag, warm) end
  return tag or warm or otherwise
end

-- Of a charge what is left when the flow has used what it is owed; at least 1, so that turns are taken.
function flows.after_owed(flow, units)
  local left = math.max(units - flow.owed, math.min(units, 1))
  flow.owed = flow.owed - (units - left)
  return left
end

-- What its key is charged meanwhile counts for who returns; what it gets back is not saved up.
function flows.delay(flow, units)
  if flow.resume >= 0 then flow.resume = flow.resume + units end
end

function flows.unpark_key(key)
  if books.waiting > 0 then queue.unpark_key(key) end
end

function flows.forget_call(id, call)
  rows.erase(records.calls, id)
  once.forget(call)
  books.owned[call.owner .. ':' .. id] = false
end

function flows.set_policy(name, weight, blocks_max, requests_max, pool_share)
  local key = rows.fetch(records.keys, name)
  local other_share = key.pool_share ~= pool_share
  local changed = other_share or key.blocks_max ~= blocks_max or key.requests_max ~= requests_max
  key.weight, key.blocks_max, key.requests_max, key.pool_share = weight, blocks_max, requests_max, pool_share
  rows.store(records.keys, name, key)
  if not changed then return end
  books.moves = books.moves + 1
  flows.unpark_key(name)
  if not other_share then return end
  -- Who waits for the other pools of its lane may start in this one.
  books.room = books.room + 1
  books.meta.dirty = 1
end
