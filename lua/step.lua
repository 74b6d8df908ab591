#!lua flags=allow-oom
-- One batch of one owner: the only script of the hot path.  All of an op happens or, when it is malformed, nothing.
-- ARGV: now (ms, '' = the server's TIME), owner, batch number, prefix of the wake channels, then one cmsgpack array an op.
-- Reply: {'ok', epoch, clock, policy, more, results, outbox}
--      | {'epoch', epoch, clock, policy}: the store was restarted, re-declare, then send the same batch again
--      | {'fenced'} no such session | {'stale'} a later batch was executed | {'unconfigured'}
--- @include "commands/admit"
--- @include "commands/claim"
--- @include "commands/first_token"
--- @include "commands/resize"
--- @include "commands/move"
--- @include "commands/settle"
--- @include "commands/redeclare"
--- @include "commands/heartbeat"
--- @include "commands/declared"
--- @include "lib/check"
local NOW, OWNER, BATCH, WAKE = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local FIRST_OP = 5

local COMMANDS = {
  A = {command_admit, 'id name name name blocks count size size size count cap cap size names names numbers'},
  K = {command_claim, 'id'},
  F = {command_first_token, 'id'},
  Z = {command_resize, 'id blocks'},
  M = {command_move, 'id names'},
  S = {command_settle, 'id cap cap'},
  R = {command_redeclare, 'id name name name name blocks count size size count cap cap size'},
  H = {command_heartbeat, 'size size'},
  Y = {command_declared, ''},
}

local function execute(packed)
  local op = cmsgpack.unpack(packed)
  local command = COMMANDS[table.remove(op, 1)]
  if not command then error('unknown op', 0) end
  check_arguments(op, command[2])
  return command[1](OWNER, unpack(op))
end

local packed_config = read_meta()
if not packed_config then return {'unconfigured'} end
config = read_config(packed_config)
open_books(time_of(NOW))

local function answer(reply)
  write_books(WAKE)
  return reply
end

local function error_text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

local session = fetch(sessions, OWNER)
if not session then return answer({'fenced'}) end
if BATCH < session.batch then return answer({'stale'}) end
renew_lease(OWNER)
if session.told ~= meta.epoch then
  session.told = meta.epoch
  store(sessions, OWNER, session)
  return answer({'epoch', meta.epoch, meta.clock, meta.policy})
end
replayed = BATCH == session.batch
session.batch = BATCH
store(sessions, OWNER, session)

local more = reap()
more = expire() or more
open_gate()
local results = {}
for i = FIRST_OP, #ARGV do
  local ok, result = pcall(execute, ARGV[i])
  results[#results + 1] = ok and result or {'error', error_text(result)}
end
close_books(WAKE)
if meta.dirty > 0 and meta.opens_at == 0 then more = true end -- behind a closed gate nothing can be done yet
return {'ok', meta.epoch, meta.clock, meta.policy, more and 1 or 0, results, outbox_of(OWNER)}
