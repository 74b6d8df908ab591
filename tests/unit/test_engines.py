"""What routing and the ledger are told of a fleet: configuration and discovery put together."""

from typing import Any, cast

import pytest

from gateway.core.books import ReplicaConfig
from gateway.core.media import MediaRule
from gateway.core.route import PoolShape
from gateway.upstream.api import Trouble
from gateway.upstream.engines import FleetPlan, WatchedEngines, blocks_limit
from gateway.upstream.fleet import FleetWatch, ReplicaShape, ReplicaSpec, ReplicaState
from gateway.upstream.scraper import Scraper


class Watch:
    """The part of a `FleetWatch` that is used here, its states set by hand."""

    def __init__(self, *places: tuple[str, str]) -> None:
        self.now = {name: state(name, pool, up=False, shape=None) for name, pool in places}
        self.resting: dict[str, str] = {}
        """Replica, and why."""
        self.reports: list[tuple[str, Trouble | None]] = []
        """Of calls: replica, and what their failure said, None of a success."""

    def set(self, name: str, up: bool = True, **numbers: Any) -> None:
        pool = self.now[name].spec.pool
        self.now[name] = state(name, pool, up, shape_of(name, pool, **numbers))

    def states(self) -> list[ReplicaState]:
        return list(self.now.values())

    def is_up(self, name: str) -> bool:
        return self.now[name].up

    def why_it_rests(self, name: str) -> str | None:
        return self.resting.get(name)

    def report_failure(self, name: str, trouble: Trouble, rest_seconds: float | None = None) -> None:
        self.reports.append((name, trouble))

    def report_success(self, name: str) -> None:
        self.reports.append((name, None))


def state(name: str, pool: str, up: bool, shape: ReplicaShape | None) -> ReplicaState:
    return ReplicaState(ReplicaSpec(pool, name, f"http://{name}:8000"), shape, up, "" if up else "away")


def shape_of(name: str, pool: str, **numbers: Any) -> ReplicaShape:
    known = {
        "num_gpu_blocks": 1001,
        "block_size": 16,
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "prefill_tokens": 16384,
    }
    return ReplicaShape(name=name, pool=pool, url=f"http://{name}:8000", **(known | numbers))


def plan(**changes: Any) -> FleetPlan:
    fields: dict[str, Any] = {
        "name": "demo",
        "model": "big/demo",
        "names": frozenset({"big/demo", "demo"}),
        "default_output_tokens": 1024,
        "max_output_tokens": None,
        "token_factor": 1.5,
        "exact_above": 0.6,
        "learns": True,
        "speculative_tokens": 3,
        "share_prompt_of_n": True,
        "safe_fraction": 0.95,
        "overtake_blocks": None,
        "pools": (("short", 4096), ("long", None)),
        "lanes": {"short": ("short", "long"), "long": ("long",)},
        "classes": (("normal", 200), ("low", 100)),
        "lease_ms": 6000,
        "heartbeat_ms": 1000,
        "media": MediaRule(image_tokens=7),
    }
    return FleetPlan(**(fields | changes))


@pytest.fixture
def watch() -> Watch:
    return Watch(("a", "short"), ("b", "short"), ("c", "long"))


def engines(watch: Watch, **changes: Any) -> WatchedEngines:
    return WatchedEngines(plan(**changes), cast(FleetWatch, watch))


# -- calls without blocks ------------------------------------------------------------------------------------------


def test_whoever_answers_is_asked_in_turn(watch: Watch) -> None:
    fleet = engines(watch)
    assert fleet.any_up([]) is None
    for name in ("a", "b", "c"):
        watch.set(name)
    assert [fleet.any_up([]) for _ in range(4)] == ["a", "b", "c", "a"]
    watch.set("c", up=False)
    assert [fleet.any_up([]) for _ in range(3)] == ["b", "a", "b"]
    assert [fleet.any_up(["b"]) for _ in range(2)] == ["a", "a"]
    assert fleet.any_up(["a", "b"]) is None
    watch.resting["a"] = "asleep"
    assert [fleet.any_up([]) for _ in range(2)] == ["b", "b"]
    assert fleet.any_up(["b"]) == "a", "its tokenizer is awake"
    assert [fleet.any_up([], only) for only in ("a", "b", "c", "b")] == ["a", "b", None, "b"]
    assert fleet.any_up(["b"], "b") is None


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpu_blocks", "safe_fraction", "limit"),
    [
        (256, 1.0, 255),  # one block is the engine's null block
        (1001, 0.95, 950),
        (1000, 0.95, 949),  # 949.05
        (101, 0.29, 29),  # 100 x 0.29 is 28.999999999999996 in floating point
        (11, 0.7, 7),
        (1, 1.0, 0),
        (2, 0.5, 0),
    ],
)
def test_the_limit_is_exact(num_gpu_blocks: int, safe_fraction: float, limit: int) -> None:
    assert blocks_limit(num_gpu_blocks, safe_fraction) == limit


