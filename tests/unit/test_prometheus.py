"""Metrics: names and labels that dashboards rely on, and bounded series whatever clients send."""

import random
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.events import (
    AdmittedByShare,
    CacheDoubted,
    CallEnded,
    Event,
    FirstToken,
    Healed,
    LeaseLost,
    LengthSurprise,
    Overdraft,
    PrefixFound,
    StoreAnswered,
    StoreUp,
    TokenGaps,
    Unmetered,
)
from gateway.core.outcomes import Code, Outcome
from gateway.core.rests import Why
from gateway.telemetry.counted import Snapshot, Totals
from gateway.telemetry.prometheus import Metrics
from gateway.telemetry.workers import RollCall

FLEETS = {"llama": {"short": ["s0", "s1"], "long": ["l0"]}, "qwen": {"all": ["q0"]}}
CLASSES = ("high", "normal", "low")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics(inflight: dict[str, int] | None = None) -> Metrics:
    return Metrics(FLEETS, CLASSES, lambda: inflight or {})


def samples(source: Metrics, roll: RollCall | None = None) -> Samples:
    """Every sample; a series that is there twice is an error."""
    found: Samples = {}
    for family in text_string_to_metric_families(source.page(roll)().decode()):
        for sample in family.samples:
            series = sample.name, frozenset(sample.labels.items())
            assert series not in found
            found[series] = sample.value
    return found


def value(source: Metrics, name: str, roll: RollCall | None = None, **labels: str) -> float | None:
    named = {("class" if label == "class_" else label): text for label, text in labels.items()}
    return samples(source, roll).get((name, frozenset(named.items())))


def ended(**changes: Any) -> CallEnded:
    usual: dict[str, Any] = {
        "request_id": "r", "route": "/v1/completions", "fleet": "llama", "lane": "short", "pool": "short",
        "replica": "s0", "key": "team-a", "group": "", "class_": "normal", "outcome": Outcome.COMPLETED,
        "reason": None, "status": 200, "refusal_ms": None, "queue_ms": 40.0, "reserved_blocks": 10,
        "unused_blocks": 3, "prompt_tokens_estimated": 150, "prompt_tokens": 100, "output_tokens": 5,
        "duration_ms": 900.0,
    }  # fmt: skip
    return CallEnded(**(usual | changes))


def test_a_completed_call_is_counted_with_what_it_left() -> None:
    source = metrics()
    source(ended())
    place = {"fleet": "llama", "pool": "short"}
    calls = {"outcome": "completed", "reason": "", "class_": "normal"} | place
    assert value(source, "kvgate_admission_requests_total", **calls) == 1
    waited = value(source, "kvgate_queue_wait_seconds_sum", fleet="llama", lane="short", class_="normal")
    assert waited == 0.04
    predicted = "kvgate_queue_wait_prediction_ratio_sum"
    assert value(source, predicted, fleet="llama", lane="short", class_="normal") is None
    assert value(source, "kvgate_reserved_unused_blocks_sum", replica="s0", **place) == 3
    assert value(source, "kvgate_estimate_error_ratio_bucket", fleet="llama", le="0.25") == 0
    assert value(source, "kvgate_estimate_error_ratio_bucket", fleet="llama", le="0.5") == 1
    source(ended(predicted_ms=50))
    assert value(source, predicted, fleet="llama", lane="short", class_="normal") == 0.8


def test_an_instant_refusal_has_a_time_and_no_wait() -> None:
    source = metrics()
    refused = {
        "outcome": Outcome.REFUSED,
        "reason": Code.QUEUE_FULL,
        "refusal_ms": 2.0,
        "unused_blocks": None,
    }
    source(ended(**refused, prompt_tokens=None))
    assert value(source, "kvgate_refusal_seconds_sum", fleet="llama", reason="queue_full") == 0.002
    names = {name for name, _ in samples(source)}
    assert not names & {"kvgate_queue_wait_seconds_count", "kvgate_estimate_error_ratio_count"}


