"""SR-02: a reload forgets nothing of what runs, and takes a file as a whole or not at all.

30 streams hold 2,700 of 3,000 blocks while the keys file and the configuration are changed under them.  That a change
counts within a second is for a clock that can be given: see `tests/unit/test_reload.py`.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.http.auth import new_key
from tests.processes import HANG_SECONDS, QUICK_STORE, GatewayProcess, World
from tests.wire import Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

STREAMS, EACH = 30, 90
HELD = STREAMS * EACH
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 16 * EACH - PROMPT_TOKENS
WHOLE = {"limit": 3000, "reserved": HELD, "debt": 0}


class Reloads:
    """One gateway under 30 streams that go on until they are told to end, and its files."""

    def __init__(self, world: World, replicas: str) -> None:
        """A letter is a replica; together they have 3,000 blocks."""
        blocks = 3000 // len(replicas) + 1
        self.mocks = [world.mock("--blocks", str(blocks), "--step-base-ms", "20") for _ in replicas]
        self.replicas = [
            {"name": name, "url": mock.url} for name, mock in zip(replicas, self.mocks, strict=True)
        ]
        self.config, (self.key,) = world.config(
            [{"name": "only", "replicas": self.replicas}], store=QUICK_STORE, queue={"depth_max": 0}
        )
        self.keys = Path(json.loads(self.config.read_text())["auth"]["keys_file"])
        self.gateway: GatewayProcess = world.gateway(self.config, self.key)
        self.wires: list[Wire] = []

    async def start_streams(self, **script: Any) -> None:
        body = completion(PROMPT_TOKENS, OUTPUT_TOKENS, stream=True, **script)
        assert blocks_of(PROMPT_TOKENS, OUTPUT_TOKENS) == EACH
        for _ in range(STREAMS):
            wire = await Wire.open(self.gateway.url)
            self.wires.append(wire)
            await wire.send(post(self.gateway.key, body))
            await wire.head()
        assert self.books() == WHOLE

    async def all_go_on(self) -> None:
        """Each stream brings events that were not there yet."""
        for wire in self.wires:
            for _ in range(3):
                assert (await wire.event() or b"").startswith(b'data: {"id"')

    def books(self) -> dict[str, int]:
        """Sums over the replicas."""
        replicas = self.replica_states().values()
        return {name: sum(replica[name] for replica in replicas) for name in WHOLE}

    def replica_states(self) -> dict[str, Any]:
        found: dict[str, Any] = self.gateway.state()["fleets"]["demo"]["pools"]["only"]["replicas"]
        return found

    def write(self, text: str) -> None:
        """As a careful operator does it: whole or not at all."""
        fresh = self.config.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.config)

    def change(self, **settings: Any) -> None:
        document = json.loads(self.config.read_text())
        document["fleets"][0].update(settings)
        self.write(json.dumps(document))

    def limit_blocks(self, total: int) -> None:
        limited = [{**replica, "num_gpu_blocks": total + 1} for replica in self.replicas]
        self.change(pools=[{"name": "only", "replicas": limited}])

    async def small_call(self, key: str | None = None) -> tuple[int, str | None]:
        answer = await ask(
            self.gateway.url, post(key or self.gateway.key, completion(PROMPT_TOKENS, 16, output_tokens=1))
        )
        return answer.status, None if answer.status == 200 else answer.code

    def failures(self) -> float:
        (line,) = [
            line
            for line in self.gateway.metrics().splitlines()
            if line.startswith('kvgate_reload_failures_total{file="config"}')
        ]
        return float(line.rsplit(" ", 1)[1])


@pytest.fixture
async def reloads(new_world: World) -> Reloads:
    here = Reloads(new_world, "a")
    await here.start_streams()
    return here


async def ended(reloads: Reloads) -> None:
    """What a reload left must be given back once, as ever."""
    await reloads.all_go_on()
    for wire in reloads.wires:
        wire.reset()
    await soon(reloads.gateway.is_quiet, "all was given back")


async def test_a_key_is_added(reloads: Reloads) -> None:
    secret, digest = new_key()
    assert await reloads.small_call(secret) == (401, "invalid_api_key")
    rows = json.loads(reloads.keys.read_text())
    reloads.keys.write_text(json.dumps([*rows, {"name": "new", "sha256": digest}]))
    async with asyncio.timeout(HANG_SECONDS):
        while (await reloads.small_call(secret))[0] != 200:
            pass
    await soon(lambda: reloads.books() == WHOLE, "the small call is gone")
    await ended(reloads)


async def test_the_budget_is_lowered_under_what_runs(reloads: Reloads) -> None:
    """Nothing is killed; nothing is admitted until less is held than may be; then calls go through again."""
    reloads.limit_blocks(2000)
    lowered = {"limit": 2000, "reserved": HELD, "debt": HELD - 2000}
    await soon(lambda: reloads.books() == lowered, "the limit counts")
    assert await reloads.small_call() == (429, "capacity_exceeded")
    await reloads.all_go_on()
    assert reloads.books() == lowered
    page = reloads.gateway.metrics()
    assert "-" not in "".join(line.rsplit(" ", 1)[1] for line in page.splitlines() if "_blocks{" in line)

    for wire in reloads.wires[:7]:
        wire.reset()
    del reloads.wires[:7]
    await soon(lambda: reloads.books()["reserved"] == HELD - 7 * EACH, "seven are given back")
    assert await reloads.small_call() == (429, "capacity_exceeded"), "2,070 are held"
    reloads.wires.pop().reset()
    await soon(lambda: reloads.books()["reserved"] == HELD - 8 * EACH, "one more")
    assert (await reloads.small_call())[0] == 200
    await ended(reloads)


async def test_a_replica_is_removed_and_added_again(new_world: World) -> None:
    """Its streams finish, no new one is placed there; once empty it is gone from the books."""
    reloads = Reloads(new_world, "ab")
    await reloads.start_streams(output_tokens=1000)
    before = {name: replica["reserved"] for name, replica in reloads.replica_states().items()}
    reloads.change(pools=[{"name": "only", "replicas": reloads.replicas[:1]}])
    await soon(
        lambda: reloads.replica_states()["b"]["state"] == "removed",
        "it is on its way out",
    )
    assert {name: replica["reserved"] for name, replica in reloads.replica_states().items()} == before
    await reloads.all_go_on()
    reloads.mocks[1].reset()
    for _ in range(5):
        assert (await reloads.small_call())[0] == 200
    assert reloads.mocks[1].log()["received"] == 0
    for mock in reloads.mocks:
        mock.slow(0.2)
    while reloads.wires:
        assert (await reloads.wires.pop().events())[-1] == b"data: [DONE]"
    await soon(lambda: list(reloads.replica_states()) == ["a"], "the empty one is forgotten")
    reloads.change(pools=[{"name": "only", "replicas": reloads.replicas}])
    await soon(
        lambda: reloads.replica_states().get("b", {}).get("state") == "up",
        "it is back",
    )
    await ended(reloads)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fleets: [{model: demo", "not YAML"),
        (None, "fleets[0].safe_fraction"),
    ],
    ids=["broken syntax", "impossible value"],
)
async def test_a_file_that_is_wrong_is_left_out_as_a_whole(
    reloads: Reloads, text: str | None, words: str
) -> None:
    good = reloads.config.read_text()
    document = json.loads(good)
    document["fleets"][0] |= {"safe_fraction": 2.0, "aliases": ["another"]}
    reloads.write(text or json.dumps(document))
    await soon(lambda: reloads.failures() == 1, "the failure is counted")
    assert words in reloads.gateway.log.read_text()
    assert reloads.books() == WHOLE
    body = {**completion(PROMPT_TOKENS, 16, output_tokens=1), "model": "another"}
    assert (await ask(reloads.gateway.url, post(reloads.gateway.key, body))).status == 404
    assert (await reloads.small_call())[0] == 200
    reloads.write(good)
    await ended(reloads)
    assert reloads.failures() == 1


async def test_of_two_reloads_in_a_moment_the_last_one_counts(reloads: Reloads) -> None:
    reloads.limit_blocks(2000)
    await asyncio.sleep(0.01)
    reloads.limit_blocks(2800)
    await soon(lambda: reloads.books()["limit"] == 2800, "the last one counts")
    assert reloads.books() == {"limit": 2800, "reserved": HELD, "debt": 0}
    assert (await reloads.small_call())[0] == 200
    await ended(reloads)
