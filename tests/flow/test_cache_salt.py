"""Whose prefixes a call finds in an engine's cache."""

from gateway.http.auth import Key
from gateway.mock.config import EngineConfig
from tests.flow.engines import MockEngine, mock_engine
from tests.flow.world import chat, gateway

ASKED = chat(max_tokens=2, messages=[{"role": "user", "content": "one word after the other " * 40}])


def hits(mock: MockEngine) -> int:
    """Tokens that the engine has found in its cache until now."""
    return mock.app.driver.engine.prefix_hits


async def test_keys_of_one_salt_find_what_they_left_and_others_nothing(store_url: str) -> None:
    async with mock_engine(EngineConfig(), speed=float("inf")) as mock:

        async def found(name: str, salt: str) -> int:
            before = hits(mock)
            async with gateway(store_url, {"a": mock.url}, key=Key(name, "normal", cache_salt=salt)) as world:
                assert (await world.visit(ASKED)).status == 200
                await world.quiet()
            return hits(mock) - before

        assert [await found("a", "x"), await found("b", "y"), await found("free", "")] == [0, 0, 0]
        assert await found("c", "x") == await found("free", "") > 0