# -- what the ledger is told ---------------------------------------------------------------------------------------


def test_the_ledger_gets_limits_of_what_answers_and_nothing_of_the_rest(watch: Watch) -> None:
    watch.set("a", num_gpu_blocks=1001, max_num_seqs=8, prefill_tokens=100)
    watch.set("b", up=False)
    config = engines(watch).books_config()
    assert config.replicas == (
        ReplicaConfig("a", "short", limit=950, usable=1000, sequences_max=8, prefill_max=100),
        ReplicaConfig("b", "short"),
        ReplicaConfig("c", "long"),
    )
    assert config.replicas[1].limit == -1, "what the store has of a silent replica is kept"


def test_lanes_classes_and_times_go_to_the_ledger_as_planned(watch: Watch) -> None:
    config = engines(watch).books_config()
    assert config.lanes == (("short", ("short", "long")), ("long", ("long",)))
    assert config.classes == (("normal", 200), ("low", 100))
    assert (config.lease_ms, config.heartbeat_ms) == (6000, 1000)


def test_what_may_overtake_is_one_replicas_limit_unless_configured(watch: Watch) -> None:
    watch.set("a", num_gpu_blocks=1001)
    watch.set("c", num_gpu_blocks=4001)
    assert engines(watch).books_config().overtake_blocks == 3800
    assert engines(watch, overtake_blocks=7).books_config().overtake_blocks == 7
    assert engines(watch, overtake_blocks=0).books_config().overtake_blocks == 0


