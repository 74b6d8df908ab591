"""The store dies under running streams, on real processes: streams go on, and the books are right again afterwards."""

import concurrent.futures
import contextlib
import json
import signal
import time
from collections.abc import Iterator

import pytest
import redis

from tests.processes import HANG_SECONDS, GatewayProcess, Mock, World, wait_until

STREAMS = 5
OUTPUT_TOKENS, STEP_MS = 400, 45
"""18 s of the mock engine: far longer than an outage here, on a busy machine, too."""
QUICK = 0.1
"""Its steps once the outage is over."""
READING_SECONDS = 2.0
"""That a reading of the store has."""
READINGS = 10
LEASE_SECONDS = 2.0


@pytest.fixture
def running(new_world: World) -> tuple[World, Mock, GatewayProcess, GatewayProcess]:
    """Two gateways on one store, with short leases."""
    mock = new_world.mock("--blocks", "301", "--step-base-ms", str(STEP_MS))
    timing = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.2}
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=timing)
    return new_world, mock, new_world.gateway(config, key), new_world.gateway(config, key)


def stream(gateway: GatewayProcess, tokens: int = OUTPUT_TOKENS) -> int:
    """Data events with a choice, of a stream that ends properly."""
    body = {"model": "demo", "prompt": [1] * 40, "max_tokens": tokens, "stream": True}
    with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    return sum(1 for event in events[:-1] if json.loads(event[6:])["choices"])


@contextlib.contextmanager
def streaming(*gateways: GatewayProcess) -> Iterator[list["concurrent.futures.Future[int]"]]:
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        yield [threads.submit(stream, gateway) for gateway in gateways for _ in range(STREAMS)]


def held(gateway: GatewayProcess) -> tuple[int, int]:
    state = gateway.state()
    return state["reserved"], state["leases"]


def quiet(*gateways: GatewayProcess) -> bool:
    return all(gateway.is_quiet() for gateway in gateways)


def test_a_store_restarted_empty_under_streams(running) -> None:
    """No stream notices; everything that runs is declared again; a new call waits for that and is served."""
    world, mock, first, second = running
    with streaming(first, second) as calls:
        wait_until(lambda: first.state()["leases"] == 2 * STREAMS, "all are admitted")
        before = first.state()["reserved"]
        assert world.store.process
        world.store.process.kill()
        world.store.process.wait()
        world.store.start()
        wait_until(first.is_ready, "the gate is open again")
        wait_until(lambda: held(first) == (before, 2 * STREAMS), "both have declared what they run")
        assert stream(second, 5) == 5
        mock.slow(QUICK)
        assert [call.result(20) for call in calls] == [OUTPUT_TOKENS] * 2 * STREAMS
    wait_until(lambda: quiet(first, second), "everything was given back")
    assert mock.metric("vllm:num_preemptions_total") == 0
    assert mock.log()["aborted"] == 0


def test_a_paused_store_loses_nobodys_place(running) -> None:
    """The store stops for longer than a lease, with both owners alive."""
    world, mock, first, second = running
    with streaming(first, second) as calls:
        wait_until(lambda: first.state()["leases"] == 2 * STREAMS, "all are admitted")
        assert world.store.process
        world.store.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + 0.3)
        world.store.process.send_signal(signal.SIGCONT)
        wait_until(lambda: first.is_ready() and second.is_ready(), "both are ready again")
        assert first.state()["leases"] == 2 * STREAMS
        mock.slow(QUICK)
        assert [call.result(20) for call in calls] == [OUTPUT_TOKENS] * 2 * STREAMS
    wait_until(lambda: quiet(first, second), "everything was given back")
    for gateway in (first, second):
        assert gateway.metric("kvgate_leases_expired_total") == 0