def test_buckets_are_cumulative_and_bounds_inclusive() -> None:
    source = metrics()
    source(TokenGaps("llama", "short", "high", [0.5, 1.0]))
    source(TokenGaps("llama", "short", "high", [20.0, 20_000.0]))
    place = {"fleet": "llama", "pool": "short", "class_": "high"}
    name = "kvgate_inter_token_seconds_bucket"
    counts = [value(source, name, le=le, **place) for le in ("0.001", "0.01", "0.02", "10.0", "+Inf")]
    assert counts == [2, 2, 3, 3, 4]
    assert value(source, "kvgate_inter_token_seconds_count", **place) == 4
    assert value(source, "kvgate_inter_token_seconds_sum", **place) == pytest.approx(20.0215)


def test_events_of_streams_and_store() -> None:
    source = metrics()
    assert value(source, "kvgate_store_up") == 0
    events: list[Event] = [
        StoreUp(True),
        StoreAnswered(0.2),
        LeaseLost("llama"),
        Healed("qwen", "settled", 3),
        Healed("qwen", "redeclared", 1),
        AdmittedByShare("llama"),
        AdmittedByShare("llama"),
        FirstToken("qwen", "all", "low", 250.0),
        Overdraft("llama", "short", "s1", 12),
        Overdraft("llama", "short", "s1", 3),
        Unmetered("llama", "long"),
        LengthSurprise("qwen", "low"),
        PrefixFound("llama", "short", "s1", 1024, 512),
        PrefixFound("llama", "short", "s1", 1024, 1024),
        CacheDoubted("llama", "short", "s1"),
    ]
    for event in events:
        source(event)
    assert value(source, "kvgate_store_up") == 1
    assert value(source, "kvgate_store_seconds_bucket", le="0.00025") == 1
    assert value(source, "kvgate_leases_expired_total", fleet="llama") == 1
    assert value(source, "kvgate_healed_total", fleet="qwen") == 4
    assert value(source, "kvgate_share_admissions_total", fleet="llama") == 2
    assert value(source, "kvgate_ttft_seconds_bucket", fleet="qwen", pool="all", class_="low", le="0.25") == 1
    assert value(source, "kvgate_overdrafts_total", fleet="llama", pool="short", replica="s1") == 2
    assert value(source, "kvgate_overdrafts_total", fleet="llama", pool="short", replica="s0") == 0
    assert value(source, "kvgate_unmetered_streams_total", fleet="llama", pool="long") == 1
    for name, count in (("expected_tokens", 2048), ("found_tokens", 1536), ("doubts", 1)):
        for replica, counted in (("s1", count), ("s0", 0)):
            here = {"fleet": "llama", "pool": "short", "replica": replica}
            assert value(source, f"kvgate_prefix_{name}_total", **here) == counted
    assert value(source, "kvgate_length_surprises_total", fleet="qwen", class_="low") == 1
    assert value(source, "kvgate_length_surprises_total", fleet="qwen", class_="high") == 0
    source(StoreUp(False))
    assert value(source, "kvgate_store_up") == 0


def test_a_failed_reload_is_counted() -> None:
    source = metrics()
    source.reload_failed("keys")
    assert value(source, "kvgate_reload_failures_total", file="keys") == 1
    assert value(source, "kvgate_reload_failures_total", file="config") == 0


def test_inflight_is_read_at_each_scrape() -> None:
    inflight = {"llama": 2}
    source = metrics(inflight)
    assert value(source, "kvgate_inflight_requests", fleet="llama") == 2
    assert value(source, "kvgate_inflight_requests", fleet="qwen") == 0
    inflight["llama"] = 0
    assert value(source, "kvgate_inflight_requests", fleet="llama") == 0


def test_the_state_of_the_store_becomes_gauges() -> None:
    source = metrics()
    replicas = {
        "s0": {"limit": 100, "reserved": 130, "debt": 30, "sequences": 2, "prefill_tokens": 0, "state": "up"},
        "s1": {
            "limit": 100,
            "reserved": 40,
            "debt": 0,
            "state": "draining",
            "rests": ["asleep", "unheard-of"],
        },
        "gone": {"limit": 0, "reserved": 5},
        "gone-too": {"limit": 0, "reserved": 6},
    }
    queue = {"short": {"normal": 4, "renamed": 1, "older": 2}}
    source.set_state("llama", {"pools": {"short": {"replicas": replicas}}, "leases": 3, "queued": queue})
    place = {"fleet": "llama", "pool": "short"}
    assert value(source, "kvgate_reserved_blocks", replica="s0", **place) == 130
    assert value(source, "kvgate_limit_blocks", replica="s1", **place) == 100
    assert value(source, "kvgate_debt_blocks", replica="s0", **place) == 30
    assert value(source, "kvgate_debt_blocks", replica="s1", **place) == 0
    assert value(source, "kvgate_reserved_blocks", replica="", **place) == 11
    rests = {why: value(source, "kvgate_replica_rests", replica="s1", why=why, **place) for why in Why}
    assert {why for why, is_it in rests.items() if is_it} == {Why.ASLEEP}
    states = {"up": 1, "draining": 0, "down": 0}
    for state, is_it in states.items():
        assert value(source, "kvgate_replica_state", replica="s0", state=state, **place) == is_it
    assert value(source, "kvgate_queue_depth", fleet="llama", lane="short", class_="normal") == 4
    assert value(source, "kvgate_queue_depth", fleet="llama", lane="short", class_="") == 3


