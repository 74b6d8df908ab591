"""Planted faults of the Python around the ledger, and of the Lua where the state machine meets them by chance only:
file, text, what it becomes, and the tests that have to see it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TestedMutant:
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


TESTED_MUTANTS: dict[str, TestedMutant] = {
    "null block forgotten (limit)": TestedMutant(
        "gateway/upstream/engines.py",
        "math.floor((num_gpu_blocks - 1) * ",
        "math.floor(num_gpu_blocks * ",
        ("tests/unit/test_engines.py",),
    ),
    "null block forgotten (largest call)": TestedMutant(
        "gateway/upstream/engines.py",
        "usable = shape.num_gpu_blocks - 1",
        "usable = shape.num_gpu_blocks",
        ("tests/unit/test_engines.py",),
    ),
    "n ignored": TestedMutant(
        "gateway/core/blocks.py",
        "return per_prompt * sum(each)",
        "return sum(each)",
        ("tests/unit/test_blocks.py",),
    ),
    "one token too little per sequence": TestedMutant(
        "gateway/core/blocks.py",
        "max_model_len) - 1 + speculative_tokens",
        "max_model_len) - 2 + speculative_tokens",
        ("tests/unit/test_blocks.py",),
    ),
    "prefill part never ended (gateway)": TestedMutant(
        "gateway/flow.py",
        "        reservation.first_token()\n",
        "        pass\n",
        ("tests/flow/test_prefill.py",),
    ),
    "who leaves the queue leaves no place": TestedMutant(
        "gateway/ledger/reservation.py",
        "self._leaves = self._answer is None or not self._answer.done() or self._answer.cancelled()",
        "self._leaves = False",
        ("tests/flow/test_repetition.py",),
    ),
    "who waited in vain leaves a place": TestedMutant(
        "gateway/ledger/reservation.py",
        "self._leaves = self._answer is None or not self._answer.done() or self._answer.cancelled()",
        "self._leaves = True",
        ("tests/integration/test_ledger_places.py",),
    ),
    "an Idempotency-Key is not declared again (gateway)": TestedMutant(
        "gateway/ledger/reservation.py",
        "int(self.by_force), self._fingerprint(), a.once,",
        'int(self.by_force), "", "",',
        ("tests/integration/test_ledger_places.py",),
    ),
    "a retry too many is remembered as a full queue": TestedMutant(
        "gateway/ledger/valkey.py",
        'frozenset({"displaced", "place_only"})',
        'frozenset({"displaced"})',
        ("tests/integration/test_ledger_places.py",),
    ),
    "a long body is hashed on the loop": TestedMutant(
        "gateway/core/identity.py",
        "INLINE_BYTES_MAX = 512 * 1024",
        "INLINE_BYTES_MAX = 1 << 30",
        ("tests/flow/test_repetition.py",),
    ),
    "fingerprints run together": TestedMutant(
        "gateway/core/identity.py",
        'f"{caller}\\n{route}\\n"',
        'f"{caller}{route}"',
        ("tests/unit/test_identity.py",),
    ),
    "each retry costs the same": TestedMutant(
        "gateway/core/retries.py",
        "price = retry_count * SCALE",
        "price = SCALE",
        ("tests/unit/test_retries.py",),
    ),
    "a retry that was asked for is one too many": TestedMutant(
        "gateway/http/proxy.py",
        "self._retries.invite(visit.key.name, call.retry_count + 1, _now_ms())",
        "pass",
        ("tests/flow/test_repetition.py",),
    ),
    "retries are queued without bound": TestedMutant(
        "gateway/http/proxy.py",
        "call.place_only = not self._retries.take",
        "call.place_only = None is self._retries.take",
        ("tests/flow/test_repetition.py",),
    ),
    "held for the one behind who returns": TestedMutant(
        "lua/lib/queue.lua",
        "  if flow.waiting > 0 and books.holds > 0 then unhold_behind(id, call, name) end\n",
        "",
        ("tests/conformance/test_places.py",),
    ),
    "an emptied flow starts anew": TestedMutant(
        "lua/lib/queue.lua",
        "flow.tag = returns and flow.resume >= 0 and math.min(tag, flow.resume) or tag",
        "flow.tag = tag",
        ("tests/conformance/test_places.py",),
    ),
    "a flow from beyond the front is put into it": TestedMutant(
        "lua/lib/fronts.lua",
        "if not front or (front.last and member > front.last) then return end",
        "if not front then return end",
        ("tests/conformance/test_fronts.py",),
    ),
    "a front that grew short is not read again": TestedMutant(
        "lua/lib/fronts.lua",
        "if front and (#front.members >= count or not front.last)",
        "if front",
        ("tests/conformance/test_fronts.py",),
    ),
    "early refusals behind a closed gate": TestedMutant(
        "lua/lib/refusals.lua",
        "books.meta.opens_at > 0 or refusals.fits_now(judged)",
        "refusals.fits_now(judged)",
        ("tests/conformance/test_prediction.py",),
    ),
    "who came after a return goes before its turn": TestedMutant(
        "lua/lib/queue.lua",
        "  if flow.later < 0 then return end",
        "  if true then return end",
        ("tests/conformance/test_places.py",),
    ),
    "of those who return one goes before its turn": TestedMutant(
        "lua/lib/queue.lua",
        "  if tonumber(arrival) <= flow.returned then return end\n",
        "",
        ("tests/conformance/test_places.py",),
    ),
    "a parked flow's new head stays parked": TestedMutant(
        "lua/lib/places.lua",
        "  if flow.waiting > 0 then queue.unpark(call, name, flow) end\n  queue.join",
        "  queue.join",
        ("tests/conformance/test_places.py",),
    ),
    "who is parked for a part is not woken by a replica that is back": TestedMutant(
        "lua/lib/rests.lua",
        "    queue.recheck_parked()",
        "    books.work = books.work",
        ("tests/conformance/test_pool_share.py",),
    ),
    "a replica that is back forgets its drain": TestedMutant(
        "lua/lib/rests.lua",
        "  if is_resting(replica.name) then",
        "  if before ~= 'down' and is_resting(replica.name) then",
        ("tests/conformance/test_rests.py",),
    ),
    "a replica that drains stays held": TestedMutant(
        "lua/lib/rests.lua",
        "    replica.state, replica.held_for = 'draining', ''",
        "    replica.state = 'draining'",
        ("tests/conformance/test_rests.py",),
    ),
    "an owner's word outlasts its lease": TestedMutant(
        "lua/lib/owners.lua",
        "  rests.forget(owner)\n",
        "",
        ("tests/conformance/test_rests.py",),
    ),
    "one word takes back another's": TestedMutant(
        "lua/lib/rests.lua",
        "if rest[1] == name and rest[2] == teller then",
        "if rest[1] == name then",
        ("tests/conformance/test_rests.py",),
    ),
    "who waits for a replica that drains has no backend": TestedMutant(
        "lua/commands/admit.lua",
        "if not (placement.is_able(call, 'up') or placement.is_able(call, 'draining')) then",
        "if not placement.is_able(call, 'up') then",
        ("tests/conformance/test_rests.py",),
    ),
    "room is not measured again after a release": TestedMutant(
        "lua/lib/placement.lua",
        "if books.bounds_room ~= books.room then",
        "if false then",
        ("tests/conformance/test_fronts.py",),
    ),
    "appointments without bound": TestedMutant(
        "lua/lib/appointments.lua",
        "math.min(due, books.meta.clock + APPOINTMENT_MAX_MS)",
        "due",
        ("tests/conformance/test_prediction.py",),
    ),
    "a call that would wait in vain waits": TestedMutant(
        "lua/lib/refusals.lua",
        "if wait <= open_to(call, terms, wait_ms) or",
        "if true or",
        ("tests/conformance/test_prediction.py",),
    ),
    "who fits now is refused because of a predicted wait": TestedMutant(
        "lua/lib/refusals.lua",
        " or refusals.fits_now(judged) then",
        " then",
        ("tests/conformance/test_prediction.py",),
    ),
    "nothing is kept for who was asked to come back": TestedMutant(
        "lua/lib/refusals.lua",
        "return amount - math.floor(amount / KEPT_PART)",
        "return amount",
        ("tests/conformance/test_prediction.py",),
    ),
    "a tenth is kept although nobody was asked to come back": TestedMutant(
        "lua/lib/refusals.lua",
        " or not appointments.any(call.lane) then",
        " then",
        ("tests/conformance/test_prediction.py",),
    ),
    "a question displaces": TestedMutant(
        "lua/lib/refusals.lua",
        "if not refusal and not terms.smallest then",
        "if not refusal then",
        ("tests/conformance/test_prediction.py",),
    ),
    "a question is judged by what is likely": TestedMutant(
        "lua/lib/refusals.lua",
        "terms.smallest or call, terms.wait_ms",
        "call, terms.wait_ms",
        ("tests/conformance/test_prediction.py",),
    ),
    "a question about what fits is refused": TestedMutant(
        "lua/commands/ask.lua",
        "refusals.fits_now(smallest) or places",
        "places",
        ("tests/conformance/test_prediction.py",),
    ),
    "a long prompt is counted before the store is asked": TestedMutant(
        "gateway/flow.py",
        "if counting.suspended and ask else None",
        "if False else None",
        ("tests/flow/test_refusals.py",),
    ),
    "who comes early keeps an appointment": TestedMutant(
        "gateway/core/retries.py",
        "if not due or due[0] > now_ms:",
        "if not due:",
        ("tests/unit/test_retries.py",),
    ),
    "an appointment is kept again and again": TestedMutant(
        "gateway/core/retries.py",
        "        del due[0]\n        return True",
        "        return True",
        ("tests/unit/test_retries.py",),
    ),
    "who was asked to come back is refused with the others": TestedMutant(
        "gateway/flow.py",
        "        if call.asked_back:\n",
        "        if False:\n",
        ("tests/flow/test_repetition.py",),
    ),
    "who returns does not pay for what its key had meanwhile": TestedMutant(
        "lua/lib/flows.lua",
        "if flow.resume >= 0 then flow.resume = flow.resume + units end",
        "",
        ("tests/conformance/test_places.py",),
    ),
    "a call that moved is moved again by a late copy": TestedMutant(
        "lua/commands/move.lua",
        "if call.state ~= 'queued' and not placement.contains(exclude, call.replica) then",
        "if false then",
        ("tests/conformance/test_moves.py",),
    ),
    "a hold stays where its call may not go": TestedMutant(
        "lua/lib/order.lua",
        "  if placement.could_use(call, replica) then return false end\n  queue.unhold(id)",
        "  if true then return false end\n  queue.unhold(id)",
        ("tests/conformance/test_pool_share.py",),
    ),
    "a flow that was parked just now stays parked": TestedMutant(
        "lua/lib/queue.lua",
        "  books.parked = nil\n",
        "",
        ("tests/conformance/test_fronts.py",),
    ),
    "what comes back is not added up": TestedMutant(
        "lua/lib/forecast.lua",
        "(play.free[replica.name] or replica.limit - replica.used) + blocks",
        "replica.limit - replica.used + blocks",
        ("tests/conformance/test_prediction.py",),
    ),
    "an end of the past makes room": TestedMutant(
        "lua/lib/forecast.lua",
        "if due > now and due <= ends.reach",
        "if due <= ends.reach",
        ("tests/conformance/test_prediction.py",),
    ),
    "who told of its next ends only has told of all": TestedMutant(
        "lua/lib/forecast.lua",
        "    if #ends == 3 * FORECAST_ENDS then reach = math.min(reach, ends[#ends - 2]) end\n",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
    "ends go by owner": TestedMutant(
        "lua/lib/forecast.lua",
        "  table.sort(numbers)\n",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
    "who leaves in vain is waited for": TestedMutant(
        "lua/lib/forecast.lua",
        "  if due >= play.soonest then expire(call, due, play) end\n",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
    "who would leave is not foreseen to wait in vain": TestedMutant(
        "lua/lib/forecast.lua",
        "if flow.calls[i] ~= call and flow.calls[i].deadline",
        "if flow.calls[i].deadline",
        ("tests/conformance/test_prediction.py",),
    ),
    "what a flow is owed is not foreseen": TestedMutant(
        "lua/lib/forecast.lua",
        "flow.tag + flows.after_owed(flow, units)",
        "flow.tag + units",
        ("tests/conformance/test_prediction.py",),
    ),
    "a class's credit is not foreseen": TestedMutant(
        "lua/lib/forecast.lua",
        "    local first = favoured(lines)\n",
        "    local first = nil\n",
        ("tests/conformance/test_prediction.py",),
    ),
    "a held replica is foreseen for anybody": TestedMutant(
        "lua/lib/forecast.lua",
        " and (held_for == '' or held_for == id or play.gone[held_for])",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
    "a hold is foreseen for ever": TestedMutant(
        "lua/lib/forecast.lua",
        " or play.gone[held_for])",
        ")",
        ("tests/conformance/test_prediction.py",),
    ),
    "a parked flow is waited for": TestedMutant(
        "lua/lib/forecast.lua",
        "    if row.parked == 0 then\n      found",
        "    if true then\n      found",
        ("tests/conformance/test_prediction.py",),
    ),
    "many more ends are played than a script may": TestedMutant(
        "lua/lib/forecast.lua",
        "math.min(#ends.numbers, FORECAST_PLAYED)",
        "#ends.numbers",
        ("tests/conformance/test_prediction.py",),
    ),
    "a script plays as often as it is asked": TestedMutant(
        "lua/lib/forecast.lua",
        "  books.rehearsed = true\n",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
    "a fenced owner foresees": TestedMutant(
        "lua/lib/owners.lua",
        "  rows.erase(records.forecasts, owner)\n",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
    "a stream goes at the pace of others": TestedMutant(
        "gateway/core/forecast.py",
        "if course is None or course.events < PACED_EVENTS_MIN:",
        "if True:",
        ("tests/unit/test_forecast.py",),
    ),
    "all calls that vary end alike": TestedMutant(
        "gateway/core/forecast.py",
        "first + int(lot * (known - first))",
        "first",
        ("tests/unit/test_forecast.py",),
    ),
    "sequences are not foreseen": TestedMutant(
        "lua/lib/forecast.lua",
        " and call.sequences <= play.seats[replica.name]",
        "",
        ("tests/conformance/test_prediction.py",),
    ),
}
