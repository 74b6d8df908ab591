--- @include "lib/flows"
--- @include "lib/queue"
-- Remembered places: where calls stood that left the queue, each for the next call with the same fingerprint.  A place
-- is a member of two zsets: `lane:class:key:fingerprint:arrival`, by bytes, and by the end of its time.
local PLACE_MS, PLACES, PLACES_OF_FLOW, SLICE = 10000, 10000, 1000, 16

local function member_of(call, fingerprint)
  return string.format('%s:%s:%012d', flows.name_of(call), fingerprint, call.arrival)
end

-- Whether calls of the flow have left any.
function places.any(name)
  return books.places > 0 and #zsets.with_prefix(zsets.PLACES, name, 1) > 0
end

-- The first that calls like this one have left, or nil.
function places.first(call, fingerprint)
  if books.places == 0 or fingerprint == '' then return nil end
  return zsets.with_prefix(zsets.PLACES, flows.name_of(call) .. ':' .. fingerprint, 1)[1]
end

local function forget(member)
  redis.call('ZREM', zsets.PLACES, member)
  redis.call('ZREM', zsets.PLACE_ENDS, member)
  books.places = books.places - 1
  local name, lane, class = string.match(member, '^(([^:]+):([^:]+):[^:]+):')
  local flow = rows.fetch(records.flows, name)
  if flow.resume < 0 or places.any(name) then return end
  flow.resume = -1
  flows.keep_flow(name, flow, flows.line(lane, class))
end

local function has_its_part(name)
  if books.places < PLACES_OF_FLOW then return false end
  return zsets.nth_with_prefix(zsets.PLACES, name, PLACES_OF_FLOW) ~= nil
end

-- Of a call that is about to leave the queue.  The one that would end first makes room, but not for a flow that has its
-- part.
function places.remember(call, fingerprint)
  if has_its_part(flows.name_of(call)) then return end
  if books.places >= PLACES then forget(redis.call('ZRANGE', zsets.PLACE_ENDS, 0, 0)[1]) end
  local member = member_of(call, fingerprint)
  redis.call('ZADD', zsets.PLACES, 0, member)
  redis.call('ZADD', zsets.PLACE_ENDS, books.meta.clock + PLACE_MS, member)
  books.places = books.places + 1
end

-- Those whose time is over; true = some are left.
function places.expire()
  if books.places == 0 then return false end
  local over = redis.call('ZRANGEBYSCORE', zsets.PLACE_ENDS, '-inf', books.meta.clock, 'LIMIT', 0, SLICE + 1)
  for i = 1, math.min(SLICE, #over) do
    books.work = books.work - 1
    forget(over[i])
  end
  return #over > SLICE
end

-- The call stands where the one before stood, and is the first of its flow perhaps.
function places.take(id, call, member)
  local name = flows.name_of(call)
  local flow = rows.fetch(records.flows, name)
  call.arrival = tonumber(zsets.last_part(member))
  if flow.waiting > 0 then queue.unpark(call, name, flow) end
  queue.join(id, call, true)
  forget(member)
  books.moves = books.moves + 1
  books.meta.dirty = 1
end
