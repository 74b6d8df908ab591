--- @include "lib/owners"
-- R id replica key class lane blocks sequences prefill cost weight blocks_max requests_max force: a running call says
-- where it runs, after its owner lost its lease or the store its data.
-- same | declared | no_room | refused id | error text

-- A call runs where nobody places calls any more: its blocks count until it ends.
local function add_removed(name)
  replicas[name] = {pool = '', limit = 0, usable = 0, sequences_max = 0, prefill_max = 0, used = 0, sequences = 0,
    prefill = 0, state = 'removed', held_for = ''}
  store_replica(name)
end

local function command_redeclare(owner, id, name, key, class, lane, blocks, sequences, prefill, cost, weight, blocks_max,
                                 requests_max, force)
  if foreign(owner, id) then return {'refused', 'id', '', 0, 0, 0} end
  local known = fetch(calls, id)
  if known and known.state ~= 'queued' then
    if known.replica ~= name then return {'error', 'declared on another replica'} end
    claim(id, known)
    return {'same'}
  end
  if not replicas[name] and force == 1 then add_removed(name) end
  local replica = replicas[name]
  if not replica then return {'no_room'} end
  local fitting = replica.used + blocks <= replica.limit or replica.used == 0
  local room = fitting and replica.sequences + sequences <= replica.sequences_max
  if force == 0 and not room then return {'no_room'} end
  if known then withdraw(id, known) end
  set_policy(key, weight, blocks_max, requests_max)
  meta.arrivals = meta.arrivals + 1
  local call = {state = 'none', owner = owner, replica = '', key = key, class = class, lane = lane, blocks = blocks,
    sequences = sequences, prefill = prefill, prefilling = 0, cost = cost, deadline = meta.clock,
    arrival = meta.arrivals, passed = 0, attempt = 0, charged = 0, exclude = {}, prefer = {}, charge = {}}
  reserve(id, call, name, 'reserved')
  return {'declared'}
end
