"""What the yardstick measures of a peer: each function returns figures by name, units last.

Latencies and gaps are what clients see; the processor time of a peer is that of all its processes.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from yardstick import bodies, machine
from yardstick.peers import ENGINE, PeerError, Standing

from gateway.tokens.tiktoken_counter import VOCABULARY, load_encoding

Figures = dict[str, float]
Report = dict[str, Any]
"""What `llmload` printed, and what the machine showed meanwhile."""

LOAD_SECONDS_MAX = 180.0
STREAM_TOKENS = 50
GROWING_TOKENS = 100
"""Of a stream that grows: once, at its 64th."""
TOKEN_MS = 100
AT_ONCE = {"tokens": 16, "interval": 0, "ttft": 0}
ENDLESS = {"tokens": 2000, "interval": TOKEN_MS, "ttft": 0}
REFUSED_STREAMS = 1200
INTERLEAVED = 3
LEAVERS = 100
LEFT_SECONDS_MAX = 6.0
TEXT_ROUNDS = 30


@dataclass(frozen=True)
class Yard:
    """Where the programs and bodies are, and how patient a measurement is."""

    folder: Path
    quiet_seconds: float
    tries: int = 3
    """Of a load during which others used a core."""
    foreign: list[float] = field(default_factory=list)
    """The share of a core that others used during each load that counts."""


# -- loads ---------------------------------------------------------------------------------------------------------


def set_engine(knobs: Mapping[str, float]) -> None:
    words = "&".join(f"{name}={value}" for name, value in {**knobs, "bytes": 256, "burst": 1}.items())
    machine.get(f"{ENGINE}/set?{words}")


def engine_stats() -> Mapping[str, Any]:
    found: Mapping[str, Any] = machine.get_json(f"{ENGINE}/stats")
    return found


def load_command(
    yard: Yard, at: Standing, body: str, headers: Sequence[str], options: Sequence[str]
) -> list[str]:
    words = [word for header in headers for word in ("-H", header)]
    return [str(yard.folder / "llmload"), "-u", str(at.port), "-f", str(yard.folder / body), *words, *options]


def load(
    yard: Yard,
    at: Standing,
    knobs: Mapping[str, float],
    body: str,
    *options: str,
    middle: Callable[[], None] | None = None,
) -> Report:
    """The load once, or until nobody else used the cores meanwhile; the quietest of at most `tries`."""
    found: list[Report] = []
    while len(found) < yard.tries:
        _until_idle()
        set_engine(knobs)
        machine.wait_until_quiet(yard.quiet_seconds)
        found.append(_one_load(load_command(yard, at, body, at.headers, options), at, middle))
        if found[-1]["foreign"] <= machine.QUIET_SHARE:
            break
    quietest = min(found, key=lambda report: float(report["foreign"]))
    yard.foreign.append(float(quietest["foreign"]))
    return quietest


def _one_load(command: Sequence[str], at: Standing, middle: Callable[[], None] | None) -> Report:
    machine.get(f"{ENGINE}/reset")
    measured = machine.cpu_seconds(at.measured_pid)
    others = sum(map(machine.cpu_seconds, at.owned)) + time.process_time()
    busy, began = machine.busy_seconds(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        if middle:
            middle()
        out, _ = process.communicate(timeout=LOAD_SECONDS_MAX)
    seconds = time.monotonic() - began
    now_busy = machine.busy_seconds()
    report: Report = json.loads(out)
    measured = machine.cpu_seconds(at.measured_pid) - measured
    others = sum(map(machine.cpu_seconds, at.owned)) + time.process_time() - others + report["cpu_s"]
    foreign = max(now_busy[0] - busy[0] - measured, now_busy[1] - busy[1] - others, 0.0) / seconds
    return report | {"peer_s": measured, "foreign": foreign, "engine": engine_stats()}


def _until_idle() -> None:
    end = time.monotonic() + LEFT_SECONDS_MAX
    while engine_stats()["active"] and time.monotonic() < end:
        time.sleep(0.1)


def warm_up(yard: Yard, at: Standing) -> None:
    """Raises PeerError where the peer does not answer."""
    set_engine(AT_ONCE)
    command = load_command(yard, at, "small.json", at.headers, ("-c", "16", "-d", "1"))
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if not report["ok"]:
        raise PeerError(f"it answers nothing: {report['status'] or report['errors']}")


def ms(report: Report, what: str, percentile: str) -> float:
    return float(report[what][f"{percentile}_us"]) / 1e3


def us_each(report: Report, what: str) -> float:
    """The peer's processor time for each of what the engine counted."""
    return 1e6 * float(report["peer_s"]) / max(1, int(report["engine"][what]))


# -- tests ---------------------------------------------------------------------------------------------------------


