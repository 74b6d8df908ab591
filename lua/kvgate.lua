-- The library that a gateway loads into the store, and what it calls there.
--- @include "step"
--- @include "hello"
--- @include "configure"
--- @include "page"
--- @include "snapshot"
--- @include "callers"
--- @include "factors"
--- @include "lengths"

local function offer(name, callback, flags)
  redis.register_function({function_name = LIBRARY .. '_' .. name, callback = callback, flags = flags})
end

-- At its memory limit the store must still take what gives memory back.
offer('step', step.run, {'allow-oom'})
offer('hello', hello.run, {'allow-oom'})
offer('configure', configure.run, {'allow-oom'})
offer('page', page.run, {'allow-oom', 'no-writes'})
offer('snapshot', snapshot.run, {'allow-oom', 'no-writes'})
offer('callers_follow', callers.follow, {'allow-oom', 'no-writes'})
offer('callers_change', callers.change, {'allow-oom'})
offer('callers_restore', callers.restore, {'allow-oom'})
offer('callers_cut', callers.cut, {'allow-oom'})
offer('factors_share', factors.share, {}) -- these two take memory, and nobody waits for them
offer('lengths_share', lengths.share, {})
