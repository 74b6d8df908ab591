"""Media through a whole gateway: reserved by the fleet's rule, and fetched from no host that it does not name."""

import math
from typing import Any

import pytest

from gateway.core.media import MediaRule
from gateway.core.outcomes import Code
from gateway.mock.engine import EngineConfig
from tests.flow.driver import CHAT
from tests.flow.engines import Peer, mock_engine, raw_engine, whole
from tests.flow.world import gateway

RULE = MediaRule(image_tokens=50, audio_tokens=70, video_tokens=90, hosts=frozenset({"pics.example"}))
DATA = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
ELSEWHERE = {"type": "image_url", "image_url": {"url": "http://evil.example/secret?token=1"}}
ANTHROPICS = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 200_000}}
ANTHROPICS_ELSEWHERE = {"type": "image", "source": {"type": "url", "url": "http://evil.example/"}}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def body_of(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]
    if path == RESPONSES:
        return {"model": "demo", "input": messages, "max_output_tokens": 4}
    return {"model": "demo", "messages": messages, "max_tokens": 4}


@pytest.mark.parametrize(("path", "part"), [(CHAT, DATA), (MESSAGES, ANTHROPICS), (RESPONSES, DATA)])
async def test_a_call_reserves_what_the_rule_says(store_url: str, path: str, part: dict[str, Any]) -> None:
    async with (
        mock_engine(EngineConfig(), speed=math.inf) as mock,
        gateway(store_url, {"a": mock.url}, media=RULE) as world,
    ):
        visitor = await world.visit(body_of(path, part, part), path=path)
        assert visitor.status == 200, visitor.body
        assert visitor.header("x-prompt-tokens") == str(1 + 7 + 2 * 50)
        assert visitor.header("x-kvgate-reserved-blocks") == str(-(-(108 + 4 - 1) // 16))
        await world.quiet()


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, ELSEWHERE),
        (RESPONSES, ELSEWHERE),
        (MESSAGES, ANTHROPICS_ELSEWHERE),
        ("/tokenize", ELSEWHERE),
        ("/v1/messages/count_tokens", ANTHROPICS_ELSEWHERE),
    ],
)
async def test_no_engine_hears_of_another_host(store_url: str, path: str, part: dict[str, Any]) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(whole(200, b"{}"))

    async with raw_engine(script) as engine, gateway(store_url, {"a": engine.url}, media=RULE) as world:
        visitor = await world.visit(body_of(path, part), path=path)
        error = visitor.json["error"]
        assert visitor.status == 400, visitor.body
        assert "evil.example" in error["message"]
        assert "secret" not in error["message"]
        assert visitor.header("x-kvgate-reason") == Code.INVALID_VALUE
        assert engine.lines == []
        await world.quiet()
