"""EH-02: every error that a client can meet is an OpenAI error envelope.  EH-03: a client's request id is only echoed.

EH-02's `limit_concurrency` of uvicorn is not used, so no such answer exists; bytes that are not HTTP stand for what
uvicorn answers by itself.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest

from gateway.app import Gateway
from gateway.config import load, load_secrets
from gateway.core.outcomes import STATUS, Code
from gateway.flow import Flow
from tests.processes import ADMIN_TOKEN, GatewayProcess, Mock, World, wait_until, world
from tests.wire import Answer, Wire, ask, completion, post

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODY_BYTES_MAX = 100_000
QUICK = {"heartbeat_seconds": 0.2}
"""A new store's gate opens after two heartbeats."""
INSIDE = re.compile(
    r"Traceback|File \"|\.py\b|/\w+/\w+|\b[A-Z][a-z]\w*(Error|Exception)\b|127\.0\.0\.1|asyncio|aiohttp"
)
"""What no message may show: stack, paths, class names, addresses, libraries."""
API_PATHS = re.compile(r"/(v1|admin|health|mock)\b[\w/.-]*")


def check(answer: Answer, code: Code, status: int | None = None) -> dict[str, Any]:
    """The envelope and what has to come with it; the error inside."""
    assert answer.status == (status or STATUS[code][0]), answer
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", answer.headers["x-request-id"])
    document = answer.json()
    assert list(document) == ["error"]
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, STATUS[code][1])
    assert error["message"]
    assert not INSIDE.search(API_PATHS.sub("", answer.body.decode())), answer.body
    assert answer.headers["x-kvgate-reason"] == code
    if answer.status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
    else:
        assert "retry-after" not in answer.headers
    return error


def check_sdk(gateway: GatewayProcess, path: str, body: object, code: Code, key: str | None = None) -> None:
    """The official client shows type and code."""
    client = openai.OpenAI(base_url=gateway.url, api_key=key or gateway.key, max_retries=0)
    with client, pytest.raises(openai.APIStatusError) as raised:
        client.post(path, body=body, cast_to=object)
    assert (raised.value.code, raised.value.type) == (code, STATUS[code][1])
    assert raised.value.request_id


def sent(gateway: GatewayProcess, method: str, path: str, **more: Any) -> Answer:
    return answer_of(gateway.client.request(method, path, **more))


def answer_of(response: httpx.Response) -> Answer:
    return Answer(response.status_code, dict(response.headers), response.content)


Place = tuple[World, Path, Mock, list[str]]
Running = tuple[GatewayProcess, Mock, list[str]]
HASTY = {
    "KVGATE_SERVER__BODY_SECONDS": "0.5",
    "KVGATE_UPSTREAM__HEADERS_SECONDS": "0.5",
    "KVGATE_UPSTREAM__FIRST_EVENT_SECONDS": "0.5",
}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """One replica of 63 usable blocks, no queue; keys without limits, with small ones, and for another model."""
    with world() as here:
        mock = here.mock("--blocks", "64", "--max-model-len", "2048")
        caps = {"blocks_max": 2, "context_tokens_max": 100, "max_output_tokens": 50}
        config, keys = here.config(
            [{"name": "only", "replicas": [mock.url]}],
            {},
            {"limits": caps},
            {"models": ["other"]},
            queue={"depth_max": 0},
            store=QUICK,
            server={"body_bytes_max": BODY_BYTES_MAX},
        )
        yield here, config, mock, keys


@pytest.fixture(scope="module")
def running(place: Place) -> Running:
    """As patient as in production: what is slow on a busy machine is not late."""
    here, config, mock, keys = place
    return here.gateway(config, keys[0]), mock, keys


@pytest.fixture(scope="module")
def hasty(place: Place) -> Running:
    """For what has to be late."""
    here, config, mock, keys = place
    return here.gateway(config, keys[0], **HASTY), mock, keys


