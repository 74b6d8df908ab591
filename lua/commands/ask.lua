--- @include "lib/dispatch"
--- @include "lib/check"
--- @include "lib/refusals"
--- @include "lib/places"
--- @include "lib/holds"
-- Q least likely key class lane sequences cost wait_ms weight blocks_max requests_max pool_share queue_max
-- queue_key_max standing ahead own_ahead held base path promised prefix past: whether the queue would refuse a call of
-- `least` blocks or more, how many is not known yet.
-- `likely` is what a refusal books, and what is compared with others' work.  `ahead` calls of its line, `own_ahead` of
-- them of its key, were told `open` before and do not wait yet.  held, base, path: of a call of `least` blocks.  prefix:
-- {block size} where it may come to share, or {}.  past: as in A.  Nothing is taken.
-- open | refused code knob measured limit retry_ms

function ask.check(op)
  check.length(op, 24, 23)
  check.integers(op, 2, 3, 1) -- least, likely
  check.names(op, 4, 6)
  check.integers(op, 7, 7, 1) -- sequences
  check.integers(op, 8, 9, 0) -- cost, wait_ms
  check.integers(op, 10, 10, 1) -- weight
  check.integers(op, 11, 13, -1) -- caps
  check.integers(op, 14, 18, 0) -- queue_max, queue_key_max, standing, ahead, own_ahead
  check.path(op, 19)
  check.flag(op, 22) -- promised
  check.block_size(op, 23)
  if op[24] then check.hashes(op, 24, 24) end -- past
end

function ask.run(_, least, likely, key, class, lane, sequences, cost, wait_ms, weight, blocks_max, requests_max,
                 pool_share, queue_max, queue_key_max, standing, ahead, own_ahead, held, base, path, promised, prefix,
                 past)
  if not books.config.pools[lane] or not books.config.shares[class] or books.meta.opens_at > 0 then return {'open'} end
  if books.meta.shut then return refusals.shut() end
  past = past or ''
  local function of_size(blocks)
    local call = {key = key, class = class, lane = lane, blocks = blocks, sequences = sequences, prefill = 0,
      cost = cost, prefer = {}, exclude = {}, promised = promised, prefix = prefix, past = past,
      yields_until = holds.yields(past)}
    elastic.want(call, held, base, path)
    return call
  end
  local smallest = of_size(least)
  flows.set_policy(key, weight, blocks_max, requests_max, pool_share)
  dispatch.run()
  if refusals.fits_now(smallest) or places.any(flows.name_of(smallest)) then return {'open'} end
  local call = queue_max > 0 and of_size(math.max(least, likely)) or smallest
  return refusals.to_queue(call, {queue_max = queue_max, queue_key_max = queue_key_max, wait_ms = wait_ms,
    returns = false, standing = standing, smallest = smallest, ahead = ahead, own_ahead = own_ahead}) or {'open'}
end
