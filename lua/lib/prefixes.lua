--- @include "lib/books"
--- @include "lib/elastic"
--- @include "lib/holds"
-- Prefixes that calls on a replica hold together (gateway/core/nodes.py).  A node is a segment there in one cache of the
-- engine: its blocks are in the replica's sums once, as long as anybody is in it.  One that a call made which is charged
-- by its path is the call's own, in its charge, until another joins it.
-- A call's prefix, and of its segments: '' where it asks for none, which costs less than a table.  Of a call that only
-- asks SIZE alone.
local SIZE, SEGMENTS, CACHE, JOINED, COMPUTED, NET, OWN_BLOCKS = 1, 2, 3, 4, 5, 6, 7
local ID, BLOCKS = 1, 2
-- A row of nodes has WIDTH values of each: replica, cache, blocks, and at these places behind the first
local WIDTH, HOLDERS, NEWCOMERS, OWN = 6, 3, 4, 5
local PREFILL_TOKENS_MIN = 512

-- Of the first segments.
local function blocks_of(prefix, count)
  local blocks = 0
  for i = 1, count do blocks = blocks + prefix[SEGMENTS][i][BLOCKS] end
  return blocks
end

-- Of an argument, which may say the first of these alone.
function prefixes.of(told)
  if #told == 0 then return '' end
  return {told[SIZE], told[SEGMENTS], told[CACHE] or 0, told[JOINED] or 0, told[COMPUTED] or 0, told[NET] or 0, 0}
end

-- Whether a prefix is of a call that is past its first token.
function prefixes.is_computed(prefix)
  return prefix[COMPUTED] == 1
end

-- Whether it says how its prompt begins.
function prefixes.any(call)
  return #call.prefix > SIZE
end

-- So many of its segments, the first, are in nodes.
function prefixes.joined(call)
  return call.prefix[JOINED] or 0
end

-- Tokens of a block.
function prefixes.block_size(call)
  return call.prefix[SIZE]
end

-- Blocks of the call that are not in its path.
function prefixes.net(call)
  return call.prefix[NET] or 0
end

function prefixes.set_net(call, net)
  local prefix = call.prefix
  if #prefix > SIZE then prefix[NET] = math.min(net, blocks_of(prefix, #prefix[SEGMENTS])) end
end

-- That of an argument.
function prefixes.net_told(prefix)
  return prefix[NET] or 0
end

-- Blocks that are counted in nodes, and not with the call.
function prefixes.shared(call)
  local prefix = call.prefix
  if #prefix <= SIZE then return 0 end
  return blocks_of(prefix, prefix[JOINED]) - prefix[OWN_BLOCKS]
end

-- Blocks that the call does not share.
function prefixes.own(call)
  return call.blocks - prefixes.shared(call)
end

-- What counts of its demand on the prefill budget where so many blocks are computed already.
function prefixes.prefill(call, shared)
  if shared == 0 then return call.prefill end
  local left = call.prefill - shared * call.prefix[SIZE]
  return left >= PREFILL_TOKENS_MIN and left or 0
end

-- What it holds of that budget when it comes to a replica.
function prefixes.prefilling(call)
  local prefix = call.prefix
  return prefix[COMPUTED] == 1 and 0 or prefixes.prefill(call, blocks_of(prefix, prefix[JOINED]))
end

-- Where the node begins in its row, or nil.
local function find(nodes, name, cache, blocks)
  for at = 1, #nodes, WIDTH do
    if nodes[at] == name and nodes[at + 1] == cache and nodes[at + 2] == blocks then return at end
  end
  return nil
end

local function nodes_of(segment)
  local row = rows.fetch(records.nodes, segment[ID])
  return row and row.nodes or {}
end

