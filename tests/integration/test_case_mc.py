"""MC-01: whatever clients make up, the number of series and the memory stay."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import GatewayProcess, World, wait_until
from tests.wire import Wire, completion, post

REQUESTS = 20_000
BATCH = 20
"""Requests that are written at once on one connection: the time goes into the gateway, not into waiting."""
CLIENTS = 4
SERIES_MAX = 50
MB = 1024 * 1024
JUNK = ('"', "\n", "\\", "{", "}", "é", "🙂", "\x00", " ", "/")
MARK = "made-up"


class Inventor:
    """Requests that never repeat a model, key, user, path, class, id or address; by seed."""

    def __init__(self, key: str, seed: int) -> None:
        self._key = key
        self._random = random.Random(seed)
        self._number = seed * REQUESTS

    def unknown_model(self) -> bytes:
        return self._with_headers(post(self._key, self._body(self._name(10_000))))

    def unknown_path(self) -> bytes:
        path = f"/v1/{MARK}/{self._new()}"
        return self._with_headers(post(self._key, self._body("demo"), path))

    def unknown_key(self) -> bytes:
        return self._with_headers(post(f"kvg_{MARK}{self._new()}", self._body("demo")))

    def served(self) -> bytes:
        return self._with_headers(post(self._key, completion(16, 1) | {"user": self._name(100)}))

    def unknown_class(self) -> bytes:
        line = f"x-kvgate-priority: {MARK}-{self._new()}"
        return self.served().replace(b"\r\n", f"\r\n{line}\r\n".encode(), 1)

    def _with_headers(self, request: bytes) -> bytes:
        lines = (
            f"x-request-id: {MARK}-{self._new()}",
            f"x-kvgate-deadline-ms: {60_000 + self._new()}",
            f"x-priority: {MARK}-{self._new()}",
            f"x-forwarded-for: 10.{self._random.randrange(256)}.0.1",
            f"user-agent: {MARK}-{self._new()}",
        )
        first, _, rest = request.partition(b"\r\n")
        return b"\r\n".join((first, *(line.encode() for line in lines), rest))

    def _body(self, model: str) -> bytes:
        body = {"model": model, "prompt": "hi", "user": self._name(100), f"{MARK}-{self._new()}": 1}
        return json.dumps(body).encode()

    def _name(self, longest: int) -> str:
        """Now and then a long one or a nasty one."""
        length = longest if self._random.random() < 0.05 else 0
        return f"{MARK}-{self._new()}{self._random.choice(JUNK)}{'x' * length}"

    def _new(self) -> int:
        self._number += 1
        return self._number


async def _on_one_connection(url: str, requests: Iterator[bytes], status: int) -> int:
    """Batch after batch; the number of answers, each of that status."""
    wire = await Wire.open(url)
    answers = 0
    while batch := [request for _, request in zip(range(BATCH), requests, strict=False)]:
        await wire.send(b"".join(batch))
        for _ in batch:
            assert (await wire.answer()).status == status
        answers += len(batch)
    wire.close()
    return answers


async def _one_each(url: str, requests: Iterator[bytes], status: int) -> int:
    """A refused key costs the connection."""
    answers = 0
    for request in requests:
        answers += await _on_one_connection(url, iter([request]), status)
    return answers


async def _client(gateway: GatewayProcess, seed: int, share: int) -> int:
    inventor = Inventor(gateway.key, seed)
    return (
        await _on_one_connection(gateway.url, (inventor.unknown_model() for _ in range(share // 2)), 404)
        + await _on_one_connection(gateway.url, (inventor.unknown_path() for _ in range(share // 4)), 404)
        + await _on_one_connection(gateway.url, (inventor.served() for _ in range(share // 20)), 200)
        + await _on_one_connection(gateway.url, (inventor.unknown_class() for _ in range(share // 20)), 400)
        + await _one_each(gateway.url, (inventor.unknown_key() for _ in range(share * 3 // 20)), 401)
    )


def _series(text: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series; raises for a text that is not in the format."""
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _memory_bytes(gateway: GatewayProcess) -> int:
    lines = Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


async def test_mc01_junk_makes_no_series(new_world: World) -> None:
    mock = new_world.mock("--speed", "inf")
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (key,) = new_world.config(pools, {"name": "configured"}, log={"level": "warning"})
    gateway = new_world.gateway(config, key)
    await _client(gateway, seed=0, share=200)
    series, memory = _series(gateway.metrics()), _memory_bytes(gateway)

    share = REQUESTS // CLIENTS
    answers = await asyncio.gather(*(_client(gateway, seed, share) for seed in range(1, CLIENTS + 1)))

    assert sum(answers) == REQUESTS
    text = gateway.metrics()
    assert len(text) < MB
    assert len(_series(text) - series) < SERIES_MAX
    assert MARK not in text
    assert key not in text
    assert _memory_bytes(gateway) - memory < 20 * MB
    await asyncio.to_thread(wait_until, gateway.is_quiet, "nothing is held")


def test_mc01_the_metrics_need_no_key_and_count_every_request(new_world: World) -> None:
    """One made-up request of each kind is one refusal, under its code and nothing else of it."""
    mock = new_world.mock("--speed", "inf")
    config, (key,) = new_world.config(
        [{"name": "only", "replicas": [mock.url]}], store={"heartbeat_seconds": 0.2}
    )
    gateway = new_world.gateway(config, key)
    gateway.client.post("/v1/completions", json={"model": MARK, "prompt": "hi"})
    gateway.client.post(
        "/v1/completions", json={"model": "demo"}, headers={"authorization": f"Bearer {MARK}"}
    )
    text = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    counted = {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvgate_admission_requests_total"
    }
    assert counted == {"model_not_found": 1, "invalid_api_key": 1}
