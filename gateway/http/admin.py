"""Everything that is not a generating call: probes, models, metrics, and the operator's API."""

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.call import Fleet
from gateway.core.outcomes import Code, Refusal
from gateway.http.errors import answer_of
from gateway.http.proxy import Keys

State = Callable[[], Awaitable[Mapping[str, Any]]]
_CODES = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED}


def create_api(
    keys: Keys,
    fleets: Mapping[str, Fleet],
    ready: Callable[[], str],
    metrics: Callable[[], Awaitable[tuple[bytes, str]]],
    state: State,
    admin_token: str | None,
    version: str,
) -> FastAPI:
    """`ready` says why not, or nothing; `fleets` by model name; no token switches the operator's API off."""
    api = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    api.include_router(_probes(ready, metrics, version))
    api.include_router(_models(keys, fleets))
    if admin_token:
        api.include_router(_admin(state, admin_token))
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
        authorization, api_key = request.headers.get("authorization"), request.headers.get("x-api-key")
        key = keys.find(
            authorization.encode("latin-1") if authorization else None,
            api_key.encode("latin-1") if api_key else None,
            int(time.time() * 1000),
        )
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


def _admin(state: State, token: str) -> APIRouter:
    router = APIRouter(prefix="/admin/v1")
    expected = f"Bearer {token}".encode()

    @router.get("/state")
    async def read_state(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, expected):
            return _refuse(Refusal(Code.INVALID_API_KEY, "the admin API needs its bearer token"))
        return JSONResponse(await state())

    return router


def _refuse(refusal: Refusal, allow: str = "GET") -> Response:
    answer = answer_of(refusal, overload_status=429, jitter=1, allow=allow)
    headers = {name.decode(): value.decode() for name, value in answer.headers if name != b"content-length"}
    return Response(answer.body, status_code=answer.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, Code.INVALID_VALUE)
    words = {
        Code.NOT_FOUND: "there is no such path here",
        Code.METHOD_NOT_ALLOWED: "this path takes another method",
    }
    allow = (error.headers or {}).get("allow", "GET")
    return _refuse(Refusal(code, words.get(code, "the request is not valid")), allow)


async def _on_exception(request: Request, error: Exception) -> Response:
    return _refuse(Refusal(Code.INTERNAL_ERROR, ""))
