--- @include "lib/books"
-- Rate quotas of a key: buckets that refill evenly.  A bucket is the instant at which it is full again; what is taken of
-- one, and what one holds, are microseconds of its refilling, so that a limit may change while it is in use.
local QUOTA_BUCKETS = 6

-- The store's time as it passed while it did not go backwards.
local function now()
  return (books.meta.clock + books.meta.skipped) * 1000
end

-- Microseconds until the bucket is full.
local function missing(key, bucket)
  return math.max((key.quotas[bucket + 1] or 0) - now(), 0)
end

-- charge: of each quota its bucket, what the call takes of it, and what it holds when it is full.  Of several that it
-- does not fit, the refusal names the one that it takes longest to wait for, and what is left of it, which is negative
-- where calls used more than they were charged; nil = it fits.
function quotas.refuse(name, charge)
  local key, longest, refusal = rows.fetch(records.keys, name), 0, nil
  for i = 1, #charge, 3 do
    local left = charge[i + 2] - missing(key, charge[i])
    if charge[i + 1] - left > longest then
      longest = charge[i + 1] - left
      refusal = {'refused', 'quota_exceeded', 'quota', charge[i], left, books.ceil_div(longest, 1000)}
    end
  end
  return refusal
end

-- costs: bucket, microseconds...; what is negative is given back.
function quotas.change(name, costs)
  if #costs == 0 then return end
  local key, changed = rows.fetch(records.keys, name), {}
  for bucket = 1, QUOTA_BUCKETS do changed[bucket] = key.quotas[bucket] or 0 end
  for i = 1, #costs, 2 do
    local bucket = costs[i] + 1
    changed[bucket] = math.max(changed[bucket], now()) + costs[i + 1]
  end
  key.quotas = changed
  rows.store(records.keys, name, key)
end

-- Adds to the answer what is missing in each bucket afterwards.
function quotas.pay(call, charge, answer)
  local costs = {}
  for i = 1, #charge, 3 do
    costs[#costs + 1] = charge[i]
    costs[#costs + 1] = charge[i + 1]
  end
  quotas.change(call.key, costs)
  call.charge = costs
  local key = rows.fetch(records.keys, call.key)
  for i = 1, #charge, 3 do answer[#answer + 1] = missing(key, charge[i]) end
  return answer
end

function quotas.refund(call)
  local costs = {}
  for i, item in ipairs(call.charge) do costs[i] = i % 2 == 0 and -item or item end
  quotas.change(call.key, costs)
end
