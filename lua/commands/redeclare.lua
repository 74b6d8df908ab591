--- @include "lib/owners"
--- @include "lib/check"
--- @include "lib/queue"
--- @include "lib/holds"
-- R id replica key class lane blocks sequences prefill cost weight blocks_max requests_max pool_share force fingerprint
-- once held base path promised prefix: a running call says where it runs and what it holds, after its owner lost its lease
-- or the store its data.  prefill: what it still holds.  prefix: as in A, then number of the cache, how many segments are
-- in nodes there, 1 where it is past its first token, and how many of its blocks are not in its path.  Where another call was admitted under its `once` meanwhile,
-- that one keeps it.
-- same | declared | no_room | refused id | error text

local function has_room(call, replica)
  return (replica.sequences + call.sequences <= replica.sequences_max or replica.sequences == 0)
    and elastic.has_blocks(call, replica, prefixes.known(call, replica))
end

function redeclare.check(op)
  check.length(op, 22)
  check.id(op)
  check.names(op, 3, 6)
  check.integers(op, 7, 8, 1) -- blocks, sequences
  check.integers(op, 9, 10, 0) -- prefill, cost
  check.integers(op, 11, 11, 1) -- weight
  check.integers(op, 12, 14, -1) -- caps
  check.integers(op, 15, 15, 0) -- force
  check.hashes(op, 16, 17) -- fingerprint, once
  check.path(op, 18)
  check.flag(op, 21) -- promised
  check.prefix(op, 22, op[7])
end

function redeclare.run(owner, id, name, key, class, lane, blocks, sequences, prefill, cost, weight, blocks_max,
                       requests_max, pool_share, force, fingerprint, named, held, base, path, promised, prefix)
  if owners.foreign(owner, id) then return {'refused', 'id', '', 0, 0, 0} end
  local known = rows.fetch(records.calls, id)
  if known and known.state == 'displaced' then
    queue.forget_displaced(id, known)
    known = nil
  end
  if known and known.state ~= 'queued' then
    if known.replica ~= name then return {'error', 'declared on another replica'} end
    reserve.claim(id, known)
    reserve.recount(id, known, held, base, path, prefixes.net_told(prefix))
    local computed = prefixes.is_computed(prefix)
    if (prefill == 0 or computed) and known.prefilling > 0 then reserve.end_prefill(id, known) end
    if computed then reserve.compute(id, known) end
    return {'same'}
  end
  -- A call runs where nobody places calls any more: its blocks count until it ends.
  if not books.replicas[name] and force == 1 then books.place_replica(name, books.new_replica(name, '')) end
  local replica = books.replicas[name]
  if not replica then return {'no_room'} end
  local call = {state = 'none', owner = owner, replica = '', pool = '', key = key, class = class, lane = lane,
    blocks = blocks, sequences = sequences, prefill = prefill, prefilling = 0, cost = cost, deadline = books.meta.clock,
    arrival = 0, passed = 0, attempt = 0, charged = 0, exclude = {}, prefer = {}, charge = {}, once = '',
    fingerprint = '', held = 0, elastic = 0, promised = promised, prefix = prefixes.of(prefix), past = '',
    yields_until = holds.WARM}
  elastic.want(call, held, base, path)
  if force == 0 and not has_room(call, replica) then return {'no_room'} end
  call.yields_until = 0 -- it ran: soft holds were not in its way just now, and it waits behind no warm call later
  if known then queue.withdraw(id, known, '') end
  flows.set_policy(key, weight, blocks_max, requests_max, pool_share)
  books.meta.arrivals = books.meta.arrivals + 1
  call.arrival = books.meta.arrivals
  if named ~= '' and not rows.fetch(records.once, named) then call.once, call.fingerprint = named, fingerprint end
  once.claim(id, call)
  reserve.take(id, call, replica, 'reserved')
  if prefixes.joined(call) > 0 then prefixes.renew() end
  return {'declared'}
end