def test_a_killed_gateway_gives_its_place_to_the_waiting(running) -> None:
    """Its lease expires, its blocks return, and the other's queued call is granted."""
    _, _, first, second = running
    big = {"model": "demo", "prompt": [1] * 1600, "max_tokens": 3000, "stream": True}
    waiting = {"model": "demo", "prompt": [1] * 1600, "max_tokens": 5}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        first.client.stream("POST", "/v1/completions", json=big) as running_stream,
    ):
        lines = running_stream.iter_lines()  # whose end would be the stream's
        assert next(lines).startswith("data: ")
        asked = threads.submit(second.client.post, "/v1/completions", json=waiting)
        wait_until(lambda: second.state()["queue"] == 1, "it waits")
        first.process.kill()
        answer = asked.result()
    assert first.process.wait(HANG_SECONDS)
    assert answer.status_code == 200
    assert int(answer.headers["x-kvgate-queue-ms"]) > 100
    wait_until(second.is_quiet, "everything was given back")


def test_a_store_at_its_memory_limit_still_settles(running) -> None:
    """Calls end and give back; nothing leaks."""
    world, mock, first, second = running

    client = redis.Redis(unix_socket_path=str(world.store.socket), protocol=2)
    with contextlib.closing(client), streaming(first, second) as calls:
        wait_until(lambda: first.state()["leases"] == 2 * STREAMS, "all are admitted")
        client.config_set("maxmemory", 1)
        mock.slow(QUICK)
        assert [call.result(20) for call in calls] == [OUTPUT_TOKENS] * 2 * STREAMS
        wait_until(lambda: quiet(first, second), "everything was given back")


def test_without_a_store_calls_are_held_and_then_refused(running) -> None:
    """Held for `store.hold_seconds`, then 503; once the outage is that old, at once; back within a moment."""
    world, _, first, _ = running
    assert world.store.process
    world.store.process.kill()
    world.store.process.wait()
    body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
    held = first.client.post("/v1/completions", json=body)
    assert (held.status_code, held.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(held.headers["retry-after"]) >= 1
    time.sleep(0.5)
    refused = first.client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert first.client.get("/health/ready").status_code == 503
    assert first.client.get("/health/live").status_code == 200
    world.store.start()
    wait_until(first.is_ready, "ready again")
    assert first.client.post("/v1/completions", json=body).status_code == 200


def test_two_fleets_in_one_gateway(new_world: World) -> None:
    """Each has its own budget; a model name decides."""
    mocks = [new_world.mock("--blocks", "101", "--model", model) for model in ("demo", "other")]
    config, (key,) = new_world.config([{"name": "only", "replicas": [mocks[0].url]}])
    document = json.loads(config.read_text())
    document["fleets"].append({"model": "other", "pools": [{"name": "only", "replicas": [mocks[1].url]}]})
    config.write_text(json.dumps(document))
    gateway = new_world.gateway(config, key)
    for model in ("demo", "other"):
        answer = gateway.client.post(
            "/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2}
        )
        assert answer.status_code == 200
        assert answer.json()["model"] == model
    missing = gateway.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert (missing.status_code, missing.json()["error"]["code"]) == (400, "missing_field")
    assert [m.log()["received"] for m in mocks] == [1, 1]
    assert {model["id"] for model in gateway.client.get("/v1/models").json()["data"]} == {"demo", "other"}


def test_what_operators_read_does_not_wait_for_a_store_that_is_known_to_be_away(running) -> None:
    """A store that takes connections and never answers: readings of it would take twice the time that all have."""
    world, _, gateway, _ = running
    assert world.store.process
    world.store.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: gateway.metric("kvgate_store_up") == 0, "the outage is known")
        began = time.monotonic()
        for _ in range(READINGS):
            assert gateway.state()["reserved"] is None
            assert gateway.metric("kvgate_store_up") == 0
        assert time.monotonic() - began < READINGS * READING_SECONDS / 2
    finally:
        world.store.process.send_signal(signal.SIGCONT)
    wait_until(lambda: quiet(gateway), "the store is read again")
