"""Prometheus text format 0.0.4, as the Python client writes it: a series per engine, then the time of creation."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

Labels = dict[str, str]
Series = list[tuple[Labels, float]]


class Histogram:
    """`bounds` are the upper ends of its buckets; the last bucket has none."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Page:
    """Lines of one scrape."""

    def __init__(self, created: float) -> None:
        self._created = created
        self._lines: list[str] = []

    def text(self) -> bytes:
        return "\n".join([*self._lines, ""]).encode()

    def gauge(self, name: str, text: str, series: Series) -> None:
        self._heading(name, text, "gauge")
        self._values(name, series)

    def counter(self, name: str, text: str, series: Series) -> None:
        self._heading(f"{name}_total", text, "counter")
        self._values(f"{name}_total", series)
        self._creation(name, text, [labels for labels, _ in series])

    def histogram(self, name: str, text: str, series: list[tuple[Labels, Histogram]]) -> None:
        self._heading(name, text, "histogram")
        for labels, histogram in series:
            self._buckets(name, labels, histogram)
        self._creation(name, text, [labels for labels, _ in series])

    def _buckets(self, name: str, labels: Labels, histogram: Histogram) -> None:
        seen = 0
        for bound, count in zip([*map(number, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            seen += count
            self._values(f"{name}_bucket", [(labels | {"le": bound}, seen)])
        self._values(f"{name}_count", [(labels, seen)])
        self._values(f"{name}_sum", [(labels, histogram.total)])

    def _creation(self, name: str, text: str, series: list[Labels]) -> None:
        self.gauge(f"{name}_created", text, [(labels, self._created) for labels in series])

    def _values(self, name: str, series: Series) -> None:
        self._lines += [f"{name}{_labels(*labels.items())} {number(value)}" for labels, value in series]

    def _heading(self, name: str, text: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def number(value: float) -> str:
    """A number as Go writes it: with an exponent from a million on."""
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6 and "e" not in text:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02}"
    return text


@lru_cache(maxsize=4096)
def _labels(*pairs: tuple[str, str]) -> str:
    """Kept, because they never change: a scrape must not hold up the engines' steps, which share its event loop."""
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(pairs)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
