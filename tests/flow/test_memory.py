"""What a call leaves behind goes when it ends, and not when the garbage collector comes round to it."""

import gc
import weakref
from typing import Any

import pytest

from gateway.mock.engine import EngineConfig
from gateway.upstream.exchange import Exchange
from tests.flow.engines import mock_engine
from tests.flow.world import chat, gateway


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> "list[weakref.ref[Exchange]]":
    """Every exchange with an engine; each holds its call and all that this has."""
    found: list[weakref.ref[Exchange]] = []
    created = Exchange.__init__

    def create(self: Exchange, *arguments: Any) -> None:
        found.append(weakref.ref(self))
        created(self, *arguments)

    monkeypatch.setattr(Exchange, "__init__", create)
    return found


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "max_tokens": 1}])
async def test_a_call_that_is_over_is_gone(
    store_url: str, exchanges: "list[weakref.ref[Exchange]]", fields: dict[str, Any]
) -> None:
    async with (
        mock_engine(EngineConfig(), speed=float("inf")) as engine,
        gateway(store_url, {"a": engine.url}) as world,
    ):
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert (await world.visit(chat(**fields))).status == 200
            await world.quiet()
            assert len(exchanges) == 5
            assert [ref() for ref in exchanges] == [None] * 5
        finally:
            gc.enable()
