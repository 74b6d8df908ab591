"""What engines and the gateway say of themselves while the load runs: `/metrics` and `/admin/v1/state`, every 0.5 s."""

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SAMPLE_SECONDS = 0.5
SCRAPE_SECONDS = 5.0
"""For one answer."""
QUIET_SECONDS = 10.0
"""How long a gateway may take until it holds nothing."""
QUIET_POLL_SECONDS = 0.2
STATE_COUNTS = ("reserved", "leases", "queue", "inflight")

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = dict[str, str]


class AdminError(Exception):
    """The gateway's state cannot be read.  Its text is one line."""


class Page:
    """One Prometheus page."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for name, labels, value in _SAMPLE.findall(text):
            self._samples.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))

    def sum(self, *names: str, **labels: str) -> float | None:
        """Over all series with these labels, of the first name that the page has; None where it has none."""
        for name in names:
            samples = self._samples.get(name)
            if samples:
                return sum(value for found, value in samples if labels.items() <= found.items())
        return None

    def series(self, name: str) -> Sequence[tuple[Labels, float]]:
        return self._samples.get(name, ())


@dataclass(slots=True)
class EngineSample:
    """One engine at one moment; None for what its page does not have."""

    at: float
    up: bool
    preemptions: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    """Share of its blocks."""
    blocks: float | None = None
    """Usable ones: the pool without the null block."""
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    generation_tokens: float | None = None
    recomputed_tokens: float | None = None
    started: float | None = None
    """Its process, as a Unix time: another one has begun its counters anew."""


@dataclass(slots=True)
class GatewaySample:
    at: float
    reserved: int
    limit: int
    queue: int
    inflight: int
    leases: int
    shares_while_queued: dict[str, float]
    """Reserved blocks over the limit, of each pool for which calls wait at this moment."""


@dataclass(slots=True)
class Observations:
    """All samples of a run; times are seconds since its start."""

    engines: dict[str, list[EngineSample]] = field(default_factory=dict)
    gateway: list[GatewaySample] = field(default_factory=list)
    refusals_before: dict[str, dict[float, float]] = field(default_factory=dict)
    refusals_after: dict[str, dict[float, float]] = field(default_factory=dict)
    left_over: dict[str, int] | None = None
    """What the gateway still held when it had had time to give all back; None without a gateway."""
    missed: int = 0
    """Scrapes without a usable answer."""
    predictions_before: dict[float, float] = field(default_factory=dict)
    predictions_after: dict[float, float] = field(default_factory=dict)
    """Cumulative buckets of real over predicted wait, before and after the run."""


def read_engine(at: float, text: str) -> EngineSample:
    page = Page(text)
    return EngineSample(
        at=at,
        up=True,
        preemptions=page.sum("vllm:num_preemptions_total", "vllm:num_preemptions"),
        running=page.sum("vllm:num_requests_running"),
        waiting=page.sum("vllm:num_requests_waiting"),
        kv_use=_mean(page, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        blocks=_usable_blocks(page),
        prompt_tokens=page.sum("vllm:prompt_tokens_total"),
        cached_tokens=page.sum("vllm:prompt_tokens_cached_total"),
        generation_tokens=page.sum("vllm:generation_tokens_total"),
        recomputed_tokens=page.sum("mock:recomputed_tokens_total"),
        started=page.sum("process_start_time_seconds"),
    )


def read_state(at: float, state: Mapping[str, Any]) -> GatewaySample | None:
    """None while the gateway does not see its store."""
    if any(state.get(name) is None for name in STATE_COUNTS):
        return None
    reserved = limit = 0
    shares: dict[str, float] = {}
    for name, fleet in state.get("fleets", {}).items():
        for pool, inside in fleet.get("pools", {}).items():
            replicas = inside.get("replicas", {}).values()
            pool_reserved = sum(replica.get("reserved") or 0 for replica in replicas)
            pool_limit = sum(replica.get("limit") or 0 for replica in replicas)
            reserved, limit = reserved + pool_reserved, limit + pool_limit
            if pool_limit and sum(fleet.get("queued", {}).get(pool, {}).values()):
                shares[f"{name}/{pool}"] = pool_reserved / pool_limit
    counts = {name: int(state[name]) for name in STATE_COUNTS}
    return GatewaySample(at, reserved, limit, counts["queue"], counts["inflight"], counts["leases"], shares)


def read_predictions(text: str) -> dict[float, float]:
    """Cumulative buckets of `kvgate_queue_wait_prediction_ratio`, of all lanes and classes."""
    buckets: dict[float, float] = {}
    for labels, value in Page(text).series("kvgate_queue_wait_prediction_ratio_bucket"):
        bound = float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    return buckets


def read_refusals(text: str) -> dict[str, dict[float, float]]:
    """Cumulative buckets of `kvgate_refusal_seconds` by reason."""
    found: dict[str, dict[float, float]] = {}
    for labels, value in Page(text).series("kvgate_refusal_seconds_bucket"):
        buckets = found.setdefault(labels.get("reason", ""), {})
        bound = float(labels["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    return found


class Observer:
    """Watches until it is cancelled; `finish` takes the last samples."""

    def __init__(self, engines: Sequence[str], admin: str | None, admin_token: str | None) -> None:
        """URLs.  `admin` is the gateway's; its state needs the token."""
        self.observations = Observations({url: [] for url in engines})
        self._admin = admin
        self._headers = {"authorization": f"Bearer {admin_token}"} if admin_token else {}
        self._client = httpx.AsyncClient(timeout=SCRAPE_SECONDS, trust_env=False)

    async def begin(self) -> None:
        """What was there before the load.  Raises AdminError."""
        now = time.monotonic()
        await asyncio.gather(*(self._engine(url, now) for url in self.observations.engines))
        if self._admin is None:
            return
        try:
            await self._state()
            page = await self._metrics()
            self.observations.refusals_before = read_refusals(page)
            self.observations.predictions_before = read_predictions(page)
        except httpx.HTTPStatusError as error:
            raise AdminError(_status_problem(self._admin, error.response)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise AdminError(f"the admin API at {self._admin} does not answer: {why}") from None
        except ValueError:
            raise AdminError(f"the admin API at {self._admin} answers no state: is it a kvgate?") from None

    async def watch(self, start: float) -> None:
        due = time.monotonic()
        while True:
            await self.sample(start, SAMPLE_SECONDS)
            due = max(due + SAMPLE_SECONDS, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def sample(self, start: float, spread_seconds: float = 0.0) -> None:
        """One sample of everything; `start` is the run's zero by `time.monotonic`.

        Spread out, so that the scrapes of engines that share a process never hold up its tokens by their sum.
        """
        engines = list(self.observations.engines)
        pause = spread_seconds / (len(engines) + 1)
        async with asyncio.TaskGroup() as scrapes:
            if self._admin is not None:
                scrapes.create_task(self._gateway(start))
            for number, url in enumerate(engines, 1):
                scrapes.create_task(self._engine_after(number * pause, url, start))

    async def finish(self, start: float) -> None:
        """Wait until the gateway holds nothing, for a bounded time, then take the last samples."""
        if self._admin is not None:
            self.observations.left_over = await self._until_quiet()
            with contextlib.suppress(httpx.HTTPError):
                page = await self._metrics()
                self.observations.refusals_after = read_refusals(page)
                self.observations.predictions_after = read_predictions(page)
        await self.sample(start)

    async def close(self) -> None:
        await self._client.aclose()

    async def _engine_after(self, seconds: float, url: str, start: float) -> None:
        await asyncio.sleep(seconds)
        await self._engine(url, start)

    async def _engine(self, url: str, start: float) -> None:
        at = time.monotonic() - start
        try:
            answer = (await self._client.get(f"{url}/metrics")).raise_for_status()
            sample = read_engine(at, answer.text)
        except (httpx.HTTPError, ValueError):
            self.observations.missed += 1
            sample = EngineSample(at, up=False)
        self.observations.engines[url].append(sample)

    async def _gateway(self, start: float) -> None:
        at = time.monotonic() - start
        try:
            sample = read_state(at, await self._state())
        except (httpx.HTTPError, ValueError):
            sample = None
        if sample is None:
            self.observations.missed += 1
        else:
            self.observations.gateway.append(sample)

    async def _state(self) -> dict[str, Any]:
        answer = await self._client.get(f"{self._admin}/admin/v1/state", headers=self._headers)
        state: dict[str, Any] = answer.raise_for_status().json()
        return state

    async def _metrics(self) -> str:
        return (await self._client.get(f"{self._admin}/metrics")).raise_for_status().text

    async def _until_quiet(self) -> dict[str, int]:
        """The counts that a gateway at rest has at 0; -1 where it does not say."""
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            found = dict.fromkeys(STATE_COUNTS, -1)
            with contextlib.suppress(httpx.HTTPError, ValueError):
                state = await self._state()
                found = {name: -1 if state.get(name) is None else int(state[name]) for name in STATE_COUNTS}
            if not any(found.values()) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(QUIET_POLL_SECONDS)


def _status_problem(admin: str, answer: httpx.Response) -> str:
    if answer.status_code in (401, 403):
        return f"the admin API at {admin} answers {answer.status_code}: is KVGATE_ADMIN_TOKEN right?"
    return f"the admin API at {admin} answers {answer.status_code} to {answer.request.url.path}"


def _mean(page: Page, *names: str) -> float | None:
    """Over the data-parallel ranks of an engine, whose pools are equally large."""
    for name in names:
        samples = page.series(name)
        if samples:
            return sum(value for _, value in samples) / len(samples)
    return None


def _usable_blocks(page: Page) -> float | None:
    pools = [labels.get("num_gpu_blocks", "") for labels, _ in page.series("vllm:cache_config_info")]
    if not pools or not all(number.isdecimal() for number in pools):
        return None
    return float(sum(int(number) - 1 for number in pools))
