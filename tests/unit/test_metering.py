"""What one call comes to hold and teaches, as its tokens are reported."""

from typing import Any

from gateway.core.growth import Growth, Holding
from gateway.core.learned import LearnedLengths
from gateway.core.sse import Usage
from gateway.metering import Meter
from tests.unit.test_growth import LAW, demand

KIND = "normal:m"


class Held:
    """In the place of a reservation."""

    def __init__(self) -> None:
        self.grown: list[Holding] = []

    def grow(self, held: int, base: int, path: bytes, net: int = 0) -> None:
        self.grown.append(Holding(held, base, path, net))


class World:
    def __init__(self, output: int = 1000) -> None:
        self.held: Any = Held()
        self.lengths = LearnedLengths()
        self.unmetered = 0
        self.meter = Meter(Growth(demand(output=output), LAW), self.held, self.lengths, KIND, self._lost)

    def _lost(self) -> None:
        self.unmetered += 1

    def write(self, *written: int) -> None:
        for tokens in written:
            if tokens >= self.meter.due:
                self.meter.note(Usage(100, tokens))

    @property
    def counts(self) -> tuple[int, int]:
        """Calls that began, and that ended of themselves."""
        known = self.lengths.of(KIND)
        return known.entries[0] // 2, sum(known.exits) // 2


def test_ages_count_while_it_runs() -> None:
    world = World()
    world.write(0, 1, 15)
    assert world.lengths.of(KIND).entries[:3] == [2, 0, 0]
    world.write(16, 31, 40)
    assert world.lengths.of(KIND).entries[:4] == [2, 2, 2, 0]
    world.meter.end(Usage(100, 50), of_itself=True)
    assert world.lengths.of(KIND).entries[:5] == [2, 2, 2, 2, 0]
    assert world.lengths.of(KIND).exits[:4] == [0, 0, 0, 2]


def test_it_holds_all_when_it_is_out_of_sight_and_teaches_as_before() -> None:
    world = World()
    world.write(0, 1, 15)
    for _ in range(3):
        world.meter.lose_sight()
    world.write(16, 400)
    assert {holding.held for holding in world.held.grown} == {demand(output=1000).blocks}
    assert world.unmetered == 0
    world.meter.end(Usage(100, 410), of_itself=True)
    assert world.counts == (1, 1)


def test_it_grows_with_what_is_told() -> None:
    world = World()
    world.write(*range(200))
    assert [holding.held for holding in world.held.grown] == [14, 18, 21]


def test_only_what_is_due_is_looked_at() -> None:
    world = World()
    world.write(1)
    assert world.meter.due == 16
    world.write(300)
    assert world.meter.due == 320


def test_what_was_stopped_is_half_a_passage() -> None:
    world = World()
    world.write(1)
    world.meter.end(Usage(100, 20), of_itself=False)
    assert world.lengths.of(KIND).entries[:3] == [2, 1, 0]
    assert sum(world.lengths.of(KIND).exits) == 0


def test_what_never_began_teaches_nothing() -> None:
    world = World()
    world.meter.end(None, of_itself=False)
    assert not world.lengths.has_news


def test_an_engine_that_tells_nothing() -> None:
    world = World()
    world.meter.lose()
    world.meter.lose()
    world.write(1, 70, 500)
    world.meter.end(Usage(100, 500), of_itself=True)
    assert world.held.grown == [Holding(demand().blocks)]
    assert world.unmetered == 1
    assert not world.lengths.has_news


def test_one_that_stops_to_tell() -> None:
    world = World()
    world.write(20)
    world.meter.lose()
    world.meter.end(Usage(100, 500), of_itself=True)
    assert world.lengths.of(KIND).entries[:4] == [2, 1, 0, 0]
    assert world.counts == (1, 0)


def test_it_ends_once() -> None:
    world = World()
    world.write(20)
    for _ in range(2):
        world.meter.end(Usage(100, 25), of_itself=True)
    assert world.counts == (1, 1)
