--- @include "lib/books"
--- @include "lib/order"
--- @include "lib/queue"
-- Doing it again at once changes nothing, so it is skipped while nothing changed.
function dispatch.run()
  if books.meta.dirty == 0 or books.meta.opens_at > 0 then return end
  queue.recheck_slice()
  books.meta.dirty = books.meta.recheck == '' and 0 or 1
  if books.waiting > 0 then order.run() end
end