OTHER_PATHS = [
    "/nope",
    "/v1/images/generations",
    "/v1/chat/completions/",
    "/v1/chat/completions/more",
    "/admin/v1/nope",
]
OTHER_METHODS = [
    ("GET", "/v1/chat/completions", "POST"),
    ("DELETE", "/v1/completions", "POST"),
    ("POST", "/v1/models", "GET"),
    ("POST", "/metrics", "GET"),
    ("PUT", "/health/live", "GET"),
    ("POST", "/admin/v1/state", "GET"),
]
BODIES = [
    ("not json", b"{", Code.INVALID_JSON),
    ("an array", b"[]", Code.INVALID_JSON),
    ("not utf-8", b'{"model":"\xff"}', Code.INVALID_JSON),
    ("nothing", b"", Code.INVALID_JSON),
    ("twice", b'{"model":"demo","n":1,"n":1}', Code.DUPLICATE_FIELD),
    ("no messages", b'{"model":"demo"}', Code.MISSING_FIELD),
    ("a wrong number", json.dumps(CHAT | {"max_tokens": 0}).encode(), Code.INVALID_VALUE),
    ("an unknown model", json.dumps(CHAT | {"model": "nope"}).encode(), Code.MODEL_NOT_FOUND),
    ("a path as model", json.dumps(CHAT | {"model": "x"}).encode(), Code.MODEL_NOT_FOUND),
    ("too many choices", json.dumps(CHAT | {"n": 17}).encode(), Code.TOO_MANY_SEQUENCES),
    ("too long", json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi " * 3000}]}).encode(),
     Code.CONTEXT_LENGTH_EXCEEDED),
    ("too large", json.dumps(CHAT | {"user": "u" * BODY_BYTES_MAX}).encode(), Code.BODY_TOO_LARGE),
]  # fmt: skip
FAULTS = [
    "garbage",
    "reset_before_headers",
    "reset_after_headers",
    "done_only",
    "status:500",
]
BUSY = ["error_event", "status:503"]
"""It says that it has no room, and there is no other one."""


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_eh02_an_unknown_path(running: Running, path: str) -> None:
    check(sent(running[0], "POST", path, json=CHAT), Code.NOT_FOUND)
    check(sent(running[0], "GET", path), Code.NOT_FOUND)
    check_sdk(running[0], path, CHAT, Code.NOT_FOUND)


@pytest.mark.parametrize(("method", "path", "allow"), OTHER_METHODS)
def test_eh02_a_wrong_method(running: Running, method: str, path: str, allow: str) -> None:
    answer = sent(running[0], method, path)
    check(answer, Code.METHOD_NOT_ALLOWED)
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize(
    ("body", "code"), [(b, c) for _, b, c in BODIES], ids=[name for name, _, _ in BODIES]
)
def test_eh02_a_bad_body(running: Running, body: bytes, code: Code) -> None:
    check(sent(running[0], "POST", "/v1/chat/completions", content=body), code)


def test_eh02_a_bad_body_by_the_official_client(running: Running) -> None:
    check_sdk(running[0], "/v1/chat/completions", CHAT | {"model": "nope"}, Code.MODEL_NOT_FOUND)
    check_sdk(running[0], "/v1/chat/completions", CHAT | {"max_tokens": "1"}, Code.INVALID_VALUE)
    check_sdk(running[0], "/v1/chat/completions", CHAT | {"user": "u" * BODY_BYTES_MAX}, Code.BODY_TOO_LARGE)


def test_eh02_a_bad_key(running: Running) -> None:
    for path, method in (
        ("/v1/chat/completions", "POST"),
        ("/v1/completions", "POST"),
        ("/v1/models", "GET"),
    ):
        answer = sent(running[0], method, path, headers={"authorization": "Bearer kvg_wrong"})
        check(answer, Code.INVALID_API_KEY)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "kvg_wrong" not in answer.body.decode()
    check(sent(running[0], "GET", "/admin/v1/state"), Code.INVALID_API_KEY)
    check_sdk(running[0], "/v1/chat/completions", CHAT, Code.INVALID_API_KEY, key="kvg_wrong")


def test_eh02_what_a_key_may_not_do(running: Running) -> None:
    gateway, _, (_, small, other) = running

    def refused(key: str, **fields: Any) -> Answer:
        headers = {"authorization": f"Bearer {key}"}
        return sent(gateway, "POST", "/v1/chat/completions", json=CHAT | fields, headers=headers)

    check(refused(other), Code.MODEL_NOT_ALLOWED)
    check(refused(small, max_tokens=51), Code.OUTPUT_LIMIT_EXCEEDED)
    check(refused(small, messages=[{"role": "user", "content": "hi " * 200}]), Code.CONTEXT_NOT_CLEARED)
    check(refused(small, max_tokens=48), Code.KEY_CAP_EXCEEDED)


async def test_eh02_a_slow_and_a_compressed_body(hasty: Running) -> None:
    gateway = hasty[0]
    head = post(gateway.key, b"x" * 10)[:-10]
    check(await ask(gateway.url, head + b"x" * 9), Code.BODY_TIMEOUT)
    gzip = head.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + b"x" * 10
    check(await ask(gateway.url, gzip), Code.UNSUPPORTED_ENCODING)


