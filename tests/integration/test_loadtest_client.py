"""What clients do with servers of all kinds, over real sockets."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gateway.loadtest.client import Clients
from gateway.loadtest.exchange import Notes
from gateway.loadtest.prompts import Prompts
from gateway.loadtest.records import Attempt, CallRecord, End, Outcome, Recording
from gateway.loadtest.scenario import Scenario, parse
from gateway.loadtest.targets import parse_target
from gateway.loadtest.workload import PlannedCall
from tests.integration.scripted_servers import (
    ABORT,
    DONE,
    END,
    ERROR,
    GOOD,
    HEAD,
    LAST,
    ROLE,
    WORD,
    Behaviour,
    Peer,
    chunk,
    refusal,
    saying,
    server,
)

CALL = PlannedCall(
    number=0, arrival_seconds=0, key="default", mix=0, prompt_tokens=20, output_tokens=3,
    answer_tokens=None, leave_after_tokens=None, slow=False,
)  # fmt: skip
SECONDS = 30
PATIENT_SECONDS, TIMEOUT_SECONDS = 20.0, 0.5
"""Of a client that no stall of the machine may end, and of one that is to give up."""
BACKOFF_SECONDS = 0.01


def scenario(client: dict[str, Any], **mix: Any) -> Scenario:
    settings = {
        "timeout_seconds": PATIENT_SECONDS,
        "retries": 0,
        "backoff_seconds": BACKOFF_SECONDS,
        **client,
    }
    kind = {"prompt_tokens": 20, "output_tokens": 3, **mix}
    phases = [{"seconds": 1, "sessions": 1}]
    return parse(json.dumps({"name": "x", "client": settings, "phases": phases, "calls": [kind]}))


class Desk:
    """One client process at work in this one."""

    def __init__(
        self, urls: Sequence[str], client: dict[str, Any], secrets: dict[str, str], **mix: Any
    ) -> None:
        self.recording = Recording(SECONDS)
        found = scenario(client, **mix)
        self.clients = Clients(
            found,
            [parse_target(url) for url in urls],
            secrets,
            Prompts(found, 1, 100),
            Notes(self.recording, time.monotonic()),
        )

    async def call(self, planned: PlannedCall = CALL) -> CallRecord:
        self.clients.start(planned)
        await self.clients.finished(SECONDS)
        return self.recording.calls[-1]


async def one(
    *behaviours: Behaviour,
    planned: PlannedCall = CALL,
    retries: int = 0,
    timeout_seconds: float = PATIENT_SECONDS,
    **mix: Any,
) -> CallRecord:
    """One call to a server with these behaviours."""
    async with server(behaviours) as served:
        desk = Desk([served.url], {"retries": retries, "timeout_seconds": timeout_seconds}, {}, **mix)
        record = await desk.call(planned)
        await desk.clients.stop()
    return record


def ends(record: CallRecord) -> list[tuple[End, str]]:
    return [(attempt.end, attempt.reason) for attempt in record.attempts]


async def test_a_good_stream_is_answered_with_the_tokens_of_its_usage() -> None:
    record = await one(saying(HEAD, GOOD))
    (attempt,) = record.attempts

    assert record.outcome is Outcome.ANSWERED
    assert (attempt.events, attempt.tokens, attempt.status, attempt.queue_ms) == (3, 3, 200, 12)
    assert attempt.headers_at is not None
    assert attempt.first_token_at is not None
    assert attempt.began <= attempt.headers_at <= attempt.first_token_at <= attempt.ended


async def test_a_gap_is_the_time_between_two_tokens() -> None:
    async def hesitate(peer: Peer) -> None:
        await peer.send(HEAD, ROLE, WORD)
        await asyncio.sleep(0.1)
        await peer.send(LAST, DONE, END)

    async with server([hesitate]) as served:
        desk = Desk([served.url], {}, {})
        record = await desk.call()
        await desk.clients.stop()

    (gap,) = desk.recording.gaps.pooled()
    assert 0.09 <= gap < record.attempts[0].seconds
    assert record.attempts[0].worst_gap == pytest.approx(gap, abs=1e-6)
    assert sum(desk.recording.tokens) == 2
    assert not desk.recording.open_gaps.pooled()


@pytest.mark.parametrize(
    ("said", "kind", "tokens"),
    [
        ([HEAD, ROLE, WORD, ERROR, DONE, END], "error_event", 1),
        ([HEAD, ROLE, WORD, ABORT, DONE, END], "finish_abort", 1),
        ([HEAD, DONE, END], "done_without_choices", 0),
        ([HEAD, ROLE, WORD, LAST, END], "ended_before_done", 2),
        ([HEAD, b"0b\r\ndata: {]}\n\n\r\n"], "event_not_json", 0),
        ([b"SSH-2.0-OpenSSH\r\n"], "not_http", 0),
        ([HEAD, b"zz\r\n"], "not_http", 0),
    ],
)
async def test_status_200_is_not_enough(said: list[bytes], kind: str, tokens: int) -> None:
    record = await one(saying(*said))

    assert record.outcome is Outcome.GAVE_UP
    assert ends(record) == [(End.FAILED, kind)]
    assert record.attempts[0].tokens == tokens


async def test_a_stream_may_be_cut_or_reset() -> None:
    async def cut(peer: Peer) -> str:
        await peer.send(HEAD, ROLE, WORD)
        return "close"

    async def reset(peer: Peer) -> None:
        await peer.send(HEAD, ROLE, WORD)
        await asyncio.sleep(0.05)
        peer.reset()

    async def silent_reset(peer: Peer) -> None:
        peer.reset()

    found = [ends(await one(behaviour))[0] for behaviour in (cut, reset, silent_reset)]

    assert found == [
        (End.FAILED, "cut_in_answer"), (End.FAILED, "reset_in_answer"), (End.FAILED, "reset_before_headers"),
    ]  # fmt: skip


async def test_nobody_looks_behind_done() -> None:
    async def careless(peer: Peer) -> str:
        await peer.send(HEAD, ROLE, WORD, LAST, DONE)
        return "close"

    assert (await one(careless)).outcome is Outcome.ANSWERED


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        ([], "headers"),
        ([HEAD, ROLE], "first_token"),
        ([HEAD, ROLE, b"9\r\ndata: {]\n\r\n"], "first_token"),
        ([HEAD, ROLE, WORD, WORD], "between_tokens"),
    ],
)
async def test_silence_times_out_and_closes_the_socket(said: list[bytes], stage: str) -> None:
    gone = asyncio.Event()

    async def fall_silent(peer: Peer) -> None:
        await peer.send(*said)
        await peer.gone()
        gone.set()

    async with server([fall_silent]) as served:
        desk = Desk([served.url], {"timeout_seconds": TIMEOUT_SECONDS}, {})
        record = await desk.call()
        async with asyncio.timeout(SECONDS):
            await gone.wait()
        await desk.clients.stop()

    assert ends(record) == [(End.TIMED_OUT, stage)]
    assert record.attempts[0].tokens == said.count(WORD)
    assert record.attempts[0].seconds >= TIMEOUT_SECONDS
    left_open = list(desk.recording.open_gaps.pooled())
    assert len(left_open) == (stage == "between_tokens")
    assert all(gap >= TIMEOUT_SECONDS * 0.99 for gap in left_open)
    assert record.attempts[0].worst_gap == pytest.approx(max(left_open, default=0), abs=1e-6)


async def test_a_long_answer_outlives_the_time_out_as_long_as_something_comes() -> None:
    timeout_seconds = 5.0

    async def drip(peer: Peer) -> None:
        await peer.send(HEAD, ROLE)
        for _ in range(12):
            await peer.send(chunked_comment, WORD)
            await asyncio.sleep(timeout_seconds / 10)
        await peer.send(LAST, DONE, END)

    chunked_comment = b"e\r\n: keep-alive\n\n\r\n"
    record = await one(drip, timeout_seconds=timeout_seconds)

    assert record.outcome is Outcome.ANSWERED
    assert record.attempts[0].seconds > timeout_seconds


async def test_a_refusal_is_tried_again_when_it_says_and_with_the_same_body() -> None:
    refused = saying(refusal(429, "queue_full", "retry-after-ms: 80"))
    async with server([refused, saying(HEAD, GOOD)]) as served:
        desk = Desk([served.url], {"retries": 3}, {})
        record = await desk.call()
        await desk.clients.stop()

    first, second = record.attempts
    assert record.outcome is Outcome.ANSWERED
    assert (first.end, first.reason, first.tokens) == (End.REFUSED, "429 queue_full", 0)
    assert second.began - first.ended >= 0.08
    assert served.requests[0] == served.requests[1]
    assert served.connections == 1


@pytest.mark.parametrize("status", [400, 404])
async def test_a_client_error_is_final(status: int) -> None:
    record = await one(saying(refusal(status, "no")), retries=3)

    assert ends(record) == [(End.REFUSED, f"{status} no")]
    assert record.outcome is Outcome.GAVE_UP


async def test_x_should_retry_decides() -> None:
    stop, again = refusal(429, "no", "x-should-retry: false"), refusal(400, "no", "x-should-retry: true")

    assert len((await one(saying(stop), retries=3)).attempts) == 1
    assert len((await one(saying(again), retries=3)).attempts) == 4


async def test_a_broken_stream_is_tried_again_and_its_tokens_are_kept_apart() -> None:
    record = await one(saying(HEAD, ROLE, WORD, WORD, ERROR, DONE, END), saying(HEAD, GOOD), retries=1)

    assert ends(record) == [(End.FAILED, "error_event"), (End.ANSWERED, "")]
    assert [attempt.tokens for attempt in record.attempts] == [2, 3]


async def test_retries_are_counted_whatever_they_are_for() -> None:
    failing = [
        saying(refusal(503, "draining")),
        saying(HEAD, DONE, END),
        saying(HEAD, ROLE, WORD, ERROR, DONE, END),
    ]
    record = await one(*failing, retries=2)

    assert [end for end, _ in ends(record)] == [End.REFUSED, End.FAILED, End.FAILED]
    assert record.outcome is Outcome.GAVE_UP


async def test_an_attempt_says_how_often_its_call_was_tried_before() -> None:
    """As the OpenAI SDK does."""
    said: list[str] = []

    async def refuse(peer: Peer) -> None:
        said.append(peer.headers["x-stainless-retry-count"])
        await peer.send(refusal(503, "draining"))

    await one(refuse, retries=2)

    assert said == ["0", "1", "2"]


async def test_a_leaver_closes_after_its_tokens() -> None:
    async def pour(peer: Peer) -> None:
        await peer.send(HEAD, ROLE)
        while True:
            await peer.send(WORD)
            await asyncio.sleep(0.005)

    async with server([pour]) as served:
        desk = Desk([served.url], {}, {})
        record = await desk.call(replace(CALL, leave_after_tokens=4))
        await desk.clients.stop()

    assert record.outcome is Outcome.LEFT
    assert 4 <= record.attempts[0].events <= 8
    assert not desk.recording.open_gaps.pooled()


async def test_what_came_in_the_read_after_which_a_client_left_is_not_counted() -> None:
    async with server([saying(HEAD + ROLE + WORD * 50)]) as served:
        desk = Desk([served.url], {}, {})
        record = await desk.call(replace(CALL, leave_after_tokens=4))
        await desk.clients.stop()

    assert record.attempts[0].events == sum(desk.recording.tokens) == 4


async def test_tokens_of_one_read_have_no_time_between_them() -> None:
    """As vLLM's own benchmark counts them: a merged read is not one token."""
    two_events_in_one_chunk = b"".join(part.split(b"\r\n")[1] for part in (WORD, WORD))
    async with server([saying(HEAD + ROLE + chunk(two_events_in_one_chunk) + LAST + DONE + END)]) as served:
        desk = Desk([served.url], {}, {})
        await desk.call()
        await desk.clients.stop()

    assert list(desk.recording.gaps.pooled()) == [0, 0]


