"""Who is refused a place in the queue, for the wait that is predicted or for others, on both implementations and with a
given clock."""

from itertools import count

import pytest
import redis

from gateway.core.books import FleetConfig, ReplicaConfig
from gateway.core.order import (
    APPOINTMENT_MAX_MS,
    ASKED_BACK,
    DRAIN_WINDOW_MS,
    FORECAST_ENDS,
    FORECAST_MARGIN_PERCENT,
    FORECAST_PLAYED,
    FORECAST_WAITING,
    LOOKAHEAD,
)
from tests.conformance.twin import IN_FULL, Op, Twin

OWNER = "o0"
BLOCKS = 100
PAUSE_MS = 500


class Lane:
    """One replica of BLOCKS blocks, or more, and a clock that the test moves."""

    def __init__(
        self,
        client: "redis.Redis[bytes]",
        replicas: int = 1,
        overtake_blocks: int = 100 * BLOCKS,
        sequences_max: int = 50,
    ) -> None:
        each = tuple(
            ReplicaConfig(f"r{i}", "p", BLOCKS, BLOCKS, sequences_max, 1000) for i in range(replicas)
        )
        classes = (("high", 0), ("normal", 200))
        config = FleetConfig(6000, 1000, overtake_blocks, (("a", ("p",)),), classes, each)
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
        class_: str = "normal",
        blocks_max: int = -1,
        exclude: tuple[str, ...] = (),
        standing: int = 0,
    ) -> Op:
        id_ = f"{next(self._ids):010x}"
        limits = [1, blocks_max, requests_max, -1, queue_max, 25]
        return [
            "A",
            id_,
            key,
            class_,
            "a",
            blocks,
            1,
            0,
            cost,
            wait_ms,
            *limits,
            [],
            list(exclude),
            [],
            "",
            "",
            standing,
            *IN_FULL,
        ]

    def ask(
        self,
        least: int,
        likely: int,
        key: str,
        wait_ms: int = 60_000,
        queue_max: int = 50,
        key_max: int = 50,
        standing: int = 0,
        ahead: tuple[int, int] = (0, 0),
    ) -> Op:
        limits = [1, -1, -1, -1, queue_max, min(key_max, queue_max)]
        return ["Q", least, likely, key, "normal", "a", 1, 1, wait_ms, *limits, standing, *ahead, *IN_FULL]

    def fill(self, *waiting: Op) -> None:
        """The replica is full, and these wait."""
        results, _ = self.step(self.admit(BLOCKS, "first"), *waiting)
        assert [result[0] for result in results] == ["grant"] + ["ticket"] * len(waiting)

    def epoch_told(self) -> bool:
        reply = self.twin.step(self.now_ms, OWNER, next(self._batches), [])
        return bool(reply[0] == "epoch")

    def foresee(self, *ends: tuple[int, str, int], owner: str = OWNER) -> None:
        """The owner tells when its calls end: milliseconds from now, replica, blocks."""
        flat = [item for end in ends for item in end]
        self.twin.step(self.now_ms, owner, next(self._batches), [["H", 0, 0, flat]])

    def predicted_ms(self, *ops: Op) -> int:
        """Of the last of these, which gets a ticket."""
        results, _ = self.step(*ops)
        assert results[-1][0] == "ticket", results[-1]
        return int(results[-1][2])

    def drain_a_queue(self) -> None:
        """Of ten calls of all blocks six come and go, for longer than the drain is measured over; the rest wait."""
        calls = [self.admit(BLOCKS, f"k{number % 2}", wait_ms=3_600_000) for number in range(10)]
        self.step(*calls)
        for call in calls[:6]:
            self.wait(4 * PAUSE_MS)
            self.step(["S", call[1], -1, -1, [], ""])

    def drain_slowly(self, blocks: int, key: str) -> None:
        """Calls come and go now and then, for longer than the drain is measured over."""
        for _ in range(3 * DRAIN_WINDOW_MS // (4 * PAUSE_MS)):
            call = self.admit(blocks, key)
            results, granted = self.step(call)
            assert results[0][0] == "grant" or call[1] in granted
            self.wait(2 * PAUSE_MS)
            self.step(["S", call[1], -1, -1, [], ""])
            self.wait(2 * PAUSE_MS)


def with_margin(ms: int) -> int:
    return ms * (100 + FORECAST_MARGIN_PERCENT) // 100


@pytest.fixture
def lane(store_client: "redis.Redis[bytes]") -> Lane:
    return Lane(store_client)


def test_a_call_that_fits_now_is_not_refused_because_of_a_large_one_that_waits(lane: Lane) -> None:
    """Small calls pass a head that does not fit, so the queue is never empty, and the drain is what they need."""
    running, large = lane.admit(BLOCKS // 2, "k0"), lane.admit(BLOCKS // 2 + 10, "k1", wait_ms=3_600_000)
    lane.step(running, large)
    lane.drain_slowly(1, "k2")
    for ahead in (
        [],
        [lane.admit(BLOCKS, "k4", wait_ms=3_600_000)],
    ):  # for whom the script looks ahead, but once
        small = lane.admit(10, "k3", wait_ms=5000)
        results, granted = lane.step(*ahead, small)
        assert results[-1][0] == "ticket", results
        assert small[1] in granted


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
    lane.drain_a_queue()
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
    lane.drain_a_queue()
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


def test_a_question_comes_after_those_that_were_told_that_they_may_wait(lane: Lane) -> None:
    """Among all, and among those of its key."""
    lane.fill(lane.admit(10, "k0"))
    sizes = [(ahead, own) for ahead in (0, 3, 4) for own in (0, 2, 3) if own <= ahead]
    asked = [lane.ask(1, 50, "k0", queue_max=5, key_max=4, ahead=each) for each in sizes]
    told = {each: result[1:5] for each, result in zip(sizes, lane.step(*asked)[0], strict=True)}
    many, own = ["queue_full", "depth_max", 5, 5], ["queue_full", "key_share", 4, 4]
    assert told == {(0, 0): [], (3, 0): [], (3, 2): [], (3, 3): own, (4, 0): many, (4, 2): many, (4, 3): many}


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
    lane.drain_a_queue()
    results, _ = lane.step(lane.ask(1, BLOCKS, "k0", wait_ms=1_000))
    assert results[0][:3] == ["refused", "predicted_wait", "wait_ms"]
    patient_ms = results[0][3] * 10 // 9 + 2
    questions = [lane.ask(least, BLOCKS, "k0", patient_ms) for least in (1, BLOCKS)]
    results, _ = lane.step(*questions)
    assert [result[0] for result in results] == ["open", "refused"]


# -- foreseen by owners ----------------------------------------------------------------------------------------------


@pytest.fixture
def full(lane: Lane) -> Lane:
    """A replica on which ten calls of 10 blocks run, of one key each."""
    results, _ = lane.step(*(lane.admit(BLOCKS // 10, f"running{i}") for i in range(10)))
    assert {result[0] for result in results} == {"grant"}
    return lane


def test_a_call_starts_when_the_ends_ahead_have_made_room_for_it(full: Lane) -> None:
    """Nobody has waited for long enough to know the drain."""
    full.foresee((500, "r0", 10), (800, "r0", 10), (2000, "r0", 25))
    assert full.predicted_ms(full.admit(20, "k0")) == with_margin(800)
    assert full.predicted_ms(full.admit(20, "k1")) == with_margin(2000)
    assert full.predicted_ms(full.admit(20, "k2")) == -1


def test_room_on_two_replicas_is_no_room_for_one_call(store_client: "redis.Redis[bytes]") -> None:
    lane = Lane(store_client, replicas=2)
    lane.step(*(lane.admit(10, "running") for _ in range(20)))
    lane.foresee((500, "r0", 10), (700, "r1", 10), (900, "r9", 20), (2000, "r1", 10))
    assert lane.predicted_ms(lane.admit(20, "k0")) == with_margin(2000)


def test_an_end_makes_room_for_one_call_where_sequences_are_scarce(
    store_client: "redis.Redis[bytes]",
) -> None:
    lane = Lane(store_client, sequences_max=4)
    lane.step(*(lane.admit(10, "running") for _ in range(4)), lane.admit(10, "k0"))
    lane.foresee(*((1000 * i, "r0", 10) for i in range(1, 5)))
    assert lane.predicted_ms(lane.admit(10, "k1")) == with_margin(2000)
    assert lane.predicted_ms(lane.admit(10, "k2")) == with_margin(3000)


def test_who_fits_now_past_others_that_do_not_is_foreseen_not_to_wait(full: Lane) -> None:
    full.step(["S", f"{1:010x}", -1, -1, [], ""], full.admit(30, "k0"))
    full.foresee((500, "r0", 10))
    assert full.predicted_ms(full.admit(10, "k1")) == 0


def test_who_fits_now_behind_one_of_its_flow_that_does_not_waits(full: Lane) -> None:
    full.step(["S", f"{1:010x}", -1, -1, [], ""], full.admit(30, "k0"))
    full.foresee((500, "r0", 10), (900, "r0", 20))
    assert full.predicted_ms(full.admit(10, "k0")) == with_margin(900)


def test_nobody_goes_where_a_replica_is_held_for_another_as_long_as_that_waits(
    store_client: "redis.Redis[bytes]",
) -> None:
    lane = Lane(store_client, overtake_blocks=10)
    lane.step(*(lane.admit(10, "running") for _ in range(10)))
    large, small = lane.admit(30, "k0"), lane.admit(10, "k1")
    lane.step(large, small)
    _, granted = lane.step(["S", f"{1:010x}", -1, -1, [], ""])
    assert granted == [small[1]]
    assert lane.twin.books.replicas["r0"].held_for == large[1]
    lane.foresee((500, "r0", 10), (800, "r0", 20), (1200, "r0", 10))
    assert lane.predicted_ms(lane.admit(10, "k2")) == with_margin(1200)


def test_nobody_goes_where_it_may_not(store_client: "redis.Redis[bytes]") -> None:
    lane = Lane(store_client, replicas=2)
    lane.step(*(lane.admit(10, "running") for _ in range(20)))
    lane.foresee((500, "r0", 10), (700, "r1", 10))
    assert lane.predicted_ms(lane.admit(10, "k0", exclude=("r0",))) == with_margin(700)


def test_no_further_than_a_dispatch_looks(full: Lane) -> None:
    full.step(*(full.admit(50, f"k{i}") for i in range(LOOKAHEAD)))
    full.foresee((500, "r0", 10), (900, "r0", 40))
    assert full.predicted_ms(full.admit(10, "z")) == -1


def test_ends_that_should_have_been_are_not_counted_on(full: Lane) -> None:
    full.foresee((500, "r0", 10), (1500, "r0", 10))
    full.now_ms += 500
    assert full.predicted_ms(full.admit(10, "k0")) == with_margin(1000)


def test_all_owners_are_asked_and_who_told_only_its_next_ends_sets_the_horizon(full: Lane) -> None:
    full.twin.hello(full.now_ms, "o1")
    full.foresee(*((10 * i, "r0", 1) for i in range(1, FORECAST_ENDS + 1)), owner="o1")
    full.foresee((200, "r0", 9), (10 * FORECAST_ENDS + 1, "r0", 60))
    assert full.predicted_ms(full.admit(29, "k0")) == with_margin(200)
    assert full.predicted_ms(full.admit(60, "k1")) == -1, "by then others may end, of which nobody has told"


def test_the_ends_of_all_owners_go_by_their_time(full: Lane) -> None:
    full.twin.hello(full.now_ms, "o1")
    full.foresee((300, "r0", 5), (900, "r0", 5), owner="o1")
    full.foresee((500, "r0", 5), (600, "r0", 5))
    assert full.predicted_ms(full.admit(10, "k0")) == with_margin(500)


def test_nothing_is_foreseen_behind_a_closed_gate(full: Lane) -> None:
    full.foresee((5000, "r0", 10))
    full.twin.restart_store()
    assert full.epoch_told()
    assert full.predicted_ms(full.admit(10, "k0")) == -1


def test_a_fenced_owner_does_not_foresee(full: Lane) -> None:
    full.twin.hello(full.now_ms, "o1")
    full.foresee((9000, "r0", 10), owner="o1")
    for _ in range(4):
        full.wait(2000)
    assert full.predicted_ms(full.admit(10, "k0")) == -1


def test_an_owner_of_which_nothing_ends_says_so(full: Lane) -> None:
    full.foresee((500, "r0", 10))
    full.foresee()
    assert full.predicted_ms(full.admit(10, "k0")) == -1


def test_those_whose_time_is_over_before_their_turn_are_not_waited_for(full: Lane) -> None:
    full.step(full.admit(10, "k0", wait_ms=1000), full.admit(10, "k0", wait_ms=3000))
    full.foresee(*((ms, "r0", 10) for ms in (2000, 2500, 3000)))
    assert full.predicted_ms(full.admit(10, "k0")) == with_margin(2500)


def test_the_flows_take_turns_by_what_they_were_charged(full: Lane) -> None:
    """The second key's first call goes before the third of the first key."""
    full.step(*(full.admit(10, "k0", cost=1000) for _ in range(3)))
    full.foresee(*((1000 * i, "r0", 10) for i in range(1, 6)))
    assert full.predicted_ms(full.admit(10, "k1", cost=1500)) == with_margin(2000)
    assert full.predicted_ms(full.admit(10, "k1", cost=1500)) == with_margin(4000)


def test_who_was_charged_lately_enters_behind_the_others(lane: Lane) -> None:
    lane.step(lane.admit(BLOCKS, "k1", cost=5000))
    lane.step(*(lane.admit(10, "k0", cost=1000) for _ in range(2)))
    lane.foresee(*((1000 * i, "r0", 10) for i in range(1, 6)))
    assert lane.predicted_ms(lane.admit(10, "k1")) == with_margin(3000)


def test_what_a_flow_is_owed_pays_for_its_next_calls(lane: Lane) -> None:
    """A call of k0 took a hundredth of what it was charged, so its next ones cost nothing and go before one of k1."""
    large = lane.admit(BLOCKS - 10, "k0", cost=20_000)
    lane.step(large, lane.admit(10, "k1", cost=5000))
    lane.step(*(lane.admit(BLOCKS, key, cost=1000) for key in ("k1", "k1", "k0", "k0", "k0")))
    lane.step(["S", large[1], BLOCKS, 200, [], ""])
    lane.foresee((1000, "r0", 10), *((1000 * i, "r0", BLOCKS) for i in range(2, 9)))
    assert lane.predicted_ms(lane.admit(BLOCKS, "k1", cost=1000)) == with_margin(6000)


def test_a_small_call_passes_those_that_do_not_fit(full: Lane) -> None:
    full.step(full.admit(50, "k0"))
    full.foresee(*((1000 * i, "r0", 10) for i in range(1, 9)))
    assert full.predicted_ms(full.admit(10, "k1")) == with_margin(1000)


def test_a_lower_class_goes_before_its_turn_when_it_has_the_credit(full: Lane) -> None:
    """With a fifth of the blocks its call of 10 goes after 40 of the higher class."""
    full.step(*(full.admit(10, "k0", class_="high") for _ in range(12)), full.admit(10, "k1"))
    full.foresee(*((1000 * i, "r0", 10) for i in range(1, 15)))
    assert full.predicted_ms(full.admit(10, "k1")) == with_margin(10_000)


def test_who_waits_for_its_keys_cap_is_neither_foreseen_nor_waited_for(full: Lane) -> None:
    full.foresee((1000, "r0", 10), (2000, "r0", 30))
    assert full.predicted_ms(full.admit(10, "running0", blocks_max=15)) == -1, "the key is at its cap"
    assert full.predicted_ms(full.admit(5, "running0", blocks_max=15)) == -1, "the flow is parked"
    assert full.predicted_ms(full.admit(10, "running9")) == with_margin(1000)


def test_where_many_wait_the_average_is_told(full: Lane) -> None:
    full.step(*(full.admit(10, f"k{i % 2}") for i in range(FORECAST_WAITING - 1)))
    full.foresee((1000, "r0", BLOCKS), (2000, "r0", BLOCKS), (3000, "r0", BLOCKS), (4000, "r0", BLOCKS))
    assert full.predicted_ms(full.admit(10, "k2")) == with_margin(1000)
    assert full.predicted_ms(full.admit(10, "k3")) == -1


def test_one_script_plays_once_and_no_more_than_so_many_ends(full: Lane) -> None:
    full.twin.hello(full.now_ms, "o1")
    full.twin.hello(full.now_ms, "o2")
    for owner in ("o1", "o2", OWNER):
        full.foresee(*((100 * i, "r0", 1) for i in range(1, FORECAST_ENDS + 1)), owner=owner)
    waits_ms = [100 * (size // 3) for size in (FORECAST_PLAYED - 1, FORECAST_PLAYED + 2)]
    assert full.predicted_ms(full.admit(FORECAST_PLAYED - 1, "k0", wait_ms=waits_ms[0] * 2)) == with_margin(
        waits_ms[0]
    )
    full.step(["S", "000000000b", -1, -1, [], ""])
    assert full.predicted_ms(full.admit(FORECAST_PLAYED + 1, "k1")) == -1
    results, _ = full.step(full.admit(3, "k2"), full.admit(3, "k3"))
    assert [result[2] for result in results] == [with_margin(100), -1]


def test_who_is_foreseen_to_wait_in_vain_is_refused(full: Lane) -> None:
    """Like one of those ahead it would have left by then."""
    full.step(full.admit(10, "k0"), full.admit(10, "k0", wait_ms=3000))
    full.foresee((1000, "r0", 10), (5000, "r0", 10))
    results, _ = full.step(full.admit(10, "k1", wait_ms=4000))
    assert results[0][:4] == ["refused", "predicted_wait", "wait_ms", with_margin(5000)]
