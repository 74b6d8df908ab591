-- Where the records of each kind are, and their fields in the order of the cmsgpack arrays that hold them.
-- header: the mark of an array of that size (msgpack's format); what follows is packed and unpacked field by field,
-- which costs half of what a table in between does.  blank: the row of an id without a record.
-- key: number of the key that has them (docs/ledger.md).

local kinds = {
  replicas = {
    key = 2, header = '\220\0\24',
    read = function(_, pool, limit, usable, sequences_usable, sequences_max, prefill_max, used, sequences, prefill,
      state, held_for, mode, full, assured, elastic, base, sums, shared, cache, distrusted,
      soft, holds, soft_end, history)
      return {pool = pool, limit = limit, usable = usable, sequences_usable = sequences_usable,
        sequences_max = sequences_max, prefill_max = prefill_max, used = used, sequences = sequences,
        prefill = prefill, state = state, held_for = held_for, mode = mode, full = full, assured = assured,
        elastic = elastic, base = base, sums = sums, shared = shared, cache = cache, distrusted = distrusted,
        soft = soft, holds = holds, soft_end = soft_end, history = history}
    end,
    write = function(row)
      return row.pool, row.limit, row.usable, row.sequences_usable, row.sequences_max, row.prefill_max, row.used,
        row.sequences, row.prefill, row.state, row.held_for, row.mode, row.full, row.assured, row.elastic,
        row.base, row.sums, row.shared, row.cache, row.distrusted, row.soft, row.holds, row.soft_end, row.history
    end,
  },
  calls = {
    key = 3, header = '\220\0\31',
    read = function(_, state, owner, replica, pool, key, class, lane, blocks, sequences, prefill, prefilling, cost,
      deadline, arrival, passed, attempt, charged, exclude, prefer, charge, once, fingerprint,
      held, asked, base, path, elastic, promised, prefix, past, yields_until)
      return {state = state, owner = owner, replica = replica, pool = pool, key = key, class = class, lane = lane,
        blocks = blocks, sequences = sequences, prefill = prefill, prefilling = prefilling, cost = cost,
        deadline = deadline, arrival = arrival, passed = passed, attempt = attempt, charged = charged,
        exclude = exclude, prefer = prefer, charge = charge, once = once, fingerprint = fingerprint,
        held = held, asked = asked, base = base, path = path, elastic = elastic, promised = promised,
        prefix = prefix, past = past, yields_until = yields_until}
    end,
    write = function(row)
      return row.state, row.owner, row.replica, row.pool, row.key, row.class, row.lane, row.blocks,
        row.sequences, row.prefill, row.prefilling, row.cost, row.deadline, row.arrival, row.passed, row.attempt,
        row.charged, row.exclude, row.prefer, row.charge, row.once, row.fingerprint, row.held, row.asked,
        row.base, row.path, row.elastic, row.promised, row.prefix, row.past, row.yields_until
    end,
  },
  flows = {
    key = 6, header = '\154', blank = {0, 0, 0, 0, 0, 0, -1, -1, 0, 0},
    read = function(_, tag, waiting, blocks, weight, parked, owed, resume, later, returned, warm)
      return {tag = tag, waiting = waiting, blocks = blocks, weight = weight, parked = parked, owed = owed,
        resume = resume, later = later, returned = returned, warm = warm}
    end,
    write = function(row)
      return row.tag, row.waiting, row.blocks, row.weight, row.parked, row.owed, row.resume, row.later, row.returned,
        row.warm
    end,
  },
  keys = {
    key = 7, header = '\152', blank = {1, -1, -1, -1, 0, 0, {}, {}},
    read = function(_, weight, blocks_max, requests_max, pool_share, blocks, calls, quotas, pools)
      return {weight = weight, blocks_max = blocks_max, requests_max = requests_max, pool_share = pool_share,
        blocks = blocks, calls = calls, quotas = quotas, pools = pools}
    end,
    write = function(row)
      return row.weight, row.blocks_max, row.requests_max, row.pool_share, row.blocks, row.calls, row.quotas,
        row.pools
    end,
  },
  sessions = {
    key = 10, header = '\149',
    read = function(_, batch, told, declared, count, sum)
      return {batch = batch, told = told, declared = declared, count = count, sum = sum}
    end,
    write = function(row)
      return row.batch, row.told, row.declared, row.count, row.sum
    end,
  },
  forecasts = { -- of an owner: due, replica, blocks of the next ends of its calls, in order
    key = 15, header = '\145',
    read = function(_, ends)
      return {ends = ends}
    end,
    write = function(row)
      return row.ends
    end,
  },
  once = {
    key = 19, header = '\145',
    read = function(_, id)
      return {id = id}
    end,
    write = function(row)
      return row.id
    end,
  },
  nodes = { -- of a segment on all replicas: name of the replica, number of its cache, blocks, holders, newcomers...
    key = 14, header = '\145',
    read = function(_, nodes)
      return {nodes = nodes}
    end,
    write = function(row)
      return row.nodes
    end,
  },
  holds = { -- of a conversation that was answered a moment ago: where, its blocks, and when its hold ends
    key = 20, header = '\147',
    read = function(_, replica, blocks, due)
      return {replica = replica, blocks = blocks, due = due}
    end,
    write = function(row)
      return row.replica, row.blocks, row.due
    end,
  },
  lines = { -- one class of one lane
    key = 1, prefix = 'line:', header = '\150', blank = {0, 0, 0, 0, 0, 0},
    read = function(_, virtual, waiting, blocks, weights, credit, warm)
      return {virtual = virtual, waiting = waiting, blocks = blocks, weights = weights, credit = credit,
        warm = warm}
    end,
    write = function(row)
      return row.virtual, row.waiting, row.blocks, row.weights, row.credit, row.warm
    end,
  },
  lanes = {
    key = 1, prefix = 'lane:', header = '\147', blank = {'', 0, -1},
    read = function(_, blocked, book, since)
      return {blocked = blocked, book = book, since = since}
    end,
    write = function(row)
      return row.blocked, row.book, row.since
    end,
  },
  capacities = { -- of a replica: what is configured, what its engine has taught (-1 = nothing), and who reads it
    key = 1, prefix = 'capacity:', header = '\154',
    read = function(_, limit, sequences_max, prefill_max, limit_learned, sequences_learned, prefill_learned, scraper,
      lease_end, number, told)
      return {limit = limit, sequences_max = sequences_max, prefill_max = prefill_max,
        limit_learned = limit_learned, sequences_learned = sequences_learned, prefill_learned = prefill_learned,
        scraper = scraper, lease_end = lease_end, number = number, told = told}
    end,
    write = function(row)
      return row.limit, row.sequences_max, row.prefill_max, row.limit_learned, row.sequences_learned,
        row.prefill_learned, row.scraper, row.lease_end, row.number, row.told
    end,
  },
  drains = {
    key = 1, prefix = 'drain:', header = '\148',
    read = function(_, start, current, previous, last)
      return {start = start, current = current, previous = previous, last = last}
    end,
    write = function(row)
      return row.start, row.current, row.previous, row.last
    end,
  },
}

-- Nothing is known yet of the fleet whose keys these are.  known and touched are for rows.lua.
function records.open(keys)
  for kind, set in pairs(kinds) do
    set.hash, set.known, set.touched = keys[set.key], {}, {}
    records[kind] = set
  end
end
