"""Running one call: from its body to the last byte of its answer, whatever becomes of client, engine and script."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gateway.mock import anthropic, audio, calls, openai, pooling, responses
from gateway.mock.bodies import Refusal, parse_object
from gateway.mock.calls import Api, Call, Server
from gateway.mock.control import Control
from gateway.mock.driver import Driver
from gateway.mock.exchange import OCTETS, Exchange
from gateway.mock.failing import BACKLOG, BUSY, DEAD, error_body, fail_early, fail_stream, fail_whole
from gateway.mock.faults import Faults, Kind
from gateway.mock.journal import Journal, Record, State
from gateway.mock.options import Options
from gateway.mock.orca import load_header
from gateway.mock.progress import NO_EXTRAS, Extras, Progress
from gateway.mock.recall import Told, number_behind
from gateway.mock.stream import Busy, EngineDead, Plan, Stream
from gateway.mock.telling import Job, KeepAlive, Shape, Teller

STORED_MAX = 1000
Parse = Callable[[Mapping[str, Any], str, Server], Call]
GENERATING_PARSERS: Mapping[str, tuple[Api, Parse]] = {
    "/v1/chat/completions": (Api.CHAT, calls.parse_chat),
    "/v1/chat/completions/batch": (Api.CHAT, calls.parse_batch),
    "/v1/completions": (Api.TEXT, calls.parse_text),
    "/v1/messages": (Api.MESSAGES, anthropic.parse_messages),
    "/v1/responses": (Api.RESPONSES, responses.parse_responses),
}
_AUDIO_PARSERS: Mapping[str, tuple[Api, Parse]] = {
    "/v1/audio/transcriptions": (Api.AUDIO, audio.parse_audio),
    "/v1/audio/translations": (Api.AUDIO, audio.parse_audio),
}
_SCORES = (Api.SCORE, pooling.parse_score)
_RANKS = (Api.RERANK, pooling.parse_rerank)
_SCORING_PARSERS: Mapping[str, tuple[Api, Parse]] = {
    "/pooling": (Api.POOLING, pooling.parse_pooling),
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _RANKS,
    "/v1/rerank": _RANKS,
    "/v2/rerank": _RANKS,
}
_EMBEDDING_PARSERS: Mapping[str, tuple[Api, Parse]] = {
    "/v1/embeddings": (Api.EMBEDDING, pooling.parse_embedding)
}
_POOLING_PARSERS = {
    "embed": {**_EMBEDDING_PARSERS, **_SCORING_PARSERS},
    "classify": _SCORING_PARSERS,
}
_SHAPES: Mapping[Api, Callable[[Call, int], Shape]] = {
    Api.CHAT: openai.OpenAIStream,
    Api.TEXT: openai.OpenAIStream,
    Api.MESSAGES: anthropic.MessagesStream,
    Api.RESPONSES: responses.ResponsesStream,
    Api.AUDIO: audio.TranscriptionStream,
}
_WHOLE: Mapping[Api, Callable[[Progress, int, Extras], dict[str, Any]]] = {
    Api.CHAT: openai.full_answer,
    Api.TEXT: openai.full_answer,
    Api.MESSAGES: anthropic.message,
    Api.RESPONSES: responses.response,
    Api.AUDIO: audio.transcription,
    **dict.fromkeys((Api.EMBEDDING, Api.POOLING, Api.LABELS, Api.SCORE, Api.RERANK), pooling.answer),
}


def parsers(options: Options) -> Mapping[str, tuple[Api, Parse]]:
    """The routes of calls that a server of these options has."""
    if options.runner != "generate":
        return _POOLING_PARSERS[options.convert]
    return {**GENERATING_PARSERS, **_AUDIO_PARSERS} if options.listens else GENERATING_PARSERS


class Generation:
    """Runs the calls of one server."""

    def __init__(
        self,
        server: Server,
        driver: Driver,
        control: Control,
        faults: Faults,
        journal: Journal,
        now: Callable[[], int],
    ) -> None:
        """`now` is the Unix time in seconds that answers tell as their creation."""
        self._server = server
        self._parsers = parsers(server.options)
        self._driver = driver
        self._control = control
        self._faults = faults
        self._journal = journal
        self._now = now
        self._running: dict[str, set[Stream]] = {}
        self._background: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, Told] = {}
        """Of streamed responses in the background; the last ones come last."""
        self.open = 0
        """Calls that were received and have not ended."""

    async def answer(self, exchange: Exchange) -> None:
        """Answer a call of one of the routes in `parsers`."""
        await self._received(exchange, exchange.path, await exchange.body())

    async def invoke(self, exchange: Exchange) -> None:
        """SageMaker's one route for all: a chat where there are messages, else a completion."""
        raw = await exchange.body()
        exchange.check_json()
        chat = "messages" in parse_object(raw)
        await self._received(exchange, "/v1/chat/completions" if chat else "/v1/completions", raw)

    def abort(self, call_ids: Sequence[str]) -> None:
        """End calls by the ids of their answers, with finish_reason "abort"; unknown ids are ignored."""
        for call_id in call_ids:
            for stream in tuple(self._running.get(call_id, ())):
                self._driver.withdraw(stream)
                stream.stop()

    async def _received(self, exchange: Exchange, route: str, raw: bytes) -> None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers]
        record = Record(exchange.path, headers, raw)
        self._journal.receive(record)
        self.open += 1
        state: State | None = None
        try:
            state = await exchange.unless_left(self._answer(exchange, record, route, raw))
        finally:
            self.open -= 1
            self._journal.move(record, state or State.ABORTED)

    async def _answer(self, exchange: Exchange, record: Record, route: str, raw: bytes) -> State:
        api, parse = self._parsers[route]
        try:
            if api is Api.AUDIO:
                body = await audio.read_form(exchange, raw)
            else:
                exchange.check_json()
                body = parse_object(raw)
            call = parse(body, exchange.request_id or _own_id(body), self._server)
            rank = self._rank(exchange)
        except Refusal as refusal:
            return await self._refuse(exchange, api, refusal)
        record.id = call.id
        record.prompt_tokens = call.prompt_tokens
        fault = call.script.fault or self._faults.take()
        if fault is not None and await fail_early(exchange, fault, self._driver.stopped):
            return State.FAILED
        if self._driver.draining and api is not Api.TEXT:
            return await self._turn_away(exchange, call)
        job = Job(exchange, record, call, fault, rank)
        goes_on = api is Api.RESPONSES and call.body.get("background")
        return await (self._begin(job) if goes_on else self._run(job))

    def cancel(self, response_id: str) -> bool:
        """End a response in the background; False where there is none that goes on."""
        task = self._background.get(response_id)
        if task is None:
            return False
        self._server.stored[response_id].document["status"] = "cancelled"
        task.cancel()
        return True

    async def tell_again(self, exchange: Exchange, response_id: str) -> None:
        """The events of a response in the background.  Of any other vLLM breaks off an answer that has begun."""
        told = self._told.get(response_id)
        if told is None:
            await exchange.start_stream()
            return exchange.cut()
        await exchange.unless_left(told.tell(exchange, number_behind(exchange)))

    async def _begin(self, job: Job) -> State:
        """A response that goes on after its answer, or whoever leaves it."""
        call = job.call
        try:
            stream = self._driver.submit(self._plan(call, job.record), job.rank)
        except (Busy, EngineDead) as error:
            return await self._no_room(job, error, late=False)
        document = responses.queued(call, self._now())
        self._store(call, document)
        told = Told() if call.stream else None
        task = asyncio.create_task(
            self._go_on(job, stream) if told is None else self._note_down(job, stream, told)
        )
        self._background[call.id] = task
        task.add_done_callback(lambda _: self._background.pop(call.id))
        if told is None:
            await job.exchange.json(200, document)
        else:
            self._told[call.id] = told
            while len(self._told) > STORED_MAX:
                del self._told[next(iter(self._told))]
            await told.tell(job.exchange)
        return State.FINISHED

    async def _note_down(self, job: Job, stream: Stream, told: Told) -> None:
        """Where the engine dies nothing more is told, and the response stays as it was, as in vLLM."""
        shape = responses.ResponsesStream(job.call, self._now())
        job.record.counts = shape.progress.counts
        told.add(shape.begin())
        try:
            while not shape.progress.finished and (token := await stream.next()) is not None:
                told.add(shape.tokens([token, *stream.take()]))
            told.add(shape.abort())
            extras = self._extras(shape.progress, stream)
            self._store(job.call, shape.whole(extras))
            told.add(shape.close(extras), over=True)
        except EngineDead:
            pass
        finally:
            self._driver.withdraw(stream)
            self._note(job.record, stream)

    async def _go_on(self, job: Job, stream: Stream) -> None:
        progress = Progress(job.call)
        job.record.counts = progress.counts
        try:
            await _collect(progress, stream)
            self._store(job.call, self._body(progress, self._extras(progress, stream)))
        except EngineDead:
            self._server.stored[job.call.id].document["status"] = "failed"
        finally:
            self._driver.withdraw(stream)
            self._note(job.record, stream)

    async def _run(self, job: Job) -> State:
        late = job.call.stream and (job.call.script.late_busy or self._server.options.late_busy)
        if late:
            await job.exchange.start_stream()
        try:
            stream = self._driver.submit(self._plan(job.call, job.record), job.rank)
        except (Busy, EngineDead) as error:
            return await self._no_room(job, error, late=late)
        running = self._running.setdefault(job.call.id, set())
        running.add(stream)
        try:
            if job.call.stream:
                return await self._stream(job, stream, started=late)
            return await self._whole(job, stream)
        finally:
            self._driver.withdraw(stream)
            running.discard(stream)
            if not running:
                self._running.pop(job.call.id, None)
            self._note(job.record, stream)

    def _plan(self, call: Call, record: Record) -> Plan:
        sequences = call.sequences(self._server.options.output_tokens)
        return Plan(
            sequences=sequences,
            reasons=tuple(call.reason_at(index, one.output_tokens) for index, one in enumerate(sequences)),
            on_admitted=partial(self._journal.move, record, State.STARTED),
            hold_seconds=call.script.hold_seconds,
            priority=call.priority,
            choices=call.choices,
            limits=tuple(limit for limit in call.limits for _ in range(call.choices)),
        )

    def _rank(self, exchange: Exchange) -> int | None:
        """The rank of the header; what is no number is ignored, as vLLM does."""
        try:
            rank = int(exchange.header(b"x-data-parallel-rank"))
        except ValueError:
            return None
        if not 0 <= rank < self._driver.ranks:
            raise Refusal(400, f"data_parallel_rank {rank} is out of range [0, {self._driver.ranks}).")
        return rank

    # Streams

    async def _stream(self, job: Job, stream: Stream, *, started: bool) -> State:
        """Status and headers leave before the engine has seen the call, as in vLLM, also while it is paused."""
        shape = _SHAPES[job.call.api](job.call, self._now())
        job.record.counts = shape.progress.counts
        if not started:
            await job.exchange.start_stream()
        keep_alive = KeepAlive(job.exchange, self._server.options.sse_keep_alive_interval_seconds)
        teller = Teller(job, shape, stream, keep_alive, self._control)
        try:
            return await self._tell(teller)
        except EngineDead:
            await teller.say(shape.error(error_body(500)))
            await job.exchange.end()
            return State.FAILED
        finally:
            keep_alive.stop()

    async def _tell(self, teller: Teller) -> State:
        """All events of a stream.  Raises EngineDead."""
        shape, stream = teller.shape, teller.stream
        due = await teller.tell(shape.begin())
        while not due and not shape.progress.finished:
            token = await stream.next()
            if token is None:
                return await self._cut_short(teller)
            events = shape.tokens([token, *stream.take()])
            if teller.scripted:
                due = await teller.tell(events)
            elif events and not teller.push(events):
                await teller.job.exchange.drained()
        extras = self._extras(shape.progress, stream)
        if due or await teller.tell(shape.close(extras)):
            return await self._strike(teller)
        self._store(shape.progress.call, self._body(shape.progress, extras))
        await teller.job.exchange.end()
        return State.FINISHED

    async def _cut_short(self, teller: Teller) -> State:
        """The engine was stopped, or the call was."""
        self._count_turned_away(teller.shape.progress)
        if await teller.tell([*teller.shape.abort(), *teller.shape.close(NO_EXTRAS)]):
            return await self._strike(teller)
        await teller.job.exchange.end()
        return State.ABORTED

    async def _strike(self, teller: Teller) -> State:
        assert teller.job.fault is not None
        await fail_stream(teller, teller.job.fault, self._driver.stopped)
        return State.FAILED

    # Whole answers

    async def _whole(self, job: Job, stream: Stream) -> State:
        progress, fault = Progress(job.call), job.fault
        job.record.counts = progress.counts
        if fault is not None and fault.engine_wide:
            self._control.strike(fault)
        elif fault is not None and fault.kind is not Kind.GZIP:
            empty = partial(self._body, progress, NO_EXTRAS)
            await fail_whole(job.exchange, fault, self._driver.stopped, empty)
            return State.FAILED
        try:
            await _collect(progress, stream)
        except EngineDead as error:
            return await self._no_room(job, error, late=False)
        self._count_turned_away(progress)
        if pooling.answers_bytes(job.call):
            return await self._bytes(job)
        load = load_header(job.exchange.header(b"endpoint-load-metrics-format"), self._driver)
        extras = self._extras(progress, stream)
        body = self._body(progress, extras)
        self._store(job.call, body)
        await job.exchange.json(200, body, load)
        return State.FINISHED if progress.finished else State.ABORTED

    def _store(self, call: Call, body: dict[str, Any]) -> None:
        """vLLM keeps all of them; here the oldest make room."""
        kept = call.api is Api.RESPONSES and call.body.get("store", True)
        if self._server.options.responses_store and kept:
            stored = self._server.stored
            stored[call.id] = responses.stored(call.body, body, self._server)
            while len(stored) > STORED_MAX:
                del stored[next(iter(stored))]

    async def _bytes(self, job: Job) -> State:
        """Vectors as they are, one chunk each."""
        headers = pooling.metadata(job.call, self._now())
        await job.exchange.start_stream(OCTETS, headers)
        job.exchange.push(pooling.vectors(job.call))
        await job.exchange.end()
        return State.FINISHED

    def _body(self, progress: Progress, extras: Extras) -> dict[str, Any]:
        return _WHOLE[progress.call.api](progress, self._now(), extras)

    # Refusals

    async def _refuse(self, exchange: Exchange, api: Api, refusal: Refusal) -> State:
        body = anthropic.refusal_body(refusal) if api is Api.MESSAGES else refusal.body
        await exchange.json(refusal.status, body)
        return State.REFUSED

    async def _no_room(self, job: Job, error: Exception, *, late: bool) -> State:
        """The engine takes no call: its queue is full, or it is dead.  `late`: the headers have gone."""
        if isinstance(error, Busy):
            self._driver.metrics.rejected(error.reason)
            text = BACKLOG if error.reason == "tokens" else BUSY
            refusal, state = Refusal(503, text, "Service Unavailable"), State.REFUSED
        else:
            refusal, state = Refusal(500, DEAD, "InternalServerError"), State.FAILED
        if not late:
            await self._refuse(job.exchange, job.call.api, refusal)
            return state
        shape = _SHAPES[job.call.api](job.call, self._now())
        job.exchange.push(shape.error(refusal.body))
        await job.exchange.end()
        return state

    async def _turn_away(self, exchange: Exchange, call: Call) -> State:
        """What vLLM does to new chats while it drains: the threads that would tokenize them have ended."""
        if call.stream:
            exchange.reset()
            return State.REFUSED
        text = "cannot schedule new futures after shutdown"
        return await self._refuse(exchange, call.api, Refusal(500, text, "InternalServerError"))

    def _count_turned_away(self, progress: Progress) -> None:
        """vLLM counts completions that reach a draining engine as aborted."""
        if self._driver.draining and not progress.started:
            self._driver.metrics.abort_while_draining()

    def _note(self, record: Record, stream: Stream) -> None:
        record.cached_tokens = stream.cached_tokens
        record.preemptions = sum(track.preemptions for track in stream.tracks)
        if stream.first_token_at is not None:
            self._journal.note_first_token(record, stream.first_token_at - stream.arrived)

    def _extras(self, progress: Progress, stream: Stream) -> Extras:
        """Of several sequences vLLM tells what the cache had of the last one's prompt."""
        options, config = self._server.options, self._server.engine
        told = options.enable_prompt_tokens_details or progress.call.api is Api.RESPONSES
        metrics = _metrics(progress, stream) if options.enable_per_request_metrics else None
        if not told:
            return Extras(metrics=metrics)
        cached = stream.tracks[-1].cached_tokens
        prompt = stream.plan.sequences[-1].prompt_tokens
        full = prompt // config.block_size * config.block_size if config.enable_prefix_caching else 0
        return Extras(cached, metrics, full - cached)


async def _collect(progress: Progress, stream: Stream) -> None:
    """See all tokens of a call, or those before the engine was stopped.  Raises EngineDead."""
    while not progress.finished:
        token = await stream.next()
        if token is None:
            return
        for one in (token, *stream.take()):
            progress.see(one)


def _own_id(body: Mapping[str, Any]) -> str:
    """The `request_id` of the body, or a new one."""
    own = body.get("request_id")
    return own if isinstance(own, str) and own else secrets.token_hex(8)


def _metrics(progress: Progress, stream: Stream) -> dict[str, float | None]:
    """vLLM's figures of one request in milliseconds."""
    now = asyncio.get_running_loop().time()
    tokens = sum(progress.counts)
    admitted, first = stream.admitted_at or now, stream.first_token_at or now
    rest_ms = (now - first) * 1000
    whole_seconds = now - stream.arrived
    return {
        "time_to_first_token_ms": (first - stream.arrived) * 1000,
        "generation_time_ms": rest_ms,
        "queue_time_ms": (admitted - stream.arrived) * 1000,
        "mean_itl_ms": rest_ms / (tokens - 1) if tokens > 1 else None,
        "tokens_per_second": tokens / whole_seconds if whole_seconds > 0 else None,
    }