def small_calls(yard: Yard, at: Standing) -> Figures:
    """a: calls that are not streamed, as fast as 64 connections make them, and 200 a second."""
    full = load(yard, at, AT_ONCE, "small.json", "-c", "64", "-w", "1", "-d", "3")
    return {
        "a_calls_s": float(full["ok_rps"]),
        "a_call_us": us_each(full, "requests"),
        "a_p99_ms": ms(full, "latency", "p99"),
        "a_errors": float(full["errors"]),
    } | calm_calls(yard, at)


def calm_calls(yard: Yard, at: Standing) -> Figures:
    calm = load(yard, at, AT_ONCE, "small.json", "-r", "200", "-w", "1", "-d", "4", "-g", "5")
    return {"a_calm_p50_ms": ms(calm, "latency", "p50"), "a_calm_p99_ms": ms(calm, "latency", "p99")}


def first_token(yard: Yard, at: Standing) -> Figures:
    """t: when the first event of a stream comes, 200 streams a second."""
    knobs = {"tokens": 4, "interval": 5, "ttft": 0}
    found = load(yard, at, knobs, "small-stream.json", "-r", "200", "-w", "1", "-d", "4", "-g", "5")
    return {"t_first_p50_ms": ms(found, "ttft", "p50"), "t_first_p99_ms": ms(found, "ttft", "p99")}


def known_prompts(yard: Yard, at: Standing) -> Figures:
    """b: 256 KB of which all but the last turn were sent before."""
    found = load(yard, at, AT_ONCE, "256k-known.json", "-c", "16", "-w", "1", "-d", "3")
    return {
        "b_known_calls_s": float(found["ok_rps"]),
        "b_known_us": us_each(found, "requests"),
        "b_known_errors": float(found["errors"]),
    }


def new_prompts(yard: Yard, at: Standing) -> Figures:
    """b: 256 KB that were never sent before.  Every call is waited for, so that all its cost is counted."""
    found = load(yard, at, AT_ONCE, "256k-new.json", "-c", "16", "-n", "3000", "-d", "8", "-g", "30")
    return {
        "b_new_calls_s": float(found["ok_rps"]),
        "b_new_us": us_each(found, "requests"),
        "b_new_errors": float(found["errors"]),
    }


def tiktoken_alone() -> Figures:
    """b: what the text of such a prompt costs in tiktoken and nothing else, no call of it twice."""
    encoding = load_encoding(VOCABULARY)
    used = 0.0
    for number in range(TEXT_ROUNDS):
        texts = [text.replace(bodies.MARKER, f"@U{number:016d}") for text in bodies.new_history()]
        before = time.process_time()
        for text in texts:
            encoding.encode_ordinary(text)
        used += time.process_time() - before
    return {"b_new_us": 1e6 * used / TEXT_ROUNDS}


def many_streams(yard: Yard, at: Standing, streams: int, prefix: str, tokens: int = STREAM_TOKENS) -> Figures:
    """d, D, g: so many streams at 10 tokens a second, each followed by the next one."""
    events = tokens + 1
    seconds = (tokens - 1) * TOKEN_MS / 1e3
    """The first token comes at once, and the event that ends it with the last."""
    seen: dict[str, int] = {}
    idle_kb = machine.memory_kb(at.pid) if at.pid else 0

    def look() -> None:
        time.sleep(seconds + 3.6)
        seen["kb"] = machine.memory_kb(at.pid) - idle_kb if at.pid else 0
        seen["open"] = int(engine_stats()["active"])

    options = ("-c", str(streams), "-R", str(seconds), "-w", str(seconds + 0.6), "-d", "6", "-E", str(tokens))
    knobs = {"tokens": tokens, "interval": TOKEN_MS, "ttft": 0}
    found = load(yard, at, knobs, "small-stream.json", *options, middle=look)
    offered = streams * events / seconds
    figures = {
        f"{prefix}_events_share": float(found["events_s"]) / offered,
        f"{prefix}_errors": float(found["errors"]),
        f"{prefix}_gap_p99_ms": ms(found, "gap", "p99"),
        f"{prefix}_transit_p99_ms": ms(found, "transit", "p99"),
    }
    if at.pid:
        figures[f"{prefix}_event_us"] = us_each(found, "events")
        figures[f"{prefix}_stream_kb"] = seen["kb"] / max(1, seen["open"])
    return figures


def growing_streams(yard: Yard, at: Standing) -> Figures:
    """g: the engine tells what each stream has written in every event, where the gateway asks for it."""
    return many_streams(yard, at, 2400, "g", GROWING_TOKENS)


