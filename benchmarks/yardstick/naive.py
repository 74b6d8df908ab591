"""The gateway that anybody would write first, in FastAPI and httpx: parse, pick a pool by length, forward, stream."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

SHORT = LONG = "http://127.0.0.1:18100"
LONG_CHARS = 4096 * 4


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # httpx's own limit is 100 connections, with which it fails at once.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/v1/chat/completions")
async def route(request: Request) -> Response:
    body = await request.json()
    chars = sum(len(message.get("content", "")) for message in body.get("messages", []))
    url = f"{SHORT if chars < LONG_CHARS else LONG}/v1/chat/completions"
    client: httpx.AsyncClient = app.state.client
    if not body.get("stream"):
        whole = await client.post(url, json=body)
        return JSONResponse(whole.json(), status_code=whole.status_code)
    answer = await client.send(client.build_request("POST", url, json=body), stream=True)

    async def chunks() -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_bytes():
                yield chunk
        finally:
            await answer.aclose()

    return StreamingResponse(chunks(), status_code=answer.status_code, media_type="text/event-stream")
