"""`docs/metrics.md` lists every metric, with its labels and its text."""

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from gateway.core.outcomes import Outcome
from gateway.telemetry.prometheus import Metrics
from gateway.telemetry.workers import RollCall

DOCUMENT = (Path(__file__).parents[2] / "docs/metrics.md").read_text()


def families() -> Iterator[Metric]:
    metrics = Metrics({"llama": {"short": ["s0"]}}, ["normal"], dict)
    found: dict[str, Metric] = {}
    for roll in (None, RollCall({0: metrics.snapshot()}, (), 0)):
        for family in metrics.families(roll):
            found.setdefault(family.name, family)
    yield from (family for name, family in sorted(found.items()) if name.startswith("kvgate_"))


def row(family: Metric) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
    return f"| `{name}` | {labels} | {family.documentation} |"


def test_every_metric_is_listed() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `kvgate_")]
    assert rows == [row(family) for family in families()]


def test_expressions_name_what_there_is() -> None:
    names = {family.name for family in families()}
    named = set(re.findall(r"kvgate_\w+", DOCUMENT))
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named} == names


def test_the_outcomes_are_named() -> None:
    assert all(f"`{outcome}`" in DOCUMENT for outcome in Outcome)