def test_what_engines_say_is_shown_and_what_they_do_not_say_is_unknown() -> None:
    source = metrics()
    engine = {"kv_use": 0.5, "preemptions": 3, "swaps": None, "strangers": 40, "incarnation": 2, "waiting": 0}
    replicas = {
        "s0": {"limit": 100, "sequences_limit": 60, "prefill_tokens_limit": 4096, "engine": engine},
        "s1": {"limit": 100, "engine": None},
    }
    source.set_state("llama", {"pools": {"short": {"replicas": replicas}}})
    place = {"fleet": "llama", "pool": "short", "replica": "s0"}
    assert value(source, "kvgate_limit_sequences", **place) == 60
    assert value(source, "kvgate_limit_prefill_tokens", **place) == 4096
    assert value(source, "kvgate_engine_kv_use_ratio", **place) == 0.5
    assert value(source, "kvgate_engine_preemptions", **place) == 3
    assert value(source, "kvgate_engine_strangers_blocks", **place) == 40
    assert value(source, "kvgate_engine_waiting_requests", **place) == 0
    assert value(source, "kvgate_engine_unknown", figure="waiting", **place) == 0
    assert value(source, "kvgate_engine_unknown", figure="swaps", **place) == 1
    page = source.page()().decode()
    assert "kvgate_engine_swap_used{" not in page, "nobody can see it"
    assert 'kvgate_engine_kv_use_ratio{fleet="llama",pool="short",replica="s1"}' not in page


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"pools": None, "queued": None},
        {"pools": {"short": None}, "queued": {"short": None}},
        {"pools": {"short": {}}, "queued": {"short": {"low": None}}},
        {"pools": {"short": {"replicas": {"s0": None, "s1": {}}}}},
        {"pools": {"short": {"replicas": {"s0": {"limit": None, "reserved": "?"}}}}},
        {"pools": [], "queued": 3},
    ],
)
def test_what_the_state_lacks_is_left_out(state: dict[str, Any]) -> None:
    source = metrics()
    source.set_state("llama", state)
    assert not {name for name, _ in samples(source)} & {"kvgate_reserved_blocks", "kvgate_queue_depth"}


def test_the_state_of_an_unknown_fleet_is_not_kept() -> None:
    source = metrics()
    source.set_state("junk", {"queued": {"short": {"low": 1}}})
    assert value(source, "kvgate_queue_depth", fleet="", lane="", class_="low") is None


def test_what_was_learned_of_lengths_is_shown() -> None:
    source = metrics()
    kinds = [
        {"class": "low", "model": "m", "p50": 120, "p90": None},
        {"class": "other", "model": "", "p50": 7, "p90": 900},
    ]
    source.set_state("qwen", {"lengths": kinds})
    shown = {
        (class_, model, quantile): value(
            source,
            "kvgate_learned_length_tokens",
            fleet="qwen",
            class_=class_,
            model=model,
            quantile=quantile,
        )
        for class_, model in (("low", "m"), ("", ""))
        for quantile in ("0.5", "0.9")
    }
    assert shown == {
        ("low", "m", "0.5"): 120,
        ("low", "m", "0.9"): None,
        ("", "", "0.5"): 7,
        ("", "", "0.9"): 900,
    }


def junk(chance: random.Random) -> str:
    raw = chance.choice(["m", 'a"b', "a\nb", "\\", "é", "x" * 10_000])
    return f"{raw}{chance.random()}"


