"""The mock as a plain ASGI app: vLLM's routes over one engine, and `/mock/...` to script and observe it.

`POST /mock/faults {"fail", "count"}` scripts the next calls (see `faults`), `POST /mock/state {"state", ...}` changes
the whole engine (see `control`), `GET /mock/log` tells what arrived and what became of it (see `journal`),
`POST /mock/reset` forgets scripts and log; the engine's calls and counters go on.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from gateway.mock import anthropic, openai, responses, tokenizer
from gateway.mock.bodies import (
    Refusal,
    is_list_of,
    missing,
    parse_object,
    token_ids,
    validation_error,
)
from gateway.mock.calls import Server, check_model
from gateway.mock.control import Control
from gateway.mock.driver import Driver
from gateway.mock.engine import EngineConfig
from gateway.mock.exchange import BodyTooLarge, ClientLeft, Exchange, Receive, Scope, Send
from gateway.mock.faults import Faults, parse_fault
from gateway.mock.generation import Generation, parsers
from gateway.mock.journal import Journal
from gateway.mock.options import Options
from gateway.mock.recall import wants_events

Handler = Callable[[Exchange], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
CORS_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY")
_CORS_VARY = b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
_CORS_HEADERS = [
    (b"vary", _CORS_VARY + b", Access-Control-Request-Private-Network"),
    (b"access-control-allow-methods", ", ".join(CORS_METHODS).encode()),
    (b"access-control-max-age", b"600"),
]
_GUARDED = ("/v1", "/v2", "/inference")
_SCALE_OUT = (
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
)


def create_app(config: EngineConfig, options: Options | None = None, *, speed: float = 1.0) -> "MockServer":
    """An engine behind ASGI.  `speed` divides step times (`math.inf`: none)."""
    return MockServer(config, options or Options(), speed=speed)


class MockServer:
    """One mock engine; `driver.stop()` is its SIGTERM."""

    def __init__(self, config: EngineConfig, options: Options, *, speed: float) -> None:
        self.config = config
        self.options = options
        self.driver = Driver(config, speed)
        self.control = Control(self.driver)
        self.faults = Faults()
        self.journal = Journal()
        self._server = Server(config, options)
        self._generation = Generation(
            self._server, self.driver, self.control, self.faults, self.journal, self._now
        )
        self._routes: Routes = self._vllm_routes() | self._mock_routes()
        if options.dev_mode:
            self._routes |= self._dev_routes()

    def _vllm_routes(self) -> Routes:
        calls: Routes = {route: {"POST": self._generation.answer} for route in parsers(self.options)}
        return (
            calls
            | (self._generating_routes() if self.options.runner == "generate" else {})
            | {
                "/v1/models": {"GET": self._models},
                "/health": {"GET": self._health},
                "/ping": {"GET": self._health, "POST": self._health},
                "/version": {"GET": self._version},
                "/load": {"GET": self._load},
                "/kv_event_sources": {"GET": self._kv_event_sources},
                "/metrics": {"GET": self._metrics},
                "/tokenize": {"POST": self._tokenize},
                "/detokenize": {"POST": self._detokenize},
            }
        )

    def _generating_routes(self) -> Routes:
        closed: Routes = {route: {"POST": self._scale_out} for route in _SCALE_OUT}
        return closed | {
            "/invocations": {"POST": self._generation.invoke},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
        }

    def _mock_routes(self) -> Routes:
        return {
            "/mock/faults": {"POST": self._add_faults},
            "/mock/state": {"GET": self.control.tell, "POST": self.control.change},
            "/mock/log": {"GET": self._log},
            "/mock/reset": {"POST": self._reset},
        }

    def _dev_routes(self) -> Routes:
        return {
            "/pause": {"POST": self.control.pause},
            "/resume": {"POST": self.control.resume},
            "/is_paused": {"GET": self.control.is_paused},
            "/sleep": {"POST": self.control.go_to_sleep},
            "/wake_up": {"POST": self.control.wake_up},
            "/is_sleeping": {"GET": self.control.is_sleeping},
            "/get_world_size": {"GET": self.control.world_size},
            "/reset_prefix_cache": {"POST": self.control.reset_prefix_cache},
            "/abort_requests": {"POST": self._abort_requests},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        exchange = Exchange(scope, receive, send, request_id_header=self.options.enable_request_id_headers)
        try:
            await self._dispatch(exchange)
        except Refusal as refusal:
            await exchange.json(refusal.status, refusal.body)
        except BodyTooLarge:
            await exchange.json(413, {"detail": "Request body too large"})
        except ClientLeft:
            return

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self.driver.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _dispatch(self, exchange: Exchange) -> None:
        if exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method"):
            await self._preflight(exchange)
            return
        if not self._authorized(exchange):
            await exchange.json(401, {"error": "Unauthorized"})
            return
        methods = self._routes.get(exchange.path) or self._stored_responses(exchange.path)
        if methods is None:
            await exchange.json(404, {"detail": "Not Found"})
        elif exchange.method not in methods:
            allow = (b"allow", ", ".join(methods).encode())
            await exchange.json(405, {"detail": "Method Not Allowed"}, [allow])
        else:
            await methods[exchange.method](exchange)

    def _stored_responses(self, path: str) -> dict[str, Handler] | None:
        """/v1/responses/ID and /v1/responses/ID/cancel."""
        parts = path.removeprefix("/v1/responses/").split("/")
        if self.options.runner != "generate":
            return None
        if not path.startswith("/v1/responses/") or len(parts) > 2 or parts[1:] not in ([], ["cancel"]):
            return None
        return {"POST" if parts[1:] else "GET": self._response}

    def _authorized(self, exchange: Exchange) -> bool:
        key = self.options.api_key
        if key is None or exchange.method == "OPTIONS" or not exchange.path.startswith(_GUARDED):
            return True
        given = exchange.header(b"authorization").encode()
        return secrets.compare_digest(given, f"Bearer {key}".encode())

    async def _preflight(self, exchange: Exchange) -> None:
        """No origin is allowed unless vLLM is told one, so every preflight is refused, as recorded."""
        wrong = ["origin"]
        if exchange.header(b"access-control-request-method") not in CORS_METHODS:
            wrong.append("method")
        await exchange.preflight(400, list(_CORS_HEADERS), f"Disallowed CORS {', '.join(wrong)}".encode())

    @staticmethod
    def _now() -> int:
        """What answers tell as the time of their creation."""
        return int(time.time())

    # vLLM's small routes

    async def _models(self, exchange: Exchange) -> None:
        permissions = [secrets.token_hex(8) for _ in self._server.names]
        await exchange.json(200, openai.models(self._server, self._now(), permissions))

    async def _health(self, exchange: Exchange) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if self.driver.dead else HTTPStatus.OK
        await exchange.answer(status, b"", b"")

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json(200, {"version": openai.VERSION})

    async def _load(self, exchange: Exchange) -> None:
        load = self._generation.open if self.options.enable_server_load_tracking else 0
        await exchange.json(200, {"server_load": load})

    async def _kv_event_sources(self, exchange: Exchange) -> None:
        await exchange.json(200, {})

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, METRICS_TYPE, self.driver.metrics.render())

    async def _object(self, exchange: Exchange) -> dict[str, Any]:
        raw = await exchange.body()
        exchange.check_json()
        return parse_object(raw)

    async def _count_tokens(self, exchange: Exchange) -> None:
        body = await self._object(exchange)
        try:
            await exchange.json(200, anthropic.counted(body, self._server))
        except Refusal as refusal:
            await exchange.json(refusal.status, anthropic.refusal_body(refusal))

    async def _tokenize(self, exchange: Exchange) -> None:
        body = await self._object(exchange)
        if "prompt" not in body and "messages" not in body:
            raise missing(body, "prompt", "messages")
        check_model(body, self._server)
        strings = bool(body.get("return_token_strs"))
        await exchange.json(200, openai.tokenized(_ids(body), self.config.max_model_len, strings=strings))

    async def _detokenize(self, exchange: Exchange) -> None:
        body = await self._object(exchange)
        ids = token_ids(body, "tokens")
        check_model(body, self._server)
        await exchange.json(200, {"prompt": tokenizer.decode(ids)})

    async def _response(self, exchange: Exchange) -> None:
        wanted = exchange.path.split("/")[3]
        found = self._server.stored.get(wanted)
        if found is None:
            raise responses.not_found(wanted)
        if exchange.method == "POST" and not self._generation.cancel(wanted):
            raise responses.not_cancelled()
        if exchange.method == "GET" and wants_events(exchange):
            return await self._generation.tell_again(exchange, wanted)
        await exchange.json(200, found.document)

    async def _scale_out(self, exchange: Exchange) -> None:
        text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        raise Refusal(403, text, "PermissionDeniedError")

    async def _abort_requests(self, exchange: Exchange) -> None:
        ids = parse_object(await exchange.body()).get("request_ids", [])
        if not is_list_of(ids, str):
            raise Refusal(400, "request_ids must be a list of strings", param="request_ids")
        self._generation.abort(ids)
        await exchange.json(200, {"status": "aborted", "aborted": len(ids)})

    # The mock's own

    async def _add_faults(self, exchange: Exchange) -> None:
        body = parse_object(await exchange.body())
        count = body.get("count", 1)
        try:
            if type(count) is not int:
                raise ValueError(f"count must be an integer, got {count!r}")
            self.faults.add(parse_fault(body.get("fail")), count)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        await exchange.json(200, {"waiting": len(self.faults)})

    async def _log(self, exchange: Exchange) -> None:
        await exchange.json(200, self.journal.shown())

    async def _reset(self, exchange: Exchange) -> None:
        self.faults.clear()
        self.journal.clear()
        await exchange.json(200, {})


def _ids(body: Mapping[str, object]) -> list[int]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if is_list_of(messages, dict):
        return tokenizer.encode_chat(messages, body.get("tools"))
    raise validation_error([("string_type", "body.prompt", "Input should be a valid string", str(prompt))])
