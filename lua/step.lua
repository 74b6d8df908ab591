-- One batch of one owner: the only script of the hot path.  All of an op happens or, when it is malformed, nothing.
-- args: now (ms, '' = the server's TIME), owner, batch number, prefix of the wake channels, then the ops, each a
--   cmsgpack array of its letter and its arguments
-- Reply: {'ok', epoch, clock, policy, more, results, outbox}; results: cmsgpack of an array for each op, since a reply
--     of arrays costs the store, and whoever reads it, more than carrying the ops out
--      | {'epoch', epoch, clock, policy}: the store was restarted, re-declare, then send the same batch again
--      | {'fenced'} no such session | {'stale'} a later batch was executed | {'unconfigured'}
--- @include "commands/admit"
--- @include "commands/ask"
--- @include "commands/claim"
--- @include "commands/first_token"
--- @include "commands/resize"
--- @include "commands/move"
--- @include "commands/settle"
--- @include "commands/redeclare"
--- @include "commands/heartbeat"
--- @include "commands/declared"
--- @include "lib/dispatch"
--- @include "lib/owners"
--- @include "lib/flows"
local FIRST_OP, VALUES_MAX = 5, 32

local COMMANDS = {
  A = admit,
  Q = ask,
  K = claim,
  F = first_token,
  Z = resize,
  M = move,
  S = settle,
  R = redeclare,
  H = heartbeat,
  Y = declared,
}

local GIVES_BACK = {M = true, S = true}

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
local function read_ops(args)
  local ops = {}
  for i = FIRST_OP, #args do
    local ok, op = pcall(values_of, args[i], VALUES_MAX)
    ops[#ops + 1] = ok and op or {failure = op}
  end
  return ops
end

-- In one go the records of all calls that the ops name, and of the keys and flows that these give back to.
local function prefetch(ops)
  local ids, keys, names = {}, {}, {}
  for i = 1, #ops do
    local id = ops[i][2]
    if type(id) == 'string' then ids[#ids + 1] = id end
  end
  rows.prefetch(records.calls, ids)
  for i = 1, #ops do
    local call = GIVES_BACK[ops[i][1]] and records.calls.known[ops[i][2]]
    if call then
      keys[#keys + 1] = call.key
      names[#names + 1] = flows.name_of(call)
    end
  end
  rows.prefetch(records.keys, keys)
  rows.prefetch(records.flows, names)
end

local function execute(owner, op)
  if op.failure then error(op.failure, 0) end
  local command = COMMANDS[op[1]] or error('unknown op', 0)
  command.check(op)
  return command.run(owner, unpack(op, 2))
end

local function error_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

local function execute_all(owner, args)
  local ops, results = read_ops(args), {}
  prefetch(ops)
  for i = 1, #ops do
    local ok, result = pcall(execute, owner, ops[i])
    results[i] = ok and result or {'error', error_text(result)}
  end
  return results
end

-- The owner's session, or the reply to a batch that is not carried out.
local function begin_batch(owner, batch)
  local meta, session = books.meta, rows.fetch(records.sessions, owner)
  if not session or batch < session.batch then return nil, {session and 'stale' or 'fenced'} end
  owners.renew_lease(owner)
  rows.store(records.sessions, owner, session)
  if session.told ~= meta.epoch then
    session.told = meta.epoch
    return nil, {'epoch', meta.epoch, meta.clock, meta.policy}
  end
  books.replayed = batch == session.batch
  session.batch = batch
  return session, nil
end

function step.run(keys, args)
  local now, owner, batch, wake = args[1], args[2], tonumber(args[3]), args[4]
  books.begin(keys)
  local config = books.read_meta()
  if not config then return {'unconfigured'} end
  books.open(config, now)
  local meta = books.meta
  local session, reply = begin_batch(owner, batch)
  if not session then
    books.write(wake)
    return reply
  end
  local more = owners.reap()
  more = owners.expire() or more
  owners.open_gate()
  local results = execute_all(owner, args)
  dispatch.run()
  books.write(wake)
  if meta.dirty > 0 and meta.opens_at == 0 then more = true end -- behind a closed gate nothing can be done yet
  return {'ok', meta.epoch, meta.clock, meta.policy, more and 1 or 0, cmsgpack.pack(results), owners.outbox(owner)}
end
