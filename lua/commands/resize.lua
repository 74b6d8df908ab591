--- @include "lib/owners"
--- @include "lib/check"
-- Z id blocks: a running call grows or shrinks; waiters and holds do not stop it, the limit does.  ok | no_room | gone

function resize.check(op)
  check.length(op, 3)
  check.id(op)
  check.integers(op, 3, 3, 1)
end

function resize.run(owner, id, blocks)
  local call = owners.mine(owner, id)
  if not owners.holds(call) then return {'gone'} end
  local replica = books.replicas[call.replica]
  local growth = blocks - call.blocks
  if growth > 0 and replica.used + growth > replica.limit then return {'no_room'} end
  reserve.claim(id, call)
  call.blocks = blocks
  rows.store(records.calls, id, call)
  replica.used = replica.used + growth
  books.store_replica(replica)
  reserve.count_held(call, growth, 0)
  books.moves = books.moves + 1
  if growth < 0 then
    books.room = books.room + 1
    flows.unpark_key(call.key)
    drain.add(replica.pool, -growth)
    books.meta.dirty = 1
  end
  return {'ok'}
end