def junk_event(chance: random.Random) -> Event:
    fleet = chance.choice(["llama", "qwen", "", junk(chance)])
    pool = chance.choice(["short", "all", "", junk(chance)])
    class_ = chance.choice(["low", junk(chance)])
    key, replica = junk(chance), junk(chance)
    kind = chance.randrange(6)
    if kind == 0:
        return TokenGaps(fleet, pool, class_, [chance.random()])
    if kind == 1:
        return FirstToken(fleet, pool, class_, chance.random())
    if kind == 2:
        return LeaseLost(fleet) if chance.random() < 0.5 else Healed(fleet, junk(chance), 1)
    if kind == 5:
        return chance.choice(
            [Overdraft(fleet, pool, replica, 1), Unmetered(fleet, pool), LengthSurprise(fleet, class_)]
        )
    changes = {"fleet": fleet, "pool": pool, "class_": class_, "key": key, "replica": replica}
    refused = {"outcome": Outcome.REFUSED, "reason": Code.MODEL_NOT_FOUND, "refusal_ms": chance.random()}
    return ended(**changes, **(refused if kind == 3 else {}))


def test_requests_cannot_make_series() -> None:
    """MC-01: 20,000 calls with names of their own."""
    chance = random.Random(1)
    source = metrics()
    for _ in range(2_000):
        source(junk_event(chance))
    before = samples(source)
    for _ in range(18_000):
        source(junk_event(chance))
    after = samples(source)
    assert before.keys() == after.keys()
    assert len(source.page()()) < 200_000
    labels = {
        text for _, pairs in after for name, text in pairs if name in ("fleet", "pool", "class", "replica")
    }
    replicas = {name for pools in FLEETS.values() for names in pools.values() for name in names}
    assert labels <= {
        "",
        *FLEETS,
        *(pool for pools in FLEETS.values() for pool in pools),
        *replicas,
        *CLASSES,
    }
    calls = sum(count for (name, _), count in after.items() if name == "kvgate_admission_requests_total")
    assert calls > 6_000
    assert value(source, "kvgate_refusal_seconds_count", fleet="", reason="model_not_found")


# -- several workers ---------------------------------------------------------------------------------------------


def roll_of(*workers: Metrics, left: tuple[Metrics, ...] = ()) -> RollCall:
    answered = dict(enumerate(source.snapshot() for source in workers))
    return RollCall(answered, [source.snapshot() for source in left], len(left))


def gaps_of(source: Metrics, *gaps_ms: float, fleet: str = "llama", pool: str = "short") -> None:
    source(TokenGaps(fleet, pool, "high", list(gaps_ms)))


def test_workers_are_added_up() -> None:
    one, two = metrics({"llama": 2}), metrics({"llama": 3, "qwen": 1})
    for source in (one, two, two):
        source(ended())
    gaps_of(one, 0.5, 20.0)
    gaps_of(two, 0.5, 20_000.0)
    gaps_of(two, 4.0, fleet="qwen", pool="all")
    one.reload_failed("keys")
    roll = roll_of(one, two)
    calls = {"fleet": "llama", "pool": "short", "outcome": "completed", "reason": "", "class_": "normal"}
    assert value(one, "kvgate_admission_requests_total", roll, **calls) == 3
    assert value(one, "kvgate_reload_failures_total", roll, file="keys") == 1
    place = {"fleet": "llama", "pool": "short", "class_": "high"}
    name = "kvgate_inter_token_seconds"
    counts = [value(one, f"{name}_bucket", roll, le=le, **place) for le in ("0.001", "0.02", "10.0", "+Inf")]
    assert counts == [2, 3, 3, 4]
    assert value(one, f"{name}_count", roll, **place) == 4
    assert value(one, f"{name}_sum", roll, **place) == pytest.approx(20.021)
    assert value(one, f"{name}_count", roll, fleet="qwen", pool="all", class_="high") == 1
    assert value(one, "kvgate_inflight_requests", roll, fleet="llama") == 5
    assert value(one, "kvgate_inflight_requests", roll, fleet="qwen") == 1
    assert value(one, "kvgate_scrape_missing_workers", roll) == 0


def test_a_page_of_all_leaves_the_own_counts_as_they_are() -> None:
    one, two = metrics(), metrics()
    for source in (one, two):
        gaps_of(source, 1.0)
    for _ in range(2):
        one.page(roll_of(one, two))()
    place = {"fleet": "llama", "pool": "short", "class_": "high"}
    assert value(one, "kvgate_inter_token_seconds_count", **place) == 1


