"""Who is refused a place in the queue, for the wait that is predicted or for others, on both implementations and with a
given clock."""

from itertools import count

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.order import APPOINTMENT_MAX_MS, ASKED_BACK, DRAIN_WINDOW_MS
from tests.conformance.twin import Op, Twin

OWNER = "o0"
BLOCKS = 100
PAUSE_MS = 500


class Lane:
    """One replica of BLOCKS blocks, and a clock that the test moves."""

    def __init__(self, client: "redis.Redis[bytes]") -> None:
        replica = ReplicaConfig("r0", "p", BLOCKS, BLOCKS, 50, 1000)
        config = FleetConfig(6000, 1000, 100 * BLOCKS, (("a", ("p",)),), (("normal", 0),), (replica,))
        self.twin = Twin(client, config)
        self.now_ms = 1_000_000
        self._batches, self._ids = count(1), count(1)
        self.twin.hello(self.now_ms, OWNER)
        self.step(["Y"])
        for _ in range(4):
            self.wait(PAUSE_MS)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.step(["Y"])

    def step(self, *ops: Op) -> tuple[list[Op], list[str]]:
        """The results, and who was granted a place."""
        reply = self.twin.step(self.now_ms, OWNER, next(self._batches), ops)
        return reply[5], reply[6][::2]

    def admit(
        self,
        blocks: int,
        key: str,
        wait_ms: int = 60_000,
        requests_max: int = -1,
        cost: int = 1,
        queue_max: int = 50,
        standing: int = 0,
    ) -> Op:
        id_ = f"{next(self._ids):010x}"
        limits = [1, -1, requests_max, -1, queue_max, 25]
        return [
            "A",
            id_,
            key,
            "normal",
            "a",
            blocks,
            1,
            0,
            cost,
            wait_ms,
            *limits,
            [],
            [],
            [],
            "",
            "",
            standing,
        ]

    def ask(
        self, least: int, likely: int, key: str, wait_ms: int = 60_000, queue_max: int = 50, standing: int = 0
    ) -> Op:
        limits = [1, -1, -1, -1, queue_max, queue_max]
        return ["Q", least, likely, key, "normal", "a", 1, 1, wait_ms, *limits, standing]

    def fill(self, *waiting: Op) -> None:
        """The replica is full, and these wait."""
        results, _ = self.step(self.admit(BLOCKS, "first"), *waiting)
        assert [result[0] for result in results] == ["grant"] + ["ticket"] * len(waiting)

    def epoch_told(self) -> bool:
        reply = self.twin.step(self.now_ms, OWNER, next(self._batches), [])
        return bool(reply[0] == "epoch")

    def drain_slowly(self, blocks: int, key: str) -> None:
        """Calls come and go now and then, for longer than the drain is measured over."""
        for _ in range(3 * DRAIN_WINDOW_MS // (4 * PAUSE_MS)):
            call = self.admit(blocks, key)
            results, granted = self.step(call)
            assert results[0][0] == "grant" or call[1] in granted
            self.wait(2 * PAUSE_MS)
            self.step(["S", call[1], -1, -1, [], ""])
            self.wait(2 * PAUSE_MS)


@pytest.fixture
def lane(store_client: "redis.Redis[bytes]") -> Lane:
    return Lane(store_client)


def test_a_call_that_fits_now_is_not_refused_because_of_a_large_one_that_waits(lane: Lane) -> None:
    """Small calls pass a head that does not fit, so the queue is never empty, and the drain is what they need."""
    running, large = lane.admit(BLOCKS // 2, "k0"), lane.admit(BLOCKS // 2 + 10, "k1", wait_ms=3_600_000)
    lane.step(running, large)
    lane.drain_slowly(1, "k2")
    small = lane.admit(10, "k3", wait_ms=5000)
    results, granted = lane.step(small)
    assert results[0][0] == "ticket", results
    assert granted == [small[1]]


def test_calls_that_wait_for_their_own_keys_cap_do_not_tell_what_the_replicas_can_do(lane: Lane) -> None:
    """The replica has room, and what comes back of it is what one key of one request at a time needs."""
    first, *rest = (lane.admit(10, "k0", 3_600_000, requests_max=1) for _ in range(12))
    lane.step(first, *rest)
    lane.wait(DRAIN_WINDOW_MS // 2)
    for call in [first, *rest][:6]:
        lane.step(["S", call[1], -1, -1, [], ""])
        lane.wait(4 * PAUSE_MS)
    whole = lane.admit(BLOCKS, "k1", wait_ms=10_000)
    results, _ = lane.step(whole)
    assert results[0][0] == "ticket", results


def test_after_a_quiet_time_nobody_is_sent_away_for_as_long_as_little_was_asked_for(lane: Lane) -> None:
    """All blocks are held by a call of about 5 s, so 20 come back in a second, though hardly one did so far."""
    lane.drain_slowly(1, "k0")
    running, refused = (lane.admit(BLOCKS, key, cost=5 * BLOCKS, queue_max=0) for key in ("k1", "k2"))
    results, _ = lane.step(running, refused)
    assert results[0][0] == "grant"
    assert results[1][:2] == ["refused", "capacity_exceeded"]
    assert results[1][-1] == 10_000, "when it has come back, and as much again for this call"


def test_behind_a_closed_gate_nobody_is_refused_for_what_was_measured_before(lane: Lane) -> None:
    """Nothing is given back there, and nobody knows yet what is held."""
    calls = [lane.admit(BLOCKS, f"k{number % 2}", wait_ms=3_600_000) for number in range(10)]
    lane.step(*calls)
    for call in calls[:6]:
        lane.wait(4 * PAUSE_MS)
        lane.step(["S", call[1], -1, -1, [], ""])
    results, _ = lane.step(lane.admit(BLOCKS, "k0", wait_ms=1_000))
    assert results[0][:2] == ["refused", "predicted_wait"]
    lane.twin.restart_store()
    assert lane.epoch_told()
    results, _ = lane.step(lane.admit(BLOCKS, "k0", wait_ms=1_000))
    assert results[0][0] == "ticket"


def test_nobody_is_sent_away_for_longer_than_the_book_reaches(lane: Lane) -> None:
    """100 calls of all blocks, each of about 5 s."""
    lane.drain_slowly(1, "k0")
    running, *refused = (lane.admit(BLOCKS, "k1", cost=5 * BLOCKS, queue_max=0) for _ in range(101))
    lane.step(running)
    told = [lane.step(call)[0][0][-1] for call in refused]
    assert told == sorted(told)
    assert told[-1] == APPOINTMENT_MAX_MS


def test_a_tenth_of_the_places_is_kept_for_who_was_asked_to_come_back(lane: Lane) -> None:
    """Until the last of them is due; before anybody is asked, the whole queue is for all."""
    running, *waiting = (lane.admit(BLOCKS, f"k{number % 2}", queue_max=20) for number in range(21))
    results, _ = lane.step(running, *waiting)
    assert [result[0] for result in results] == ["grant"] + ["ticket"] * 20
    lane.wait(PAUSE_MS)
    lane.step(*(["S", call[1], -1, -1, [], ""] for call in (running, *waiting[-2:])))
    asked, *newcomers = (lane.admit(BLOCKS, "k0", queue_max=depth) for depth in (17, 20, 20))
    returning = lane.admit(BLOCKS, "k0", queue_max=20, standing=ASKED_BACK)
    results, _ = lane.step(asked, *newcomers, returning)
    assert [result[0] for result in results] == ["refused", "ticket", "refused", "ticket"]
    assert results[2][1:5] == ["queue_full", "depth_max", 18, 20]
    lane.wait(results[2][5])
    results, _ = lane.step(lane.admit(BLOCKS, "k0", queue_max=20))
    assert results[0][0] == "ticket"


def test_a_tenth_of_the_time_is_kept_for_who_was_asked_to_come_back(lane: Lane) -> None:
    calls = [lane.admit(BLOCKS, f"k{number % 2}", wait_ms=3_600_000) for number in range(10)]
    lane.step(*calls)
    for call in calls[:6]:
        lane.wait(4 * PAUSE_MS)
        lane.step(["S", call[1], -1, -1, [], ""])
    results, _ = lane.step(lane.admit(BLOCKS, "k0", wait_ms=1_000))
    assert results[0][:2] == ["refused", "predicted_wait"]
    wait_ms = results[0][3]
    newcomer, returning = (lane.admit(BLOCKS, "k0", wait_ms, standing=s) for s in (0, ASKED_BACK))
    results, _ = lane.step(newcomer, returning)
    assert results[0][:5] == ["refused", "predicted_wait", "wait_ms", wait_ms, wait_ms]
    assert results[1][0] == "ticket"


def test_a_question_is_refused_where_a_call_of_any_size_would_be(lane: Lane) -> None:
    lane.fill(lane.admit(10, "k0"), lane.admit(10, "k0"))
    sizes = [lane.admit(blocks, "k0", queue_max=2) for blocks in (1, 50, BLOCKS)]
    results, _ = lane.step(lane.ask(1, 50, "k0", queue_max=2), *sizes)
    assert {tuple(result[:5]) for result in results} == {("refused", "queue_full", "depth_max", 2, 2)}


def test_a_question_books_what_is_likely(lane: Lane) -> None:
    lane.drain_slowly(1, "k0")
    lane.fill(lane.admit(10, "k0"))
    small, large = (lane.step(lane.ask(1, likely, "k0", queue_max=1))[0][0] for likely in (1, 90))
    assert large[-1] > small[-1] > 0


def test_a_question_takes_no_place_from_anybody(lane: Lane) -> None:
    """Its key would have the least of it."""
    lane.fill(lane.admit(40, "k0"), lane.admit(40, "k0"))
    results, displaced = lane.step(lane.ask(1, 1, "k1", queue_max=2))
    assert (results, displaced) == ([["open"]], [])
    results, displaced = lane.step(lane.admit(1, "k1", queue_max=2))
    assert (results[0][0], len(displaced)) == ("ticket", 1)


def test_a_question_about_what_fits_now_is_open(lane: Lane) -> None:
    """Beside a large call that waits."""
    running, large = lane.admit(BLOCKS // 2, "k0"), lane.admit(BLOCKS, "k1")
    lane.step(running, large)
    results, _ = lane.step(lane.ask(1, BLOCKS, "k2", queue_max=1), lane.ask(60, BLOCKS, "k1", queue_max=1))
    assert [result[0] for result in results] == ["open", "refused"]


def test_a_question_is_refused_for_the_wait_of_the_smallest_call(lane: Lane) -> None:
    calls = [lane.admit(BLOCKS, f"k{number % 2}", wait_ms=3_600_000) for number in range(10)]
    lane.step(*calls)
    for call in calls[:6]:
        lane.wait(4 * PAUSE_MS)
        lane.step(["S", call[1], -1, -1, [], ""])
    results, _ = lane.step(lane.ask(1, BLOCKS, "k0", wait_ms=1_000))
    assert results[0][:3] == ["refused", "predicted_wait", "wait_ms"]
    patient_ms = results[0][3] * 10 // 9 + 2
    questions = [lane.ask(least, BLOCKS, "k0", patient_ms) for least in (1, BLOCKS)]
    results, _ = lane.step(*questions)
    assert [result[0] for result in results] == ["open", "refused"]
