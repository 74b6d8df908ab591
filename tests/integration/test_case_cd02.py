"""CD-02: a reply of the store that is lost together with its connection makes nothing count twice.

The way to the store swallows the reply to the admit of a call of 100 blocks, to the settle of one whose client left, or
to the settle of one that was answered, which also corrects what the call was charged.  The gateway sends the same batch
again, so the store carries the op out twice.  The quota here is what the key may hold, and the charge is the call's
block-seconds in the fair order.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.core.estimate import call_cost
from gateway.core.invariants import Snapshot
from gateway.core.order import TAG_SCALE
from tests.faults.proxy import StoreProxy, store_proxy
from tests.integration.watched_books import ADMIT, SETTLE, WatchedBooks, reserved, watched_books
from tests.processes import QUICK_STORE, GatewayProcess, World
from tests.wire import Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

PROMPT_TOKENS, OUTPUT_TOKENS = 400, 1201
BLOCKS = blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS)
CHARGE = TAG_SCALE * call_cost(BLOCKS, PROMPT_TOKENS, OUTPUT_TOKENS)
"""Paid at admission; at the settle it becomes that of the seconds in which the blocks were really held."""
SMALL_OUTPUT_TOKENS = 401
SMALL_BLOCKS = blocks_of(PROMPT_TOKENS, SMALL_OUTPUT_TOKENS)
SMALL_CHARGE = TAG_SCALE * call_cost(SMALL_BLOCKS, PROMPT_TOKENS, SMALL_OUTPUT_TOKENS)
FLOW, KEY = ("only", "normal", "key-0"), "key-0"
HEARTBEATS_SECONDS = 3 * QUICK_STORE["heartbeat_seconds"]
LOOK_SECONDS = 0.005
RUN_TOKENS = 150
"""3 s of the mock engine: it still runs when the books are read, on a busy machine, too."""


@dataclass
class Case:
    """A gateway whose way to the store loses replies, and the books."""

    gateway: GatewayProcess
    proxy: StoreProxy
    books: WatchedBooks
    after_loss: Snapshot | None = None
    """The books at the moment when the reply was lost, before the gateway could send anything again."""

    def lose_reply(self, op: bytes) -> None:
        """To the next batch with such an op."""
        self.proxy.swallow = op
        self.proxy.on_swallow = self._note_loss

    def _note_loss(self) -> None:
        self.after_loss = self.books.read()

    async def begin(self, prompt_tokens: int, max_tokens: int, **script: int) -> Wire:
        wire = await Wire.open(self.gateway.url)
        body = completion(prompt_tokens, max_tokens, stream=True, **script)
        await wire.send(post(self.gateway.key, body))
        status, _ = await wire.head()
        assert status == 200
        return wire

    async def whole(self) -> None:
        """What the gateway has for the store was answered, and heartbeats found nothing to mend."""
        await soon(lambda: self.proxy.swallowed == 1, "the reply was lost")
        await soon(self.gateway.is_ready, "the gateway is back at the store")
        await asyncio.sleep(HEARTBEATS_SECONDS)
        assert await asyncio.to_thread(self.gateway.metric, "kvgate_healed_total") == 0
        assert await asyncio.to_thread(self.gateway.metric, "kvgate_leases_expired_total") == 0


def held(books: Snapshot) -> tuple[int, int, int]:
    """Blocks on the replica, and blocks and calls of the key."""
    key = books.keys[KEY]
    return reserved(books), key.blocks, key.calls


@asynccontextmanager
async def case(world: World, **limits: int) -> AsyncIterator[Case]:
    mock = world.mock("--blocks", "1001", "--step-base-ms", "20")
    config, (key,) = world.config(
        [{"name": "only", "replicas": [mock.url]}], {"limits": limits}, store=QUICK_STORE
    )
    path = str(world.store.socket)
    async with store_proxy(path, tcp=True) as proxy:
        gateway = world.gateway(config, key, wait=False, KVGATE_STORE__URL=proxy.url)
        await asyncio.to_thread(gateway.wait_ready)
        try:
            async with watched_books(path, LOOK_SECONDS) as books:
                yield Case(gateway, proxy, books)
        finally:
            await asyncio.to_thread(gateway.stop)  # while the proxy still stands


LOSSES = {
    "reserve": (ADMIT, "answered"),
    "release": (SETTLE, "left"),
    "settle": (SETTLE, "answered"),
}


@pytest.mark.parametrize(("op", "ending"), LOSSES.values(), ids=LOSSES)
async def test_a_lost_reply(new_world: World, op: bytes, ending: str) -> None:
    """The key may hold one such call: anything held twice would be refused or seen, and the next call is served."""
    async with case(new_world, blocks_max=BLOCKS, requests_max=1) as c:
        c.lose_reply(op)
        wire = await c.begin(PROMPT_TOKENS, OUTPUT_TOKENS, output_tokens=RUN_TOKENS)
        running = c.books.read()
        (id_,) = running.calls
        assert held(running) == (BLOCKS, BLOCKS, 1)
        assert running.flows[FLOW].tag == CHARGE
        await end(wire, ending)
        await soon(c.gateway.is_quiet, "all is given back")
        await c.whole()
        assert held(c.books.read()) == (0, 0, 0)
        assert c.after_loss is not None
        assert reserved(c.after_loss) == (BLOCKS if op == ADMIT else 0)
        assert c.books.carried_out(op, id_) == 2
        assert c.books.carried_out(SETTLE if op == ADMIT else ADMIT, id_) == 1
        assert c.books.reserved == {0, BLOCKS}
        await assert_ends(c.gateway, completed=int(ending == "answered"), cancelled=int(ending == "left"))
        body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, output_tokens=2)
        assert (await ask(c.gateway.url, post(c.gateway.key, body))).status == 200


async def end(wire: Wire, ending: str) -> None:
    if ending == "left":
        wire.reset()
    else:
        assert (await wire.events())[-1] == b"data: [DONE]"


async def assert_ends(gateway: GatewayProcess, **outcomes: int) -> None:
    page = await asyncio.to_thread(gateway.metrics)
    for outcome, count in outcomes.items():
        lines = [
            line
            for line in page.splitlines()
            if line.startswith("kvgate_admission_requests_total{") and f'outcome="{outcome}"' in line
        ]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) == count, lines


@pytest.mark.parametrize("ending", ["answered", "left"])
async def test_releasing_twice_takes_nothing_from_a_live_call(new_world: World, ending: str) -> None:
    """Neither blocks nor, in the fair order, the correction of what was charged."""
    async with case(new_world) as c:
        stays = await c.begin(PROMPT_TOKENS, SMALL_OUTPUT_TOKENS)
        (stays_id,) = c.books.read().calls
        began = time.monotonic()
        wire = await c.begin(PROMPT_TOKENS, OUTPUT_TOKENS, output_tokens=RUN_TOKENS)
        both = c.books.read()
        (id_,) = both.calls.keys() - {stays_id}
        assert held(both) == (SMALL_BLOCKS + BLOCKS, SMALL_BLOCKS + BLOCKS, 2)
        assert both.flows[FLOW].tag == SMALL_CHARGE + CHARGE
        c.lose_reply(SETTLE + id_.encode())
        c.books.reserved.clear()
        await end(wire, ending)
        await soon(lambda: id_ not in c.books.read().calls, "it was given back")
        ran_seconds = time.monotonic() - began
        await c.whole()
        assert c.books.carried_out(SETTLE, id_) == 2
        left = c.books.read()
        assert list(left.calls) == [stays_id]
        assert held(left) == (SMALL_BLOCKS, SMALL_BLOCKS, 1)
        assert c.books.reserved <= {SMALL_BLOCKS + BLOCKS, SMALL_BLOCKS}
        block_seconds, rest = divmod(left.flows[FLOW].tag - SMALL_CHARGE, TAG_SCALE)
        assert rest == 0
        assert 0 < block_seconds <= math.ceil(BLOCKS * ran_seconds), "what it held, once"
        assert await stays.event(), "it still runs"
        stays.reset()
        await soon(c.gateway.is_quiet, "all is given back")
        assert held(c.books.read()) == (0, 0, 0)