def test_a_worker_that_is_away_counts_but_has_no_calls() -> None:
    """Counters do not go down; what it holds now nobody knows."""
    one, away = metrics({"llama": 1}), metrics({"llama": 7})
    for source in (one, away):
        source(LeaseLost("llama"))
    one(StoreUp(True))
    roll = roll_of(one, left=(away,))
    assert value(one, "kvgate_leases_expired_total", roll, fleet="llama") == 2
    assert value(one, "kvgate_inflight_requests", roll, fleet="llama") == 1
    assert value(one, "kvgate_store_up", roll) == 1
    assert value(one, "kvgate_scrape_missing_workers", roll) == 1


def test_the_store_is_up_when_it_answers_every_worker() -> None:
    one, two = metrics(), metrics()
    one(StoreUp(True))
    assert value(one, "kvgate_store_up", roll_of(one, two)) == 0
    two(StoreUp(True))
    assert value(one, "kvgate_store_up", roll_of(one, two)) == 1


def test_the_state_of_the_store_is_shown_once() -> None:
    one, two = metrics(), metrics()
    for source in (one, two):
        source.set_state("llama", {"queued": {"short": {"low": 4}}})
    place = {"fleet": "llama", "lane": "short", "class_": "low"}
    assert value(one, "kvgate_queue_depth", roll_of(one, two), **place) == 4


def test_a_process_counts_on_from_the_one_before() -> None:
    before, after = metrics(), metrics()
    before(LeaseLost("llama"))
    gaps_of(before, 0.5, 20.0)
    after.inherit(before.snapshot().totals)
    gaps_of(after, 20.0)
    after(LeaseLost("llama"))
    assert value(after, "kvgate_leases_expired_total", fleet="llama") == 2
    place = {"fleet": "llama", "pool": "short", "class_": "high"}
    assert value(after, "kvgate_inter_token_seconds_sum", **place) == pytest.approx(0.0405)
    assert value(after, "kvgate_inter_token_seconds_bucket", le="0.001", **place) == 1


def test_calls_that_the_log_lost_are_counted_once_and_by_the_next_process_too() -> None:
    lost = 2
    source = Metrics(FLEETS, CLASSES, dict, lambda: lost)
    name = "kvgate_call_log_lost_total"
    assert value(source, name) == 2
    lost = 5
    assert value(source, name) == value(source, name, roll_of(source)) == 5
    after = metrics()
    assert value(after, name) == 0
    after.inherit(source.snapshot().totals)
    assert value(after, name) == 5


def test_a_snapshot_is_a_copy_and_can_be_sent() -> None:
    source = metrics({"llama": 1})
    source(ended())
    gaps_of(source, 1.0)
    taken = source.snapshot()
    sent = msgspec.msgpack.encode(taken)
    source(ended())
    gaps_of(source, 1.0)
    assert msgspec.msgpack.decode(sent, type=Snapshot) == taken
    assert taken.totals != source.snapshot().totals


def test_what_another_version_counts_is_left_out() -> None:
    """A worker that was started again may be newer than the others."""
    source = metrics()
    source(StoreAnswered(0.2))
    buckets = {(): ([1, 2], 3.0)}
    source.inherit(
        Totals({"kvgate_new": {("a",): 1}}, {"kvgate_store_seconds": buckets, "kvgate_more": buckets})
    )
    assert value(source, "kvgate_store_seconds_count") == 1
    assert not any(name.startswith(("kvgate_new", "kvgate_more")) for name, _ in samples(source))


def test_processes_are_told_apart_where_there_are_several() -> None:
    source = metrics()
    alone = {labels for name, labels in samples(source) if name.startswith("process_")}
    assert alone <= {frozenset()}
    assert value(source, "kvgate_scrape_missing_workers") is None
    found = samples(source, roll_of(source, metrics()))
    several = {labels for name, labels in found if name.startswith("process_")}
    assert several <= {frozenset({("worker", "0")}), frozenset({("worker", "1")})}
    assert bool(alone) == bool(several)


@pytest.mark.parametrize("name", ["leases_expired", "healed", "share_admissions"])
def test_what_is_worth_an_alert_is_there_before_it_happens(name: str) -> None:
    assert value(metrics(), f"kvgate_{name}_total", fleet="llama") == 0
