#!lua flags=allow-oom
-- One batch of one owner: the only script of the hot path.  All of an op happens or, when it is malformed, nothing.
-- ARGV: now (ms, '' = the server's TIME), owner, batch number, prefix of the wake channels, then the ops, each a
--   cmsgpack array of its letter and its arguments
-- Reply: {'ok', epoch, clock, policy, more, results, outbox}; results: cmsgpack of an array for each op, since a reply
--     of arrays costs the store, and whoever reads it, more than carrying the ops out
--      | {'epoch', epoch, clock, policy}: the store was restarted, re-declare, then send the same batch again
--      | {'fenced'} no such session | {'stale'} a later batch was executed | {'unconfigured'}
--- @late "commands/admit"
--- @late "commands/claim"
--- @late "commands/first_token"
--- @late "commands/resize"
--- @late "commands/move"
--- @late "commands/settle"
--- @late "commands/redeclare"
--- @late "commands/heartbeat"
--- @late "commands/declared"
--- @include "lib/dispatch"
--- @include "lib/owners"
local NOW, OWNER, BATCH, WAKE = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local FIRST_OP, VALUES_MAX = 5, 32

local COMMANDS = {
  A = admit,
  K = claim,
  F = first_token,
  Z = resize,
  M = move,
  S = settle,
  R = redeclare,
  H = heartbeat,
  Y = declared,
}

local function all_but_first(_, ...)
  return {...}
end

-- The bytes of an array's header: 1, or 3 from 16 values on (msgpack's format).
local function header_of(packed)
  local mark = string.byte(packed)
  if mark == 220 then return 3 end
  if mark < 144 or mark > 159 then error('an op is an array', 0) end
  return 1
end

-- The values of an op, at most so many.
local function values_of(packed, limit)
  return all_but_first(cmsgpack.unpack_limit(packed, limit, header_of(packed)))
end

-- Each op's values, or the error of reading it.
local function read_ops()
  local ops = {}
  for i = FIRST_OP, #ARGV do
    local ok, op = pcall(values_of, ARGV[i], VALUES_MAX)
    ops[#ops + 1] = ok and op or {failure = op}
  end
  return ops
end

-- In one go the records of all calls that the ops name.
local function prefetch(ops)
  local ids = {}
  for i = 1, #ops do
    local id = ops[i][2]
    if type(id) == 'string' then ids[#ids + 1] = id end
  end
  if #ids > 0 then rows.prefetch(records.calls, ids) end
end

local function execute(op)
  if op.failure then error(op.failure, 0) end
  local command = books.need(COMMANDS[op[1]] or error('unknown op', 0))
  command.check(op)
  return command.run(OWNER, unpack(op, 2))
end

local function error_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

local function execute_all()
  local ops, results = read_ops(), {}
  prefetch(ops)
  for i = 1, #ops do
    local ok, result = pcall(execute, ops[i])
    results[i] = ok and result or {'error', error_text(result)}
  end
  return results
end

local config = books.read_meta()
if not config then return {'unconfigured'} end
books.open(config, NOW)

local meta, session = books.meta, rows.fetch(records.sessions, OWNER)
if not session or BATCH < session.batch then
  books.write(WAKE)
  return {session and 'stale' or 'fenced'}
end
owners.renew_lease(OWNER)
rows.store(records.sessions, OWNER, session)
if session.told ~= meta.epoch then
  session.told = meta.epoch
  books.write(WAKE)
  return {'epoch', meta.epoch, meta.clock, meta.policy}
end
books.replayed = BATCH == session.batch
session.batch = BATCH

local more = owners.reap()
more = owners.expire() or more
owners.open_gate()
local results = execute_all()
dispatch.run()
books.write(WAKE)
if meta.dirty > 0 and meta.opens_at == 0 then more = true end -- behind a closed gate nothing can be done yet
return {'ok', meta.epoch, meta.clock, meta.policy, more and 1 or 0, cmsgpack.pack(results), owners.outbox(OWNER)}
