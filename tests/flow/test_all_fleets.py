"""What a caller is told whose key has limits over all fleets, and what its fleet is asked then."""

import asyncio
import re
import time
from typing import Any

import pytest

from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome
from gateway.core.quota import ALL_FLEETS_LIMITS, AllFleets, Quota
from gateway.http.auth import Key
from gateway.ledger.api import Reservation
from gateway.ledger.valkey import ValkeyLedger
from gateway.mock.engine import EngineConfig
from gateway.mock.faults import Fault, Kind
from tests.flow.driver import Visitor
from tests.flow.engines import mock_engine
from tests.flow.world import World, chat, gateway, soon, soon_true

NOWHERE = "http://127.0.0.1:9"
"""No call there gets as far as its engine."""
REQUESTS_PER_MINUTE, OUTPUT_PER_DAY = 0, 5
"""Buckets."""


def over_all(bucket: int, limit: int) -> Quota:
    return Quota(bucket, limit, limit, ALL_FLEETS_LIMITS)


def key_of(requests_max: int | None, *quotas: Quota, **own: Any) -> Key:
    return Key("limited", "normal", all_fleets=AllFleets(requests_max, quotas), **own)


def message(refused: Visitor) -> str:
    return str(refused.json["error"]["message"])


async def waits_for_limit(world: World) -> None:
    async def one() -> bool:
        return bool((await world.limits.state())["queue"] == 1)

    await soon_true(one, "a call waits for its key's limit")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the books in which a reservation was opened, in this order."""
    found: list[str] = []
    own = ValkeyLedger.open

    def noted(ledger: ValkeyLedger, *arguments: Any) -> Reservation:
        found.append("limits" if ledger.fleet.endswith("limits") else "fleet")
        return own(ledger, *arguments)

    monkeypatch.setattr(ValkeyLedger, "open", noted)
    return found


async def test_a_quota_over_all_fleets_is_named_and_nobody_else_is_asked(
    store_url: str, asked: list[str]
) -> None:
    key = key_of(None, over_all(REQUESTS_PER_MINUTE, 1))
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=key) as world,
    ):
        first = await world.visit(chat())
        assert (first.status, asked) == (200, ["limits", "fleet"])
        assert first.header("x-ratelimit-limit-requests") == "1"
        assert first.header("x-ratelimit-remaining-requests") == "0"
        assert first.header("x-kvgate-queue-ms") == "0"
        second = await world.visit(chat())
        assert (second.status, second.json["error"]["code"]) == (429, "quota_exceeded")
        assert "the key's limits.all_fleets.requests_per_minute, which is 1" in message(second)
        assert int(second.header("retry-after") or 0) > 50
        assert second.header("x-ratelimit-remaining-requests") == "0"
        assert asked == ["limits", "fleet", "limits"]
        third = await world.visit(chat())
        assert third.header("x-kvgate-refused-by") == "cache"
        assert len(asked) == 3
        await world.quiet()


async def test_a_key_without_such_limits_asks_its_fleet_alone(store_url: str, asked: list[str]) -> None:
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=Key("free", "normal")) as world,
    ):
        assert (await world.visit(chat())).status == 200
        assert asked == ["fleet"]
        assert not world.limits.opened, "nothing was said to the store"
        await world.quiet()


async def test_headers_tell_of_the_tightest_quota_of_both(store_url: str) -> None:
    quotas = (Quota(REQUESTS_PER_MINUTE, 10, 10), over_all(OUTPUT_PER_DAY, 1000))
    for over_all_limit, told in ((5, "5"), (500, "10")):
        key = key_of(None, over_all(REQUESTS_PER_MINUTE, over_all_limit), quotas[1], quotas=quotas[:1])
        async with (
            mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
            gateway(store_url, {"a": mock.url}, key=key) as world,
        ):
            answer = await world.visit(chat())
            assert answer.status == 200
            assert answer.header("x-ratelimit-limit-requests") == told
            assert answer.header("x-ratelimit-limit-tokens") == "1000"
            assert answer.header("x-ratelimit-remaining-tokens") == "992", "charged with the estimate"
            await world.quiet()


async def test_who_is_refused_by_its_fleet_has_taken_nothing_of_any_quota(store_url: str) -> None:
    key = key_of(1, over_all(REQUESTS_PER_MINUTE, 1), over_all(OUTPUT_PER_DAY, 8))
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=key, queue_max=0) as world,
    ):
        release = await world.hold(1000)
        refused = await world.visit(chat())
        assert (refused.status, refused.json["error"]["code"]) == (429, "capacity_exceeded")
        await soon(lambda: not world.limits.inflight, "its place was given back")
        release()
        await soon(lambda: not world.ledger.inflight, "there is room")
        assert (await world.visit(chat())).status == 200
        await world.quiet()


async def test_a_failed_engine_costs_nothing_and_usage_corrects_both(store_url: str) -> None:
    key = key_of(None, over_all(OUTPUT_PER_DAY, 100), quotas=(Quota(OUTPUT_PER_DAY, 100, 100),))
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=key) as world,
    ):
        mock.app.faults.add(Fault(Kind.RESET_BEFORE_HEADERS), 1)
        assert (await world.visit(chat(max_tokens=90))).status == 502
        await soon(lambda: not world.ledger.inflight and not world.limits.inflight, "it was given back")
        body = chat(max_tokens=90, mock={"output_tokens": 10})
        for remaining in ("10", "0"):  # 90 are charged, 10 are used
            answer = await world.visit(body)
            assert (answer.status, answer.header("x-ratelimit-remaining-tokens")) == (200, remaining)
            await soon(lambda: not world.ledger.inflight and not world.limits.inflight, "it was corrected")
        refused = await world.visit(body)
        assert refused.status == 429
        assert "of the key's limits.all_fleets.output_tokens_per_day, which is" in message(refused)
        assert "; 80 left now" in message(refused)
        await world.quiet()


async def test_more_than_a_full_bucket_over_all_fleets_holds_never_fits(
    store_url: str, asked: list[str]
) -> None:
    async with gateway(store_url, {"a": NOWHERE}, key=key_of(None, over_all(OUTPUT_PER_DAY, 5))) as world:
        refused = await world.visit(chat())
        assert (refused.status, refused.json["error"]["code"]) == (400, "key_cap_exceeded")
        assert "limits.all_fleets.output_tokens_per_day gives at most 5 at once" in message(refused)
        assert not asked
        await world.quiet()


async def test_a_key_of_no_calls_at_all_is_refused_unread(store_url: str, asked: list[str]) -> None:
    async with gateway(store_url, {"a": NOWHERE}, key=key_of(0)) as world:
        refused = await world.visit(b"no json")
        assert (refused.status, refused.json["error"]["code"]) == (429, "quota_exceeded")
        assert "limits.all_fleets.requests_max is 0" in message(refused)
        assert not asked
        await world.quiet()


async def test_a_call_waits_for_its_limit_before_it_asks_its_fleet(store_url: str, asked: list[str]) -> None:
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=key_of(1)) as world,
    ):
        release = await world.hold_limit("limited")
        asked.clear()
        visiting = asyncio.create_task(world.visit(chat()))
        await waits_for_limit(world)
        assert asked == ["limits"], "it takes no place in its fleet's queue"
        await asyncio.sleep(0.02)
        release()
        answer = await visiting
        assert (answer.status, asked) == (200, ["limits", "fleet"])
        assert int(answer.header("x-kvgate-queue-ms") or 0) >= 20
        assert answer.header("x-kvgate-queue-position") is None, "it never stood in its fleet's queue"
        assert world.only_end().outcome is Outcome.COMPLETED
        await world.quiet()


async def test_who_waited_for_its_limit_may_wait_that_much_less_for_its_fleet(store_url: str) -> None:
    passed = [0.0]

    def now() -> float:
        return time.monotonic() + passed[0]

    async with gateway(store_url, {"a": NOWHERE}, key=key_of(1), wait_ms=20_000, now=now) as world:
        release, release_limit = await world.hold(1000), await world.hold_limit("limited")
        visiting = asyncio.create_task(world.visit(chat()))
        await waits_for_limit(world)
        passed[0] = 15.0
        release_limit()
        await world.queued(1)
        ticket = next(ask for ask in world.ledger._asks.values() if ask.admission.key == "limited")
        assert ticket._wait_left_ms() <= 5_000
        passed[0] = 20.0
        ticket._waited_out()  # as its timer does, which goes by another clock
        refused = await visiting
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_timeout")
        told = re.match(r"waited (\d+) ms .* is 20000 ms", message(refused))
        assert told, message(refused)
        assert int(told[1]) >= 19_999, "in all"
        assert world.only_end().refusal_ms is None, "it was not refused at once"
        release()
        await world.quiet()


async def test_who_waited_for_its_limit_was_not_refused_at_once(store_url: str) -> None:
    """So it says nothing of how fast refusals are."""
    key = key_of(1, quotas=(Quota(REQUESTS_PER_MINUTE, 1, 1),))
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=key) as world,
    ):
        assert (await world.visit(chat())).status == 200
        world.facts.clear()
        release = await world.hold_limit("limited")
        visiting = asyncio.create_task(world.visit(chat()))
        await waits_for_limit(world)
        release()
        assert message(await visiting).endswith("limits.requests_per_minute, which is 1; 0 left now")
        end = world.only_end()
        assert (end.reason, end.refusal_ms) == (Code.QUOTA_EXCEEDED, None)
        await world.quiet()


async def test_waiting_for_a_limit_in_vain_is_a_queue_timeout(store_url: str, asked: list[str]) -> None:
    async with gateway(store_url, {"a": NOWHERE}, key=key_of(1), wait_ms=50) as world:
        release = await world.hold_limit("limited")
        asked.clear()
        refused = await world.visit(chat())
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_timeout")
        assert asked == ["limits"]
        release()
        await world.quiet()


async def test_with_the_queue_off_a_key_at_its_limit_is_refused_by_name(
    store_url: str, asked: list[str]
) -> None:
    async with gateway(store_url, {"a": NOWHERE}, key=key_of(1), queue_max=0) as world:
        release = await world.hold_limit("limited")
        asked.clear()
        refused = await world.visit(chat())
        assert (refused.status, refused.json["error"]["code"]) == (429, "quota_exceeded")
        assert "the key would hold 2, its limits.all_fleets.requests_max is 1" in message(refused)
        assert asked == ["limits"]
        release()
        await world.quiet()


async def test_a_call_that_moves_keeps_its_place_within_the_limits(store_url: str, asked: list[str]) -> None:
    config = EngineConfig(step_base_ms=1)
    key = key_of(1, over_all(REQUESTS_PER_MINUTE, 9))
    async with mock_engine(config, speed=4) as first, mock_engine(config, speed=4) as second:
        urls = {"a": first.url, "b": second.url}
        async with gateway(store_url, urls, blocks={"a": 2001}, key=key) as world:
            first.app.faults.add(Fault(Kind.RESET_BEFORE_HEADERS), 1)
            answer = await world.visit(chat())
            assert (answer.status, answer.header("x-kvgate-replica")) == (200, "b")
            assert answer.header("x-ratelimit-remaining-requests") == "8", "paid once"
            assert asked == ["limits", "fleet"]
            await world.quiet()


async def test_a_place_that_was_lost_within_the_limits_cuts_no_stream(store_url: str) -> None:
    async with (
        mock_engine(EngineConfig(step_base_ms=1), speed=4) as mock,
        gateway(store_url, {"a": mock.url}, key=key_of(1)) as world,
    ):
        visitor = Visitor(world.app, chat(stream=True, max_tokens=100))
        task = asyncio.create_task(visitor.run())
        await visitor.begun.wait()
        (within,) = world.limits._asks.values()
        within._lost()
        await task
        assert (visitor.status, visitor.events[-1]) == (200, b"[DONE]")
        assert [fact.reason for fact in world.facts if isinstance(fact, CallEnded)] == [None]
        await world.quiet()


async def test_draining_ends_who_waits_for_a_limit(store_url: str) -> None:
    async with gateway(store_url, {"a": NOWHERE}, key=key_of(1)) as world:
        release = await world.hold_limit("limited")
        visiting = asyncio.create_task(world.visit(chat()))
        await waits_for_limit(world)
        world.calls.drain()
        refused = await visiting
        assert (refused.status, world.only_end().reason) == (503, Code.DRAINING)
        release()
        await world.quiet()
