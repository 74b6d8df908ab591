"""The call log of real processes: every end of a call has its line with the right figures, and no line is lost."""

import asyncio
import contextlib
import io
import json
import resource
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.cli import main
from gateway.config import load, load_secrets
from gateway.core.events import CallEnded
from gateway.core.outcomes import Code, Outcome
from gateway.telemetry.calllog import FOLLOW_SECONDS
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World, wait_until
from tests.wire import Answer, Wire, ask, blocks_of, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

CALLS = "kvgate_admission_requests_total"
LOST = "kvgate_call_log_lost_total"
ENGINE = (
    "--blocks",
    "201",
    "--max-model-len",
    "4096",
    "--step-base-ms",
    "1",
    "--enable-prompt-tokens-details",
)
LOG = {"calls": "calls.jsonl", "level": "warning"}
BODY_BYTES_MAX = 100_000
WHOLE = (1600, 1601)
"""Prompt and output tokens of a call that takes the whole engine, its 200 blocks."""
PROMPT = "the-prompt-that-no-log-may-hold"
QUERY, COOKIE = "the-query-that-no-log-may-hold", "the-cookie-that-no-log-may-hold"
WRONG_KEY = "kvg_the-wrong-key-that-no-log-may-hold"


@dataclass
class Scene:
    """Gateways of one configuration, and the log that they share."""

    world: World
    path: Path
    keys: list[str]
    gateways: list[GatewayProcess]
    official: Counter[str] = field(default_factory=Counter)
    """Tokens, as engines told clients."""

    @property
    def gateway(self) -> GatewayProcess:
        return self.gateways[0]

    async def ask(self, name: str, body: Any, key: int = 0, **more: Any) -> Answer:
        """A call by its request id, and its whole answer."""
        return await ask(self.gateway.url, named(name, self.keys[key], body, **more))

    async def open(self, name: str, body: Any, key: int = 0, gateway: int = 0, **more: Any) -> Wire:
        wire = await Wire.open(self.gateways[gateway].url)
        await wire.send(named(name, self.keys[key], body, **more))
        return wire

    async def fill(self) -> Wire:
        """A stream that holds the whole engine until it is left."""
        wire = await self.open("holder", completion(*WHOLE, stream=True, fail="hang:1"))
        status, _ = await wire.head()
        assert status == 200
        return wire

    def lines(self) -> list[dict[str, Any]]:
        return lines_of(self.path)

    async def line(self, name: str) -> dict[str, Any]:
        """Of one call, once."""
        await soon(lambda: by_id(self.lines(), name), f"a line of {name}")
        (found,) = by_id(self.lines(), name)
        return found

    async def assert_counted(self) -> None:
        """The log has what the metric counts, by outcome and reason."""
        counted: Counter[tuple[str, str]] = Counter()
        for gateway in self.gateways:
            counted += counts(await asyncio.to_thread(gateway.metrics))
        logged = Counter((line["outcome"], line["reason"] or "") for line in self.lines())
        assert logged == counted