NOT_HTTP = {
    "words": b"hello\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
}


@pytest.mark.parametrize("junk", NOT_HTTP.values(), ids=NOT_HTTP)
async def test_eh02_bytes_that_are_not_http(running: Running, junk: bytes) -> None:
    answer = await ask(running[0].url, junk)
    check(answer, Code.INVALID_VALUE)
    assert answer.headers["connection"] == "close"


async def test_eh02_junk_behind_a_running_stream_does_not_get_into_it(running: Running) -> None:
    """Its connection ends instead."""
    gateway = running[0]
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, completion(16, 32, stream=True, fail="hang:1")))
    await wire.head()
    await wire.event()
    await wire.send(b"\x00\x01 junk\r\n\r\n")
    received = await _all_events(wire)
    assert b"HTTP/1.1" not in received
    wire.close()


async def _all_events(wire: Wire) -> bytes:
    """Until the connection breaks, as it has to."""
    received = b""
    try:
        while (event := await wire.event()) is not None:
            received += event
    except (asyncio.IncompleteReadError, ConnectionError):
        return received
    raise AssertionError("the stream went on to its end")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", FAULTS)
def test_eh02_an_engine_that_fails(running: Running, fault: str, stream: bool) -> None:
    fails(running, fault, Code.UPSTREAM_ERROR, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", BUSY)
def test_eh02_an_engine_without_room(running: Running, fault: str, stream: bool) -> None:
    fails(running, fault, Code.NO_BACKEND, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_eh02_an_engine_that_hangs(hasty: Running, stream: bool) -> None:
    fails(hasty, "hang", Code.UPSTREAM_TIMEOUT, stream)


def fails(running: Running, fault: str, code: Code, stream: bool) -> None:
    gateway, mock, _ = running
    mock.reset()
    mock.fail(fault)
    check(sent(gateway, "POST", "/v1/chat/completions", json=CHAT | {"stream": stream}), code)
    wait_until(gateway.takes_calls, "the engine is suspect no more")
    mock.fail(fault)
    check_sdk(gateway, "/v1/chat/completions", CHAT | {"stream": stream}, code)
    assert mock.log()["received"] == 2
    wait_until(gateway.is_quiet, "nothing is held")
    wait_until(gateway.takes_calls, "nor now")


def test_eh02_an_engine_that_refuses_is_passed_on(running: Running) -> None:
    """Not ours: vLLM's own words, which are an envelope too."""
    gateway, mock, _ = running
    mock.fail("status:400")
    answer = sent(gateway, "POST", "/v1/chat/completions", json=CHAT)
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "The request was refused by a script."
    assert answer.headers["x-request-id"]


async def test_eh02_no_room_and_no_queue(running: Running) -> None:
    gateway, _, _ = running
    wire = await Wire.open(gateway.url)
    await wire.send(post(gateway.key, completion(16, 900, stream=True, hold_seconds=30)))
    await asyncio.to_thread(wait_until, lambda: gateway.state()["reserved"], "the blocks are held")
    check(await ask(gateway.url, post(gateway.key, completion(16, 900))), Code.CAPACITY_EXCEEDED)
    await asyncio.to_thread(
        check_sdk, gateway, "/v1/completions", completion(16, 900), Code.CAPACITY_EXCEEDED
    )
    wire.reset()
    await asyncio.to_thread(wait_until, gateway.is_quiet, "nothing is held")


async def test_eh02_a_full_queue_and_a_wait_in_vain(new_world: World) -> None:
    mock = new_world.mock("--blocks", "64")
    queue = {"depth_max": 1, "seconds_max": 2}
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], queue=queue, store=QUICK)
    gateway = new_world.gateway(config, key)
    wires = [await Wire.open(gateway.url) for _ in range(2)]
    await wires[0].send(post(key, completion(16, 900, stream=True, hold_seconds=30)))
    await asyncio.to_thread(wait_until, lambda: gateway.state()["reserved"], "the blocks are held")
    await wires[1].send(post(key, completion(16, 900)))
    await asyncio.to_thread(wait_until, lambda: gateway.state()["queue"], "one waits")
    check(await ask(gateway.url, post(key, completion(16, 900))), Code.QUEUE_FULL)
    check(await wires[1].answer(), Code.QUEUE_TIMEOUT)
    await asyncio.to_thread(check_sdk, gateway, "/v1/completions", completion(16, 900), Code.QUEUE_TIMEOUT)
    for wire in wires:
        wire.reset()


