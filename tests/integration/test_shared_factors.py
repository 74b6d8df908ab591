"""What is learned of estimates, shared through a real store."""

from collections.abc import Iterator

import pytest
import redis

from gateway.core.content import Part
from gateway.core.factors import OBSERVED_MAX, OBSERVED_MIN, Factors
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.factors import SharedFactors
from gateway.ledger.scripts import fleet_keys
from tests.integration.ledger_world import PATIENT_SECONDS, running_store

PART = [Part("words-11/1", "words/1", 1000)]
KEY = "{kvgate:f}:factors"


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
        self.factors = Factors()
        self.shared = SharedFactors(store.url, fleet, self.factors, PATIENT_SECONDS)

    def see(self, ratio: float, times: int = OBSERVED_MIN) -> None:
        for _ in range(times):
            self.factors.observe(PART, round(1000 * ratio))

    @property
    def estimate(self) -> int:
        return self.factors.estimate(PART)


async def test_others_know_it_and_who_starts_later(store: EmbeddedStore) -> None:
    first, second = Process(store), Process(store)
    first.see(0.5)
    for process in (first, second):
        await process.shared.exchange()
    later, of_another_fleet = Process(store), Process(store, "g")
    for process in (later, of_another_fleet):
        await process.shared.exchange()
    assert first.estimate == second.estimate == later.estimate in range(500, 506)
    assert of_another_fleet.estimate == 1000


async def test_what_was_told_is_told_once(store: EmbeddedStore) -> None:
    process = Process(store)
    process.see(0.5)
    for _ in range(3):
        await process.shared.exchange()
    assert sum(map(int, data(store).hgetall(KEY).values())) == process.factors.total == 2 * OBSERVED_MIN


async def test_a_store_that_lost_it_gets_it_back(store: EmbeddedStore) -> None:
    process, other = Process(store), Process(store)
    process.see(0.5)
    await process.shared.exchange()
    data(store).flushall()
    process.see(0.5, times=1)
    await process.shared.exchange()
    await other.shared.exchange()
    assert other.estimate == process.estimate in range(500, 506)


async def test_while_the_store_is_away_it_goes_on_learning() -> None:
    with running_store() as own:
        process = Process(own)
        process.see(0.5)
        assert own.process is not None
        own.process.kill()
        own.process.wait()
        await process.shared.exchange()
        process.see(0.5)
        assert process.estimate in range(500, 506)
        own.start()
        await process.shared.exchange()
        assert sum(map(int, data(own).hgetall(KEY).values())) == 4 * OBSERVED_MIN


async def test_the_store_forgets_outliers_and_stays_small(store: EmbeddedStore) -> None:
    process = Process(store)
    process.see(4.0, times=1)
    for _ in range(3):
        process.see(1.0, times=OBSERVED_MAX // 2)
        await process.shared.exchange()
    kept = {field: int(count) for field, count in data(store).hgetall(KEY).items()}
    assert set(kept) == {b"words-11/1:0", b"words/1:0"}
    assert all(count <= OBSERVED_MAX for count in kept.values())
    assert process.estimate == 1000


async def test_what_is_not_ours_is_left_out(store: EmbeddedStore) -> None:
    data(store).hset(KEY, mapping={"x": "1", ":3": "1", "words/1:y": "1", "words/1:2": "-4", b"\xff:1": "2"})
    process = Process(store)
    process.see(0.5)
    await process.shared.exchange()
    assert process.estimate in range(500, 506)


def test_the_key_is_beside_those_of_the_books() -> None:
    keys = fleet_keys("f")
    assert KEY not in keys
    assert KEY.partition("}")[0] == keys[0].partition("}")[0]
