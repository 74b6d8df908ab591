--- @include "lib/owners"
--- @include "commands/claim"
-- A id key class lane blocks sequences prefill cost wait_ms weight blocks_max requests_max queue_max prefer exclude
-- charge: admit.  grant replica | ticket position wait_ms | refused code knob measured limit retry_ms

local function refuse_outright(call)
  local configured, unknown, fitting, up, largest = false, false, false, false, 0
  for _, replica in pairs(replicas) do
    if contains(config.pools[call.lane], replica.pool) and replica.state ~= 'removed' then
      configured = true
      unknown = unknown or replica.usable == 0
      largest = math.max(largest, replica.usable)
      if call.blocks <= replica.usable and call.sequences <= replica.sequences_max then
        fitting = true
        up = up or replica.state == 'up'
      end
    end
  end
  if configured and not unknown and not fitting then
    return {'refused', 'context_length_exceeded', 'usable', call.blocks, largest, 0}
  end
  if not up then return {'refused', 'no_backend', '', 0, 0, FIRST_APPOINTMENT_MS} end
  local key = key_of(call.key)
  if key.blocks_max >= 0 and call.blocks > key.blocks_max then
    return {'refused', 'key_cap_exceeded', 'blocks_max', call.blocks, key.blocks_max, 0}
  end
  if key.requests_max == 0 then
    return {'refused', 'quota_exceeded', 'requests_max', 1, 0, FIRST_APPOINTMENT_MS}
  end
  return nil
end

-- Where the call may start without a ticket: nobody that could start waits in its lane, and it fits.
local function at_once(id, call)
  if meta.opens_at > 0 or #with_prefix(ORDER, call.lane, 1) > 0 or flow_of(call).waiting > 0 or capped(call) then
    return nil
  end
  return place(id, call)
end

local function refuse_capped(call)
  local key, wait = key_of(call.key), wait_told(call)
  if key.requests_max >= 0 and key.calls + 1 > key.requests_max then
    return {'refused', 'quota_exceeded', 'requests_max', key.calls + 1, key.requests_max, wait}
  end
  return {'refused', 'quota_exceeded', 'blocks_max', key.blocks + call.blocks, key.blocks_max, wait}
end

-- Most blocks free on one replica that the call may use.
local function most_free(call)
  local free = 0
  for name, replica in pairs(replicas) do
    if could_use(call, name, replica) then free = math.max(free, replica.limit - replica.used) end
  end
  return free
end

local function refuse_to_queue(call, queue_max, wait_ms)
  local waiting = line_of(call.lane, call.class).waiting
  if waiting < queue_max and wait_ms > 0 then return nil end
  if waiting < queue_max then return {'refused', 'queue_timeout', 'seconds_max', 0, wait_ms, wait_told(call)} end
  if queue_max > 0 then return {'refused', 'queue_full', 'depth_max', waiting, queue_max, appointment(call)} end
  if meta.opens_at > 0 then return {'refused', 'store_unavailable', '', 0, 0, meta.opens_at - meta.clock} end
  if capped(call) then return refuse_capped(call) end
  return {'refused', 'capacity_exceeded', 'limit', call.blocks, most_free(call), appointment(call)}
end

-- Its place in its flow, to which a move brings it back.
local function number(call)
  meta.arrivals = meta.arrivals + 1
  call.arrival = meta.arrivals
end

local function enqueue(id, call)
  number(call)
  local flow = flow_of(call)
  if flow.waiting == 0 then
    flow.tag = math.max(line_of(call.lane, call.class).virtual, flow.tag)
    store(flows, flow_name(call), flow)
  end
  redis.call('ZADD', OWNED, 0, call.owner .. ':' .. id)
  join(id, call)
end

local function command_admit(owner, id, key, class, lane, blocks, sequences, prefill, cost, wait_ms, weight, blocks_max,
                             requests_max, queue_max, prefer, exclude, charge)
  if foreign(owner, id) then return {'refused', 'id', '', 0, 0, 0} end
  if fetch(calls, id) then return command_claim(owner, id) end
  if not config.pools[lane] or not config.shares[class] then
    return {'refused', 'settings', '', 0, 0, FIRST_APPOINTMENT_MS}
  end
  local call = {state = 'none', owner = owner, replica = '', key = key, class = class, lane = lane, blocks = blocks,
    sequences = sequences, prefill = prefill, prefilling = 0, cost = cost, deadline = meta.clock + wait_ms, arrival = 0,
    passed = 0, attempt = 0, charged = 0, exclude = exclude, prefer = prefer, charge = charge}
  set_policy(key, weight, blocks_max, requests_max)
  local refusal = refuse_outright(call)
  if refusal then return refusal end
  dispatch()
  local name = at_once(id, call)
  if name then
    number(call)
    pay(call)
    reserve(id, call, name, 'reserved')
    return {'grant', name}
  end
  refusal = refuse_to_queue(call, queue_max, wait_ms)
  if refusal then return refusal end
  local wait = wait_told(call)
  enqueue(id, call)
  return {'ticket', line_of(lane, class).waiting, wait}
end
