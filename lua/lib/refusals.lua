--- @include "lib/placement"
--- @include "lib/appointments"
--- @include "lib/queue"
--- @include "lib/holds"
-- What a refused call is told: code, knob, measured, limit, retry_ms.
local POOL_SHARE_SCALE, KEPT_PART = 1000000, 10
local PLACE_ONLY, ASKED_BACK = 1, 2
local SHUT_RETRY_MS = 5000

-- The operator has closed the fleet; nil = he has not.
function refusals.shut()
  return books.meta.shut and {'refused', 'gate_closed', '', 0, 0, SHUT_RETRY_MS} or nil
end

-- The call is larger than all replicas of its lane (context_length_exceeded), or those that would do are down or keep no
-- promise.
function refusals.backend(call)
  local configured, unknown, fitting, largest, knob = false, false, false, 0, ''
  for _, pool in ipairs(books.config.pools[call.lane]) do
    for _, replica in ipairs(books.pool(pool)) do
      if replica.state ~= 'removed' then
        configured = true
        unknown = unknown or replica.usable == 0
        largest = math.max(largest, replica.usable)
        if call.blocks <= replica.usable and call.sequences <= replica.sequences_usable then
          fitting = true
          if replica.state ~= 'down' then knob = 'promised' end
        end
      end
    end
  end
  if configured and not unknown and not fitting then
    return {'refused', 'context_length_exceeded', 'usable', call.blocks, largest, 0}
  end
  return {'refused', 'no_backend', knob, 0, 0, drain.FIRST_APPOINTMENT_MS}
end

-- Most blocks that a key may hold of one pool of the lane when all replicas are up; nil where that is not known.
local function part_in_health(key, lane)
  local most = 0
  for _, pool in ipairs(books.config.pools[lane]) do
    local limit = 0
    for _, replica in ipairs(books.pool(pool)) do
      if replica.state ~= 'removed' then
        if replica.usable == 0 then return nil end
        limit = limit + replica.limit
      end
    end
    most = math.max(most, math.floor(limit * key.pool_share / POOL_SHARE_SCALE))
  end
  return most
end

-- The call is larger than its key may ever hold, or its key may hold none; nil = neither.
function refusals.cap(call, key)
  if key.blocks_max >= 0 and call.blocks > key.blocks_max then
    return {'refused', 'key_cap_exceeded', 'blocks_max', call.blocks, key.blocks_max, 0}
  end
  local most = key.pool_share >= 0 and part_in_health(key, call.lane)
  if most and call.blocks > most then
    return {'refused', 'key_cap_exceeded', 'pool_share', call.blocks, most, 0}
  end
  if key.requests_max ~= 0 then return nil end
  return {'refused', 'quota_exceeded', 'requests_max', 1, 0, drain.FIRST_APPOINTMENT_MS}
end

local function capped(call)
  local key, wait = rows.fetch(records.keys, call.key), appointments.wait_told(call)
  if key.requests_max >= 0 and key.calls + 1 > key.requests_max then
    return {'refused', 'quota_exceeded', 'requests_max', key.calls + 1, key.requests_max, wait}
  end
  if key.blocks_max >= 0 and key.blocks + call.blocks > key.blocks_max then
    return {'refused', 'quota_exceeded', 'blocks_max', key.blocks + call.blocks, key.blocks_max, wait}
  end
  local pool = books.config.pools[call.lane][1]
  local held = placement.held_in(key, pool) + call.blocks
  return {'refused', 'quota_exceeded', 'pool_share', held, placement.part(key, pool), wait}
end

-- Most blocks on one replica that the call may use which no whole demand is counted in.
local function most_free(call)
  local free = 0
  for _, replica in pairs(books.replicas) do
    if placement.could_use(call, replica) then free = math.max(free, holds.limit(call, replica) - replica.full) end
  end
  return free
end

-- No hold is for a call that does not wait yet.
function refusals.fits_now(call)
  return not placement.capped(call) and placement.place('', call)
end

-- Of the places and the time of a queue a part is kept for who was asked to come back, while anybody was.
local function open_to(call, terms, amount)
  if terms.standing == ASKED_BACK or not appointments.any(call.lane) then return amount end
  return amount - math.floor(amount / KEPT_PART)
end

-- It would wait in vain, as far as anybody can tell; not who fits now, past those that do not.
local function too_late(call, terms)
  local judged, wait_ms = terms.smallest or call, terms.wait_ms
  local wait = appointments.expected_wait(judged)
  if wait <= open_to(call, terms, wait_ms) or books.meta.opens_at > 0 or refusals.fits_now(judged) then return nil end
  return {'refused', 'predicted_wait', 'wait_ms', wait, wait_ms, appointments.book(call)}
end

-- nil = it may wait.
local function to_open_queue(call, terms)
  local wait_ms, own_max = terms.wait_ms, terms.queue_key_max
  if wait_ms <= 0 then return {'refused', 'queue_timeout', 'seconds_max', 0, wait_ms, appointments.wait_told(call)} end
  local own = rows.fetch(records.flows, flows.name_of(call)).waiting + (terms.own_ahead or 0)
  if own >= own_max then return {'refused', 'queue_full', 'key_share', own, own_max, appointments.book(call)} end
  if terms.returns then return nil end
  if terms.standing == PLACE_ONLY then return {'refused', 'queue_full', 'place_only', 0, 0, appointments.book(call)} end
  return too_late(call, terms)
end

-- nil = it may wait, in the place of another key's newest call.
local function to_full_queue(call, waiting, terms)
  local key = terms.wait_ms > 0 and queue.crowder(call)
  if not key then return {'refused', 'queue_full', 'depth_max', waiting, terms.queue_max, appointments.book(call)} end
  local refusal = to_open_queue(call, terms)
  if not refusal and not terms.smallest then queue.displace(call.lane, call.class, key) end
  return refusal
end

-- terms: queue_max, queue_key_max, wait_ms, returns (a place that it may take is remembered), standing (PLACE_ONLY: it may
-- wait in such a place only; ASKED_BACK: it comes when it was told to), smallest (of a call that only asks: what it is at
-- least), ahead and own_ahead (of such a call: what will wait before it).  nil = it may wait.
function refusals.to_queue(call, terms)
  local waiting, meta = flows.line(call.lane, call.class).waiting + (terms.ahead or 0), books.meta
  if waiting < open_to(call, terms, terms.queue_max) then return to_open_queue(call, terms) end
  if terms.queue_max > 0 then return to_full_queue(call, waiting, terms) end
  if meta.opens_at > 0 then return {'refused', 'store_unavailable', '', 0, 0, meta.opens_at - meta.clock} end
  if not placement.is_able(call, 'up') then
    return {'refused', 'no_backend', 'draining', 0, 0, drain.FIRST_APPOINTMENT_MS}
  end
  if placement.capped(call) then return capped(call) end
  return {'refused', 'capacity_exceeded', 'limit', call.blocks, most_free(call), appointments.book(call)}
end