def test_eh02_no_backend(new_world: World) -> None:
    """A replica that died is an upstream error until it is known to be down; then there is no backend."""
    mock = new_world.mock("--blocks", "64")
    config, (key,) = new_world.config(
        [{"name": "only", "replicas": [mock.url]}], queue={"seconds_max": 1}, store=QUICK
    )
    gateway = new_world.gateway(config, key)
    mock.process.kill()
    mock.process.wait()
    check(sent(gateway, "POST", "/v1/chat/completions", json=CHAT), Code.UPSTREAM_ERROR)
    sent(gateway, "POST", "/v1/chat/completions", json=CHAT)
    wait_until(lambda: gateway.client.get("/health/ready").status_code == 503, "the gateway is not ready")
    check(sent(gateway, "POST", "/v1/chat/completions", json=CHAT), Code.NO_BACKEND)
    check_sdk(gateway, "/v1/chat/completions", CHAT, Code.NO_BACKEND)
    assert gateway.client.get("/health/live").status_code == 200


def test_eh02_a_replica_that_never_answered(new_world: World) -> None:
    config, (key,) = new_world.config([{"name": "only", "replicas": ["http://127.0.0.1:9"]}])
    gateway = new_world.gateway(config, key, wait=False)
    wait_until(lambda: _answers(gateway), "the gateway answers")
    check(sent(gateway, "POST", "/v1/chat/completions", json=CHAT), Code.NO_BACKEND)


