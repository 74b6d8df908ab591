"""`kvgate verify` on a real store: no false alarm under traffic, planted corruptions found, and what it exits with."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.cli import main
from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.invariants import Rule
from gateway.ledger import verify as verifying
from gateway.ledger.records import config_arguments, decode_record
from gateway.ledger.scripts import fleet_keys, library
from gateway.ledger.verify import NotVerified, verify
from tests.conformance.books import pack_record
from tests.integration.ledger_world import Member, World, eventually, running_store, world

SMALL_PAGES = (3,)


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running_store() as store:
        yield str(store.socket)


def url(path: str) -> str:
    return f"unix://{path}"


# -- under traffic ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def traffic(w: World, clients: int = 12) -> AsyncIterator[None]:
    """Clients of two processes that reserve, wait, stream and give back without a pause."""
    members = [await w.join(), await w.join()]
    dice = random.Random(1)

    async def client(member: Member, key: str) -> None:
        while True:
            ask = member.open(dice.choice([1, 10, 40]), key=key, prefill=dice.choice([0, 600]))
            await ask.granted()
            ask.first_token()
            await asyncio.sleep(dice.choice([0, 0.001, 0.005]))
            ask.settle(None, None)

    tasks = [asyncio.create_task(client(members[i % 2], f"k{i % 5}")) for i in range(clients)]
    try:
        await eventually(lambda: int(w.store.hget(w.key("meta"), "arrivals") or 0) > 100)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for member in members:
            await member.ledger.close(5)


async def test_no_false_alarm_under_traffic(path: str) -> None:
    async with world(path, 100, 50) as w, traffic(w):
        before = arrivals(w)
        for _ in range(40):
            report = await verify(url(path), w.fleet)
            assert report.violations == ()
        assert arrivals(w) > before + 40, "there was traffic meanwhile"


async def test_pages_between_which_scripts_ran_are_not_judged(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under traffic pages of three entries seldom belong together; then nothing is said, and never a lie."""
    monkeypatch.setattr(verifying, "PAGE_SIZES", SMALL_PAGES)
    monkeypatch.setattr(verifying, "READS_MAX", 5)
    async with world(path, 400, 200, lease_ms=6000) as w:
        m = await w.join()
        held = [await m.reserve(1, key="held") for _ in range(200)]
        async with traffic(w):
            for _ in range(10):
                with contextlib.suppress(NotVerified):
                    assert (await verify(url(path), w.fleet)).violations == ()
        for ask in held:
            ask.settle(None, None)


async def test_a_corruption_is_found_under_traffic(path: str) -> None:
    async with world(path, 100, 50) as w:
        async with traffic(w):
            change(w, "keys", "key", "k1", calls=lambda n: n + 1)
            (violation,) = (await verify(url(path), w.fleet)).violations
        assert (violation.rule, violation.about) == (Rule.HOLDINGS, "key k1 calls")


def arrivals(w: World) -> int:
    return int(w.store.hget(w.key("meta"), "arrivals") or 0)


# -- planted corruptions ---------------------------------------------------------------------------------------------


def change(w: World, name: str, kind: str, field: str, **changes: Callable[[Any], Any]) -> None:
    """Rewrite a record: each change is a function of the old value."""
    row = decode_record(kind, w.store.hget(w.key(name), field))
    for column, new in changes.items():
        row[column] = new(row[column])
    w.store.hset(w.key(name), field, pack_record(kind, row))


def call_in(w: World, state: str) -> str:
    return min(id_ for id_, found in w.states().items() if found == state)


def without(w: World, name: str) -> None:
    """The index loses a member."""
    w.store.zremrangebyrank(w.key(name), 0, 0)


