"""Everything that is not a generating call: probes, models, metrics, and the operator's API."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.call import Fleet
from gateway.core.outcomes import Code, Refusal
from gateway.core.request import Dialect, Endpoint
from gateway.http.errors import answer_of
from gateway.http.proxy import Keys

State = Callable[[], Awaitable[Mapping[str, Any]]]
BODY_BYTES_MAX = 65_536
"""Of a request to the operator's API."""
_CODES = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED}


class Desk(Protocol):
    """What operators do to keys; each answer is JSON or says why not."""

    def rows(self) -> list[dict[str, Any]]:
        """All keys; called in a thread."""
        ...

    async def create(self, fields: Mapping[str, Any], /) -> dict[str, Any] | Refusal: ...

    async def rotate(self, name: str, /) -> dict[str, Any] | Refusal: ...

    async def revoke(self, name: str, cut: bool, /) -> dict[str, Any] | Refusal: ...

    async def cut(self, fields: Mapping[str, Any], /) -> dict[str, Any] | Refusal: ...


class FleetDesk(Protocol):
    """What operators do to fleets; each answer is JSON or says why not."""

    async def drain(self, fields: Mapping[str, Any], /) -> dict[str, Any] | Refusal: ...

    async def undrain(self, fields: Mapping[str, Any], /) -> dict[str, Any] | Refusal: ...

    async def gate(self, fields: Mapping[str, Any], /) -> dict[str, Any] | Refusal: ...


def create_api(
    keys: Keys,
    fleets: Mapping[str, Fleet],
    ready: Callable[[], str],
    metrics: Callable[[], Awaitable[tuple[bytes, str]]],
    state: State,
    lengths: Callable[[], Mapping[str, Any]],
    desk: Desk,
    fleet_desk: FleetDesk,
    admin_token: str | None,
    version: str,
) -> FastAPI:
    """`ready` says why not, or nothing; `fleets` by model name; no token switches the operator's API off."""
    api = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    api.include_router(_probes(ready, metrics, version))
    api.include_router(_models(keys, fleets))
    if admin_token:
        api.include_router(_admin(state, lengths, desk, fleet_desk, admin_token))
    api.add_exception_handler(_Refused, _on_refused)
    api.add_exception_handler(HTTPException, _on_http_exception)
    api.add_exception_handler(Exception, _on_exception)
    return api


def _probes(
    ready: Callable[[], str], metrics: Callable[[], Awaitable[tuple[bytes, str]]], version: str
) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live")
    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def live() -> Response:
        return Response(status_code=200)

    @router.get("/health/ready")
    async def is_ready() -> Response:
        problem = ready()
        return JSONResponse(
            {"ready": not problem, "problem": problem or None}, status_code=503 if problem else 200
        )

    @router.get("/version")
    async def version_() -> Response:
        return JSONResponse({"version": version})

    @router.get("/metrics")
    async def metrics_() -> Response:
        body, content_type = await metrics()
        return Response(body, headers={"content-type": content_type})

    return router