def _answers(gateway: GatewayProcess) -> bool:
    try:
        return gateway.client.get("/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_eh02_a_model_has_to_be_named_where_there_are_several(new_world: World) -> None:
    mocks = [new_world.mock("--model", model) for model in ("one", "two")]
    fleets = [
        {"name": f"fleet-{n}", "model": model, "pools": [{"name": "only", "replicas": [mock.url]}]}
        for n, (model, mock) in enumerate(zip(("one", "two"), mocks, strict=True))
    ]
    config, (key,) = new_world.config([], fleets=fleets, store=QUICK)
    gateway = new_world.gateway(config, key)
    for body in ({"messages": CHAT["messages"]}, {"model": None, "messages": CHAT["messages"]}):
        error = check(sent(gateway, "POST", "/v1/chat/completions", json=body), Code.MISSING_FIELD)
        assert error["param"] == "model"


def test_eh02_the_store_is_away(new_world: World) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config(
        [{"name": "only", "replicas": [mock.url]}], store=QUICK | {"on_outage": "refuse"}
    )
    gateway = new_world.gateway(config, key)
    assert new_world.store.process
    new_world.store.process.kill()
    check(sent(gateway, "POST", "/v1/chat/completions", json=CHAT), Code.STORE_UNAVAILABLE)
    check_sdk(gateway, "/v1/chat/completions", CHAT, Code.STORE_UNAVAILABLE)


# -- a fault of our own ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_process(config: Path, key: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """The same ASGI application without a server, so that a fault can be put into it."""
    settings = load(config, {})
    gateway = Gateway(settings, load_secrets(settings, {"KVGATE_ADMIN_TOKEN": ADMIN_TOKEN}))
    await gateway.start()
    transport = httpx.ASGITransport(app=gateway, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://kvgate", headers=headers
        ) as client:
            while gateway.problem():
                await asyncio.sleep(0.01)
            yield gateway, client
    finally:
        await gateway.stop()


def broken(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("Traceback of /usr/lib/secret.py")


Where = Callable[[Gateway], tuple[object, str]]
PLACES: Mapping[str, Where] = {
    "before a call is known": lambda gateway: (gateway._proxy, "_open_call"),
    "in the flow": lambda gateway: (Flow, "_estimate"),
    "after the reserve": lambda gateway: (Flow, "_stream"),
    "at the engine": lambda gateway: (gateway._upstream, "exchange"),
}


@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
async def test_eh02_an_unhandled_exception(
    new_world: World, monkeypatch: pytest.MonkeyPatch, where: Where
) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    async with in_process(config, key) as (gateway, client):
        with monkeypatch.context() as patch:
            patch.setattr(*where(gateway), broken)
            for stream in (False, True):
                answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
                check(answer_of(answer), Code.INTERNAL_ERROR)
        while (await gateway.state())["reserved"] or gateway.calls.inflight():
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_eh02_an_unhandled_exception_once_the_stream_began(
    new_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is gone; an error event tells, and no SDK takes the rest for an answer."""
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    async with in_process(config, key) as (_, client):
        monkeypatch.setattr("gateway.http.relay.AnswerRelay.finish", broken)
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    *_, error, done, rest = answer.text.split("\n\n")
    assert (answer.status_code, done, rest) == (200, "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == Code.INTERNAL_ERROR
    assert not INSIDE.search(error)


async def test_eh02_an_unhandled_exception_beside_the_request_path(
    new_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    async with in_process(config, key) as (_, client):
        monkeypatch.setattr("gateway.telemetry.prometheus.Metrics.page", broken)
        check(answer_of(await client.get("/metrics")), Code.INTERNAL_ERROR)


def test_eh02_codes_are_distinct() -> None:
    told = {Code.QUOTA_EXCEEDED, Code.CAPACITY_EXCEEDED, Code.QUEUE_TIMEOUT, Code.QUEUE_FULL, Code.NO_BACKEND}
    assert len({code.value for code in told}) == len(told)


# -- EH-03 -----------------------------------------------------------------------------------------------------------

UNSAFE_IDS = {
    "100 kB": b"a" * 100_000,
    "129 characters": b"a" * 129,
    "quotes": b"\"';--",
    "a hash tag": b"{tag}",
    "non-ascii": "ключ".encode(),
    "latin-1": b"\xe9\xff",
    "a tab": b"a\tb",
    "spaces": b"a b",
    "markup": b"<script>",
    "nothing": b"",
}


async def test_eh03_one_id_for_ten_calls_at_once(new_world: World) -> None:
    mock = new_world.mock("--blocks", "1000")
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    gateway = new_world.gateway(config, key)
    body = completion(16, 16, stream=True, hold_seconds=0.5) | {"request_id": "same"}
    request = with_id(post(key, body), b"same")
    calls = [asyncio.create_task(ask(gateway.url, request)) for _ in range(10)]
    await asyncio.to_thread(wait_until, lambda: gateway.state()["leases"] == 10, "ten leases at once")
    answers = await asyncio.gather(*calls)
    assert [answer.status for answer in answers] == [200] * 10
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    ids = [dict(record["headers"])["x-request-id"] for record in mock.log()["requests"]]
    assert len(set(ids)) == 10
    assert "same" not in ids
    assert len({record["id"] for record in mock.log()["requests"]}) == 10
    await asyncio.to_thread(wait_until, gateway.is_quiet, "nothing is held")


@pytest.mark.parametrize("unsafe", UNSAFE_IDS.values(), ids=UNSAFE_IDS)
async def test_eh03_an_unsafe_id_is_replaced(running: Running, unsafe: bytes) -> None:
    gateway, mock, _ = running
    mock.reset()
    answer = await ask(gateway.url, with_id(post(gateway.key, completion(16, 4)), unsafe))
    assert answer.status == 200
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    for record in mock.log()["requests"]:
        assert re.fullmatch("kvg-[0-9a-f]{32}", dict(record["headers"])["x-request-id"])
    refused = await ask(gateway.url, with_id(post(gateway.key, b"{"), unsafe))
    assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])


@pytest.mark.parametrize(
    "injected", [b"a\r\nx-evil: 1", b"a\nx-evil: 1", b"a\rx-evil: 1"], ids=["crlf", "lf", "cr"]
)
async def test_eh03_an_id_injects_no_header(running: Running, injected: bytes) -> None:
    """To HTTP a line break ends the header, so the rest is another one, or no HTTP; it is never part of an id."""
    gateway, mock, _ = running
    mock.reset()
    answer = await ask(gateway.url, with_id(post(gateway.key, completion(16, 4)), injected))
    assert answer.status in (200, 400)
    assert "x-evil" not in answer.headers
    assert "evil" not in answer.headers["x-request-id"]
    assert all("x-evil" not in dict(record["headers"]) for record in mock.log()["requests"])


@pytest.mark.parametrize("path", ["/v1/models", "/nope", "/health/live"])
async def test_eh03_the_other_paths_echo_ids_the_same_way(running: Running, path: str) -> None:
    gateway = running[0]
    request = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n\r\n".encode()
    assert (await ask(gateway.url, with_id(request, b"mine"))).headers["x-request-id"] == "mine"
    assert (await ask(gateway.url, with_id(request, b"{tag}"))).headers["x-request-id"] != "{tag}"


def with_id(request: bytes, request_id: bytes) -> bytes:
    """Behind the request line."""
    first, _, rest = request.partition(b"\r\n")
    return first + b"\r\nx-request-id: " + request_id + b"\r\n" + rest
