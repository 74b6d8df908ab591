"""The operator's API where no real gateway is needed; the rest is in `tests/integration/test_admin_keys.py`."""

from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any, cast

from gateway.http.admin import Desk, FleetDesk, create_api
from gateway.http.auth import Callers, Keyring

TOKEN = "admin"


async def no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


async def no_state() -> dict[str, Any]:
    return {}


async def test_who_leaves_before_the_body_is_there_is_no_error_of_ours() -> None:
    """What the server cannot handle is a traceback in the log."""
    callers, desk = Callers(Keyring((), None)), cast(Desk, SimpleNamespace(create=None))
    fleet_desk = cast(FleetDesk, SimpleNamespace())
    api = create_api(callers, {}, lambda: "", no_metrics, no_state, dict, desk, fleet_desk, TOKEN, "1")
    sent: list[MutableMapping[str, Any]] = []

    async def left() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    path = {"path": "/admin/v1/keys", "raw_path": b"/admin/v1/keys", "query_string": b"", "root_path": ""}
    scope = {"type": "http", "method": "POST", "http_version": "1.1", "headers": headers, **path}
    await api(scope, left, send)
    assert sent[0]["status"] == 499
