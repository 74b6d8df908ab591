"""The experiment's traces, scaled to the tiny model, and clients who play them.

A real engine ends each answer at a length that nobody is told before: `min_tokens` keeps the end of the text away, and
`logit_bias` makes it the first token that is not kept away.  To kvgate neither says how long an answer will be.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.experiment import traces
from tests.corpus import KINDS
from tests.vllm.answers import parse
from tests.vllm.engine import MODEL, Vllm
from tests.vllm.load import IDS
from tests.vllm.mixed import CALL_SECONDS, CHAT, TEXT
from tests.wire import Wire, post

END_OF_TEXT = "2"
"""The id of `</s>`, as `logit_bias` names it."""
SURE = 100
"""The highest bias: beside it the logits of a random model are nothing."""
CHARACTERS_A_TOKEN = 8
"""Of English, more than the tiny model's tokenizer puts into one."""

Prompt = list[int] | str
Writer = Callable[[random.Random, int], Prompt]
"""A prompt of so many tokens."""


@dataclass(frozen=True)
class TracedCall:
    number: int
    path: str
    prompt: Prompt
    prompt_tokens: int | None
    """None: only the tokenizer knows."""
    output_tokens: int
    limit: int

    @property
    def finish_reason(self) -> str:
        return "stop" if self.output_tokens < self.limit else "length"

    @property
    def asks_for_usage(self) -> bool:
        """Every other client does."""
        return self.number % 2 == 0

    def body(self, salt: str) -> dict[str, Any]:
        """`salt` keeps apart in the engine's prefix cache who plays the same calls again."""
        prompt: dict[str, Any] = {"prompt": self.prompt}
        if self.path == CHAT:
            prompt = {"messages": [{"role": "user", "content": self.prompt}]}
        ending: dict[str, Any] = {"ignore_eos": True}
        if self.output_tokens < self.limit:
            ending = {"min_tokens": self.output_tokens - 1, "logit_bias": {END_OF_TEXT: SURE}}
        usage = {"stream_options": {"include_usage": True}} if self.asks_for_usage else {}
        fixed = {
            "model": MODEL,
            "temperature": 0,
            "stream": True,
            "max_tokens": self.limit,
            "cache_salt": salt,
        }
        return fixed | prompt | ending | usage


@dataclass(frozen=True)
class Trace:
    """One of the experiment's, with all its lengths divided by `part`."""

    sizes: traces.Sizes
    part: int
    path: str
    blocks: int
    """Of the engine that it is played on, with the null block."""
    context_tokens: int
    clients: int
    """More than the engine can serve at once."""
    events_tokens: int
    """That an event has, as the engine's `--stream-interval` says: with one a token two cores are busy with events, and
    how many calls run at once makes little difference."""

    @property
    def usable_blocks(self) -> int:
        return self.blocks - 1

    def calls(self, seed: int, count: int, model: Path) -> list[TracedCall]:
        chance, write = random.Random(seed), text_writer(model) if self.path == CHAT else ids
        return [self.call(number, chance, write) for number in range(count)]

    def call(self, number: int, chance: random.Random, write: Writer) -> TracedCall:
        prompt, output, limit = (max(size // self.part, 1) for size in self.sizes(chance))
        counted = None if self.path == CHAT else prompt
        return TracedCall(number, self.path, write(chance, prompt), counted, output, limit)


TRACES = {
    "generous": Trace(traces.generous, 4, TEXT, 256, 2048, 80, 4),
    "chat": Trace(traces.chat, 8, CHAT, 512, 4096, 90, 1),
}
"""Prompts of 50 to 100 tokens, answers of 75 to 175 and limits of 1,024; prompts with a median of 100 tokens, answers
with one of 40 and a p99 of 944, and limits of 256 to 2,048."""


def ids(chance: random.Random, tokens: int) -> list[int]:
    return chance.choices(IDS, k=tokens)


def text_writer(model: Path) -> Writer:
    """Writes English by the tokenizer of the model in that folder."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def write(chance: random.Random, tokens: int) -> str:
        text = KINDS["English"](chance, CHARACTERS_A_TOKEN * tokens)
        ends = tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: ends[min(tokens, len(ends)) - 1][1]]

    return write


# -- clients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """One answer."""

    text: str
    finish_reason: str
    usage: tuple[int, int] | None
    """Tokens of prompt and output; None where the client heard nothing of them."""
    ttft_seconds: float
    """From the request's last byte to the first event, the wait in the queue included."""


@dataclass(frozen=True)
class Turn:
    """Calls that were played, each client with its next one when one ended."""

    told: Mapping[int, Told]
    """By the calls' numbers."""
    began: float
    dry: float
    """In seconds since the epoch, when no call was left to begin with."""
    tokens: int
    """That the engine wrote until then."""
    preemptions: int
    """Until the last call had ended."""

    @property
    def seconds(self) -> float:
        return self.dry - self.began


async def play(
    engine: Vllm, url: str, key: str, calls: Sequence[TracedCall], clients: int, salt: str
) -> Turn:
    """`url`: of the engine or of a gateway before it.  Raises AssertionError for an answer that is not as asked for."""
    source, dry, told = iter(calls), asyncio.Event(), dict[int, Told]()

    async def client(calls: Iterator[TracedCall]) -> None:
        for call in calls:
            told[call.number] = await ask(url, post(key, call.body(salt), call.path, alone=True))
            judge(call, told[call.number])
        dry.set()

    before, began = await counted(engine), time.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(source))
        await dry.wait()
        tokens, until = (await counted(engine))[0] - before[0], time.time()
    return Turn(told, began, until, tokens, (await counted(engine))[1] - before[1])


async def counted(engine: Vllm) -> tuple[int, int]:
    """Tokens that it has written, and preemptions."""
    names = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
    tokens, preemptions = [round(await asyncio.to_thread(engine.metric, name)) for name in names]
    return tokens, preemptions


async def ask(url: str, request: bytes) -> Told:
    """One streamed answer to its end."""
    wire = await Wire.open(url)
    raw, first = bytearray(), 0.0
    try:
        await wire.send(request)
        sent = time.monotonic()
        async with asyncio.timeout(CALL_SECONDS):
            async for part in wire.raw():
                raw += part
                if not first and b"\ndata: " in raw:
                    first = time.monotonic()
    finally:
        wire.close()
        Wire.opened.remove(wire)
    answer = parse(bytes(raw))
    assert answer.status == 200, answer
    *events, done, rest = answer.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b""), answer.body[-400:]
    return read([json.loads(event.removeprefix(b"data: ")) for event in events], first - sent)


def read(frames: Sequence[Mapping[str, Any]], ttft_seconds: float) -> Told:
    usages = [frame["usage"] for frame in frames if frame.get("usage")]
    choices = [choice for frame in frames for choice in frame["choices"]]
    text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(usages) <= 1, "a client was told the tokens of its answer more than once"
    usage = (usages[0]["prompt_tokens"], usages[0]["completion_tokens"]) if usages else None
    return Told(text, ",".join(reasons), usage, ttft_seconds)


def judge(call: TracedCall, told: Told) -> None:
    """It ended where it was to, by itself where it was to, and its client heard of tokens if it had asked."""
    assert told.finish_reason == call.finish_reason, (call, told)
    assert (told.usage is not None) == call.asks_for_usage, (call, told)
    if told.usage is not None:
        assert told.usage[1] == call.output_tokens, (call, told)
        assert call.prompt_tokens in (None, told.usage[0]), (call, told)
