"""How calls end when their engine gets SIGTERM: a real one and the mock, both started for this.

A real engine then does one of three things, by chance: within 0.1 s it ends its calls with finish_reason "abort", it
ends them as if its core had crashed, or it ends only some or none, and the others hear nothing until they leave.
What it ends is compared with the mock's SIGTERM and with the mock's crash.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.processes import Mock
from tests.vllm.answers import Facts, differences, facts_of_events, facts_of_json
from tests.vllm.engine import MOCK_OPTIONS, MODEL, TEST_SECONDS, Vllm
from tests.vllm.environment import ready_place
from tests.vllm.load import IDS
from tests.wire import Wire, post, soon

pytestmark = pytest.mark.timeout(TEST_SECONDS)
RUNNING, BEHIND = "vllm:num_requests_running", "vllm:num_requests_waiting"
FILLERS = {"first": (3500, 500, True, 1), "second": (3500, 500, True, 1)}
CALLS = {
    "stream": (64, 3500, True, 1),
    "stream of two": (64, 3000, True, 2),
    "whole": (64, 3500, False, 1),
    "waiting stream": (3900, 100, True, 1),
}
"""Prompt tokens, output tokens, whether it streams, choices.  The last one waits: the fillers leave it no room."""
END_SECONDS = 5.0


def test_sigterm(tmp_path: Path) -> None:
    real = Vllm(ready_place(os.environ), tmp_path / "vllm.log")
    try:
        real.wait_ready()
        expected = asyncio.run(ends(real, lambda: real.process.send_signal(signal.SIGTERM)))
    finally:
        real.stop()
    stopped = of_mock(lambda mock: mock.process.send_signal(signal.SIGTERM))
    crashed = of_mock(crash)
    print(f"of {len(stopped)} calls the real engine ended {len(expected)}: {', '.join(expected)}")
    assert len(stopped) == len(crashed) == len(FILLERS) + len(CALLS)
    found = min((compare(expected, given) for given in (stopped, crashed)), key=len)
    assert not found, "\n" + "\n".join(found)


def crash(mock: Mock) -> None:
    answer = httpx.post(f"{mock.url}/mock/state", json={"state": "crash"}, trust_env=False)
    answer.raise_for_status()


def of_mock(stop: Callable[[Mock], None]) -> dict[str, Facts]:
    mock = Mock(*MOCK_OPTIONS)
    try:
        return asyncio.run(ends(mock, lambda: stop(mock)))
    finally:
        mock.stop()


def compare(expected: dict[str, Facts], given: dict[str, Facts]) -> list[str]:
    return [line for name, seen in expected.items() for line in differences(name, seen, given[name])]


async def ends(engine: Vllm | Mock, stop: Callable[[], None]) -> dict[str, Facts]:
    """How each call ended; one that got no end is missing."""
    chance = random.Random(2)
    wires = {name: await _begin(engine.url, call, chance) for name, call in FILLERS.items()}
    await soon(lambda: engine.metric(RUNNING) == len(wires), "the fillers run")
    wires |= {name: await _begin(engine.url, call, chance) for name, call in CALLS.items()}
    await soon(lambda: engine.metric(BEHIND) >= 1, "a call waits")
    for name, wire in wires.items():
        if name != "whole":
            assert (await wire.head())[0] == 200
        if name not in ("whole", "waiting stream"):
            assert await wire.event()
    stop()
    try:
        ended = await asyncio.gather(*(_end(wire, streams=name != "whole") for name, wire in wires.items()))
        return {name: seen for name, seen in zip(wires, ended, strict=True) if seen is not None}
    finally:
        for wire in wires.values():
            wire.reset()


async def _begin(url: str, call: tuple[int, int, bool, int], chance: random.Random) -> Wire:
    prompt_tokens, output_tokens, streams, choices = call
    body = {
        "model": MODEL,
        "prompt": chance.choices(IDS, k=prompt_tokens),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": streams,
        "n": choices,
    }
    wire = await Wire.open(url)
    await wire.send(post("none", body))
    return wire


async def _end(wire: Wire, *, streams: bool) -> Facts | None:
    """The last two events of a stream whose head was read, or a whole answer but for how far it had come."""
    try:
        async with asyncio.timeout(END_SECONDS):
            if streams:
                last = [event + b"\n\n" for event in (await wire.events())[-2:]]
                return facts_of_events(last, exact=True)
            answer = await wire.answer()
    except TimeoutError:
        return None
    seen = facts_of_json(answer.json(), exact=True)
    return {"status": str(answer.status)} | {path: seen[path] for path in seen if ".usage." not in path}