async def test_a_slow_reader_is_felt_at_the_other_end_and_has_no_gaps() -> None:
    """The server's own buffers fill up, because the client reads once in a while from a small one."""
    stuck_at: list[int] = []
    words = WORD * 200

    async def pour(peer: Peer) -> None:
        peer.writer.transport.set_write_buffer_limits(high=16_384)
        await peer.send(HEAD, ROLE)
        for number in range(10_000):
            peer.writer.write(words)
            if peer.writer.transport.get_write_buffer_size() > 1 << 20:
                stuck_at.append(number)
                return

    async with server([pour]) as served:
        desk = Desk([served.url], {"timeout_seconds": 5}, {}, slow={"fraction": 1, "read_seconds": 0.05})
        record = await desk.call(replace(CALL, slow=True, leave_after_tokens=300))
        await desk.clients.stop()

    assert stuck_at
    assert record.outcome is Outcome.LEFT
    assert not desk.recording.gaps.pooled()
    assert sum(desk.recording.tokens) == record.attempts[0].events


async def test_a_slow_reader_reads_at_most_once_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: set[float] = set()
    monkeypatch.setattr(Notes, "unpaced_tokens", lambda _, at, count: moments.add(at))

    async def drip(peer: Peer) -> None:
        await peer.send(HEAD, ROLE)
        for _ in range(60):
            await peer.send(WORD)
            await asyncio.sleep(0.005)
        await peer.send(LAST, DONE, END)

    slow = {"fraction": 1, "read_seconds": 0.1}
    record = await one(drip, planned=replace(CALL, slow=True), slow=slow)

    assert record.outcome is Outcome.ANSWERED
    assert record.attempts[0].events == 61
    reads = sorted(moments)
    assert all(after - before >= 0.099 for before, after in pairwise(reads))
    assert len(reads) >= 3