def test_prompts_are_shared_until_an_engine_holds_more_than_was_reckoned(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.set("a")
    made = engines(watch)
    assert made.shape().share_prompt_of_n
    for _ in range(3):
        made.holds_more("a")
    assert not made.shape().share_prompt_of_n
    assert [record.args for record in caplog.records] == [("a", "demo")]
    made.update(plan())
    assert not made.shape().share_prompt_of_n, "another replica changes nothing of it"
    made.update(plan(share_prompt_of_n=False))
    made.update(plan())
    assert made.shape().share_prompt_of_n


# -- what routing is told ------------------------------------------------------------------------------------------


def test_a_pool_promises_what_each_of_its_replicas_can_do_and_the_blocks_of_its_largest(watch: Watch) -> None:
    watch.set("a", num_gpu_blocks=1001, max_model_len=8192, max_num_seqs=8, block_size=32)
    watch.set("b", num_gpu_blocks=2001, max_model_len=4096, max_num_seqs=4, block_size=16)
    short = PoolShape(
        "short",
        4096,
        4096,
        block_size=16,
        usable_max=2000,
        sequences_max=8,
        context_max=8192,
        replicas=("a", "b"),
    )
    assert engines(watch).shape().pools == (short,)


def test_the_plan_is_in_the_shape(watch: Watch) -> None:
    shape = engines(watch, max_output_tokens=99).shape()
    assert (shape.name, shape.model, shape.names) == ("demo", "big/demo", frozenset({"big/demo", "demo"}))
    assert (shape.default_output_tokens, shape.max_output_tokens) == (1024, 99)
    assert (shape.token_factor, shape.exact_above, shape.learns) == (1.5, 0.6, True)
    assert (shape.speculative_tokens, shape.share_prompt_of_n) == (3, True)
    assert shape.media == MediaRule(image_tokens=7)
    assert shape.lanes == {"short": ("short", "long"), "long": ("long",)}
    assert shape.pools == (), "no replica has answered yet"


def test_a_replica_that_went_down_still_says_what_can_ever_fit(watch: Watch) -> None:
    """Such a call gets 503 and may come back, not 400."""
    watch.set("c", up=False, num_gpu_blocks=4001)
    assert [pool.name for pool in engines(watch).shape().pools] == ["long"]


def test_a_shape_is_complete_when_every_replica_has_answered(watch: Watch) -> None:
    """Until then nothing is refused for good because of what is known."""
    watch.set("a")
    watch.set("b")
    assert not engines(watch).shape().complete
    watch.set("c", up=False)
    assert engines(watch).shape().complete


def test_the_shape_is_kept_until_a_replica_changes(watch: Watch) -> None:
    watch.set("a")
    made = engines(watch)
    first = made.shape()
    watch.set("a", num_gpu_blocks=5001)
    assert made.shape() is first
    made.changed()
    assert made.shape().pools[0].usable_max == 5000


# -- single replicas -----------------------------------------------------------------------------------------------


def test_where_a_replica_is(watch: Watch) -> None:
    made = engines(watch)
    assert (made.url("c"), made.pool("c")) == ("http://c:8000", "long")


def test_another_replica_is_one_of_the_lane_that_is_up_and_was_not_tried(watch: Watch) -> None:
    made = engines(watch)
    watch.set("a")
    assert not made.another_can_hold("short", ["a"], 1, 1)
    watch.set("b", up=False)
    assert not made.another_can_hold("short", ["a"], 1, 1)
    watch.set("c")
    assert made.another_can_hold("short", ["a"], 1, 1)
    assert not made.another_can_hold("long", ["c"], 1, 1)
    assert made.another_can_hold("long", [], 1, 1)


def test_another_replica_is_large_enough(watch: Watch) -> None:
    made = engines(watch)
    watch.set("a")
    watch.set("b", num_gpu_blocks=101, max_num_seqs=4)
    assert made.another_can_hold("short", ["a"], 100, 4)
    assert not made.another_can_hold("short", ["a"], 101, 4)
    assert not made.another_can_hold("short", ["a"], 100, 5)


def test_ends_of_calls_go_to_the_watch(watch: Watch) -> None:
    made = engines(watch)
    made.report_failure("a", Trouble.SLOW)
    made.report_success("b")
    assert watch.reports == [("a", Trouble.SLOW), ("b", None)]


async def test_the_real_watch_knows_its_replicas_before_they_answer() -> None:
    """Pools and addresses come from the configuration, so a call that is granted in the first moment finds them."""

    async def nothing_changes(names: frozenset[str]) -> None:
        raise AssertionError(names)

    watch = FleetWatch(
        [ReplicaSpec("short", "a", "http://127.0.0.1:1")],
        frozenset({"demo"}),
        nothing_changes,
        scraper=Scraper(),
    )
    made = WatchedEngines(plan(pools=(("short", None),), lanes={"short": ("short",)}), watch)
    assert (made.url("a"), made.pool("a"), made.another_can_hold("short", [], 1, 1)) == (
        "http://127.0.0.1:1",
        "short",
        False,
    )
    assert made.books_config().replicas == (ReplicaConfig("a", "short"),)
    await watch.close()


@pytest.mark.parametrize(
    ("short", "long", "changes", "size"),
    [
        ({"prefix_caching": True}, {"prefix_caching": True}, {}, 16),
        ({"prefix_caching": True}, {}, {}, 16),
        ({}, {}, {}, 0),
        ({"prefix_caching": True}, {"prefix_caching": True}, {"share_prefixes": False}, 0),
        ({"prefix_caching": True}, {"prefix_caching": True}, {"encoder_tokens": 1500}, 0),
        ({"prefix_caching": True}, {"prefix_caching": True}, {"speculative_tokens": 1}, 0),
        ({"prefix_caching": True}, {"prefix_caching": True, "block_size": 32}, {}, 0),
    ],
)
def test_beginnings_are_shared_where_an_engine_keeps_them(
    short: dict[str, Any], long: dict[str, Any], changes: dict[str, Any], size: int
) -> None:
    watch = Watch(("s0", "short"), ("l0", "long"))
    made = WatchedEngines(
        plan(**{"share_prefixes": True, "speculative_tokens": 0, **changes}), cast(FleetWatch, watch)
    )
    assert made.shape().prefix_block_size == 0, "nothing is known yet"
    watch.set("s0", **short)
    watch.set("l0", **long)
    made.changed()
    assert made.shape().prefix_block_size == size


@pytest.mark.parametrize(
    ("short", "on", "keeps"),
    [({"prefix_caching": True}, True, True), ({}, True, False), ({"prefix_caching": True}, False, False)],
)
def test_histories_are_held_where_an_engine_keeps_them(short: dict[str, Any], on: bool, keeps: bool) -> None:
    watch = Watch(("s0", "short"), ("l0", "long"))
    made = WatchedEngines(plan(soft_hold=on), cast(FleetWatch, watch))
    watch.set("s0", **short)
    made.changed()
    assert made.shape().keeps_histories is keeps


def test_a_name_that_some_engine_has_for_an_adapter_is_one() -> None:
    watch = Watch(("s0", "short"), ("l0", "long"))
    made = WatchedEngines(plan(), cast(FleetWatch, watch))
    watch.set("s0", bases=frozenset({"big/demo", "demo", "tuned"}))
    watch.set("l0", bases=frozenset({"big/demo", "demo"}))
    shape = made.shape()
    assert [shape.adapter(name) for name in ("big/demo", "demo", None, "tuned", "unheard of")] == [
        "",
        "",
        "",
        "tuned",
        "unheard of",
    ]
