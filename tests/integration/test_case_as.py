"""AS-01: what of a request and an answer crosses the gateway.  AS-02: no way to an engine but the metered ones.

Also how soon a change of the keys file counts.
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.core.outcomes import Code
from gateway.core.request import UNRESERVED, Endpoint
from gateway.http.auth import new_key
from tests.processes import HANG_SECONDS, GatewayProcess, Mock, World, wait_until, world
from tests.wire import Answer, Wire, ask, completion, post, soon

UPSTREAM_KEY = "U1-upstream-secret"
BODY = completion(16, 4)
QUICK = {"heartbeat_seconds": 0.2}
"""A new store's gate opens after two heartbeats."""
ALLOWED = {
    "host", "content-length", "content-type", "accept", "user-agent", "traceparent", "x-session-id",
    "accept-encoding", "x-request-id", "authorization", "x-prompt-tokens",
}  # fmt: skip
"""What the requests of this file may bring to an engine."""


# -- AS-01 ---------------------------------------------------------------------------------------------------------


class Trap:
    """A proxy that nobody may use."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def was_used(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._listener.accept()[0].close()
            return True
        return False

    def close(self) -> None:
        self._listener.close()


class Decorator:
    """A TCP relay to an engine that puts more lines into the heads of its answers."""

    def __init__(self, engine_url: str, lines: bytes) -> None:
        self._engine = int(engine_url.rsplit(":", 1)[1])
        self._lines = lines
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                engine = socket.create_connection(("127.0.0.1", self._engine))
                threading.Thread(target=_copy, args=(client, engine, b""), daemon=True).start()
                threading.Thread(target=_copy, args=(engine, client, self._lines), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, lines: bytes) -> None:
    with contextlib.suppress(OSError), source, target:
        while data := source.recv(65536):
            target.sendall(data.replace(b"server: uvicorn\r\n", b"server: uvicorn\r\n" + lines))
        target.shutdown(socket.SHUT_WR)


HOSTILE = (
    b"set-cookie: session=1\r\nset-cookie: other=2\r\nconnection: x-inner\r\nx-inner: 1\r\nkeep-alive: timeout=99\r\n"
    b"proxy-authenticate: Basic\r\nx-kvgate-replica: liar\r\nx-kept: yes\r\n"
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[GatewayProcess, Mock, Trap]]:
    """A gateway with a proxy in its environment, and an engine that has a key of its own and says too much."""
    with world() as here, contextlib.closing(Trap()) as trap:
        mock = here.mock("--api-key", UPSTREAM_KEY)
        with contextlib.closing(Decorator(mock.url, HOSTILE)) as decorator:
            upstream = {"api_key_env": "ENGINE_KEY"}
            config, (key,) = here.config(
                [{"name": "only", "replicas": [decorator.url]}], upstream=upstream, store=QUICK
            )
            names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
            proxies = dict.fromkeys(names, f"http://{trap.address}")
            yield here.gateway(config, key, ENGINE_KEY=UPSTREAM_KEY, **proxies), mock, trap


Guarded = tuple[GatewayProcess, Mock, Trap]


def everything(key: str, connection: str, body: dict[str, object]) -> bytes:
    """Every header that has no business behind a gateway, and some that have."""
    lines = (
        "host: evil", "X-Api-Key: K1-as-api-key", "Api-Key: K1-as-azure-key", "Cookie: session=K1-as-cookie",
        "Proxy-Authorization: Basic K1", f"Connection: {connection}", "X-Secret: 1", "TE: trailers",
        "Trailer: X-Late", "Upgrade: h2c", "Expect: 100-continue", "X-Forwarded-For: 10.0.0.1",
        "X-Forwarded-Host: evil", "Forwarded: for=10.0.0.1", "X-Real-IP: 10.0.0.1", "Keep-Alive: timeout=5",
        "X-Kvgate-Priority: high", "OpenAI-Organization: mine", "X-Request-Id: mine", "Accept-Encoding: gzip",
        "Content-Type: application/json", "Accept: */*", "User-Agent: tester", "X-Session-Id: s1",
        f"traceparent: 00-{'1' * 32}-{'2' * 16}-01",
    )  # fmt: skip
    raw = json.dumps(body).encode()
    fields = [f"Authorization: Bearer {key}", *lines, f"content-length: {len(raw)}"]
    return message("POST /v1/completions HTTP/1.1", fields, raw)


def message(first: str, fields: Sequence[str], body: bytes) -> bytes:
    return "\r\n".join((first, *fields, "", "")).encode() + body


async def expecting(gateway: GatewayProcess, request: bytes) -> Answer:
    """The body follows only when the gateway has asked for it."""
    head, _, body = request.partition(b"\r\n\r\n")
    wire = await Wire.open(gateway.url)
    await wire.send(head + b"\r\n\r\n")
    status, _ = await wire.head()
    assert status == 100
    await wire.send(body)
    answer = await wire.answer()
    wire.close()
    return answer


@pytest.mark.parametrize("connection", ["X-Secret", "X-Secret, Upgrade, X-Session-Id", "close, x-secret"])
async def test_as01_the_engine_gets_its_own_key_and_an_allow_list(guarded: Guarded, connection: str) -> None:
    gateway, mock, _ = guarded
    mock.reset()
    answer = await expecting(gateway, everything(gateway.key, connection, BODY))
    assert answer.status == 200, answer
    (record,) = mock.log()["requests"]
    names = [name for name, _ in record["headers"]]
    got = dict(record["headers"])
    named = {"x-session-id"} if "X-Session-Id" in connection else set()
    assert set(names) == ALLOWED - named
    assert len(names) == len(set(names))
    assert got["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert got["host"].startswith("127.0.0.1:")
    assert got["accept-encoding"] == "identity"
    assert got["x-request-id"] != "mine"
    shown = json.dumps(record)
    assert gateway.key not in shown
    assert "K1" not in shown
    assert "evil" not in shown
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
async def test_as01_the_answer_is_clean_and_true_to_its_bytes(
    guarded: Guarded, stream: bool, gzip: bool
) -> None:
    gateway, mock, _ = guarded
    mock.reset()
    if gzip:
        mock.fail("gzip")
    answer = await expecting(gateway, everything(gateway.key, "X-Secret", completion(16, 4, stream=stream)))
    assert answer.status == 200
    for name in ("server", "set-cookie", "keep-alive", "proxy-authenticate", "x-inner", "content-encoding"):
        assert name not in answer.headers, name
    assert "x-inner" not in answer.headers.get("connection", "")
    assert answer.headers["x-kept"] == "yes"
    assert answer.headers["x-kvgate-replica"] != "liar"
    assert UPSTREAM_KEY not in str(answer)
    if stream:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert "content-length" not in answer.headers
        assert answer.body.endswith(b"data: [DONE]\n\n")
    else:
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.json()["usage"]["completion_tokens"] == 4


async def test_as01_the_proxy_of_the_environment_is_not_used(guarded: Guarded) -> None:
    """Not for calls, and not for the probes that have been running since the start."""
    gateway, _, trap = guarded
    assert (await ask(gateway.url, post(gateway.key, BODY))).status == 200
    assert not trap.was_used()


def test_as01_no_key_is_in_the_log(guarded: Guarded) -> None:
    gateway = guarded[0]
    text = gateway.log.read_text()
    assert "/v1" in text or "completed" in text
    for secret in (gateway.key, UPSTREAM_KEY, "K1-as"):
        assert secret not in text


async def test_as01_without_a_key_for_the_engine_none_is_sent(new_world: World) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    gateway = new_world.gateway(config, key)
    assert (await expecting(gateway, everything(key, "X-Secret", BODY))).status == 200
    (record,) = mock.log()["requests"]
    assert {name for name, _ in record["headers"]} == ALLOWED - {"authorization"}


# -- AS-02 ---------------------------------------------------------------------------------------------------------

GENERATING = "/v1/chat/completions"
VARIANTS = (
    "//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/", "/V1/chat/completions",
    "/v1/Chat/Completions", "/v1/../v1/chat/completions", "/./v1/chat/completions", "/v1/chat/completions/.",
    "/%2e%2e/v1/chat/completions", "/v1/%2e%2e/v1/chat/completions", "/v1%2fchat%2fcompletions",
    "/v1/chat%2Fcompletions", "/%761/chat/completions", "/v1/chat/completions%20", "/v1/chat/completions%00",
    "/v1/chat/completions;x", "/v1/chat;x/completions", "/v1/chat/completions.", "/v1/chat/completions%3f",
    "/v1/completions/", "/v1/completions;x", "/v1/chat/completions/batches", "\\v1\\chat\\completions",
    "/v1\\chat\\completions", "/health/../v1/chat/completions", "/admin/v1/../../v1/completions",
)  # fmt: skip
ENGINE_PATHS = (
    "/responses", "/v1/responses/", "/embeddings", "/v1/messages/count_token", "/v1/audio/transcription",
    "/v2/score", "/v3/rerank", "/rerank/", "/Score", "/v1/pooling", "/classify", "/generate", "/invocations",
    "/inference/v1/generate", "/v1/tokenize", "/detokenize/", "/tokenizer_info", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping", "/abort_requests", "/reset_prefix_cache",
    "/collective_rpc", "/server_info", "/load", "/scale_elastic_ep", "/start_profile", "/docs", "/openapi.json",
    "/redoc", "/metrics/", "/mock/log", "/mock/reset", "/mock/faults", "/admin/v1/", "/admin",
)  # fmt: skip
TO_ENGINES = (*(endpoint.value for endpoint in Endpoint), *UNRESERVED)
KEYLESS_OPEN = {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics"}


@pytest.fixture(scope="module")
def walled() -> Iterator[tuple[GatewayProcess, Mock]]:
    with world() as here:
        mock = here.mock()
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
        yield here.gateway(config, key), mock


Walled = tuple[GatewayProcess, Mock]


def request(method: str, path: str, key: str | None, *lines: str) -> bytes:
    raw = json.dumps(
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    ).encode()
    fields = ["host: kvgate", "content-type: application/json", f"content-length: {len(raw)}", *lines]
    if key:
        fields.append(f"authorization: Bearer {key}")
    return message(f"{method} {path} HTTP/1.1", fields, raw)


async def shut(gateway: GatewayProcess, raw: bytes, head: bool = False) -> int:
    """The status of an answer that has to be a refusal with the envelope, without a body for HEAD."""
    wire = await Wire.open(gateway.url)
    await wire.send(raw)
    if head:
        status, headers = await wire.head()
        assert headers["content-type"] == "application/json"
    else:
        answer = await wire.answer()
        status = answer.status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"
    wire.close()
    return status


@pytest.mark.parametrize("with_key", [False, True], ids=["no key", "a valid key"])
@pytest.mark.parametrize("path", VARIANTS + ENGINE_PATHS)
async def test_as02_a_path_that_is_not_on_the_list(walled: Walled, path: str, with_key: bool) -> None:
    gateway, mock = walled
    key = gateway.key if with_key else None
    malformed = {400} if path.startswith(("//", "\\")) else set()
    for method in ("POST", "GET", "OPTIONS", "PUT"):
        assert await shut(gateway, request(method, path, key)) in {404} | malformed, method
    assert await shut(gateway, request("HEAD", path, key), head=True) in {404} | malformed
    assert mock.log()["received"] == 0


@pytest.mark.parametrize("path", TO_ENGINES)
async def test_as02_the_generating_paths_without_a_key(walled: Walled, path: str) -> None:
    gateway, mock = walled
    wrong = ("kvg_wrong", "", gateway.key[:-1], gateway.key.upper(), gateway.key + "x", " ", '""', "null")
    for key in wrong:
        assert await shut(gateway, request("POST", path, key)) == 401
    for line in ("x-api-key: kvg_wrong", f"authorization: Basic {gateway.key}", f"authorization: {gateway.key}",
                 f"cookie: key={gateway.key}", f"api-key: {gateway.key}"):  # fmt: skip
        assert await shut(gateway, request("POST", path, None, line)) == 401
    assert await shut(gateway, request("POST", f"{path}?key={gateway.key}", None)) == 401
    assert mock.log()["received"] == 0


@pytest.mark.parametrize("path", [*TO_ENGINES, "/v1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
async def test_as02_other_methods(walled: Walled, path: str, method: str) -> None:
    gateway, mock = walled
    good = "GET" if path == "/v1/models" else "POST"
    expected = 401 if method == good else 405
    assert await shut(gateway, request(method, path, None)) == expected
    if method != good:
        assert await shut(gateway, request(method, path, gateway.key)) == 405
    assert mock.log()["received"] == 0


async def test_as02_head(walled: Walled) -> None:
    gateway, mock = walled
    for path in (GENERATING, "/v1/completions"):
        assert await shut(gateway, request("HEAD", path, gateway.key), head=True) == 405
        wire = await Wire.open(gateway.url)
        await wire.send(request("HEAD", path, None))
        _, headers = await wire.head()
        assert int(headers["content-length"]) > 0
        assert await wire._reader.read() == b"", "HEAD has no body"
        wire.close()
    assert mock.log()["received"] == 0


@pytest.mark.parametrize("path", [GENERATING, "/v1/realtime", "/", "/admin/v1/state"])
async def test_as02_a_websocket(walled: Walled, path: str) -> None:
    gateway, mock = walled
    for key in (None, gateway.key):
        upgrade = (
            f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        )
        credentials = f"authorization: Bearer {key}\r\n" if key else ""
        assert await shut(gateway, f"{upgrade}{credentials}\r\n".encode()) in (401, 404, 405)
    assert mock.log()["received"] == 0


async def test_as02_what_needs_no_key_says_nothing_of_the_engines(walled: Walled) -> None:
    """The gateway's own probes and metrics answer; they reach no generating path and show no address."""
    gateway, mock = walled
    for path in KEYLESS_OPEN:
        answer = await ask(gateway.url, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert answer.status == 200, path
        assert b"vllm:" not in answer.body
        assert mock.url.encode() not in answer.body
    assert mock.log()["received"] == 0


async def test_as02_the_listed_paths_are_metered(walled: Walled) -> None:
    """With the key each of them is forwarded, and each is one admission."""
    gateway, mock = walled
    mock.reset()
    before = _admitted(gateway)
    for path in (GENERATING, "/v1/completions"):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "hi"}],
            "prompt": "hi",
            "max_tokens": 4,
        }
        answer = await ask(gateway.url, post(gateway.key, body, path))
        assert answer.status == 200
        assert int(answer.headers["x-kvgate-reserved-blocks"]) >= 1
    absolute = request("POST", f"http://other.example{GENERATING}?x=1#y", gateway.key)
    assert (await ask(gateway.url, absolute)).status == 200
    assert mock.log()["received"] == 3
    assert {record["path"] for record in mock.log()["requests"]} == {GENERATING, "/v1/completions"}
    await asyncio.to_thread(wait_until, lambda: _admitted(gateway) == before + 3, "three admissions")


