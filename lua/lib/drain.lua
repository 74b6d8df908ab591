--- @include "lib/books"
-- How fast a pool gives blocks back.
local DRAIN_WINDOW_MS, DRAIN_SETTLING_MS, FIRST_APPOINTMENT_MS = 10000, 1000, 1000
drain.WINDOW_MS = DRAIN_WINDOW_MS
drain.FIRST_APPOINTMENT_MS = FIRST_APPOINTMENT_MS -- where nothing was given back yet

-- Blocks given back per window, now: a sliding window of two halves.
function drain.now(row)
  local age = books.meta.clock - row.start
  if age >= 2 * DRAIN_WINDOW_MS then return 0 end
  if age >= DRAIN_WINDOW_MS then
    return math.floor(row.current * (2 * DRAIN_WINDOW_MS - age) / DRAIN_WINDOW_MS)
  end
  if row.previous < 0 then
    return math.floor(row.current * DRAIN_WINDOW_MS / math.max(age, DRAIN_SETTLING_MS))
  end
  return row.current + math.floor(row.previous * (DRAIN_WINDOW_MS - age) / DRAIN_WINDOW_MS)
end

-- Blocks were given back.
function drain.add(pool, blocks)
  local row = rows.fetch(records.drains, pool) or {start = books.meta.clock, current = 0, previous = -1, last = 0}
  local age = books.meta.clock - row.start
  if age >= DRAIN_WINDOW_MS then
    local adjacent = age < 2 * DRAIN_WINDOW_MS
    row.previous = adjacent and row.current or -1
    row.start = adjacent and row.start + DRAIN_WINDOW_MS or books.meta.clock
    row.current = 0
  end
  row.current = row.current + blocks
  row.last = drain.now(row)
  rows.store(records.drains, pool, row)
end
