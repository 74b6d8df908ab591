"""What is learned of how much calls write, shared through a real store."""

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import NoReturn

import pytest
import redis

from gateway.core import lengths as core
from gateway.core.events import LengthSurprise
from gateway.core.learned import LearnedLengths, quantile
from gateway.core.lengths import Lengths, Surprise, Watched, merge
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.lengths import SharedLengths
from gateway.ledger.scripts import fleet_keys
from gateway.ledger.wire import StoreAway
from tests.integration.ledger_world import PATIENT_SECONDS, running_store

KEY = "{kvgate:f}:lengths"
KIND = "normal:demo"


@pytest.fixture(scope="module")
def shared_store() -> Iterator[EmbeddedStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(shared_store: EmbeddedStore) -> EmbeddedStore:
    data(shared_store).flushall()
    return shared_store


def data(store: EmbeddedStore) -> "redis.Redis[bytes]":
    return redis.Redis(unix_socket_path=str(store.socket), protocol=2)


class Process:
    """What one gateway knows."""

    def __init__(self, store: EmbeddedStore, fleet: str = "f") -> None:
        self.lengths = LearnedLengths()
        self.surprises: list[LengthSurprise] = []
        self.shared = SharedLengths(
            store.url, fleet, self.lengths, self.surprises.append, reply_seconds=PATIENT_SECONDS
        )

    def see(self, written: int, times: int, kind: str = KIND, of_itself: bool = True) -> None:
        for _ in range(times):
            news: dict[int, tuple[int, int]] = {}
            Watched().end(written, of_itself, news)
            self.lengths.observe(kind, news)

    @property
    def median(self) -> int | None:
        return quantile(self.lengths.of(KIND), 0.5)

    @property
    def known(self) -> Lengths:
        return self.lengths.of(KIND)


async def exchange(*processes: Process) -> None:
    for process in processes:
        await process.shared.exchange()
        process.shared.close()


async def test_others_know_it_and_who_starts_later(store: EmbeddedStore) -> None:
    first, second = Process(store), Process(store)
    first.see(200, 100)
    await exchange(first, second)
    later, of_another_fleet = Process(store), Process(store, "g")
    await exchange(later, of_another_fleet)
    assert first.known.entries == second.known.entries == later.known.entries
    assert later.known.seen == 100
    assert later.median == second.median is not None
    assert of_another_fleet.median is None


async def test_what_was_told_is_told_once(store: EmbeddedStore) -> None:
    first, second = Process(store), Process(store)
    first.see(200, 10)
    second.see(40, 10)
    for _ in range(3):
        await exchange(first, second)
    assert first.known.entries == second.known.entries
    assert first.known.seen == 20


async def test_a_store_that_lost_it_gets_it_back(store: EmbeddedStore) -> None:
    process, other = Process(store), Process(store)
    process.see(200, 100)
    await exchange(process)
    data(store).flushall()
    process.see(200, 1, kind="normal:another")
    await exchange(process, other)
    assert other.known.entries == process.known.entries
    assert other.known.seen == 100


async def test_while_the_store_is_away_it_goes_on_learning() -> None:
    with running_store() as own:
        process = Process(own)
        process.see(200, 50)
        await exchange(process)
        assert own.process is not None
        own.process.kill()
        own.process.wait()
        process.see(200, 25)
        await exchange(process)
        process.see(200, 25)
        assert process.known.seen == 100
        own.start()
        await exchange(process)
        later = Process(own)
        await exchange(later)
        assert later.known.seen == process.known.seen == 100


async def test_what_could_not_be_told_is_told_later(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, other = Process(store), Process(store)
    process.see(200, 50)
    await exchange(process)
    process.see(200, 50)

    def away(*_: object) -> NoReturn:
        raise StoreAway("away")

    with monkeypatch.context() as patch:
        patch.setattr(process.shared._connection, "evaluate", away)
        await exchange(process)
    await exchange(process, other)
    assert other.known.seen == process.known.seen == 100


async def test_old_calls_count_half(store: EmbeddedStore) -> None:
    process = Process(store)
    for _ in range(30):
        process.see(200, 100)
        await exchange(process)
    assert process.known.seen <= core.ENTRIES_MAX
    assert process.surprises == []


async def test_longer_calls_are_a_surprise_and_shorter_ones_are_none(store: EmbeddedStore) -> None:
    """The same calls in two processes: what they tell comes together in the store."""
    first, second = Process(store), Process(store)
    processes = (first, second)
    for process in processes:
        process.see(200, 200)
    await exchange(*processes)
    for process in processes:
        process.see(20, 200)
    await exchange(*processes)
    assert first.surprises == second.surprises == []
    seen = first.known.seen
    for _ in range(20):
        for process in processes:
            process.see(900, 2)
        await exchange(*processes)
        if first.surprises or second.surprises:
            break
    assert [*first.surprises, *second.surprises] == [LengthSurprise("f", "normal")]
    await exchange(first)
    assert first.known.seen < seen / 5


async def test_chance_is_no_surprise(store: EmbeddedStore) -> None:
    process, chance = Process(store), random.Random(7)
    for _ in range(60):
        for _ in range(50):
            process.see(min(int(chance.lognormvariate(5.7, 0.9)), 16_000), 1)
        await exchange(process)
    assert process.surprises == []
    assert process.median in range(200, 420)


async def test_what_is_not_ours_is_left_out(store: EmbeddedStore) -> None:
    rows = {"x": "1", "a:b": "1 2 3 4", "c:d": "1,2 3,4 0 0", b"\xff:y": "x", KIND: "nothing of ours"}
    data(store).hset(KEY, mapping=rows)  # type: ignore[arg-type]
    process = Process(store)
    process.see(200, 10)
    await exchange(process)
    assert process.known.seen == 10
    assert sorted(kind for kind in ("a:b", "c:d") if any(process.lengths.of(kind).entries)) == []


async def test_kinds_are_bounded(store: EmbeddedStore) -> None:
    process = Process(store)
    for number in range(300):
        process.see(100, 1, kind=process.lengths.kind("normal", f"model-{number}"))
    await exchange(process)
    assert data(store).hlen(KEY) <= 128
    assert sum(lengths.seen for _, _, lengths in process.lengths) == 300


@pytest.mark.parametrize("seed", range(6))
async def test_the_store_does_what_is_specified(store: EmbeddedStore, seed: int) -> None:
    chance, process = random.Random(seed), Process(store)
    known, surprise, surprises = Lengths(), Surprise(), 0
    for step in range(40):
        news: dict[int, tuple[int, int]] = {}
        for _ in range(chance.choice((1, 5, 200))):
            if step < 25:
                Watched().end(chance.randrange(50, 250), chance.random() < 0.8, news)
            else:  # nobody ends any more
                Watched().advance(chance.randrange(300, 900), news)
        process.lengths.observe(KIND, news)
        surprises += merge(known, surprise, news)
        await exchange(process)
        assert (process.known.entries, process.known.exits) == (known.entries, known.exits)
        assert len(process.surprises) == surprises
        alarm = data(store).hget(KEY, KIND).split()[2:]  # type: ignore[union-attr]
        assert [float(figure) for figure in alarm] == pytest.approx(
            [surprise.missing, surprise.variance], abs=1e-6
        )
    assert surprises > 0


def test_the_key_is_beside_those_of_the_books() -> None:
    keys = fleet_keys("f")
    assert KEY not in keys
    assert KEY.partition("}")[0] == keys[0].partition("}")[0]


def test_news_is_kept_until_it_is_told() -> None:
    lengths = LearnedLengths()
    news: Mapping[int, tuple[int, int]] = {0: (2, 0), 1: (2, 2)}
    lengths.observe(KIND, news)
    taken = lengths.take_news()
    assert taken == {KIND: news}
    assert not lengths.has_news
    lengths.observe(KIND, news)
    lengths.give_back(taken)
    assert lengths.take_news() == {KIND: {0: (4, 0), 1: (4, 4)}}


async def test_the_store_is_left_alone_until_it_is_wanted(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.ledger.lengths.NEWS_SECONDS", 0.01)
    first, second = Process(store), Process(store)
    first.see(200, 50)
    await exchange(first)
    wanted, asked = False, 0

    def is_wanted() -> bool:
        nonlocal asked
        asked += 1
        return wanted

    running = asyncio.create_task(second.shared.run(is_wanted))
    try:
        async with asyncio.timeout(PATIENT_SECONDS):
            while asked < 5:
                await asyncio.sleep(0.01)
            assert second.known.seen == 0
            wanted = True
            while second.known.seen != 50:
                await asyncio.sleep(0.01)
            second.see(200, 50)
            while first.known.seen != 100:
                await exchange(first)
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
