-- The library that a gateway loads into the store, and what it calls there.
--- @include "step"
--- @include "hello"
--- @include "configure"
--- @include "page"
--- @include "snapshot"

local function offer(name, module, flags)
  redis.register_function({function_name = LIBRARY .. '_' .. name, callback = module.run, flags = flags})
end

-- At its memory limit the store must still take what gives memory back.
offer('step', step, {'allow-oom'})
offer('hello', hello, {'allow-oom'})
offer('configure', configure, {'allow-oom'})
offer('page', page, {'allow-oom', 'no-writes'})
offer('snapshot', snapshot, {'allow-oom', 'no-writes'})