async def test_whole_answers() -> None:
    def answer(reason: str) -> bytes:
        value = {"choices": [{"finish_reason": reason}], "usage": {"completion_tokens": 3}}
        body = json.dumps(value).encode()
        return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    good = await one(saying(answer("stop")), stream=False)
    aborted = await one(saying(answer("abort")), stream=False)

    assert (good.outcome, good.attempts[0].tokens, good.attempts[0].first_token_at) == (
        Outcome.ANSWERED,
        3,
        None,
    )
    assert ends(aborted) == [(End.FAILED, "finish_abort")]


async def test_keys_are_sent_and_connections_are_used_again() -> None:
    async with server([saying(HEAD, GOOD)]) as served:
        desk = Desk([served.url], {}, {"default": "secret"})
        for _ in range(3):
            await desk.call()
        await desk.clients.stop()

    assert [headers["authorization"] for headers in served.headers] == ["Bearer secret"] * 3
    assert served.connections == 1


async def test_without_secrets_no_authorization_is_sent() -> None:
    async with server([saying(HEAD, GOOD)]) as served:
        desk = Desk([served.url], {}, {})
        await desk.call()
        await desk.clients.stop()

    assert "authorization" not in served.headers[0]


async def test_a_retry_goes_to_another_engine() -> None:
    async with server([saying(refusal(503, "busy"))]) as busy, server([saying(HEAD, GOOD)]) as free:
        desk = Desk([busy.url, free.url], {"retries": 1}, {})
        record = await desk.call()
        await desk.clients.stop()

    assert [attempt.target for attempt in record.attempts] == [0, 1]
    assert record.outcome is Outcome.ANSWERED


