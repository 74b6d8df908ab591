--- @include "lib/books"
--- @include "lib/queue"
--- @include "lib/holds"
-- Replicas that get no new calls though they answer, who says so ('operator', or an owner, with whose lease its word
-- ends), and why.  In the store {replica, teller, why}... in order, '' while there are none.

local function list()
  if books.meta.rests == '' then return {} end
  return cmsgpack.unpack(books.meta.rests)
end

local function store(rests_now)
  table.sort(rests_now, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  books.set('rests', #rests_now > 0 and cmsgpack.pack(rests_now) or '')
end

local function is_resting(name)
  for _, rest in ipairs(list()) do
    if rest[1] == name then return true end
  end
  return false
end

-- The replica answers, so it may be given calls unless somebody says that it rests.
function rests.let_answer(replica)
  local before = replica.state
  replica.state = 'up'
  if is_resting(replica.name) then
    replica.state, replica.held_for = 'draining', ''
    holds.drop(replica)
  elseif before ~= 'up' then
    queue.recheck_parked()
  end
  books.place_replica(replica.name, replica)
  books.room = books.room + 1
  books.meta.dirty = 1
end

local function reconsider(name)
  local replica = books.replicas[name]
  if replica and (replica.state == 'up' or replica.state == 'draining') then rests.let_answer(replica) end
end

-- why: '' = it rests no longer, as far as the teller is concerned.
function rests.set(teller, name, why)
  local kept, before = {}, ''
  for _, rest in ipairs(list()) do
    if rest[1] == name and rest[2] == teller then before = rest[3] else kept[#kept + 1] = rest end
  end
  if before == why then return end
  if why ~= '' then kept[#kept + 1] = {name, teller, why} end
  store(kept)
  reconsider(name)
end

-- The lease of an owner is over.
function rests.forget(owner)
  for _, rest in ipairs(list()) do
    if rest[2] == owner then rests.set(owner, rest[1], '') end
  end
end

-- Names of the replicas that answer and rest, in order.
function rests.draining()
  local names = {}
  for name, replica in pairs(books.replicas) do
    if replica.state == 'draining' then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end
