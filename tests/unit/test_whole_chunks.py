"""Chunks that go to the client as they came from the engine: no reader of either can tell, however a stream is cut."""

import asyncio
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.call import Call
from gateway.core.events import Event, TokenGaps
from gateway.core.lifecycle import Phase
from gateway.core.request import Dialect
from gateway.core.sse import Usage
from gateway.deadline import Deadline
from gateway.http import gaps, relay
from gateway.http.protocol import Cycle
from gateway.http.relay import AnswerRelay
from gateway.upstream import exchange
from gateway.upstream.api import UpstreamFailed
from gateway.upstream.exchange import Exchange, _size_line
from gateway.upstream.limits import UpstreamLimits
from tests.flow.engines import DONE, LAST_CHUNK, STREAM_HEAD, chunk, event

WORD = event("word")
OTHER_WORD = event("another")
FINISH = event("", "stop")
ABORT = event("", "abort")
ERROR = b'data: {"error":{"message":"EngineCore encountered an issue.","code":500}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3}}\n\n'
COUNTED = WORD.replace(b"}\n\n", b',"usage":{"prompt_tokens":11,"completion_tokens":2}}\n\n')
COMMENT = b": keep-alive\n\n"
NO_JSON = b'data: {"choices":[{}\n\n'
NO_CHOICE = b'data: {"object":"chat.completion.chunk","choices":[]}\n\n'
WITH_ERROR = WORD.replace(b"}\n\n", b',"error":{"message":"EngineCore encountered an issue."}}\n\n')
OTHER_OBJECT = WORD.replace(b"chat.completion.chunk", b"error")
SPOKEN = event('\\"error\\": \\n\\n\u2028')
TWO_LINES = WORD.replace(b',"created"', b'\ndata: ,"created"')
NAMED = b"event: x\n" + WORD
CRLF = WORD.replace(b"\n", b"\r\n")
EVENTS = [
    WORD, FINISH, ABORT, ERROR, USAGE, COUNTED, COMMENT, NO_JSON, NO_CHOICE, WITH_ERROR, OTHER_OBJECT, SPOKEN,
    TWO_LINES, NAMED, CRLF, DONE, WORD + WORD, WORD[:50], WORD[50:], WORD + b"\n", b"\n", b"data: \n\n",
]  # fmt: skip
"""What a chunk may hold: whole events of every kind, several, parts, and what is none."""

IDLE_SECONDS = 7.0


class Socket:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def get_write_buffer_size(self) -> int:
        return 0


@dataclass
class Stream:
    """One answer on its way from the engine's bytes to the client's."""

    engine: Socket
    client: Socket
    cycle: Cycle
    relay: AnswerRelay
    exchange: Exchange
    deadline: "IdleWatch"
    call: Call
    told: list[Event]
    """The observer's."""

    def feed(self, data: bytes, *cuts: int) -> None:
        for start, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
            if start < end:
                self.exchange.feed(data[start:end])

    def seen(self) -> tuple[object, ...]:
        """All that the client, the books and the connection learn."""
        self.relay.report()
        events, exchange = self.relay._stream, self.exchange
        judged: tuple[object, ...] = ()
        if events is not None:
            judged = (
                events.started,
                events.usage,
                events.events,
                events.unmetered,
                events.finish_reason,
                cast(Any, self.call.meter).told[:] if self.call.meter else None,
                events.done,
                events.failure,
                events.failure_bytes,
            )
        counted = (self.call.status, self.call.usage, self.call.output_events)
        ended = (exchange._ended, str(exchange._failure), str(exchange._error), exchange.reusable)
        return payload(b"".join(self.client.written)), judged, counted, ended


def payload(answer: bytes) -> tuple[bytes, bool]:
    """The body that the client reads, and whether it is complete; of HTTP/1.0 with what is not body."""
    if b"transfer-encoding" not in answer:
        return answer, False
    data: list[bytes] = []
    ends: list[bool] = []
    reader = SimpleNamespace(on_body=data.append, on_message_complete=lambda: ends.append(True))
    httptools.HttpResponseParser(reader).feed_data(answer)
    return b"".join(data), bool(ends)


class ParsingCycle(Cycle):
    """Takes nothing unparsed: what a stream has to look like."""

    def look(self) -> None:
        self.chunk_to = None


class IdleWatch(Deadline):
    """Remembers what it was set to."""

    __slots__ = ("seconds",)

    def set(self, seconds: float) -> None:
        self.seconds = seconds
        super().set(seconds)


