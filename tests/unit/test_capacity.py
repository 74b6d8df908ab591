"""The closed loop: what signals move which budget, by how much, and how often."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.capacity import (
    FLOOR_PERCENT,
    PREFILL_FLOOR,
    QUIET_MS,
    SEQUENCES_FLOOR,
    SETTLING_MS,
    STRANGERS_MS,
    Budgets,
    Learned,
    Reading,
    Rules,
    is_another,
    is_young,
    learn,
)

SCRAPE_MS = 2_000
CONFIGURED = Budgets(blocks=950, sequences=256, prefill=16_384)
ENGINE = Reading(
    num_gpu_blocks=1001, kv_use=0.0, preemptions=0, running=0, waiting=0, tokens=0, started_at=100.0
)
NOTHING = Budgets(0, 0, 0)
RULES = Rules(slow_start_ms=30_000)


@dataclass
class Replica:
    """One engine under observation: what it says, what the ledger holds there, and the clock."""

    engine: Reading = ENGINE
    held: Budgets = NOTHING
    learned: Learned | None = None
    clock: int = 1_000_000
    configured: Budgets = CONFIGURED
    cold: bool = False
    seen: list[Learned] = field(default_factory=list)

    def scrape(self, **says: Any) -> Budgets:
        """After the next interval; what is said stays so."""
        self.clock += SCRAPE_MS
        self.engine = msgspec.structs.replace(self.engine, **says)
        self.learned = learn(
            self.learned, self.clock, self.configured, self.held, self.engine, RULES, self.cold
        )
        self.seen.append(self.learned)
        return self.budgets

    def hold(self, **held: int) -> None:
        self.held = msgspec.structs.replace(self.held, **held)

    def pass_ms(self, milliseconds: int) -> None:
        self.clock += milliseconds - SCRAPE_MS

    @property
    def budgets(self) -> Budgets:
        assert self.learned is not None
        return self.learned.budgets(self.configured)


@pytest.fixture
def replica() -> Replica:
    found = Replica()
    assert found.scrape() == CONFIGURED
    return found


# -- strangers -------------------------------------------------------------------------------------------------------


def test_kv_use_above_what_the_ledger_holds_is_subtracted(replica: Replica) -> None:
    replica.hold(blocks=300)
    replica.scrape(kv_use=0.5)
    assert replica.scrape().blocks == 950 - 200


def test_a_difference_of_one_reading_is_a_call_that_just_ended(replica: Replica) -> None:
    replica.hold(blocks=300)
    replica.scrape(kv_use=0.5)
    assert replica.scrape(kv_use=0.3) == CONFIGURED
    assert replica.scrape(kv_use=0.5) == CONFIGURED


def test_of_strangers_the_most_in_half_a_minute_counts(replica: Replica) -> None:
    replica.scrape(kv_use=0.4)
    assert replica.scrape().blocks == 550
    assert replica.scrape(kv_use=0.1).blocks == 550
    for _ in range(STRANGERS_MS // SCRAPE_MS):
        replica.scrape()
    assert replica.budgets.blocks == 850
    replica.scrape(kv_use=0.0)
    replica.pass_ms(STRANGERS_MS)
    assert replica.scrape() == CONFIGURED


def test_the_null_block_is_in_nobodys_use(replica: Replica) -> None:
    """An engine whose 1,000 usable blocks are all in use says 1.0."""
    replica.hold(blocks=1000)
    for _ in range(3):
        assert replica.scrape(kv_use=1.0) == CONFIGURED


def test_what_is_not_exported_says_nothing(replica: Replica) -> None:
    unseen = dict.fromkeys(("kv_use", "preemptions", "running", "waiting"))
    for _ in range(3):
        assert replica.scrape(**unseen) == CONFIGURED


# -- preemptions -----------------------------------------------------------------------------------------------------


def test_a_preemption_cuts_to_95_percent_of_what_is_held(replica: Replica) -> None:
    replica.hold(blocks=900)
    assert replica.scrape(preemptions=3) == Budgets(855, 256, 16_384)


def test_a_cut_has_to_settle_before_the_next(replica: Replica) -> None:
    """A limit bites only as calls end: cutting at each reading would swing."""
    replica.hold(blocks=900)
    replica.scrape(preemptions=1)
    for count in range(2, 20):
        assert replica.scrape(preemptions=count).blocks == 855, "what is held is above the limit still"
    replica.hold(blocks=855)
    assert replica.scrape(preemptions=20).blocks == 812


def test_ten_seconds_at_least_are_between_two_cuts(replica: Replica) -> None:
    replica.hold(blocks=900)
    replica.scrape(preemptions=1)
    replica.hold(blocks=800)
    for count in range(2, 1 + SETTLING_MS // SCRAPE_MS):
        assert replica.scrape(preemptions=count).blocks == 855
    assert replica.scrape(preemptions=50).blocks == 760


def test_preemptions_never_cut_below_half(replica: Replica) -> None:
    for count in range(1, 60):
        replica.hold(blocks=replica.budgets.blocks)
        replica.pass_ms(SETTLING_MS)
        replica.scrape(preemptions=count)
    assert replica.budgets.blocks == 475


def test_strangers_are_not_subtracted_twice_by_a_cut(replica: Replica) -> None:
    replica.hold(blocks=600)
    replica.scrape(kv_use=0.8)
    replica.scrape()
    assert replica.budgets.blocks == 750
    assert replica.scrape(preemptions=1).blocks == 570


def test_a_limit_finds_what_an_engine_can_take_and_does_not_swing(replica: Replica) -> None:
    """An engine that preempts above 800 blocks, under a load that takes whatever there is; calls end slowly."""
    used, preemptions = 950, 0
    limits = []
    for _ in range(1800):  # an hour
        used = max(min(replica.budgets.blocks, used + 40), used - 20)
        preemptions += used > 800
        replica.hold(blocks=used)
        replica.scrape(preemptions=preemptions)
        limits.append(replica.budgets.blocks)
    settled = limits[60:]
    assert min(settled) >= 755
    assert max(settled) <= 801
    assert preemptions < 120


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_waiting_while_kv_is_free_lowers_prefill_by_a_tenth(replica: Replica) -> None:
    """24 prompts of 8k: blocks are free, prefill is what they wait for."""
    replica.hold(blocks=700, sequences=24, prefill=16_000)
    assert replica.scrape(kv_use=0.6, waiting=22, running=2) == CONFIGURED, "each request waits a step"
    assert replica.scrape() == Budgets(950, 256, 14_745)
    assert replica.scrape() == Budgets(950, 256, 14_745), "what is held has to come down first"


def test_a_prefill_bound_load_never_lowers_blocks_or_sequences(replica: Replica) -> None:
    for _ in range(300):
        allowed = replica.budgets
        replica.hold(blocks=900, sequences=24, prefill=min(16_384, allowed.prefill))
        replica.scrape(kv_use=0.7, waiting=22, running=2)
    assert replica.budgets == Budgets(950, 256, PREFILL_FLOOR)


def test_one_prompt_above_the_budget_lowers_nothing(replica: Replica) -> None:
    replica.hold(blocks=900, sequences=24, prefill=65_536)
    for _ in range(10):
        assert replica.scrape(kv_use=0.7, waiting=3) == CONFIGURED


def test_waiting_with_nothing_in_prefill_lowers_sequences_to_what_runs(replica: Replica) -> None:
    """Short prompts in an engine that takes 64 sequences at a time."""
    for _ in range(100):
        held = replica.budgets.sequences
        replica.hold(blocks=400, sequences=held)
        replica.scrape(kv_use=0.4, running=min(held, 64), waiting=max(held - 64, 0))
    assert replica.budgets == Budgets(950, 64, 16_384)


def test_a_stalled_engine_says_nothing_of_how_many_it_takes(replica: Replica) -> None:
    for _ in range(100):
        replica.hold(sequences=replica.budgets.sequences)
        replica.scrape(running=0, waiting=5)
    assert replica.budgets.sequences == SEQUENCES_FLOOR
    assert learn(None, 0, CONFIGURED, NOTHING, ENGINE, RULES).budgets(CONFIGURED) == CONFIGURED


def test_a_call_of_many_sequences_still_fits() -> None:
    learned = Learned(engine=ENGINE, waited=True)
    reading = msgspec.structs.replace(ENGINE, running=0, waiting=9)
    learned = learn(learned, 0, CONFIGURED, Budgets(10, 100, 0), reading, Rules(128))
    assert learned.budgets(CONFIGURED).sequences == 128


def test_waiting_for_blocks_is_no_matter_of_prefill(replica: Replica) -> None:
    replica.hold(blocks=930, prefill=8_000)
    for _ in range(10):
        assert replica.scrape(kv_use=0.93, waiting=5) == CONFIGURED


# -- growth ----------------------------------------------------------------------------------------------------------


def test_a_limit_grows_after_a_quiet_minute_while_it_binds(replica: Replica) -> None:
    replica.hold(blocks=900)
    assert replica.scrape(preemptions=1).blocks == 855
    replica.hold(blocks=800)
    for _ in range(QUIET_MS // SCRAPE_MS - 1):
        assert replica.scrape().blocks == 855
    assert replica.scrape().blocks == 856
    replica.hold(blocks=700)
    assert replica.scrape().blocks == 856, "nobody needs more"


def test_what_grew_back_is_as_configured(replica: Replica) -> None:
    replica.hold(blocks=900)
    replica.scrape(preemptions=1)
    for _ in range(200):
        replica.hold(blocks=replica.budgets.blocks)
        replica.scrape()
    assert replica.budgets == CONFIGURED
    assert replica.learned is not None
    assert replica.learned.blocks is None


def test_prefill_and_sequences_grow_when_nothing_waits(replica: Replica) -> None:
    replica.hold(sequences=200, prefill=16_000)
    replica.scrape(waiting=9)
    replica.scrape()
    replica.hold(prefill=0)
    replica.scrape(waiting=0)
    assert replica.budgets.prefill == 14_745
    replica.pass_ms(QUIET_MS)
    replica.hold(prefill=14_700)
    assert replica.scrape().prefill == 14_761


def test_what_was_learned_outlives_a_lower_configuration(replica: Replica) -> None:
    replica.hold(blocks=900)
    replica.scrape(preemptions=1)
    replica.configured = Budgets(400, 256, 16_384)
    assert replica.scrape().blocks == 400
    replica.configured = CONFIGURED
    assert replica.scrape().blocks == 855


# -- incarnations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "another"),
    [
        ({}, {}, False),
        ({"tokens": 5}, {"tokens": 9}, False),
        ({}, {"started_at": 101.0}, True),
        ({}, {"num_gpu_blocks": 1000}, True),
        ({}, {"num_gpu_blocks": None, "started_at": None}, False),
        ({"started_at": None, "tokens": 9}, {"started_at": None, "tokens": 8}, True),
        ({"started_at": None, "preemptions": 9}, {"started_at": None, "preemptions": 0}, True),
        (
            {"tokens": 9},
            {"tokens": 8},
            False,
        ),  # the same process by its start: a page of several is not in step
    ],
)
def test_what_tells_processes_apart(before: dict[str, Any], after: dict[str, Any], another: bool) -> None:
    replaced = msgspec.structs.replace
    assert is_another(replaced(ENGINE, **before), replaced(ENGINE, **after)) is another


def test_another_process_starts_anew(replica: Replica) -> None:
    replica.hold(blocks=900)
    replica.scrape(preemptions=1, kv_use=1.0)
    replica.scrape()
    assert replica.budgets.blocks < 900
    assert replica.scrape(started_at=200.0, preemptions=0) == CONFIGURED
    assert [learned.incarnation for learned in replica.seen] == [1, 1, 1, 2]


def test_a_page_that_lacks_figures_hides_no_restart(replica: Replica) -> None:
    replica.scrape(started_at=None, num_gpu_blocks=None)
    replica.scrape(started_at=300.0, num_gpu_blocks=500)
    assert replica.learned is not None
    assert replica.learned.incarnation == 2


def test_what_was_learned_goes_through_the_store(replica: Replica) -> None:
    replica.hold(blocks=500, sequences=9, prefill=700)
    replica.scrape(kv_use=0.7, preemptions=1, waiting=4)
    replica.scrape()
    assert msgspec.json.decode(msgspec.json.encode(replica.learned), type=Learned) == replica.learned


# -- slow start ------------------------------------------------------------------------------------------------------


def test_a_cold_engine_gets_more_blocks_with_time() -> None:
    replica = Replica(cold=True)
    assert replica.scrape() == Budgets(95, 256, 16_384)
    replica.pass_ms(15_000)
    assert replica.scrape().blocks == 522
    replica.pass_ms(15_000)
    assert replica.scrape() == CONFIGURED
    assert replica.scrape() == CONFIGURED


def test_a_restarted_engine_is_cold_and_one_that_goes_on_is_not(replica: Replica) -> None:
    replica.cold = True
    assert replica.scrape() == CONFIGURED
    assert replica.scrape(started_at=200.0).blocks == 95


def test_a_preemption_of_a_cold_engine_cuts_what_it_will_have(replica: Replica) -> None:
    replica.cold = True
    replica.scrape(started_at=200.0)
    replica.hold(blocks=90)
    assert replica.scrape(preemptions=1).blocks <= 190
    for _ in range(15):
        replica.scrape()
    assert replica.budgets.blocks == 475


@pytest.mark.parametrize(
    ("started_at", "young"), [(None, False), (0.0, False), (880.0, False), (881.0, True), (1001.0, True)]
)
def test_how_old_a_process_is(started_at: float | None, young: bool) -> None:
    assert is_young(Reading(started_at=started_at), wall_seconds=1000.0) is young


# -- whatever an engine says -----------------------------------------------------------------------------------------

FIGURES = {
    "kv_use": st.none() | st.floats(0, 1),
    "preemptions": st.none() | st.integers(0, 50),
    "running": st.none() | st.integers(0, 300),
    "waiting": st.none() | st.integers(0, 300),
    "num_gpu_blocks": st.sampled_from((None, 1001, 1001, 1001, 500)),
    "started_at": st.sampled_from((None, 100.0, 100.0, 100.0, 200.0)),
    "tokens": st.none() | st.integers(0, 1000),
}
BUDGETS = st.builds(Budgets, st.integers(0, 2000), st.integers(0, 600), st.integers(0, 70_000))
STEPS = st.lists(
    st.tuples(st.fixed_dictionaries(FIGURES), BUDGETS, st.sampled_from((0, 1, 2_000, SETTLING_MS, QUIET_MS))),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, BUDGETS, st.booleans(), st.sampled_from((0, 1, 30_000)))
def test_budgets_keep_their_bounds(steps: list[Any], configured: Budgets, cold: bool, slow_ms: int) -> None:
    learned, clock = None, 0
    for says, held, pause_ms in steps:
        clock += pause_ms
        before = learned
        learned = learn(learned, clock, configured, held, Reading(**says), Rules(slow_start_ms=slow_ms), cold)
        now = learned.budgets(configured)
        assert 0 <= now.blocks <= configured.blocks
        assert 0 <= now.sequences <= configured.sequences
        assert 0 <= now.prefill <= configured.prefill
        if learned.cold_since is None:
            assert now.blocks + learned.strangers_blocks >= configured.blocks * FLOOR_PERCENT // 100
        else:
            assert clock - learned.cold_since < slow_ms
        assert now.sequences >= min(configured.sequences, SEQUENCES_FLOOR)
        assert now.prefill >= min(configured.prefill, PREFILL_FLOOR)
        assert len(learned.strangers) <= STRANGERS_MS + 1
        if before and learned.incarnation == before.incarnation:
            _compare(before, learned, clock, configured)


def _compare(before: Learned, after: Learned, clock: int, configured: Budgets) -> None:
    """What one reading may change within an incarnation."""
    was, now = before.budgets(configured), after.budgets(configured)
    cut = (after.blocks or configured.blocks) < min(before.blocks or configured.blocks, configured.blocks)
    if cut:
        assert before.cut_at is None or clock - before.cut_at >= SETTLING_MS
        assert after.preempted_at == clock
    if now.prefill < was.prefill or now.sequences < was.sequences:
        assert after.waited_at == clock
        assert before.lowered_at is None or clock - before.lowered_at >= SETTLING_MS
    if (after.blocks or 0) > (before.blocks or configured.blocks):
        assert before.preempted_at is not None
        assert clock - before.preempted_at >= QUIET_MS


@settings(deadline=None)
@given(STEPS)
def test_waiting_alone_never_moves_blocks(steps: list[Any]) -> None:
    """Without strangers and preemptions blocks stay as configured, whatever waits."""
    learned, clock = None, 0
    for says, held, pause_ms in steps:
        clock += pause_ms
        calm = says | {"preemptions": 7, "kv_use": 0.0}
        learned = learn(learned, clock, CONFIGURED, held, Reading(**calm), RULES)
        assert learned.budgets(CONFIGURED).blocks == CONFIGURED.blocks


# -- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_cache_has_the_number_of_its_process(replica: Replica) -> None:
    """Also as a gateway sees it that knows nothing of before; a page that says nothing changes nothing."""
    replica.scrape(prefix_caching=True)
    number = replica.seen[-1].cache
    assert 0 < number < 2**53
    replica.scrape(prefix_caching=None)
    replica.scrape(prefix_caching=None)
    assert replica.seen[-1].cache == number
    assert Learned(engine=msgspec.structs.replace(ENGINE, prefix_caching=True), incarnation=9).cache == number
    replica.scrape(prefix_caching=True, started_at=200.0)
    assert replica.seen[-1].cache not in (0, number)


@pytest.mark.parametrize("says", [None, False])
def test_an_engine_without_prefix_caching_has_no_cache(says: bool | None) -> None:
    assert Learned(engine=msgspec.structs.replace(ENGINE, prefix_caching=says)).cache == 0


def test_a_process_that_does_not_tell_its_start_is_told_by_its_incarnation() -> None:
    engine = Reading(num_gpu_blocks=1001, prefix_caching=True)
    assert Learned(engine=engine, incarnation=1).cache != Learned(engine=engine, incarnation=2).cache
