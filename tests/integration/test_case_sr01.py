"""SR-01: a gateway that is told to end, with 20 streams of 30 s, ten calls that wait and a grace period of 5 s.

Whatever ends it, the store has nothing of it in the moment in which its process is gone.
"""

import asyncio
import signal
import time
from collections.abc import Sequence

import pytest

from tests.faults.proxy import store_proxy
from tests.integration.test_shutdown import (
    assert_books_empty,
    assert_cut,
    assert_draining,
    is_ready,
    open_stream,
    send,
    wait_for_exit,
)
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World
from tests.wire import Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

STREAMS, WAITING = 20, 10
STEP_MS = 100
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 300
"""30 s of the engine's time."""
SHORT_TOKENS = 80
"""8 s: on a busy machine, too, they run until ten calls wait behind them."""
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
GRACE_SECONDS = 5.0
PATIENT_SECONDS = 25.0
"""A grace period that nobody sits out, and still shorter than a stream."""
EXIT_SECONDS = 10.0
"""After the grace period at most, on a machine that stands still for seconds; the streams would go on for longer."""
LATE_SECONDS = 0.4
"""Of a slow store's replies: longer than the process needs to end when it does not wait for them."""
AT_ONCE_SECONDS = GRACE_SECONDS - 1.0
"""Ten answers, on a machine that has other things to do: nobody waits for the grace period."""


class Scene:
    """The streams fill the engine, so that the other calls wait."""

    def __init__(self, world: World, store_url: str = "", grace_seconds: float = GRACE_SECONDS) -> None:
        """`store_url`: the gateway's way to the store, if not the straight one."""
        self.world = world
        self.grace_seconds = grace_seconds
        costs = ("--step-base-ms", str(STEP_MS), "--step-running-us", "0", "--step-prefill-us", "0")
        self.mock: Mock = world.mock("--blocks", str(STREAMS * BLOCKS + 1), *costs)
        pools = [{"name": "only", "replicas": [self.mock.url]}]
        config, (key,) = world.config(pools, server={"grace_seconds": grace_seconds}, store=QUICK_STORE)
        environ = {"KVGATE_STORE__URL": store_url} if store_url else {}
        self.gateway: GatewayProcess = world.gateway(config, key, wait=True, **environ)
        self.streams: Sequence[Wire] = ()
        self.waiting: Sequence[Wire] = ()
        self.told_at = 0.0

    async def begin(self, output_tokens: int = OUTPUT_TOKENS) -> None:
        body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, stream=True, output_tokens=output_tokens)
        self.streams = await asyncio.gather(*(open_stream(self.gateway, body) for _ in range(STREAMS)))
        bodies = (completion(PROMPT_TOKENS, OUTPUT_TOKENS, number % 2 == 0) for number in range(WAITING))
        self.waiting = await asyncio.gather(*(send(self.gateway, body) for body in bodies))
        await soon(self.is_full, "the engine is full and ten calls wait")

    def is_full(self) -> bool:
        state = self.gateway.state()
        found = (state["reserved"], state["leases"], state["queue"])
        return found == (STREAMS * BLOCKS, STREAMS, WAITING)

    def tell(self, sig: signal.Signals) -> None:
        self.told_at = self.told_at or time.monotonic()
        self.gateway.process.send_signal(sig)

    async def nobody_else_gets_in(self) -> None:
        """Who waits is sent away without waiting longer, and so are new calls and probes."""
        async with asyncio.timeout(AT_ONCE_SECONDS):
            for wire in self.waiting:
                assert_draining(await wire.answer())
            assert not await asyncio.to_thread(is_ready, self.gateway)
            new = completion(PROMPT_TOKENS, OUTPUT_TOKENS)
            assert_draining(await ask(self.gateway.url, post(self.gateway.key, new)))

    async def events_of_streams(self) -> list[list[bytes]]:
        return list(await asyncio.gather(*(wire.events() for wire in self.streams)))

    async def gone(self) -> float:
        """Seconds from the first signal to the end of the process; the first thing after it is a look at the books."""
        status = await wait_for_exit(self.gateway, self.grace_seconds + EXIT_SECONDS)
        seconds = time.monotonic() - self.told_at
        await assert_books_empty(self.world)
        assert status == 0
        return seconds

    async def engine_saw(self, ending: str) -> None:
        """All streams ended so there, and no call that waited ever arrived."""
        await soon(lambda: self.mock.log()[ending] == STREAMS, f"the engine saw them {ending}")
        assert self.mock.log()["received"] == STREAMS


async def test_streams_are_cut_after_the_grace_period(new_world: World) -> None:
    scene = Scene(new_world)
    await scene.begin()
    scene.tell(signal.SIGTERM)
    await scene.nobody_else_gets_in()
    for events in await scene.events_of_streams():
        assert_cut(events)
    assert time.monotonic() - scene.told_at >= GRACE_SECONDS
    assert await scene.gone() <= GRACE_SECONDS + EXIT_SECONDS
    await scene.engine_saw("aborted")


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_grace_period(new_world: World, sig: signal.Signals) -> None:
    scene = Scene(new_world, grace_seconds=PATIENT_SECONDS)
    await scene.begin()
    scene.tell(sig)
    await scene.nobody_else_gets_in()
    scene.tell(sig)
    for events in await scene.events_of_streams():
        assert_cut(events)
    assert await scene.gone() < PATIENT_SECONDS
    await scene.engine_saw("aborted")


async def test_streams_may_end_within_the_grace_period(new_world: World) -> None:
    """And their process does not sit the rest of it out."""
    scene = Scene(new_world, grace_seconds=PATIENT_SECONDS)
    await scene.begin(SHORT_TOKENS)
    scene.tell(signal.SIGTERM)
    await scene.nobody_else_gets_in()
    for events in await scene.events_of_streams():
        assert events[-1] == b"data: [DONE]"
        assert not any(b'"error"' in event for event in events)
        assert sum(b'"text":' in event for event in events) == SHORT_TOKENS
    assert await scene.gone() < PATIENT_SECONDS
    await scene.engine_saw("finished")


async def test_the_process_waits_for_a_slow_store(new_world: World) -> None:
    """What the last streams held is given back through a batch that cannot leave before the one before is answered."""
    async with store_proxy(str(new_world.store.socket), tcp=True) as proxy:
        scene = await asyncio.to_thread(Scene, new_world, proxy.url, PATIENT_SECONDS)
        await scene.begin()
        proxy.reply_seconds = LATE_SECONDS
        scene.tell(signal.SIGTERM)
        await scene.nobody_else_gets_in()
        scene.tell(signal.SIGTERM)
        for events in await scene.events_of_streams():
            assert_cut(events)
        assert await scene.gone() < PATIENT_SECONDS
        await scene.engine_saw("aborted")
