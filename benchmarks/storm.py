"""The incident, with and without the gateway: 40 streams over one small engine.

    python benchmarks/storm.py [--svg docs/storm.svg]

Both runs send the same 40 calls (256 prompt tokens, 512 output tokens) at once to a mock engine with 255 usable blocks
of 32 tokens; one run through kvgate, one directly.  Printed: preemptions, the longest silence between two tokens of a
stream that had begun, and the time for all answers.  The SVG shows every such gap.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.processes import World, world

CALLS, PROMPT_TOKENS, OUTPUT_TOKENS = 40, 256, 512
ENGINE = ("--blocks", "256", "--block-size", "32", "--max-model-len", "4096")
LEFT, TOP, WIDTH, HEIGHT = 60, 34, 640, 150
COLOURS = {"without": "#c0392b", "with kvgate": "#1f7a4d"}


@dataclass
class Run:
    name: str
    seconds: float = 0.0
    preemptions: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and seconds of silence that ended then."""

    @property
    def worst_gap(self) -> float:
        return max(gap for _, gap in self.gaps)


async def one_call(session: aiohttp.ClientSession, url: str, run: Run, began: float, number: int) -> None:
    body = {
        "model": "demo",
        "prompt": [number + 1] * PROMPT_TOKENS,
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
    }
    last: float | None = None
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if last is not None:
                run.gaps.append((now - began, now - last))
            last = now


async def storm(name: str, url: str, key: str) -> Run:
    run, began = Run(name), time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers={"authorization": f"Bearer {key}"}
    ) as session:
        await asyncio.gather(*(one_call(session, url, run, began, n) for n in range(CALLS)))
    run.seconds = time.monotonic() - began
    return run


def both(here: World) -> Iterator[Run]:
    for name in COLOURS:
        mock = here.mock(*ENGINE)
        url, key = mock.url, ""
        if name == "with kvgate":
            config, (key,) = here.config(
                [{"name": "only", "replicas": [mock.url]}], queue={"seconds_max": 120}
            )
            url = here.gateway(config, key).url
        run = asyncio.run(storm(name, url, key))
        run.preemptions = int(mock.metric("vllm:num_preemptions_total"))
        yield run


def svg(runs: list[Run]) -> str:
    """Every gap as a dot: time along, silence up (square-root scale, so that 10 ms and 5 s both show)."""
    end = max(run.seconds for run in runs)
    top = max(run.worst_gap for run in runs)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{2 * (HEIGHT + TOP) + 40}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for row, run in enumerate(runs):
        base = TOP + HEIGHT + row * (HEIGHT + TOP)
        title = f"{run.name}: {run.preemptions} preemptions, longest gap {run.worst_gap:.2f} s"
        title += f", all done in {run.seconds:.1f} s"
        parts.append(f'<text x="{LEFT}" y="{base - HEIGHT - 10}" font-weight="bold">{title}</text>')
        parts.append(f'<path d="M{LEFT} {base - HEIGHT}V{base}H{LEFT + WIDTH}" stroke="#999" fill="none"/>')
        for mark in (0.02, 0.5, 2, 5):
            if mark <= top:
                y = base - HEIGHT * (mark / top) ** 0.5
                parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{mark:g} s</text>')
                parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + WIDTH}" stroke="#eee"/>')
        seen = set()
        for at, gap in run.gaps:
            x, y = round(LEFT + WIDTH * at / end), round(base - HEIGHT * (gap / top) ** 0.5)
            if (x, y) not in seen:
                seen.add((x, y))
                parts.append(f'<circle cx="{x}" cy="{y}" r="1.4" fill="{COLOURS[run.name]}"/>')
    axis = 2 * (HEIGHT + TOP) + 22
    parts.append(f'<text x="{LEFT}" y="{axis}">0 s</text>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{axis}" text-anchor="end">{end:.0f} s</text>')
    parts.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{axis}" text-anchor="middle">silence between two tokens of one stream</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--svg", type=Path)
    parsed = parser.parse_args()
    with world() as here:
        runs = list(both(here))
    for run in runs:
        figures: dict[str, Any] = {
            "run": run.name,
            "preemptions": run.preemptions,
            "longest_gap_seconds": round(run.worst_gap, 3),
            "seconds": round(run.seconds, 1),
        }
        print(json.dumps(figures))
    if parsed.svg:
        parsed.svg.write_text(svg(runs))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