def _models(keys: Keys, fleets: Mapping[str, Fleet]) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models that this key may use, each with the longest context that a replica offers now."""
        key = keys.find(request.scope, dict(request.scope["headers"]), int(time.time() * 1000))
        if key is None:
            return _refuse(
                Refusal(Code.INVALID_API_KEY, "no valid API key in `Authorization: Bearer` or `x-api-key`")
            )
        allowed = {name: fleet for name, fleet in fleets.items() if key.models is None or name in key.models}
        return JSONResponse(
            {"object": "list", "data": [_model(name, fleet) for name, fleet in allowed.items()]}
        )

    return router


def _model(name: str, fleet: Fleet) -> dict[str, Any]:
    shape = fleet.engines.shape()
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvgate",
        "root": shape.model,
        "parent": None,
        "max_model_len": max((pool.max_model_len for pool in shape.pools), default=None),
    }


def _admin(
    state: State,
    lengths: Callable[[], Mapping[str, Any]],
    desk: Desk,
    fleet_desk: FleetDesk,
    token: str,
) -> APIRouter:
    router = APIRouter(prefix="/admin/v1", dependencies=[Depends(_bearer(token))])

    @router.get("/state")
    async def read_state() -> Response:
        return JSONResponse(await state())

    @router.get("/lengths")
    async def read_lengths() -> Response:
        return JSONResponse(lengths())

    @router.post("/cut")
    async def cut(request: Request) -> Response:
        return _told(await desk.cut(await _fields(request)))

    @router.post("/drain")
    async def drain(request: Request) -> Response:
        return _told(await fleet_desk.drain(await _fields(request)))

    @router.post("/undrain")
    async def undrain(request: Request) -> Response:
        return _told(await fleet_desk.undrain(await _fields(request)))

    @router.post("/gate")
    async def gate(request: Request) -> Response:
        return _told(await fleet_desk.gate(await _fields(request)))

    router.include_router(_keys(desk))
    return router


def _bearer(token: str) -> Callable[[Request], Awaitable[None]]:
    expected = f"Bearer {token}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, expected):
            raise _Refused(Refusal(Code.INVALID_API_KEY, "the admin API needs its bearer token"))

    return check


def _keys(desk: Desk) -> APIRouter:
    router = APIRouter(prefix="/keys")

    @router.get("")
    async def list_() -> Response:
        return await asyncio.to_thread(lambda: JSONResponse({"keys": desk.rows()}))

    @router.post("")
    async def create(request: Request) -> Response:
        return _told(await desk.create(await _fields(request)), status=201)

    @router.post("/{name}/rotate")
    async def rotate(name: str) -> Response:
        return _told(await desk.rotate(name))

    @router.delete("/{name}")
    async def revoke(name: str, request: Request) -> Response:
        cut = request.query_params.get("cut", "false")
        if cut not in ("true", "false"):
            raise _Refused(Refusal(Code.INVALID_VALUE, f"cut is true or false, got {cut!r}", "cut"))
        return _told(await desk.revoke(name, cut == "true"))

    return router


async def _fields(request: Request) -> dict[str, Any]:
    """A JSON object.  Raises _Refused."""
    body = await _body(request)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _Refused(Refusal(Code.INVALID_JSON, f"a JSON object is needed: {error}")) from None


async def _body(request: Request) -> bytes:
    """Raises _Refused."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > BODY_BYTES_MAX:
                raise _Refused(Refusal(Code.BODY_TOO_LARGE, f"at most {BODY_BYTES_MAX} bytes are read here"))
    except ClientDisconnect:  # nobody hears this
        raise _Refused(Refusal(Code.CLIENT_DISCONNECT, "the body did not arrive")) from None
    return body


class _Refused(Exception):
    """A request to the operator's API that is not carried out."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _told(answer: dict[str, Any] | Refusal, status: int = 200) -> Response:
    if isinstance(answer, Refusal):
        return _refuse(answer)
    return JSONResponse(answer, status_code=status, headers={"cache-control": "no-store"})


def _refuse(refusal: Refusal, allow: str = "GET", dialect: Dialect = Dialect.OPENAI) -> Response:
    answer = answer_of(refusal, overload_status=429, jitter=1, allow=allow, dialect=dialect)
    headers = {name.decode(): value.decode() for name, value in answer.headers if name != b"content-length"}
    return Response(answer.body, status_code=answer.status, headers=headers)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _Refused)
    return _refuse(error.refusal)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, Code.INVALID_VALUE)
    words = {
        Code.NOT_FOUND: "there is no such path here",
        Code.METHOD_NOT_ALLOWED: "this path takes another method",
    }
    allow = (error.headers or {}).get("allow", "GET")
    refusal = Refusal(code, words.get(code, "the request is not valid"))
    return _refuse(refusal, allow, _dialect_of(request.scope["path"]))


def _dialect_of(path: str) -> Dialect:
    """Whoever asks for something beneath `/v1/messages`, as for its `count_tokens`, is a client of Anthropic."""
    is_anthropics = path == Endpoint.MESSAGES or path.startswith(f"{Endpoint.MESSAGES}/")
    return Dialect.ANTHROPIC if is_anthropics else Dialect.OPENAI


async def _on_exception(request: Request, error: Exception) -> Response:
    return _refuse(Refusal(Code.INTERNAL_ERROR, ""))