local function fetch(segments)
  local ids = {}
  for _, segment in ipairs(segments) do
    if records.nodes.known[segment[ID]] == nil then ids[#ids + 1] = segment[ID] end
  end
  rows.prefetch(records.nodes, ids)
end

-- Of the segments the longest run from the first that is computed on each replica.
local function runs_of(segments)
  local gains = {blocks = {}, runs = {}, most = 0}
  for i = 1, #segments do
    local nodes, blocks, grew = nodes_of(segments[i]), segments[i][BLOCKS], false
    for at = 1, #nodes, WIDTH do
      local name = nodes[at]
      local replica = books.replicas[name]
      if nodes[at + HOLDERS] > 0 and nodes[at + OWN] == '' and nodes[at + 2] == blocks and (gains.runs[name] or 0) == i - 1
        and replica and replica.cache > 0 and replica.cache == nodes[at + 1] then
        local shared = (gains.blocks[name] or 0) + blocks
        gains.blocks[name], gains.runs[name], grew = shared, i, true
        gains.most = math.max(gains.most, shared)
      end
    end
    if not grew then break end
  end
  return gains
end

-- Looked up once for all calls that begin alike, until it changes.
local function gains_of(segments)
  local parts = {}
  for i, segment in ipairs(segments) do parts[2 * i - 1], parts[2 * i] = segment[ID], segment[BLOCKS] end
  local name = table.concat(parts, ':')
  if books.gains_at ~= books.turns then books.gains, books.gains_at = {}, books.turns end
  if not books.gains[name] then
    fetch(segments)
    books.gains[name] = runs_of(segments)
  end
  return books.gains[name]
end

-- As much as may be shared on each replica by a call whose prompt is not known.
local function bounds_of(call)
  local gains = {blocks = {}, runs = {}, most = 0}
  for name, replica in pairs(books.replicas) do
    gains.blocks[name] = math.min(replica.shared, call.blocks - 1)
    gains.most = math.max(gains.most, gains.blocks[name])
  end
  return gains
end

-- nil where the call shares nothing, else by name of the replica blocks and runs (how many of its segments) that it
-- would share there, and the most blocks of any.
function prefixes.gains(call)
  local prefix = call.prefix
  if #prefix == 0 then return nil end
  if call.gains_at ~= books.turns then
    call.gains = #prefix > SIZE and gains_of(prefix[SEGMENTS]) or bounds_of(call)
    call.gains_at = books.turns
  end
  return call.gains.most > 0 and call.gains or nil
end

-- Blocks that the call would share there.
function prefixes.gain(call, replica)
  local gains = prefixes.gains(call)
  return gains and gains.blocks[replica.name] or 0
end

-- It is admitted there on the strength of what others have computed.
function prefixes.share(call, replica)
  local prefix = call.prefix
  if #prefix <= SIZE then return end
  local gains = prefixes.gains(call)
  local run = gains and gains.runs[replica.name] or 0
  prefix[CACHE], prefix[JOINED], prefix[COMPUTED] = replica.cache, run, 0
end

-- Nodes count by themselves, or are gone (negative): they are the whole demand of nobody in particular.
local function count(replica, blocks)
  replica.shared, replica.used = replica.shared + blocks, replica.used + blocks
  replica.full, replica.assured = replica.full + blocks, replica.assured + blocks
end

-- What was another call's own counts by itself from now on, and leaves that one's charge.
local function free(nodes, at, replica)
  local id, blocks = nodes[at + OWN], nodes[at + 2]
  local other = rows.fetch(records.calls, id)
  nodes[at + OWN] = ''
  count(replica, blocks)
  elastic.uncount(other, replica)
  other.prefix[OWN_BLOCKS] = other.prefix[OWN_BLOCKS] - blocks
  elastic.count(other, replica)
  rows.store(records.calls, id, other)
  books.turns = books.turns + 1
end

-- own: the call's id, where a node that is not there becomes its own; else ''.  Blocks of that.
local function join(prefix, segment, replica, own)
  local nodes, alone = nodes_of(segment), 0
  local at = find(nodes, replica.name, prefix[CACHE], segment[BLOCKS])
  if not at then
    at = #nodes + 1
    nodes[at], nodes[at + 1], nodes[at + 2] = replica.name, prefix[CACHE], segment[BLOCKS]
    nodes[at + HOLDERS], nodes[at + NEWCOMERS], nodes[at + OWN] = 0, 0, own
    if own == '' then count(replica, segment[BLOCKS]) else alone = segment[BLOCKS] end
    books.turns = books.turns + 1
  elseif nodes[at + OWN] ~= '' then
    free(nodes, at, replica)
  end
  local place = at + (prefix[COMPUTED] == 1 and HOLDERS or NEWCOMERS)
  nodes[place] = nodes[place] + 1
  if nodes[at + HOLDERS] == 1 then books.turns = books.turns + 1 end -- perhaps the first
  rows.store(records.nodes, segment[ID], {nodes = nodes})
  return alone
end

-- The call joins the nodes of these segments; blocks of those that are its own.
local function join_all(first, last, id, call, replica)
  local own, alone = elastic.is_by_path(call, replica) and id or '', 0
  for i = first, last do alone = alone + join(call.prefix, call.prefix[SEGMENTS][i], replica, own) end
  return alone
end

function prefixes.enter(id, call, replica)
  local prefix = call.prefix
  if prefix[JOINED] == 0 then return end
  fetch(prefix[SEGMENTS])
  prefix[OWN_BLOCKS] = join_all(1, prefix[JOINED], id, call, replica)
end

-- Blocks of its nodes that count there without it.
function prefixes.known(call, replica)
  local prefix, blocks = call.prefix, 0
  for i = 1, prefixes.joined(call) do
    local segment = prefix[SEGMENTS][i]
    local nodes = nodes_of(segment)
    local at = find(nodes, replica.name, prefix[CACHE], segment[BLOCKS])
    if at and nodes[at + OWN] == '' then blocks = blocks + segment[BLOCKS] end
  end
  return blocks
end

-- The last one out takes the node away.
local function leave(prefix, segment, replica)
  local nodes = nodes_of(segment)
  local at = find(nodes, replica.name, prefix[CACHE], segment[BLOCKS])
  local place = at + (prefix[COMPUTED] == 1 and HOLDERS or NEWCOMERS)
  nodes[place] = nodes[place] - 1
  if nodes[at + HOLDERS] == 0 then books.turns = books.turns + 1 end -- perhaps the last
  if nodes[at + HOLDERS] + nodes[at + NEWCOMERS] == 0 then
    if nodes[at + OWN] == '' then count(replica, -segment[BLOCKS]) end
    for _ = 1, WIDTH do table.remove(nodes, at) end
  end
  if #nodes == 0 then
    rows.erase(records.nodes, segment[ID])
  else
    rows.store(records.nodes, segment[ID], {nodes = nodes})
  end
end

-- The call is in no node any more.
function prefixes.leave(call, replica)
  local prefix = call.prefix
  if #prefix <= SIZE then return end
  if prefix[JOINED] > 0 then
    fetch(prefix[SEGMENTS])
    for i = 1, prefix[JOINED] do leave(prefix, prefix[SEGMENTS][i], replica) end
  end
  prefix[CACHE], prefix[JOINED], prefix[COMPUTED], prefix[OWN_BLOCKS] = 0, 0, 0, 0
end

-- A newcomer becomes a holder.
local function settle_in(prefix, segment, replica)
  local nodes = nodes_of(segment)
  local at = find(nodes, replica.name, prefix[CACHE], segment[BLOCKS])
  nodes[at + NEWCOMERS], nodes[at + HOLDERS] = nodes[at + NEWCOMERS] - 1, nodes[at + HOLDERS] + 1
  rows.store(records.nodes, segment[ID], {nodes = nodes})
end

-- Its prompt is in the cache now: what it begins with is shared, and its own charge is only the rest.
function prefixes.compute(id, call, replica)
  local prefix = call.prefix
  if #prefix <= SIZE or prefix[COMPUTED] == 1 then return end
  fetch(prefix[SEGMENTS])
  for i = 1, prefix[JOINED] do settle_in(prefix, prefix[SEGMENTS][i], replica) end
  prefix[COMPUTED] = 1
  if prefix[CACHE] > 0 and prefix[CACHE] == replica.cache then
    local alone = join_all(prefix[JOINED] + 1, #prefix[SEGMENTS], id, call, replica)
    elastic.uncount(call, replica)
    prefix[JOINED], prefix[OWN_BLOCKS] = #prefix[SEGMENTS], prefix[OWN_BLOCKS] + alone
    elastic.count(call, replica)
  end
  books.store_replica(replica)
  prefixes.renew()
end

-- Who waits may share what nobody could before.
function prefixes.renew()
  books.turns = books.turns + 1
  books.room = books.room + 1
  books.meta.dirty = 1
end

-- The number of a replica's cache, 0 = none: one that is distrusted is none.
function prefixes.set_cache(replica, cache)
  if cache == replica.distrusted then cache = 0 end
  if cache == replica.cache then return end
  replica.cache = cache
  holds.drop(replica)
  books.store_replica(replica)
  prefixes.renew()
end

-- What an owner is told of a call's place: its replica, and of a call that asks to share how many of its segments it
-- does, and the cache that they are in; then 1 where it is warm.
function prefixes.told(call)
  local prefix, is_warm = call.prefix, holds.is_warm(call)
  if call.replica == '' or (#prefix <= SIZE and not is_warm) then return call.replica end
  return {call.replica, prefixes.joined(call), prefix[CACHE] or 0, is_warm and 1 or nil}
end
