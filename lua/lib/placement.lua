--- @include "lib/flows"
--- @include "lib/drain"
--- @include "lib/elastic"
--- @include "lib/prefixes"
--- @include "lib/holds"
-- Where a call fits.
local POOL_SHARE_SCALE = 1000000

-- Whether a call that was promised the guarantee may be there, or was not promised it.
local function keeps_promise(call, replica)
  return call.promised == 0 or replica.mode ~= 'elastic'
end

function placement.contains(list, item)
  for i = 1, #list do
    if list[i] == item then return true end
  end
  return false
end

-- Whether the call can run there at all, however busy it is now; the replica is in a pool of its lane.
function placement.could_run(call, replica)
  return replica.state == 'up' and not placement.contains(call.exclude, replica.name)
    and call.blocks <= replica.usable and call.sequences <= replica.sequences_usable and keeps_promise(call, replica)
end

-- Whether some replica of its lane in that state is large enough.
function placement.is_able(call, state)
  for _, pool in ipairs(books.config.pools[call.lane]) do
    for _, replica in ipairs(books.pool(pool)) do
      if replica.state == state and call.blocks <= replica.usable and call.sequences <= replica.sequences_usable
        and keeps_promise(call, replica) then return true end
    end
  end
  return false
end

-- Blocks that the key holds in the pool.
function placement.held_in(key, pool)
  for i = 1, #key.pools, 2 do
    if key.pools[i] == pool then return key.pools[i + 1] end
  end
  return 0
end

-- Blocks of the pool that a key with a share may hold now.
function placement.part(key, pool)
  return math.floor(books.limit_of(pool) * key.pool_share / POOL_SHARE_SCALE)
end

-- Whether the call stays within the part of the pool that its key may hold.
local function within_part(call, pool)
  local key = rows.fetch(records.keys, call.key)
  return key.pool_share < 0 or placement.held_in(key, pool) + call.blocks <= placement.part(key, pool)
end

function placement.could_use(call, replica)
  return placement.contains(books.config.pools[call.lane] or {}, replica.pool) and placement.could_run(call, replica)
    and within_part(call, replica.pool)
end

-- All but the blocks; shared: those that it shares there.
local function fits_besides(id, call, replica, shared)
  return (replica.sequences + call.sequences <= replica.sequences_max or replica.sequences == 0)
    and (replica.prefill == 0
      or replica.prefill + (shared == 0 and call.prefill or prefixes.prefill(call, shared)) <= replica.prefill_max)
    and (replica.held_for == '' or replica.held_for == id)
    and placement.could_run(call, replica)
end

function placement.roomier(replica, other)
  local free, other_free = replica.limit - replica.used, other.limit - other.used
  return free > other_free or (free == other_free and replica.name < other.name)
end

local function percent(replica)
  return math.floor(replica.used * 100 / math.max(replica.limit, 1))
end

local function fits(id, call, replica, shared)
  return elastic.has_blocks(call, replica, shared) and fits_besides(id, call, replica, shared)
end

-- Whether the blocks alone rule the pool out.
local function crowded(pool, blocks)
  if books.bounds_room ~= books.room then books.bounds, books.bounds_room = {}, books.room end
  local most = books.bounds[pool]
  return most and blocks > most
end

-- The loop is most of what a call costs where there are many replicas: what is rarely true comes first, without a call.
local function emptiest(id, call, pool)
  local blocks, list, may_vary, gains = call.blocks, books.pool(pool), call.path ~= '', prefixes.gains(call)
  local cold = books.soft and not holds.is_warm(call)
  local best, best_free, most, shared = nil, nil, 0, 0
  if crowded(pool, elastic.least(call) - (gains and gains.most or 0)) then return nil end
  for i = 1, #list do
    local replica = list[i]
    local used, limit = replica.used, replica.limit
    local free = limit - used
    local needed = may_vary and elastic.blocks(call, replica) or blocks
    if gains then
      shared = gains.blocks[replica.name] or 0
      needed = math.max(needed - shared, 0)
    end
    local room = used == 0 and math.huge or free
    if room > most then most = room end -- for warm ones, too
    if cold and replica.soft > 0 then
      local held = holds.counted(replica)
      room, limit = room - held, limit - held
    end
    if room >= needed and (not best or free > best_free or (free == best_free and replica.name < best.name))
      and fits_besides(id, call, replica, shared)
      and (replica.full + blocks - shared <= limit or used == 0 or elastic.bound_holds(call, replica, shared)) then
      best, best_free = replica, free
    end
  end
  if not best then books.bounds[pool] = most end
  return best
end

-- Whether a replica where the call shares so many blocks, and that it prefers or not, comes before another one.
local function is_warmer(replica, shared, preferred, other)
  if shared ~= other.shared then return shared > other.shared end
  if preferred ~= other.preferred then return preferred end
  return placement.roomier(replica, other.replica)
end

-- Of the replicas that are at most so full the one that shares most with the call, then a preferred one, then the
-- emptiest; nil where none does either.
local function warmest(id, call, pool, fullest)
  local gains, best = prefixes.gains(call), nil
  if not gains and #call.prefer == 0 then return nil end
  local function consider(name, preferred)
    local replica = books.replicas[name]
    if not replica or replica.pool ~= pool or percent(replica) > fullest then return end
    local shared = prefixes.gain(call, replica)
    if (shared > 0 or preferred) and fits(id, call, replica, shared)
      and (not best or is_warmer(replica, shared, preferred, best)) then
      best = {replica = replica, shared = shared, preferred = preferred}
    end
  end
  for name in pairs(gains and gains.blocks or {}) do consider(name, placement.contains(call.prefer, name)) end
  for _, name in ipairs(call.prefer) do consider(name, true) end
  return best and best.replica
end

-- Where the conversation is held softly with which the call goes on, if it fits there.
local function home(id, call)
  local hold = holds.find(call.past)
  local replica = hold and books.replicas[hold.replica]
  if replica and placement.could_use(call, replica) and fits(id, call, replica, prefixes.gain(call, replica)) then
    return replica
  end
  return nil
end

-- Its home; else the first pool of the lane with room, there the warmest replica unless it is 10 % fuller; most free
-- blocks.
function placement.place(id, call)
  if books.unfit[call] == books.room then return nil end
  local there = home(id, call)
  if there then return there end
  for _, pool in ipairs(books.config.pools[call.lane]) do
    local best = within_part(call, pool) and emptiest(id, call, pool)
    if best then return warmest(id, call, pool, percent(best) + 10) or best end
  end
  books.unfit[call] = books.room
  return nil
end

function placement.capped(call)
  local key = rows.fetch(records.keys, call.key)
  if (key.blocks_max >= 0 and key.blocks + call.blocks > key.blocks_max)
    or (key.requests_max >= 0 and key.calls + 1 > key.requests_max) then return true end
  if key.pool_share < 0 then return false end
  for _, pool in ipairs(books.config.pools[call.lane]) do
    if within_part(call, pool) then return false end
  end
  return true
end