async def test_nobody_listens() -> None:
    async with server([saying(HEAD, GOOD)]) as served:
        url = served.url
    desk = Desk([url], {"retries": 1}, {})
    record = await desk.call()
    await desk.clients.stop()

    assert ends(record) == [(End.FAILED, "connect")] * 2
    assert record.attempts[0].sent_at is None
    assert desk.recording.socket_shortage == 0


async def test_the_end_of_the_run_stops_everything_and_says_so() -> None:
    async def fall_silent(peer: Peer) -> None:
        await peer.send(HEAD, ROLE, WORD)
        await peer.gone()

    async with server([fall_silent]) as served:
        desk = Desk([served.url], {"timeout_seconds": 30, "retries": 1}, {})
        desk.clients.start(CALL)
        await desk.clients.finished(0.1)
        live = desk.clients.counts.live
        await desk.clients.stop()

    (record,) = desk.recording.calls
    assert (live, desk.clients.counts.live) == (1, 0)
    assert record.outcome is Outcome.UNFINISHED
    assert ends(record) == [(End.STOPPED, "")]
    assert len(desk.recording.open_gaps.pooled()) == 1
    assert desk.clients._notes.streaming == 0


def test_an_attempt_that_never_began_has_no_seconds() -> None:
    assert Attempt(0, 1.0, ended=1.0).seconds == 0