def refusals(yard: Yard, at: Standing, rounds: int) -> Figures:
    """e: 100 refusals a second while 1,200 streams run; in turns streams alone, small prompts, 256 KB."""
    prompts = {"alone": None, "small": "small.json", "large": "256k-known.json"}
    refused: dict[str, list[Report]] = {kind: [] for kind in prompts}
    streams: dict[str, list[Report]] = {kind: [] for kind in prompts}
    for _ in range(rounds):
        for kind, body in prompts.items():
            with _streams_behind(yard, at, streams[kind]):
                if body:
                    refused[kind].append(_refused(yard, at, body))
    offered = REFUSED_STREAMS * 1e3 / TOKEN_MS
    arrived = [report["events_s"] / offered for reports in streams.values() for report in reports]
    figures: Figures = {"e_events_share": min(arrived)}
    for kind, reports in streams.items():
        figures[f"e_{kind}_gap_p99_ms"] = statistics.median(ms(report, "gap", "p99") for report in reports)
    for kind in ("small", "large"):
        reports = refused[kind]
        count = sum(report["status"].get("429", 0) for report in reports)
        figures[f"e_{kind}_p99_ms"] = statistics.median(ms(report, "non200", "p99") for report in reports)
        figures[f"e_{kind}_refused_share"] = count / max(1, sum(report["completed"] for report in reports))
    return figures


def _refused(yard: Yard, at: Standing, body: str) -> Report:
    options = ("-r", "100", "-w", "0.5", "-d", "5", "-g", "3")
    command = load_command(yard, at, body, at.refused_headers, options)
    out = subprocess.run(command, check=True, capture_output=True, timeout=LOAD_SECONDS_MAX).stdout
    report: Report = json.loads(out)
    return report


@contextmanager
def _streams_behind(yard: Yard, at: Standing, reports: list[Report]) -> Iterator[None]:
    """1,200 streams that do not end; the report on their six seconds after the fourth is added to `reports`."""
    _until_idle()
    set_engine(ENDLESS)
    machine.wait_until_quiet(yard.quiet_seconds)
    options = ("-c", str(REFUSED_STREAMS), "-R", "3", "-w", "4", "-d", "6", "-g", "0")
    command = load_command(yard, at, "small-stream.json", at.headers, options)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        time.sleep(4)
        yield
        out, _ = process.communicate(timeout=LOAD_SECONDS_MAX)
    reports.append(json.loads(out))


def leavers(yard: Yard, at: Standing) -> Figures:
    """f: 100 clients leave; how many the engine sees go, and how soon 99 of them."""
    slow, long_ = {"tokens": 16, "interval": 500, "ttft": 0}, {"tokens": 4, "interval": 0, "ttft": 4000}
    ways = {
        "stream": (slow, "small-stream.json", "1800"),
        "prefill": (long_, "small-stream.json", "1000"),
        "whole": (long_, "small.json", "1000"),
    }
    figures: Figures = {}
    for way, (knobs, body, leave_ms) in ways.items():
        seen, delays_ms = _leave(yard, at, knobs, body, leave_ms)
        figures[f"f_{way}_seen"] = seen
        if delays_ms:
            figures[f"f_{way}_p99_ms"] = sorted(delays_ms)[99 * len(delays_ms) // 100 - 1]
    return figures


def _leave(
    yard: Yard, at: Standing, knobs: Mapping[str, float], body: str, leave_ms: str
) -> tuple[int, list[float]]:
    """How many the engine saw leave, and after how long: by stream where clients knew it, else in order."""
    kept = yard.folder / "aborts.txt"
    options = ("-c", str(LEAVERS), "-R", "0.5", "-1", "-b", leave_ms, "-A", str(kept), "-d", "3", "-g", "1")
    load(replace(yard, tries=1), at, knobs, body, *options)
    _until_idle()
    left = [(words[0], int(words[1])) for words in map(str.split, kept.read_text().splitlines())]
    lines = [line.split() for line in machine.get(f"{ENGINE}/aborts").splitlines()]
    seen = {words[0]: int(words[1]) for words in lines}
    if all(stream in seen for stream, _ in left):
        return len(left), [(seen[stream] - ns) / 1e6 for stream, ns in left]
    if len(left) != len(seen):
        return len(seen), []
    pairs = zip(sorted(ns for _, ns in left), sorted(seen.values()), strict=True)
    return len(seen), [(saw - went) / 1e6 for went, saw in pairs]


def store_cost(yard: Yard, at: Standing) -> Figures:
    """s: the store's processor time for admit, first token and settle, streams of 64 connections."""
    assert at.store_pid is not None
    calls = 20_000
    options = ("-c", "64", "-n", str(calls), "-d", "60")
    set_engine(AT_ONCE)
    machine.wait_until_quiet(yard.quiet_seconds)
    before = machine.cpu_seconds(at.store_pid)
    command = load_command(yard, at, "small-stream.json", at.headers, options)
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if report["ok"] < calls:
        raise PeerError(f"{calls - report['ok']} of {calls} calls failed")
    return {"s_store_us": 1e6 * (machine.cpu_seconds(at.store_pid) - before) / calls}