def _admitted(gateway: GatewayProcess) -> float:
    lines = gateway.metrics().splitlines()
    found = [
        x for x in lines if x.startswith("kvgate_admission_requests_total{") and 'outcome="completed"' in x
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def test_as02_the_admin_api_is_off_without_its_token(new_world: World) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    gateway = new_world.gateway(config, key, KVGATE_ADMIN_TOKEN="")
    for credentials in (key, "", "admin-token-of-the-tests"):
        assert await shut(gateway, request("GET", "/admin/v1/state", credentials)) == 404


@pytest.mark.parametrize("content", ["", "[]", "keys: []"])
async def test_as02_an_empty_keys_file_lets_nobody_in(new_world: World, content: str) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    (new_world.folder / "keys.yaml").write_text(content)
    gateway = new_world.gateway(config, key)
    for given in (None, key, "", "anonymous"):
        for method, path in (("POST", GENERATING), ("POST", "/v1/completions"), ("GET", "/v1/models")):
            assert await shut(gateway, request(method, path, given)) == 401
    assert mock.log()["received"] == 0


async def test_as02_open_only_where_the_operator_says_so(new_world: World) -> None:
    mock = new_world.mock()
    config, _ = new_world.config(
        [{"name": "only", "replicas": [mock.url]}], auth={"required": False}, store=QUICK
    )
    gateway = new_world.gateway(config, "none")
    assert (await ask(gateway.url, request("POST", GENERATING, None))).status == 200


# -- the keys file -------------------------------------------------------------------------------------------------


async def test_a_change_of_the_keys_file_counts(new_world: World) -> None:
    """Added, removed, blocked by an end date and rotated, while requests keep coming; no restart.

    That it does within a second is for a clock that can be given: see `tests/unit/test_reload.py`.
    """
    mock = new_world.mock()
    config, (first,) = new_world.config(
        [{"name": "only", "replicas": [mock.url]}], {"name": "first"}, store=QUICK
    )
    gateway = new_world.gateway(config, first)
    (second, second_digest), (third, third_digest) = new_key(), new_key()
    path = new_world.folder / "keys.yaml"
    rows = json.loads(path.read_text())

    async def status(key: str) -> int:
        return (await ask(gateway.url, post(key, BODY))).status

    async def counts(change: Callable[[], object], key: str, expected: int) -> None:
        change()
        async with asyncio.timeout(HANG_SECONDS):
            while await status(key) != expected:
                pass

    assert (await status(first), await status(second)) == (200, 401)
    await counts(lambda: _write(path, [*rows, {"name": "second", "sha256": second_digest}]), second, 200)
    assert await status(first) == 200
    blocked = {**rows[0], "expires": "2020-01-01"}
    await counts(lambda: _write(path, [blocked, {"name": "second", "sha256": second_digest}]), first, 401)
    await counts(lambda: _write(path, [*rows, {"name": "second", "sha256": third_digest}]), second, 401)
    assert (await status(third), await status(first)) == (200, 200)
    await counts(lambda: _write(path, rows), third, 401)
    path.write_text("- {name: broken")
    failures = 'kvgate_reload_failures_total{file="keys"} 1.0'
    await soon(lambda: failures in gateway.metrics(), "it is told")
    assert await status(first) == 200, "the last good keys stay"
    await counts(lambda: _write(path, []), first, 401)
    answer = await ask(gateway.url, post(first, BODY))
    assert answer.code == Code.INVALID_API_KEY


async def test_a_gateway_follows_the_keys_commands(
    new_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Created, rotated and revoked by `kvgate keys`; a stream that runs when its key goes gets to its end."""
    mock = new_world.mock()
    config, (first,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store=QUICK)
    gateway = new_world.gateway(config, first)

    def keys(*arguments: str) -> str:
        assert main(["keys", *arguments, "--file", str(new_world.folder / "keys.yaml")]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    async def counts(key: str, expected: int) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while (await ask(gateway.url, post(key, BODY))).status != expected:
                pass

    created = keys("create", "alice", "--limit", "requests_max=9")
    await counts(created, 200)
    rotated = keys("rotate", "alice")
    await counts(created, 401)
    await counts(rotated, 200)
    stream = await Wire.open(gateway.url)
    await stream.send(post(rotated, completion(16, 200, stream=True)))
    assert (await stream.head())[0] == 200
    keys("revoke", "alice")
    await counts(rotated, 401)
    assert gateway.state()["leases"] == 1, "the stream still runs"
    assert (await stream.events())[-1] == b"data: [DONE]"
    stream.close()
    await counts(first, 200)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    """As a careful operator does it: whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rows))
    os.replace(new, path)