class Heard:
    """In the place of a meter: what it is told."""

    def __init__(self) -> None:
        self.due = 0
        self.told: list[Usage | None] = []

    def note(self, usage: Usage) -> None:
        self.told.append(usage)

    def lose(self) -> None:
        self.told.append(None)

    def lose_sight(self) -> None:
        raise AssertionError("its client reads")


def stream(
    cycle: type[Cycle] = Cycle,
    version: str = "1.1",
    drop_usage: bool = False,
    meter_asked: bool | None = None,
) -> Stream:
    """`meter_asked`: by the client, of a call that is metered; None = it is not metered."""
    loop, client = asyncio.get_running_loop(), Socket()
    transport, log = cast(asyncio.Transport, client), logging.getLogger()
    answer = cycle(
        scope=cast(Any, {"type": "http", "method": "POST", "http_version": version}),
        transport=transport,
        flow=FlowControl(transport),
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    call = Call(
        request_id="",
        request=cast(
            Any,
            SimpleNamespace(
                path="",
                holds_blocks=True,
                dialect=Dialect.OPENAI,
                include_usage_asked=not drop_usage,
                meter_asked=bool(meter_asked),
            ),
        ),
        headers=[],
        fleet=cast(Any, SimpleNamespace(name="demo")),
        terms=cast(Any, SimpleNamespace(class_="normal")),
        started=0.0,
        task=cast(Any, None),
        identity=cast(Any, None),
        phase=Phase.CONNECTING,
        meter=cast(Any, None if meter_asked is None else Heard()),
    )
    told: list[Event] = []
    receiver = AnswerRelay(call, answer.send, answer, [], lambda: None, told.append)
    deadline = IdleWatch(loop, lambda: None)
    engine = Socket()
    exchange = Exchange(
        cast(asyncio.Transport, engine), receiver, UpstreamLimits(idle_seconds=IDLE_SECONDS), deadline
    )
    return Stream(engine, client, answer, receiver, exchange, deadline, call, told)


def begun(cycle: type[Cycle] = Cycle, version: str = "1.1") -> Stream:
    """Its first token is with the client."""
    way = stream(cycle, version)
    way.feed(STREAM_HEAD + chunk(WORD))
    return way


async def test_a_whole_chunk_with_a_token_is_passed_on_as_it_came() -> None:
    way, piece = begun(), chunk(WORD)
    way.feed(piece)
    way.relay.report()
    assert way.client.written[-1] is piece
    assert (way.call.output_events, way.deadline.seconds) == (2, IDLE_SECONDS)


@pytest.mark.parametrize("asked", [False, True])
async def test_usage_is_told_and_taken_out_without_another_look(asked: bool) -> None:
    way = stream(meter_asked=asked)
    way.feed(STREAM_HEAD + chunk(COUNTED))
    way.feed(piece := chunk(COUNTED))
    assert way.client.written[-1] == (piece if asked else chunk(WORD))
    assert (way.client.written[-1] is piece) == asked
    assert cast(Any, way.call.meter).told == [Usage(11, 2)] * 2
    way.relay.report()
    assert (way.call.usage, way.call.output_events) == (Usage(11, 2), 2)


async def test_a_stream_shows_how_far_it_is() -> None:
    way = stream()
    assert way.relay.course is None
    way.feed(STREAM_HEAD + chunk(WORD))
    first = way.relay.course
    assert first
    assert first.last_at == first.first_at
    way.feed(chunk(WORD))
    way.feed(chunk(WORD + WORD))
    course = way.relay.course
    assert course
    assert (first.events, course.events, course.first_at) == (1, 4, first.first_at)
    assert course.last_at > first.last_at


@pytest.mark.parametrize(
    "told",
    [FINISH, ABORT, ERROR, USAGE, COUNTED, COMMENT, NO_JSON, NO_CHOICE, WITH_ERROR, OTHER_OBJECT, DONE],
)
async def test_an_event_that_tells_more_is_parsed(told: bytes) -> None:
    way, piece = begun(), chunk(told)
    way.feed(piece)
    assert all(written is not piece for written in way.client.written)


async def test_the_time_between_tokens_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all in one stream, parsed or not; what is no token does not end a gap."""
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(relay, "time", clock)
    monkeypatch.setattr(gaps, "time", clock)
    way = stream()
    way.feed(STREAM_HEAD + chunk(WORD))
    for now, data in [(10.5, WORD), (10.625, COMMENT), (10.75, FINISH), (11.25, WORD), (11.5, WORD)]:
        clock.now = now
        way.feed(chunk(data))
    way.relay.report()
    way.relay.report()
    assert [event.gaps_ms for event in way.told if isinstance(event, TokenGaps)] == [[500, 250, 500], [250]]
    assert len(way.told) == 3


async def test_the_first_token_leaves_before_the_books_hear_of_it() -> None:
    way = stream()
    written: list[int] = []
    way.relay._first_token = lambda: written.append(len(way.client.written))
    way.feed(STREAM_HEAD + chunk(WORD))
    way.feed(chunk(WORD))
    assert written == [1]


async def test_a_client_that_does_not_read_keeps_no_first_token_from_the_books() -> None:
    way = stream()
    way.cycle.flow.pause_writing()
    written: list[int] = []
    way.relay._first_token = lambda: written.append(len(way.client.written))
    way.feed(STREAM_HEAD + chunk(WORD))
    assert written == [0]
    way.cycle.flow.resume_writing()
    way.exchange.lost(OSError("gone"))
    with pytest.raises(UpstreamFailed):
        await way.exchange.finish()
    assert WORD in payload(b"".join(way.client.written))[0]


async def test_a_client_that_needs_another_framing_gets_it() -> None:
    way = begun(version="1.0")
    way.feed(chunk(WORD))
    assert way.client.written[-1] == WORD


async def test_each_token_moves_the_idle_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for when the limit has passed, so that a token need not set it."""
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    for module in (relay, gaps, exchange):
        monkeypatch.setattr(module, "time", clock)
    way = begun()
    assert way.deadline.seconds == IDLE_SECONDS
    clock.now += 5
    way.feed(chunk(WORD))
    clock.now += 2  # what the first token had set has passed
    way.exchange.late()
    assert (way.deadline.seconds, way.exchange._failure) == (5, None)
    clock.now += 5
    way.exchange.late()
    with pytest.raises(UpstreamFailed, match="nothing for 7 s"):
        await way.exchange.finish()


async def test_a_client_that_does_not_read_stops_the_engine() -> None:
    way = begun()
    way.cycle.flow.pause_writing()
    way.cycle.look()
    written = len(way.client.written)
    way.feed(chunk(WORD))
    assert (len(way.client.written), way.engine.reads) == (written, False)
    way.cycle.flow.resume_writing()
    way.feed(chunk(OTHER_WORD))  # was read already, and comes behind what still waits
    way.feed(LAST_CHUNK)
    await way.exchange.finish()
    assert (way.client.written[written:], way.engine.reads) == ([chunk(WORD), chunk(OTHER_WORD)], True)


async def test_a_client_that_left_gets_nothing() -> None:
    way = begun()
    way.cycle.disconnected = True
    way.cycle.look()
    written = len(way.client.written)
    way.feed(chunk(WORD))
    assert len(way.client.written) == written


async def test_no_chunk_is_offered_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another limit counts until then."""
    monkeypatch.setattr(AnswerRelay, "take_chunk", taking := Mock(return_value=True))
    way = stream()
    way.feed(STREAM_HEAD + chunk(COMMENT))
    way.feed(chunk(WORD))
    assert not taking.called
    way.feed(chunk(WORD))
    assert taking.called


async def test_what_the_receiver_raises_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    way = begun()
    monkeypatch.setattr(
        AnswerRelay, "take_chunk", taking := Mock(side_effect=[RuntimeError("no more"), True])
    )
    way.feed(chunk(WORD))
    way.feed(chunk(WORD))
    with pytest.raises(RuntimeError, match="no more"):
        await way.exchange.finish()
    assert (way.call.output_events, way.exchange.reusable, taking.call_count) == (1, False, 1)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 255, 256, 4095, 4096, 65_535, 65_536, 1 << 20])
def test_a_chunk_is_known_by_its_length(size: int) -> None:
    assert _size_line(len(chunk(b"x" * size))) == b"%x\r\n" % size


@pytest.mark.parametrize("chunk_bytes", [0, 1, 4, 5, 21, 262, 1 << 25])
def test_there_are_lengths_that_no_chunk_has(chunk_bytes: int) -> None:
    """Five bytes are the last chunk, 21 lie between sizes of one and of two digits, and some are too many."""
    assert _size_line(chunk_bytes) == b""


def inside_another() -> list[bytes]:
    """What looks like a chunk is the middle of one."""
    whole = chunk(COMMENT + chunk(WORD) + COMMENT)
    start = whole.index(chunk(WORD))
    return [whole[:start], chunk(WORD), whole[start + len(chunk(WORD)) :]]


def behind_half_a_size() -> list[bytes]:
    """The size of a chunk is cut so that the rest of it is right for what comes with it."""
    body = (WORD + b"\r\n").ljust(int(b"1%x" % len(WORD), 16) - len(COMMENT), b":") + COMMENT
    whole = chunk(body)
    return [chunk(WORD) + whole[:1], chunk(WORD), whole[1 + len(chunk(WORD)) :]]


@pytest.mark.parametrize(
    "pieces", [inside_another(), behind_half_a_size()], ids=["inside", "behind half a size"]
)
async def test_what_only_looks_like_a_chunk_is_parsed(pieces: list[bytes]) -> None:
    assert pieces[1] == chunk(WORD)
    ways = [begun(Cycle), begun(ParsingCycle)]
    for piece in (*pieces, chunk(WORD), LAST_CHUNK):
        for way in ways:
            way.feed(piece)
        assert ways[0].seen() == ways[1].seen()
    assert ways[0].exchange.reusable


async def test_a_compressed_answer_is_decoded_to_its_end() -> None:
    """Even where its bytes look like a token: they are none."""
    way = stream()
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    packer = zlib.compressobj(wbits=31)
    way.feed(head + chunk(packer.compress(WORD) + packer.flush(zlib.Z_SYNC_FLUSH)))
    way.feed(chunk(WORD))
    with pytest.raises(UpstreamFailed, match="cannot be decoded"):
        await way.exchange.finish()
    assert way.call.output_events == 1


FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": chunk,
    "extension": lambda data: b"%x;a=b\r\n%b\r\n" % (len(data), data),
    "capitals": lambda data: b"%X\r\n%b\r\n" % (len(data), data),
    "zeros": lambda data: b"0%x\r\n%b\r\n" % (len(data), data),
    "too short": lambda data: b"%x\r\n%b\r\n" % (len(data) + 1, data),
    "too long": lambda data: b"%x\r\n%b\r\n" % (len(data) - 1, data),
    "no end": lambda data: b"%x\r\n%bxx" % (len(data), data),
    "two": lambda data: chunk(data) + chunk(WORD),
    "halves": lambda data: chunk(data[:1]) + chunk(data[1:] or b"\n"),
    "last": lambda data: chunk(data) + LAST_CHUNK,
    "trailers": lambda data: chunk(data) + b"0\r\nx-end: 1\r\n\r\n",
    "another answer": lambda data: chunk(data) + LAST_CHUNK + STREAM_HEAD,
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_chunks_of_every_kind_are_read_alike(framing: str) -> None:
    ways = [begun(Cycle), begun(ParsingCycle)]
    for way in ways:
        way.feed(FRAMINGS[framing](OTHER_WORD))
        way.feed(chunk(WORD))
    assert ways[0].seen() == ways[1].seen()


PIECES = st.tuples(
    st.sampled_from([WORD] * 6 + [COUNTED] * 6 + EVENTS),
    st.sampled_from(["plain"] * 15 + sorted(FRAMINGS)),
    st.one_of(st.just([]), st.just([]), st.lists(st.integers(0, 260), max_size=3)),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=8),
    st.lists(st.integers(0, 300), max_size=3),
    st.sampled_from(["1.1", "1.0"]),
    st.booleans(),
    st.sampled_from([None, False, True]),
)
def test_nobody_can_tell_what_was_parsed(
    pieces: list[tuple[bytes, str, list[int]]],
    first_cuts: list[int],
    version: str,
    drop_usage: bool,
    meter_asked: bool | None,
) -> None:
    async def check() -> None:
        ways = [stream(cycle, version, drop_usage, meter_asked) for cycle in (Cycle, ParsingCycle)]
        for way in ways:
            way.feed(STREAM_HEAD + chunk(WORD), *first_cuts)
        for data, framing, cuts in pieces:
            for way in ways:
                way.feed(FRAMINGS[framing](data), *cuts)
            assert ways[0].seen() == ways[1].seen()
        for way in ways:
            way.exchange.lost(None)
        assert ways[0].seen() == ways[1].seen()

    asyncio.run(check())
