"""The mock as a plain ASGI app: vLLM's routes over one engine, and `/mock/...` to script and observe it.

`POST /mock/faults {"fail", "count"}` scripts the next calls (see `faults`), `GET /mock/log` tells what arrived and
what became of it (see `journal`), `POST /mock/reset` clears both; the engine's calls and counters go on.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

from gateway.mock import openai, tokenizer
from gateway.mock.calls import (
    Call,
    Refusal,
    check_model,
    check_token_ids,
    missing,
    parse_call,
    parse_object,
    validation_error,
)
from gateway.mock.driver import Driver, Plan, Stream
from gateway.mock.engine import EngineConfig, Token
from gateway.mock.exchange import CUT, JSON, RESET, BodyTooLarge, ClientLeft, Exchange, Receive, Scope, Send
from gateway.mock.faults import Fault, Faults, Kind, parse_fault
from gateway.mock.journal import Journal, Record, State
from gateway.mock.openai import Progress, StreamShape

Handler = Callable[[Exchange], Awaitable[None]]

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
GARBAGE = b'\x00\xff not an event\n{"id": \ndata {]\n\n'
_BUSY = (
    "The engine is currently busy and cannot accept new requests."
    " Please try again later or on a different instance."
)
_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_ERRORS = {
    400: ("The request was refused by a script.", "BadRequestError"),
    500: (_DEAD, "InternalServerError"),
    503: (_BUSY, "Service Unavailable"),
}


def create_app(
    config: EngineConfig, *, speed: float = 1.0, api_key: str | None = None, output_tokens: int | None = None
) -> "MockServer":
    """An engine behind ASGI.

    `speed` divides step times (`math.inf`: none).  `api_key` guards `/v1` only, as in vLLM.  `output_tokens` ends
    the sequences of calls that script no length; by default they run to their limit.
    """
    return MockServer(config, speed=speed, api_key=api_key, output_tokens=output_tokens)


class MockServer:
    """One mock engine; `driver.stop()` is its SIGTERM."""

    def __init__(
        self, config: EngineConfig, *, speed: float, api_key: str | None, output_tokens: int | None
    ) -> None:
        self.config = config
        self.driver = Driver(config, speed)
        self.faults = Faults()
        self.journal = Journal()
        self._api_key = api_key
        self._output_tokens = output_tokens
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": partial(self._generate, chat=True)},
            "/v1/completions": {"POST": partial(self._generate, chat=False)},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._healthy},
            "/ping": {"GET": self._healthy, "POST": self._healthy},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/mock/faults": {"POST": self._add_faults},
            "/mock/log": {"GET": self._log},
            "/mock/reset": {"POST": self._reset},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._dispatch(exchange)
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
        except BodyTooLarge:
            await exchange.json(413, {"detail": "Request body too large"})
        except ClientLeft:
            return

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self.driver.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _dispatch(self, exchange: Exchange) -> None:
        if not self._authorized(exchange):
            await exchange.json(401, {"error": "Unauthorized"})
            return
        methods = self._routes.get(exchange.path)
        if methods is None:
            await exchange.json(404, {"detail": "Not Found"})
        elif exchange.method not in methods:
            allow = (b"allow", ", ".join(methods).encode())
            await exchange.json(405, {"detail": "Method Not Allowed"}, [allow])
        else:
            await methods[exchange.method](exchange)

    def _authorized(self, exchange: Exchange) -> bool:
        if self._api_key is None or not exchange.path.startswith("/v1"):
            return True
        given = exchange.header(b"authorization").encode()
        return secrets.compare_digest(given, f"Bearer {self._api_key}".encode())

    # Generation

    async def _generate(self, exchange: Exchange, *, chat: bool) -> None:
        raw = await exchange.body()
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers]
        record = Record(exchange.path, headers, raw)
        self.journal.receive(record)
        state: State | None = None
        try:
            state = await exchange.unless_left(self._answer(exchange, record, raw, chat))
        finally:
            self.journal.move(record, state or State.ABORTED)

    async def _answer(self, exchange: Exchange, record: Record, raw: bytes, chat: bool) -> State:
        try:
            call = parse_call(chat, raw, secrets.token_hex(8), self.config, exchange.request_id)
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
            return State.REFUSED
        record.id = call.id
        fault = call.script.fault or self.faults.take()
        if fault is not None and await self._fail_early(exchange, fault):
            return State.FAILED
        stream = self.driver.submit(self._plan(call, record))
        try:
            return await (self._stream if call.stream else self._whole)(exchange, call, stream, fault)
        finally:
            self.driver.withdraw(stream)

    def _plan(self, call: Call, record: Record) -> Plan:
        sequences = call.sequences(self._output_tokens)
        reasons = tuple(call.reason_at(index, sizes.output_tokens) for index, sizes in enumerate(sequences))
        started = partial(self.journal.move, record, State.STARTED)
        return Plan(sequences, reasons, started, call.script.hold_seconds)

    async def _stream(self, exchange: Exchange, call: Call, stream: Stream, fault: Fault | None) -> State:
        """Status and headers leave before the engine has seen the call, as in vLLM."""
        await exchange.start_stream()
        shape = StreamShape(call, int(time.time()))
        strike_at = None if fault is None else fault.strikes_after_events
        sent = 0
        token: Token | None = None
        while strike_at is None or sent < strike_at:
            token = await stream.next()
            for event in _events(shape, token):
                await exchange.write(event)
                sent += 1
                if sent == strike_at:
                    break
            if sent != strike_at and (token is None or shape.progress.finished):
                await exchange.end()
                return State.ABORTED if token is None else State.FINISHED
        assert fault is not None
        await self._strike(exchange, shape, fault)
        return State.FAILED

    async def _whole(self, exchange: Exchange, call: Call, stream: Stream, fault: Fault | None) -> State:
        progress = Progress(call)
        if fault is not None and fault.kind is not Kind.GZIP:
            await self._fail_whole(exchange, progress, fault)
            return State.FAILED
        while not progress.finished:
            token = await stream.next()
            if token is None:
                break
            progress.see(token)
        await exchange.json(200, openai.full_answer(progress, int(time.time())))
        return State.FINISHED if progress.finished else State.ABORTED

    # Scripted failures

    async def _fail_early(self, exchange: Exchange, fault: Fault) -> bool:
        """Faults before the headers; False when the call goes on."""
        if fault.kind is Kind.STATUS and fault.number is not None:
            await exchange.json(fault.number, error_body(fault.number))
        elif fault.kind is Kind.RESET_BEFORE_HEADERS:
            exchange.break_off(RESET)
        elif fault.silent:
            await self._hang(exchange)
        else:
            exchange.gzip = fault.kind is Kind.GZIP
            return False
        return True

    async def _strike(self, exchange: Exchange, shape: StreamShape, fault: Fault) -> None:
        """Faults within a stream, after the events that were to go before."""
        if fault.kind is Kind.CUT_AFTER_EVENTS:
            exchange.break_off(CUT)
        elif fault.kind in (Kind.RESET_AFTER_HEADERS, Kind.RESET_AFTER_EVENTS):
            exchange.break_off(RESET)
        elif fault.kind is Kind.HANG:
            await self._hang(exchange)
        else:
            for event in _last_events(shape, fault.kind):
                await exchange.write(event)
            await exchange.end()

    async def _fail_whole(self, exchange: Exchange, progress: Progress, fault: Fault) -> None:
        """The same faults where there are no events to count."""
        if fault.kind is Kind.GARBAGE:
            await exchange.answer(200, JSON, GARBAGE)
        elif fault.kind is Kind.ERROR_EVENT:
            await exchange.json(503, error_body(503))
        elif fault.kind in (Kind.DONE_ONLY, Kind.FINISH_ABORT):
            await exchange.json(200, openai.full_answer(progress, int(time.time())))
        else:
            await exchange.start_promising(JSON, length=1000)
            if fault.number:
                await exchange.write(b'{"id":"')
            if fault.kind is Kind.HANG:
                await self._hang(exchange)
            else:
                exchange.break_off(CUT if fault.kind is Kind.CUT_AFTER_EVENTS else RESET)

    async def _hang(self, exchange: Exchange) -> None:
        """Silence until the client leaves, which cancels this, or the server stops."""
        await self.driver.stopped.wait()
        exchange.break_off(RESET)

    # Everything else

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json(200, openai.models(self.config, int(time.time()), secrets.token_hex(8)))

    async def _healthy(self, exchange: Exchange) -> None:
        await exchange.answer(200, b"", b"")

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json(200, {"version": openai.VERSION})

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, METRICS_TYPE, self.driver.metrics.render())

    async def _tokenize(self, exchange: Exchange) -> None:
        body = parse_object(await exchange.body())
        if "prompt" not in body and "messages" not in body:
            raise missing(body, "prompt", "messages")
        check_model(body, self.config)
        ids = _ids(body)
        strings = bool(body.get("return_token_strs"))
        await exchange.json(200, openai.tokenized(ids, self.config, strings=strings))

    async def _detokenize(self, exchange: Exchange) -> None:
        body = parse_object(await exchange.body())
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise missing(body, "tokens")
        check_model(body, self.config)
        check_token_ids(ids)
        await exchange.json(200, {"prompt": tokenizer.decode(ids)})

    async def _add_faults(self, exchange: Exchange) -> None:
        body = parse_object(await exchange.body())
        count = body.get("count", 1)
        try:
            if type(count) is not int:
                raise ValueError(f"count must be an integer, got {count!r}")
            self.faults.add(parse_fault(body.get("fail")), count)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        await exchange.json(200, {"waiting": len(self.faults)})

    async def _log(self, exchange: Exchange) -> None:
        await exchange.json(200, self.journal.shown())

    async def _reset(self, exchange: Exchange) -> None:
        self.faults.clear()
        self.journal.clear()
        await exchange.json(200, {})


def error_body(status: int) -> dict[str, Any]:
    """The envelope of a scripted error, worded as vLLM does where it has that status."""
    message, kind = _ERRORS.get(status, (HTTPStatus(status).phrase, HTTPStatus(status).phrase))
    return Refusal(status, message, kind).body


def _events(shape: StreamShape, token: Token | None) -> Iterator[bytes]:
    """The events of a token, or of the engine's stop, and the closing ones when it was the last."""
    yield from shape.abort() if token is None else shape.token(token)
    if token is None or shape.progress.finished:
        yield from shape.close()


def _last_events(shape: StreamShape, kind: Kind) -> Iterator[bytes]:
    if kind is Kind.GARBAGE:
        yield GARBAGE
    elif kind is Kind.ERROR_EVENT:
        yield from (openai.error_frame(error_body(503)), openai.DONE)
    elif kind is Kind.FINISH_ABORT:
        yield from (*shape.abort(), *shape.close())
    else:
        yield openai.DONE


def _ids(body: dict[str, Any]) -> list[int]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return tokenizer.encode_chat(messages, body.get("tools"))
    raise validation_error([("string_type", "body.prompt", "Input should be a valid string", str(prompt))])
