--- @include "lib/owners"
--- @include "lib/dispatch"
--- @include "lib/check"
--- @include "commands/claim"
--- @include "lib/refusals"
--- @include "lib/appointments"
--- @include "lib/queue"
--- @include "lib/quotas"
--- @include "lib/places"
--- @include "lib/once"
--- @include "lib/holds"
-- A id key class lane blocks sequences prefill cost wait_ms weight blocks_max requests_max pool_share queue_max
-- queue_key_max prefer exclude charge fingerprint once standing held base path promised prefix past: admit.
-- fingerprint: of key, route and body, '' until it is asked for.  once: hash of key and `Idempotency-Key`, always with a
-- fingerprint, '' = none.  standing: 1 = it may wait only in a place that was left, 2 = it comes back when it was asked
-- to, 0 = as others.  held, base, path: what it is to hold at first (-1 = all) and later, where it is charged by its path
-- ('' = nowhere).  promised: 1 = the guarantee.  prefix: block size, and {id, blocks} of each segment with which the prompt
-- begins; '' = it shares nothing.  past, which may be left out: name of the conversation with which it goes on, '' = none.
-- grant place missing_us... | ticket position wait_ms missing_us... | fingerprint: ask again with it |
-- refused code knob measured limit retry_ms

-- Refusals that no waiting can change.
local function refuse_outright(call)
  if not (placement.is_able(call, 'up') or placement.is_able(call, 'draining')) then return refusals.backend(call) end
  local key = rows.fetch(records.keys, call.key)
  return refusals.cap(call, key)
end

-- Somebody that could start waits in the lane, or before this call in its flow.
local function others_first(call)
  if books.waiting == 0 then return false end
  return fronts.waits(call.lane)
    or rows.fetch(records.flows, flows.name_of(call)).waiting > 0
end

-- Where the call may start without a ticket.
local function at_once(id, call)
  if books.meta.opens_at > 0 or others_first(call) or placement.capped(call) then return nil end
  return placement.place(id, call)
end

-- Its place in its flow, to which a move brings it back.
local function number(call)
  books.meta.arrivals = books.meta.arrivals + 1
  call.arrival = books.meta.arrivals
end

-- Into the place that was left, or behind all others of its flow.  The wait that is expected.
local function enqueue(id, call, place)
  books.owned[call.owner .. ':' .. id] = true
  if place then
    places.take(id, call, place)
    return -1
  end
  local wait = appointments.expected_wait(call)
  number(call)
  queue.join(id, call)
  return wait
end

function admit.check(op)
  check.length(op, 28, 27)
  check.id(op)
  check.names(op, 3, 5)
  check.integers(op, 6, 7, 1) -- blocks, sequences
  check.integers(op, 8, 10, 0) -- prefill, cost, wait_ms
  check.integers(op, 11, 11, 1) -- weight
  check.integers(op, 12, 14, -1) -- caps
  check.integers(op, 15, 16, 0) -- queue_max, queue_key_max
  check.name_list(op, 17)
  check.name_list(op, 18)
  check.charge(op, 19)
  check.hashes(op, 20, 21) -- fingerprint, once
  check.integers(op, 22, 22, 0) -- standing
  check.path(op, 23)
  check.flag(op, 26) -- promised
  check.prefix(op, 27, op[6])
  if op[28] then check.hashes(op, 28, 28) end -- past
end

function admit.run(owner, id, key, class, lane, blocks, sequences, prefill, cost, wait_ms, weight, blocks_max,
                   requests_max, pool_share, queue_max, queue_key_max, prefer, exclude, charge, fingerprint, named,
                   standing, held, base, path, promised, prefix, past)
  if owners.foreign(owner, id) then return {'refused', 'id', '', 0, 0, 0} end
  if rows.fetch(records.calls, id) then return claim.run(owner, id) end
  if not books.config.pools[lane] or not books.config.shares[class] then
    return {'refused', 'settings', '', 0, 0, drain.FIRST_APPOINTMENT_MS}
  end
  past = past or ''
  local call = {state = 'none', owner = owner, replica = '', pool = '', key = key, class = class, lane = lane,
    blocks = blocks, sequences = sequences, prefill = prefill, prefilling = 0, cost = cost,
    deadline = books.meta.clock + wait_ms, arrival = 0, passed = 0, attempt = 0, charged = 0, exclude = exclude,
    prefer = prefer, charge = {},
    once = named, fingerprint = named ~= '' and fingerprint or '', held = 0, elastic = 0, promised = promised,
    prefix = prefixes.of(prefix), past = past, yields_until = holds.yields(past)}
  elastic.want(call, held, base, path)
  local refusal = once.refuse(call) or refusals.shut()
  if refusal then return refusal end
  flows.set_policy(key, weight, blocks_max, requests_max, pool_share)
  refusal = refuse_outright(call) or quotas.refuse(key, charge)
  if refusal then return refusal end
  dispatch.run()
  local replica = at_once(id, call)
  if replica then
    number(call)
    reserve.pay(call)
    prefixes.share(call, replica)
    reserve.take(id, call, replica, 'reserved')
    once.claim(id, call)
    return quotas.pay(call, charge, {'grant', prefixes.told(call)})
  end
  if fingerprint == '' and queue_max > 0 and places.any(flows.name_of(call)) then return {'fingerprint'} end
  local place = places.first(call, fingerprint)
  refusal = refusals.to_queue(call, {queue_max = queue_max, queue_key_max = queue_key_max, wait_ms = wait_ms,
    returns = place ~= nil, standing = standing})
  if refusal then return refusal end
  local wait = enqueue(id, call, place)
  once.claim(id, call)
  return quotas.pay(call, charge, {'ticket', flows.line(lane, class).waiting, wait})
end
