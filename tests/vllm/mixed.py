"""Calls of every kind, each small beside an engine, by callers who call again and again until they are told to end."""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.corpus import KINDS as TEXTS
from tests.processes import GatewayProcess
from tests.vllm.answers import Answer, parse
from tests.vllm.engine import BLOCK_SIZE, MODEL
from tests.vllm.load import IDS
from tests.wire import Wire, post

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CALL_SECONDS = 600.0
"""That a call may take in all, its wait in the queue included: a machine with other work is that slow."""
LEAVE_SECONDS = 4.0
"""A client that does not wait for anything leaves within that time, in the queue or later."""
LOST_KEPT = 20
STOPS = ["e", "t", " "]
"""One of them comes within a few tokens of a random model."""
CHAT_TOKENS = 48
"""More than a template adds to a short chat."""


@dataclass(frozen=True)
class Call:
    kind: str
    path: str
    body: Mapping[str, Any]
    blocks: int
    """That it can hold at most."""
    prompt_tokens: int | None = None
    """As the engine has to count them; None = only the model's tokenizer knows."""
    output_tokens: int | None = None
    """None = it may end before its limit."""
    leave_after_events: int | None = None
    leave_after_seconds: float | None = None

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


class Mix:
    """Calls by seed, none of which can hold more than `blocks_max` blocks."""

    def __init__(self, seed: int, blocks_max: int, model: Path) -> None:
        """`model`: the folder of the served model, whose tokenizer says which texts are short enough."""
        self._chance = random.Random(seed)
        self._tokens_max = blocks_max * BLOCK_SIZE
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._makers = [maker for maker, weight in WEIGHTS.items() for _ in range(weight)]

    def next(self) -> Call:
        return self._chance.choice(self._makers)(self)

    def _ids(self, tokens: int) -> list[int]:
        """Random ones, which no prefix cache can match."""
        return self._chance.choices(IDS, k=tokens)

    def _text(self, kind: str, prompt: int, output: int, **more: Any) -> Call:
        """A completion of token ids; it runs to its limit."""
        body = _body(output, prompt=self._ids(prompt), **more)
        return Call(kind, TEXT, body, _blocks(prompt, output), prompt, output)

    def _short(self) -> tuple[int, int]:
        return self._chance.randint(8, 64), self._chance.randint(64, 256)

    def _long(self) -> tuple[int, int]:
        """A prompt that counts in the prefill budget, from 512 tokens on, or nearly so; and a short answer."""
        output = self._chance.randint(16, 64)
        return self._tokens_max - output - self._chance.randint(0, 96), output

    def short_stream(self) -> Call:
        return self._text("short stream", *self._short(), **USAGE)

    def short_whole(self) -> Call:
        return self._text("short whole", *self._short())

    def long_stream(self) -> Call:
        return self._text("long stream", *self._long(), **USAGE)

    def long_whole(self) -> Call:
        return self._text("long whole", *self._long())

    def chat_stream(self) -> Call:
        return self._chat("chat stream", stream=True)

    def chat_whole(self) -> Call:
        return self._chat("chat whole")

    def stopped(self) -> Call:
        """It ends long before its limit."""
        stream = self._chance.random() < 0.5
        return self._chat("stopped", ends_early=True, stream=stream, stop=STOPS)

    def choices(self) -> Call:
        """Two to four of one prompt."""
        count = self._chance.randint(2, 4)
        prompt = self._chance.randint(8, 64)
        output = self._chance.randint(16, self._tokens_max // count - prompt - BLOCK_SIZE)
        body = _body(output, prompt=self._ids(prompt), n=count, **self._chance.choice([{}, USAGE]))
        return Call("choices", TEXT, body, count * _blocks(prompt, output), prompt, count * output)

    def prompts(self) -> Call:
        """Two prompts, two choices of each."""
        sizes = [self._chance.randint(8, 64) for _ in range(2)]
        output = self._chance.randint(8, self._tokens_max // 4 - 64 - BLOCK_SIZE)
        body = _body(output, prompt=[self._ids(size) for size in sizes], n=2)
        blocks = 2 * sum(_blocks(size, output) for size in sizes)
        return Call("prompts", TEXT, body, blocks, sum(sizes), 4 * output)

    def leaves_a_stream(self) -> Call:
        prompt, output = self._chance.choice([self._short, self._long])()
        body = _body(output, prompt=self._ids(prompt), stream=True)
        events = self._chance.randint(1, output)
        return Call("leaves a stream", TEXT, body, _blocks(prompt, output), leave_after_events=events)

    def leaves(self) -> Call:
        """In the queue, before its answer began, or in the middle of it."""
        prompt, output = self._short()
        body = _body(output, prompt=self._ids(prompt), stream=self._chance.random() < 0.5)
        seconds = self._chance.uniform(0, LEAVE_SECONDS)
        return Call("leaves", TEXT, body, _blocks(prompt, output), leave_after_seconds=seconds)

    def _chat(self, kind: str, *, ends_early: bool = False, **more: Any) -> Call:
        """Text of any language; estimated where kvgate does not have the tokenizer."""
        output = self._chance.randint(16, 128)
        text = self._chat_text(self._tokens_max - output - CHAT_TOKENS)
        body = _body(output, messages=[{"role": "user", "content": text}], **more)
        tokens = len(self._tokenizer.encode(text, add_special_tokens=False).ids) + CHAT_TOKENS
        return Call(kind, CHAT, body, _blocks(tokens, output), None, None if ends_early else output)

    def _chat_text(self, tokens_max: int) -> str:
        """As much of a text as fits twice: what is estimated may be too much."""
        write = TEXTS[self._chance.choice(list(TEXTS))]
        text = write(self._chance, self._chance.randint(20, 1500))
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if len(encoded.ids) <= tokens_max // 2:
            return text
        _, end = encoded.offsets[tokens_max // 2]
        return text[:end]


USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
WEIGHTS: dict[Callable[[Mix], Call], int] = {
    Mix.short_stream: 22,
    Mix.short_whole: 10,
    Mix.long_stream: 16,
    Mix.long_whole: 10,
    Mix.chat_stream: 10,
    Mix.chat_whole: 6,
    Mix.stopped: 4,
    Mix.choices: 6,
    Mix.prompts: 4,
    Mix.leaves_a_stream: 8,
    Mix.leaves: 4,
}


def _body(output: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": output, "ignore_eos": True, **more}


def _blocks(prompt: int, output: int) -> int:
    """The last token's KV is never written."""
    return -(-(prompt + output - 1) // BLOCK_SIZE)


APART_SECONDS = 0.02
"""Between the first calls of two callers: of a crowd that comes at once not every prompt is counted exactly."""


class Callers:
    """As many calls under way as there are callers; what was wrong with an answer is in `lost`."""

    def __init__(self, gateway: GatewayProcess, mix: Mix, count: int, blocks_max: int) -> None:
        self.answered: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.lost: list[str] = []
        self._gateway = gateway
        self._mix = mix
        self._count = count
        self._blocks_max = blocks_max
        self._numbers = itertools.count()
        self._ending = False

    async def run(self) -> None:
        """Until `end` was called and every call that had begun has ended.  Raises what a caller raises."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._count):
                group.create_task(self._call_on())
                await asyncio.sleep(APART_SECONDS)

    def end(self) -> None:
        self._ending = True

    async def _call_on(self) -> None:
        while not self._ending:
            call, number = self._mix.next(), next(self._numbers)
            assert call.blocks <= self._blocks_max, call
            if answer := await self._one(call, number):
                self._judge(call, answer)
            else:
                self.left[call.kind] += 1

    async def _one(self, call: Call, number: int) -> Answer | None:
        """The whole answer; None = the client left, which every other time happens by RST."""
        wire = await Wire.open(self._gateway.url)
        raw = b""
        try:
            await wire.send(post(self._gateway.key, json.dumps(call.body).encode(), call.path, alone=True))
            async with asyncio.timeout(call.leave_after_seconds or CALL_SECONDS):
                async for part in wire.raw():
                    raw += part
                    if call.leave_after_events and raw.count(b"\ndata: ") >= call.leave_after_events:
                        break
        except TimeoutError:
            if not call.leave_after_seconds:
                self._lose(call, f"no end within {CALL_SECONDS:g} s of {len(raw)} bytes")
        else:
            if call.leave_after_events is None:
                return parse(raw)
        finally:
            (wire.reset if number % 2 else wire.close)()
            Wire.opened.remove(wire)
        return None

    def _judge(self, call: Call, answer: Answer) -> None:
        reserved = int(answer.header("x-kvgate-reserved-blocks") or 0)
        if answer.status != 200 or not 0 < reserved <= self._blocks_max:
            self._lose(call, f"{answer.status}, {reserved} blocks, {_end(answer)}")
        elif wrong := _wrong(call, answer):
            self._lose(call, wrong)
        else:
            self.answered[call.kind] += 1

    def _lose(self, call: Call, words: str) -> None:
        if len(self.lost) < LOST_KEPT:
            self.lost.append(f"{call.kind}: {words}")


def _wrong(call: Call, answer: Answer) -> str:
    """What is not as it was asked for; empty where all is."""
    if call.streams:
        *events, done, rest = answer.body.split(b"\n\n")
        if (done, rest) != (b"data: [DONE]", b""):
            return f"no end of a stream: {_end(answer)}"
        if b'data: {"error' in answer.body:
            return f"an error in a stream: {_end(answer)}"
        usage = _usage(events)
    else:
        usage = answer.json()["usage"]
    if usage is None:
        return ""
    counted = usage["prompt_tokens"], usage["completion_tokens"]
    asked = call.prompt_tokens or counted[0], call.output_tokens or counted[1]
    return "" if counted == asked else f"{counted} tokens instead of {asked}"


def _end(answer: Answer) -> str:
    return f"{len(answer.body)} bytes that end with {answer.body[-400:]!r}"


def _usage(events: Sequence[bytes]) -> Mapping[str, int] | None:
    """None where the client did not ask for it."""
    found: Mapping[str, int] | None = json.loads(events[-1].removeprefix(b"data: ")).get("usage")
    return found