CORRUPTIONS: dict[str, tuple[Rule, Callable[[World], Any]]] = {
    "blocks leaked": (Rule.SUMS, lambda w: change(w, "replicas", "replica", "r0", used=lambda n: n + 7)),
    "blocks handed out twice": (Rule.SUMS, lambda w: change(w, "replicas", "replica", "r0", used=lambda n: n - 1)),
    "a prefill share never ended": (
        Rule.SUMS,
        lambda w: change(w, "replicas", "replica", "r0", prefill=lambda n: n + 600),
    ),
    "a key's holdings": (Rule.HOLDINGS, lambda w: change(w, "keys", "key", "k", calls=lambda n: n + 1)),
    "a record lost": (Rule.INDEX, lambda w: w.store.hdel(w.key("calls"), call_in(w, "reserved"))),
    "a record broken": (Rule.RECORD, lambda w: w.store.hset(w.key("calls"), call_in(w, "reserved"), b"\xc1")),
    "a call of two states": (
        Rule.STATE,
        lambda w: change(w, "calls", "call", call_in(w, "queued"), replica=lambda _: "r0"),
    ),
    "an owner without a lease": (Rule.OWNER, lambda w: w.store.delete(w.key("owners"))),
    "a digest": (
        Rule.DIGEST,
        lambda w: change(w, "sessions", "session", w.store.hkeys(w.key("sessions"))[0].decode(), sum=lambda n: n + 1),
    ),
    "a waiter out of the queue": (Rule.INDEX, lambda w: without(w, "queue")),
    "a flow out of the order": (Rule.INDEX, lambda w: without(w, "order")),
    "a ticket without deadline": (Rule.INDEX, lambda w: without(w, "deadlines")),
    "a call that no lease ends": (Rule.INDEX, lambda w: without(w, "owned")),
    "a grant nobody gave": (Rule.INDEX, lambda w: w.store.zadd(w.key("outbox"), {"o:00000000aa": 0})),
    "a flow parked for nothing": (
        Rule.PARKED,
        lambda w: change(w, "flows", "flow", "a:normal:waits", parked=lambda _: 1),
    ),
    "waiters miscounted": (Rule.WAITING, lambda w: change(w, "meta", "line", "line:a:normal", waiting=lambda n: n - 1)),
    "a hold for a call that runs": (
        Rule.HOLD,
        lambda w: change(w, "replicas", "replica", "r0", held_for=lambda _: call_in(w, "reserved")),
    ),
    "a blocked head that is gone": (
        Rule.BLOCKED,
        lambda w: change(w, "meta", "lane", "lane:a", blocked=lambda _: "00000000aa"),
    ),
    "a waiter nobody looks at": (
        Rule.DISPATCH,
        lambda w: change(w, "replicas", "replica", "r0", limit=lambda n: n + 1000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("corruption", CORRUPTIONS)
async def test_a_planted_corruption_is_found(path: str, corruption: str) -> None:
    """In books with a call that runs and one that waits; nobody mends or uses them meanwhile."""
    rule, corrupt = CORRUPTIONS[corruption]
    async with world(path, 100, lease_ms=600_000) as w:
        m = await w.join()
        asks = [await m.reserve(90, prefill=600), m.open(50, key="waits")]
        waiter = asyncio.create_task(asks[1].granted())
        await eventually(lambda: "queued" in w.states().values())
        assert (await verify(url(path), w.fleet)).violations == ()
        await m.stop()
        corrupt(w)
        found = {violation.rule for violation in (await verify(url(path), w.fleet)).violations}
        waiter.cancel()
        w.store.flushall()
    assert rule in found


async def test_what_one_read_alone_saw_is_not_reported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(path, 100) as w:
        await w.join()
        sound = w.store.hget(w.key("replicas"), "r0")
        change(w, "replicas", "replica", "r0", used=lambda n: n + 1)
        read, reads = verifying._read, []

        async def read_and_mend(*arguments: Any) -> Any:
            reads.append(await read(*arguments))
            w.store.hset(w.key("replicas"), "r0", sound)
            return reads[-1]

        monkeypatch.setattr(verifying, "_read", read_and_mend)
        assert (await verify(url(path), w.fleet)).violations == ()
        assert len(reads) >= 2


async def test_books_of_many_pages_are_read_whole(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "PAGE_SIZES", (50,))
    async with world(path, 2000, lease_ms=600_000) as w:
        m = await w.join()
        asks = [m.open(1, key=f"k{i % 300}") for i in range(1500)]
        await asyncio.gather(*(ask.granted() for ask in asks))
        await m.stop()
        report = await verify(url(path), w.fleet)
        assert (report.violations, report.held, report.waiting, report.replicas) == ((), 1500, 0, 1)
        change(w, "replicas", "replica", "r0", used=lambda n: n - 1)
        (violation,) = (await verify(url(path), w.fleet)).violations
        assert (violation.expected, violation.found) == (1500, 1499)
        w.store.flushall()


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(path: str) -> Iterator[tuple["redis.Redis[bytes]", tuple[str, ...]]]:
    """A configured fleet `demo` without calls: a client, and its keys."""
    client = redis.Redis(unix_socket_path=path, protocol=2)
    keys = fleet_keys("demo")
    config = FleetConfig(
        6000, 1000, 10, (("a", ("p",)),), (("normal", 0),), (ReplicaConfig("r0", "p", 10, 10, 5, 5),)
    )
    client.function_load(library().text, replace=True)
    configure = library().function("configure")
    client.fcall(configure, len(keys), *keys, "", "wake:", "fleet", *config_arguments(config))  # type: ignore[arg-type]
    yield client, keys
    client.flushall()
    client.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], list[str]]:
    """Status, and the lines of both outputs."""
    status = main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_books_that_hold(path: str, fleet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--store", url(path), "--fleet", "demo")
    assert (status, err) == (0, [])
    assert out == ["fleet demo: the books hold: 0 calls on 1 replicas, 0 waiting"]


def test_one_line_for_each_violation(path: str, fleet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client, keys = fleet
    row = decode_record("replica", client.hget(keys[1], "r0")) | {"used": 12, "sequences": 1}
    client.hset(keys[1], "r0", pack_record("replica", row))
    status, out, err = run(capsys, "--store", url(path), "--fleet", "demo")
    assert (status, err) == (1, [])
    sums = "a replica's figures are the sums of its calls"
    assert out == [
        f"fleet demo: replica r0 used: {sums}: expected 0, found 12",
        f"fleet demo: replica r0 sequences: {sums}: expected 0, found 1",
        "fleet demo: note: replica r0 holds 2 blocks above its limit",
    ]


def test_the_fleets_of_a_configuration(
    path: str, fleet: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvgate.yaml"
    config.write_text(json.dumps(document(url(path), "demo", "other")))
    assert run(capsys, "--config", config, "--fleet", "demo")[0] == 0
    status, out, err = run(capsys, "--config", config)
    assert (status, len(out), len(err)) == (2, 1, 1)
    assert "fleet other: the store does not know it" in err[0]
    status, _, err = run(capsys, "--config", config, "--fleet", "none")
    assert (status, "no fleet `none`" in err[0]) == (2, True)


def document(store: str, *fleets: str) -> dict[str, Any]:
    return {
        "store": {"url": store},
        "auth": {"required": False},
        "fleets": [
            {"model": name, "name": name, "pools": [{"name": "p", "replicas": [f"http://127.0.0.1:{port}"]}]}
            for port, name in enumerate(fleets, start=1)
        ],
    }


def test_an_embedded_store_is_reached_by_its_url_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvgate.yaml"
    config.write_text(json.dumps(document("embedded", "demo")))
    status, _, err = run(capsys, "--config", config)
    assert (status, "--store" in err[0]) == (2, True)


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("redis://u:s3cret@127.0.0.1:9/0", "does not answer"),
        ("unix:///nowhere/store.sock", "does not answer"),
        ("nonsense", "URL of the store"),
    ],
)
def test_a_store_that_cannot_be_reached(store: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--store", store, "--fleet", "demo")
    assert (status, out, len(err)) == (2, [], 1)
    assert words in err[0]
    assert "s3cret" not in err[0]


def test_another_layout_is_not_judged(path: str, fleet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client, keys = fleet
    client.hset(keys[0], "layout", 99)
    status, _, err = run(capsys, "--store", url(path), "--fleet", "demo")
    assert (status, "layout 99" in err[0]) == (2, True)


def test_a_store_needs_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--store", "redis://127.0.0.1:9")
    assert (status, "--fleet" in err[0]) == (2, True)


async def test_a_store_that_does_not_answer_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "PAGE_SECONDS", 0.1)
    server = await asyncio.start_unix_server(_read_only, tmp_path / "s")
    async with server, asyncio.timeout(30):
        with pytest.raises(NotVerified, match="does not answer"):
            await verify(url(str(tmp_path / "s")), "demo")


async def _read_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()