def named(
    name: str, key: str, body: Any, path: str = "/v1/completions", method: str = "POST", headers: str = ""
) -> bytes:
    more = f"x-request-id: {name}\r\n{headers}content-type"
    request = post(key, body, path).replace(b"content-type", more.encode(), 1)
    return request.replace(b"POST", method.encode(), 1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return []


def by_id(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("request_id") == name]


def counts(page: str) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == CALLS:
                found[sample.labels["outcome"], sample.labels["reason"]] += int(sample.value)
    return found


def serve(
    world: World,
    *keys: dict[str, Any],
    mocks: int = 1,
    gateways: int = 1,
    options: tuple[str, ...] = (),
    **more: Any,
) -> tuple[Scene, list[Mock]]:
    engines = [world.mock(*ENGINE) for _ in range(mocks)]
    replicas = more.pop("replicas", None) or [
        {"name": f"r{number}", "url": engine.url} for number, engine in enumerate(engines)
    ]
    store = QUICK_STORE | more.pop("store", {})
    config, secrets = world.config(
        [{"name": "only", "replicas": replicas}],
        *(keys or ({"name": "team-a", "group": "research"},)),
        store=store,
        log=LOG,
        **more,
    )
    running = [world.gateway(config, secrets[0], *options, wait=False) for _ in range(gateways)]
    for gateway in running:
        gateway.wait_ready()
    return Scene(world, world.folder / "calls.jsonl", secrets, running), engines


# -- who was served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_completed_call_has_the_engines_figures(new_world: World, stream: bool) -> None:
    scene, (mock,) = serve(new_world)
    body = completion(100, 20, hold_seconds=0.2) | {"stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    for name in ("first", "again"):
        answer = await scene.ask(name, body)
        assert answer.status == 200
        usage = usage_of(answer, stream)
        line = await scene.line(name)
        assert (line["prompt_tokens"], line["output_tokens"]) == (100, 20)
        assert (line["prompt_tokens"], line["output_tokens"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert (line["prompt_estimated"], line["output_estimated"], line["charged"]) == (False, False, True)
        blocks = int(answer.headers["x-kvgate-reserved-blocks"])
        assert line["reserved_blocks"] == blocks == blocks_of(100, 20)
        assert blocks * 0.2 <= line["block_seconds"] <= blocks * line["seconds"]
        assert known(line) == {
            "request_id": name, "route": "/v1/completions", "model": "demo", "fleet": "demo", "key": "team-a",
            "group": "research", "class": "normal", "lane": "only", "pool": "only", "replica": "r0",
            "outcome": "completed", "reason": None, "status": 200, "retry_ms": None,
        }  # fmt: skip
    assert (await scene.line("first"))["cached_tokens"] == 0
    assert (await scene.line("again"))["cached_tokens"] == 96, "all but the last block"
    assert [record["cached_tokens"] for record in mock.log()["requests"]] == [0, 96]
    await scene.assert_counted()


def usage_of(answer: Answer, stream: bool) -> dict[str, Any]:
    if not stream:
        return dict(answer.json()["usage"])
    frames = [frame.removeprefix(b"data: ") for frame in answer.body.split(b"\n\n") if frame]
    return dict(json.loads(frames[-2])["usage"])


def known(line: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on time and tokens."""
    names = "request_id route model fleet key group class lane pool replica outcome reason status retry_ms"
    return {name: line[name] for name in names.split()}


async def test_a_call_without_model_or_limit_and_one_of_several_choices(new_world: World) -> None:
    scene, _ = serve(new_world, fleet={"default_output_tokens": 30})
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3}
    answer = await scene.ask("plain", body, path="/v1/chat/completions")
    line = await scene.line("plain")
    assert (line["model"], line["route"]) == ("demo", "/v1/chat/completions")
    assert line["output_tokens"] == answer.json()["usage"]["completion_tokens"] == 90


async def test_blocks_are_paid_for_on_every_replica(new_world: World) -> None:
    """The first one is silent for half a second, the second one serves."""
    scene, mocks = serve(new_world, mocks=2, upstream={"headers_seconds": 0.5, "first_event_seconds": 0.5})
    mocks[0].fail("hang")
    answer = await scene.ask("moved", completion(100, 20))
    assert answer.headers["x-kvgate-replica"] == "r1"
    line = await scene.line("moved")
    assert (line["outcome"], line["replica"]) == ("completed", "r1")
    assert 0.5 * line["reserved_blocks"] <= line["block_seconds"] <= line["seconds"] * line["reserved_blocks"]


async def test_what_an_engine_refuses_is_not_charged(new_world: World) -> None:
    scene, _ = serve(new_world)
    answer = await scene.ask("bad", completion(100, 20, fail="status:400"))
    assert answer.status == 400
    line = await scene.line("bad")
    assert (line["outcome"], line["reason"], line["status"], line["charged"]) == (
        "completed",
        None,
        400,
        False,
    )
    assert (line["prompt_tokens"], line["prompt_estimated"], line["output_tokens"]) == (100, True, None)


# -- who was refused ---------------------------------------------------------------------------------------------

LIMITED, OTHER, CLOSED, ONCE, NOW = 1, 2, 3, 4, 5
"""Keys, by their places in the keys file; 0 has no limits."""
KEYS: tuple[dict[str, Any], ...] = (
    {"name": "free", "group": "research"},
    {"name": "limited", "limits": {"blocks_max": 2, "context_tokens_max": 100, "max_output_tokens": 50}},
    {"name": "other", "models": ["other"]},
    {"name": "closed", "limits": {"requests_max": 0}},
    {"name": "once", "limits": {"requests_per_minute": 1}},
    {"name": "now", "class": "now"},
)
SMALL = completion(16, 16)


@dataclass(frozen=True)
class Refused:
    """A request that is refused without waiting for anything, whatever the engine does."""

    code: str
    status: int
    body: Any = field(default_factory=lambda: SMALL)
    key: int = 0
    known_model: str | None = "demo"
    at_edge: bool = True
    """Before it was given to its fleet."""
    headers: str = ""
    method: str = "POST"


REFUSED = [
    Refused("invalid_json", 400, b"{", known_model=None),
    Refused("missing_field", 400, {"model": "demo", "max_tokens": 1}, known_model=None),
    Refused("duplicate_field", 400, b'{"model":"demo","n":1,"n":1}', known_model=None),
    Refused("invalid_value", 400, SMALL | {"max_tokens": "x"}, known_model=None),
    Refused("too_many_sequences", 400, SMALL | {"n": 17}, known_model=None),
    Refused("context_length_exceeded", 400, completion(5000, 1), at_edge=False),
    Refused("output_limit_exceeded", 400, completion(1, 51), LIMITED, at_edge=False),
    Refused("key_cap_exceeded", 400, completion(40, 10), LIMITED, at_edge=False),
    Refused("context_not_cleared", 403, completion(101, 1), LIMITED, at_edge=False),
    Refused("model_not_allowed", 403, SMALL, OTHER),
    Refused("model_not_found", 404, SMALL | {"model": "n" * 999}, known_model="n" * 256),
    Refused("quota_exceeded", 429, SMALL, CLOSED, known_model=None),
    Refused("method_not_allowed", 405, b"", known_model=None, method="PUT"),
    Refused("body_too_large", 413, b" " * (BODY_BYTES_MAX + 1), known_model=None),
    Refused("unsupported_encoding", 415, b"", known_model=None, headers="content-encoding: gzip\r\n"),
]


async def test_every_refusal_is_a_line(new_world: World) -> None:
    """With who, what and why; what only a busy engine or a lost one refuses has its own tests below."""
    classes = [{"name": "now", "depth_max": 0}, {"name": "normal", "depth_max": 1}]
    limits = {"body_bytes_max": BODY_BYTES_MAX, "body_seconds": 0.5}
    scene, _ = serve(new_world, *KEYS, classes=classes, server=limits, upstream={"idle_seconds": 600})
    for refused in REFUSED:
        await expect_refused(scene, refused)
    await expect_no_key(scene)
    await expect_late_body(scene)
    await expect_rate(scene)
    await expect_no_room(scene)
    text = scene.path.read_text()
    for secret in (PROMPT, QUERY, COOKIE, WRONG_KEY, *scene.keys, *(key[:12] for key in scene.keys)):
        assert secret not in text
    await scene.assert_counted()


async def expect_refused(scene: Scene, refused: Refused) -> None:
    answer = await scene.ask(
        refused.code, refused.body, refused.key, method=refused.method, headers=refused.headers
    )
    assert (answer.status, answer.code) == (refused.status, refused.code)
    line = await scene.line(refused.code)
    told = answer.headers.get("retry-after-ms")
    keyless = refused.code == "method_not_allowed"
    key = KEYS[refused.key]
    assert known(line) == {
        "request_id": refused.code, "route": "/v1/completions", "model": refused.known_model,
        "fleet": None if refused.at_edge else "demo", "key": None if keyless else key["name"],
        "group": None if keyless else key.get("group"), "class": None if keyless else key.get("class", "normal"),
        "lane": line["lane"], "pool": None, "replica": None, "outcome": "refused", "reason": refused.code,
        "status": refused.status, "retry_ms": None if told is None else int(told),
    }  # fmt: skip
    assert_nothing_used(line)


def assert_nothing_used(line: dict[str, Any]) -> None:
    assert not line["charged"]
    assert (line["output_tokens"], line["cached_tokens"]) == (None, None)
    assert (line["reserved_blocks"], line["block_seconds"]) == (0, 0)


async def expect_no_key(scene: Scene) -> None:
    """A prompt, a query string, a cookie and a wrong key: none of it is in the line."""
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    path = f"/v1/chat/completions?q={QUERY}"
    request = named(
        "no-key", WRONG_KEY, body, path, headers=f"cookie: {COOKIE}\r\nx-api-key: {WRONG_KEY}\r\n"
    )
    answer = await ask(scene.gateway.url, request)
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    line = await scene.line("no-key")
    assert (line["key"], line["group"], line["class"], line["model"]) == (None, None, None, None)
    assert (line["route"], line["reason"]) == ("/v1/chat/completions", "invalid_api_key")
    answer = await ask(
        scene.gateway.url, named("with-key", scene.keys[0], body, path, headers=f"cookie: {COOKIE}\r\n")
    )
    assert answer.status == 200
    assert (await scene.line("with-key"))["route"] == "/v1/chat/completions"


async def expect_late_body(scene: Scene) -> None:
    """A body that does not arrive, and one whose client leaves."""
    for name, leaves, told in (
        ("late", False, ("refused", "body_timeout", 408)),
        ("gone", True, ("cancelled", "client_disconnect", 499)),
    ):
        wire = await Wire.open(scene.gateway.url)
        await wire.send(named(name, scene.keys[0], SMALL)[:-5])
        if leaves:
            wire.reset()
        else:
            assert (await wire.answer()).code == "body_timeout"
        line = await scene.line(name)
        assert (line["outcome"], line["reason"], line["status"]) == told
        assert (line["key"], line["model"]) == ("free", None)


async def expect_rate(scene: Scene) -> None:
    """A rate quota tells the true time to come back, and so does the line."""
    assert (await scene.ask("rate-1", SMALL, ONCE)).status == 200
    answer = await scene.ask("rate-2", SMALL, ONCE)
    assert (answer.status, answer.code) == (429, "quota_exceeded")
    line = await scene.line("rate-2")
    assert (line["retry_ms"], line["lane"]) == (int(answer.headers["retry-after-ms"]), "only")
    assert line["retry_ms"] > 50_000
    assert_nothing_used(line)


async def expect_no_room(scene: Scene) -> None:
    """What a full engine refuses, with and without a queue, and who leaves that queue."""
    holder = await scene.fill()
    answer = await scene.ask("capacity", SMALL, NOW)
    assert answer.code == "capacity_exceeded"
    line = await scene.line("capacity")
    assert (line["class"], line["retry_ms"]) == ("now", int(answer.headers["retry-after-ms"]))

    waiting = await scene.open("left-queued", SMALL)
    await soon(lambda: scene.gateway.state()["queue"] == 1, "one waits")
    answer = await scene.ask("full", SMALL, key=0)
    assert answer.code == "queue_full"
    line = await scene.line("full")
    assert (line["reason"], line["lane"], line["prompt_tokens"], line["prompt_estimated"]) == (
        "queue_full",
        "only",
        16,
        True,
    )
    assert_nothing_used(line)
    waiting.reset()
    line = await scene.line("left-queued")
    assert (line["outcome"], line["reason"], line["status"]) == ("cancelled", "client_disconnect", 499)
    assert 0 < line["queue_ms"] <= line["seconds"] * 1000 + 1
    assert_nothing_used(line)

    answer = await scene.ask("waited", SMALL, headers="x-kvgate-deadline-ms: 300\r\n")
    assert answer.code == "queue_timeout"
    line = await scene.line("waited")
    assert (line["reason"], line["status"]) == ("queue_timeout", 429)
    assert line["queue_ms"] >= 300
    assert_nothing_used(line)

    holder.reset()
    line = await scene.line("holder")
    assert (line["outcome"], line["reason"], line["status"]) == ("cancelled", "client_disconnect", 200)
    assert (line["prompt_tokens"], line["prompt_estimated"]) == (1600, True)
    assert (line["output_tokens"], line["output_estimated"], line["charged"]) == (1, True, True)
    assert line["reserved_blocks"] == 200
    assert line["block_seconds"] >= 0.3 * 200


# -- what broke --------------------------------------------------------------------------------------------------


async def test_engines_that_fail(new_world: World) -> None:
    scene, (mock,) = serve(new_world, upstream={"headers_seconds": 0.5, "first_event_seconds": 0.5})
    for name, script, stream, status, reason, events in (
        ("reset", "reset_before_headers", True, 502, "upstream_error", None),
        ("abort", "finish_abort:0", False, 502, "upstream_error", None),
        ("silent", "hang", True, 504, "upstream_timeout", None),
        ("cut", "cut_after_events:3", True, 200, "upstream_error", 3),
        ("error", "error_event:2", True, 200, "upstream_error", 2),
    ):
        answer = await scene.ask(name, completion(100, 20, stream=stream, fail=script))
        assert answer.status == status, name
        line = await scene.line(name)
        assert (line["outcome"], line["reason"], line["status"]) == ("failed", reason, status), name
        assert (line["prompt_tokens"], line["prompt_estimated"]) == (100, True)
        assert (line["output_tokens"], line["charged"]) == (events, events is not None), name
        assert (line["replica"], line["reserved_blocks"]) == ("r0", blocks_of(100, 20))
        wait_until(scene.gateway.is_ready, "its replica is up again")
    mock.process.kill()
    await asyncio.to_thread(mock.process.wait)
    await scene.ask("dead", SMALL)
    await soon(lambda: not scene.gateway.is_ready(), "its replica is known to be down")
    answer = await scene.ask("nowhere", SMALL)
    assert answer.code == "no_backend"
    line = await scene.line("nowhere")
    assert (line["reason"], line["retry_ms"]) == ("no_backend", int(answer.headers["retry-after-ms"]))
    assert_nothing_used(line)
    await scene.assert_counted()


async def test_a_store_that_is_away(new_world: World) -> None:
    scene, _ = serve(new_world, store={"on_outage": "refuse"})
    new_world.store.stop()
    await soon(lambda: not scene.gateway.is_ready(), "the store is known to be away")
    answer = await scene.ask("away", SMALL)
    assert answer.code == "store_unavailable"
    line = await scene.line("away")
    assert (line["outcome"], line["reason"], line["status"]) == ("refused", "store_unavailable", 503)
    assert_nothing_used(line)
    await scene.assert_counted()


async def test_a_lease_that_was_lost(new_world: World) -> None:
    """One gateway stands still past its lease, the other one's call gets its place; both write one file."""
    mock = new_world.mock(*ENGINE[2:], "--blocks", "1001")
    replicas = [{"name": "r0", "url": mock.url, "num_gpu_blocks": 201}]
    scene, _ = serve(
        new_world,
        mocks=0,
        gateways=2,
        replicas=replicas,
        store={"lease_seconds": 1},
        upstream={"idle_seconds": 600},
    )
    stopped = scene.gateways[0].process
    lost = await scene.fill()
    stopped.send_signal(signal.SIGSTOP)
    try:
        taker = await scene.open("taker", completion(*WHOLE, stream=True, fail="hang:1"), gateway=1)
        assert (await taker.head())[0] == 200
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert b'"code":"lease_lost"' in (await lost.events())[-2]
    line = await scene.line("holder")
    assert (line["outcome"], line["reason"], line["status"]) == ("failed", "lease_lost", 200)
    assert (line["output_tokens"], line["output_estimated"], line["charged"]) == (1, True, True)
    assert line["block_seconds"] >= 200, "a lease's time, and more"
    taker.reset()
    assert (await scene.line("taker"))["reason"] == "client_disconnect"
    await scene.assert_counted()


# -- ends of processes, and of files -----------------------------------------------------------------------------


async def test_a_shutdown_writes_everything(new_world: World) -> None:
    """Who waited, who was cut, and who came last: the lines are there when the process has ended."""
    scene, _ = serve(new_world, server={"grace_seconds": 1}, upstream={"idle_seconds": 600})
    holder = await scene.fill()
    waiting = await scene.open("waiting", SMALL)
    await soon(lambda: scene.gateway.state()["queue"] == 1, "one waits")
    scene.gateway.process.send_signal(signal.SIGTERM)
    assert (await waiting.answer()).code == "draining"
    assert (await scene.ask("late", SMALL)).code == "draining"
    assert (await holder.events())[-1] == b"data: [DONE]"
    assert await asyncio.to_thread(scene.gateway.process.wait, 10) == 0
    found = {line["request_id"]: line for line in scene.lines()}
    assert {name: (line["outcome"], line["reason"], line["status"]) for name, line in found.items()} == {
        "waiting": ("refused", "draining", 503),
        "late": ("refused", "draining", 503),
        "holder": ("failed", "draining", 200),
    }
    assert found["holder"]["block_seconds"] >= 200
    assert found["waiting"]["retry_ms"] >= 1000


async def test_a_gateway_that_stops_waits_for_its_log(
    new_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would have been written some day is written now."""
    monkeypatch.setattr("gateway.telemetry.calllog.FLUSH_SECONDS", 600)
    config, _ = new_world.config([{"name": "only", "replicas": [new_world.mock().url]}], log=LOG)
    settings = load(config, {})
    gateway = Gateway(settings, load_secrets(settings, {}))
    await gateway.start()
    last = CallEnded(
        request_id="last", route="/v1/completions", key="", group="", class_="", outcome=Outcome.REFUSED,
        reason=Code.DRAINING, status=503, refusal_ms=1, duration_ms=1,
    )  # fmt: skip
    gateway._observe(last)
    await gateway.stop()
    assert [line["request_id"] for line in lines_of(new_world.folder / "calls.jsonl")] == ["last"]


async def test_workers_share_a_file_that_is_moved_away(new_world: World) -> None:
    """No line is lost or torn, whoever wrote it into which file; and the sums are what clients were told."""
    scene, _ = serve(new_world, options=("--workers", "2"))
    moved, told = scene.path.with_suffix(".jsonl.1"), Counter()

    async def round_of(number: int) -> None:
        answers = await asyncio.gather(*(scene.ask(f"{number}-{n}", completion(16, 4)) for n in range(50)))
        for answer in answers:
            usage = answer.json()["usage"]
            told.update(
                prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"], calls=1
            )

    await round_of(0)
    await soon(lambda: len(scene.lines()) == 50, "the first lines are written")
    scene.path.rename(moved)
    await round_of(1)
    await asyncio.sleep(FOLLOW_SECONDS)
    await round_of(2)
    await soon(lambda: len(lines_of(moved) + scene.lines()) == 150, "all lines are there")
    scene.gateway.stop()
    lines = lines_of(moved) + scene.lines()
    assert sorted(line["request_id"] for line in lines) == sorted(
        f"{r}-{n}" for r in range(3) for n in range(50)
    )
    assert all(by_id(scene.lines(), f"2-{n}") for n in range(50)), "those that came after it was noticed"
    assert scene.path.stat().st_mode & 0o777 == 0o600
    assert used(scene.path, moved) == told


def used(*paths: Path) -> Counter[str]:
    """By `kvgate usage`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["usage", *map(str, paths), "--json"]) == 0
    total = json.loads(output.getvalue())["total"]
    return Counter({name: total[name] for name in ("prompt_tokens", "output_tokens", "calls")})


async def test_a_full_disk_costs_lines_and_no_call(new_world: World) -> None:
    """The system lets the process's files grow no further: some lines are lost, counted, and told afterwards."""
    scene, _ = serve(new_world)
    scene.path.write_bytes(b"\n" * 1_000_000)
    limits = resource.prlimit(scene.gateway.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(scene.gateway.process.pid, resource.RLIMIT_FSIZE, (1_000_900, limits[1]))
    answers = [await scene.ask(f"full-{n}", SMALL) for n in range(10)]
    assert [answer.status for answer in answers] == [200] * 10
    await soon(lambda: scene.gateway.metric(LOST) + len(scene.lines()) == 10, "all are accounted for")
    lost = scene.gateway.metric(LOST)
    assert 8 <= lost <= 10
    assert "calls are missing in it since the start" in scene.gateway.log.read_text()
    resource.prlimit(scene.gateway.process.pid, resource.RLIMIT_FSIZE, limits)
    assert (await scene.ask("after", SMALL)).status == 200
    await scene.line("after")
    assert sum(line.get("lost", 0) for line in scene.lines()) == lost == scene.gateway.metric(LOST)


async def test_a_folder_that_is_not_there(new_world: World) -> None:
    scene, _ = serve(new_world)
    scene.gateway.stop()
    environ = {"KVGATE_LOG__CALLS": str(new_world.folder / "nowhere" / "calls.jsonl")}
    gateway = new_world.gateway(new_world.folder / "kvgate.yaml", scene.keys[0], **environ)
    assert (await ask(gateway.url, post(scene.keys[0], SMALL))).status == 200
    await soon(lambda: gateway.metric(LOST) == 1, "it is counted")
    assert "No such file or directory" in gateway.log.read_text()


async def test_without_the_setting_there_is_no_file(new_world: World) -> None:
    mock = new_world.mock(*ENGINE)
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
    gateway = new_world.gateway(config, key)
    assert (await ask(gateway.url, post(key, SMALL))).status == 200
    assert gateway.metric(LOST) == 0
    assert not list(new_world.folder.glob("*.jsonl"))
