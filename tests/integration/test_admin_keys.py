"""Keys in the store by the admin API and the command line, on real gateways: two processes with two workers each."""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis

from gateway.cli import main
from tests.integration.test_workers import all_there, connection_to
from tests.processes import (
    ADMIN_TOKEN,
    HANG_SECONDS,
    QUICK_STORE,
    GatewayProcess,
    Mock,
    World,
    wait_until,
    world,
)
from tests.wire import Wire, ask, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

STEP_MS = 20
CALL = completion(16, 2)
ALL = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""Gateway and worker."""


class Admin:
    """The admin API of one gateway."""

    def __init__(self, url: str, token: str = ADMIN_TOKEN) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=f"{url}/admin/v1", headers=headers, timeout=10, trust_env=False)

    def __call__(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        answer = self._client.request(method, path, **options)
        assert answer.status_code == status, answer.text
        assert answer.headers["x-request-id"]
        return answer.json()

    def create(self, name: str, **fields: Any) -> str:
        """A new key's secret."""
        made = self("POST", "/keys", 201, json={"name": name, **fields})
        assert made["name"] == name
        return str(made["secret"])

    def refused(self, method: str, path: str, status: int, **options: Any) -> tuple[str, str | None, str]:
        error = self(method, path, status, **options)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error["code"], error["param"], error["message"]

    def names(self) -> list[str]:
        return [row["name"] for row in self("GET", "/keys")["keys"]]

    def close(self) -> None:
        self._client.close()


@contextmanager
def admin_of(gateway: GatewayProcess, token: str = ADMIN_TOKEN) -> Iterator[Admin]:
    admin = Admin(gateway.url, token)
    try:
        yield admin
    finally:
        admin.close()


def gateways_of(
    here: World, count: int = 1, *options: str, auth: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[GatewayProcess], Mock]:
    """On one store, with one key, `filed`, in their file."""
    mock = here.mock("--blocks", "1001", "--step-base-ms", str(STEP_MS))
    config, (key,) = here.config(
        [{"name": "only", "replicas": [mock.url]}],
        {"name": "filed"},
        store=QUICK_STORE | settings.pop("store", {}),
        auth={"keys_in_store": True, **(auth or {})},
        **settings,
    )
    return [here.gateway(config, key, *options) for _ in range(count)], mock


LONG_NAMES = [f"{number:02}{'x' * 120}" for number in range(50)]
"""Of models: what an entry may name until it is too long."""


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[World, GatewayProcess, Admin]]:
    with world() as here:
        (gateway,), _ = gateways_of(here, fleet={"aliases": LONG_NAMES})
        with admin_of(gateway) as admin:
            yield here, gateway, admin


@pytest.fixture
def one(running: tuple[World, GatewayProcess, Admin]) -> Iterator[tuple[GatewayProcess, Admin]]:
    """A gateway for all who need but one; each leaves no key behind."""
    _, gateway, admin = running
    yield gateway, admin
    for name in admin.names():
        if name != "filed":
            admin("DELETE", f"/keys/{name}")


async def status_of(wire: Wire, key: str) -> int:
    """Of a request that leaves the connection open whatever the answer."""
    head = f"GET /v1/models HTTP/1.1\r\nhost: kvgate\r\nauthorization: Bearer {key}\r\n\r\n"
    return (await wire.ask(head.encode())).status


async def all_say(wires: list[Wire], key: str, status: int) -> None:
    """Soon every worker does; how soon is for a clock that can be given: see `test_shared_keys.py`."""
    async with asyncio.timeout(HANG_SECONDS):
        while {await status_of(wire, key) for wire in wires} != {status}:
            await asyncio.sleep(0.02)


async def test_every_worker_of_every_gateway_follows(new_world: World) -> None:
    """Each step by another gateway than the one before."""
    gateways, _ = gateways_of(new_world, 2, "--workers", "2")
    for gateway in gateways:
        await all_there(gateway)
    wires = [await connection_to(gateways[number], worker) for number, worker in ALL]
    with admin_of(gateways[0]) as first, admin_of(gateways[1]) as second:
        secret = first.create("team-a")
        await all_say(wires, secret, 200)
        renewed = second("POST", "/keys/team-a/rotate")["secret"]
        await all_say(wires, secret, 401)
        await all_say(wires, renewed, 200)
        assert first("DELETE", "/keys/team-a") == {"name": "team-a"}
        await all_say(wires, renewed, 401)
        await all_say(wires, gateways[0].key, 200)


def test_a_key_from_its_making_to_its_end(one: tuple[GatewayProcess, Admin]) -> None:
    gateway, admin = one
    limits = {"requests_max": 2, "requests_per_minute": 5}
    secret = admin.create(
        "team-a",
        limits=limits,
        models=["demo"],
        expires="2099-01-31",
        weight=2,
        group="g",
        **{"class": "low"},
    )
    assert re.fullmatch(r"kvg_[a-z2-7]{32}", secret)
    answer = gateway.client.post("/v1/completions", json=CALL, headers={"authorization": f"Bearer {secret}"})
    assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "5")
    filed, row = admin("GET", "/keys")["keys"]
    assert (filed["name"], filed["source"]) == ("filed", "file")
    shown = row.pop("sha256")
    assert re.fullmatch(r"[0-9a-f]{8}", shown)
    assert row == {
        "name": "team-a", "class": "low", "weight": 2, "group": "g", "models": ["demo"], "limits": limits,
        "mode": None, "cache_salt": False, "expires": "2099-01-31T00:00:00Z", "source": "store",
    }  # fmt: skip
    renewed = admin("POST", "/keys/team-a/rotate")["secret"]
    assert renewed != secret
    (_, again) = admin("GET", "/keys")["keys"]
    assert again.pop("sha256") != shown
    assert again == row, "all else stays"
    admin("DELETE", "/keys/team-a")
    assert admin.names() == ["filed"]
    log = gateway.log.read_text()
    for what in ("created", "new secret", "revoked"):
        assert re.search(rf"key team-a [^\n]*{what}", log)
    assert secret not in log
    assert renewed not in log


def test_what_the_store_holds_is_no_secret(
    running: tuple[World, GatewayProcess, Admin], one: tuple[GatewayProcess, Admin]
) -> None:
    secret = one[1].create("team-a")
    store = redis.Redis(unix_socket_path=str(running[0].store.socket), protocol=2)
    entry = json.loads(store.hget("{kvgate:keys}:entries", "team-a") or b"")
    store.close()
    assert entry == {"name": "team-a", "sha256": hashlib.sha256(secret.encode()).hexdigest()}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({}, "name", "missing"),
    "a bad name": ({"name": "a b"}, "name", "'a b'"),
    "a name that is no part of a path": ({"name": ".."}, "name", "part of a path"),
    "a name of the file": ({"name": "filed"}, "name", "'filed' is a key of the keys file"),
    "a name of the store": ({"name": "stored"}, "name", "'stored' is a key already"),
    "an unknown field": ({"name": "x", "wieght": 2}, "wieght", "unknown"),
    "an unknown class": ({"name": "x", "class": "gold"}, "class", "'gold', known are high, normal, low"),
    "an unknown model": ({"name": "x", "models": ["demo", "gpt"]}, "models", "'gpt'"),
    "an unknown limit": ({"name": "x", "limits": {"blocks": 1}}, "limits.blocks", "unknown"),
    "a bad limit": ({"name": "x", "limits": {"blocks_max": 0}}, "limits.blocks_max", "got 0"),
    "a limit as text": ({"name": "x", "limits": {"blocks_max": "5"}}, "limits.blocks_max", "'5'"),
    "a bad date": ({"name": "x", "expires": "soon"}, "expires", "has to be a date"),
    "a date without zone": ({"name": "x", "expires": "2027-01-31T12:00:00"}, "expires", "has to be a date"),
    "a weight of nothing": ({"name": "x", "weight": 0}, "weight", "got 0"),
    "a digest": ({"name": "x", "sha256": "0" * 64}, "sha256", "is made here"),
    "a group that is a key": ({"name": "x", "group": "stored"}, "group", "outside of the group"),
}


def test_what_is_wrong_is_named(one: tuple[GatewayProcess, Admin]) -> None:
    _, admin = one
    admin.create("stored")
    for what, (fields, param, words) in WRONG.items():
        code, named, message = admin.refused("POST", "/keys", 400, json=fields)
        assert (code, named) == ("invalid_value", param), what
        assert words in message, what
    assert admin.names() == ["filed", "stored"]


def test_bodies_paths_and_credentials(one: tuple[GatewayProcess, Admin]) -> None:
    gateway, admin = one
    for body, status, code in (
        (b"", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"name": "\xff"}', 400, "invalid_json"),
        (b'{"name": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "invalid_json"),
        (b'{"name": "' + b"x" * 70_000 + b'"}', 413, "body_too_large"),
    ):
        assert admin.refused("POST", "/keys", status, content=body)[0] == code
    assert admin.refused("POST", "/keys/nobody/rotate", 404)[:2] == ("not_found", "name")
    assert admin.refused("DELETE", "/keys/nobody", 404)[:2] == ("not_found", "name")
    assert "keys file" in admin.refused("DELETE", "/keys/filed", 400)[2]
    assert "keys file" in admin.refused("POST", "/keys/filed/rotate", 400)[2]
    assert admin.refused("DELETE", "/keys/filed?cut=yes", 400)[:2] == ("invalid_value", "cut")
    assert admin.refused("PUT", "/keys", 405)[0] == "method_not_allowed"
    for token in ("wrong", gateway.key):
        with admin_of(gateway, token) as other:
            for method, path in (
                ("GET", "/keys"),
                ("POST", "/keys"),
                ("DELETE", "/keys/a"),
                ("POST", "/cut"),
            ):
                assert other.refused(method, path, 401)[0] == "invalid_api_key"
    for fields, param in (
        ({}, "key"),
        ({"key": 1}, "key"),
        ({"key": "a b"}, "key"),
        ({"key": "a", "b": 1}, "b"),
    ):
        assert admin.refused("POST", "/cut", 400, json=fields)[:2] == ("invalid_value", param)
    assert admin.names() == ["filed"]


def test_an_entry_has_a_bound(one: tuple[GatewayProcess, Admin]) -> None:
    _, admin = one
    message = admin.refused("POST", "/keys", 400, json={"name": "x", "models": LONG_NAMES})[2]
    assert re.search(r"the entry has \d{4} bytes, at most 4096", message)
    admin.create("x", models=LONG_NAMES[:20])


def test_keys_of_the_file_alone(new_world: World) -> None:
    """Where the store's are off they are listed, and no others are made; without a token there is nothing."""
    (gateway,), _ = gateways_of(new_world, auth={"keys_in_store": False})
    with admin_of(gateway) as admin:
        assert admin.names() == ["filed"]
        for method, path in (("POST", "/keys"), ("POST", "/keys/a/rotate"), ("DELETE", "/keys/a")):
            options = {"json": {"name": "a"}} if path == "/keys" else {}
            code, param, message = admin.refused(method, path, 400, **options)
            assert (code, param) == ("invalid_value", "auth.keys_in_store")
            assert "is off" in message


def test_no_token_no_admin_api(new_world: World) -> None:
    (gateway,), _ = gateways_of(new_world)
    config = new_world.folder / "kvgate.yaml"
    other = new_world.gateway(config, gateway.key, KVGATE_ADMIN_TOKEN="")
    with admin_of(other) as admin:
        for method, path in (("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/a"), ("POST", "/cut")):
            assert admin.refused(method, path, 404)[0] == "not_found"
    with admin_of(gateway) as admin:
        secret = admin.create("a")
    wait_until(lambda: completes(other, secret), "it follows all the same")


def completes(gateway: GatewayProcess, secret: str) -> bool:
    headers = {"authorization": f"Bearer {secret}"}
    return gateway.client.post("/v1/completions", json=CALL, headers=headers).status_code == 200


async def test_a_store_that_is_away_and_returns_without_its_data(new_world: World) -> None:
    """Nobody who was in is thrown out, nobody who was not is let in, an edit is refused; then all goes on."""
    (gateway, other), _ = gateways_of(new_world, 2, store={"hold_seconds": 1})
    with admin_of(gateway) as admin:
        secret = admin.create("team-a")
        wait_until(lambda: completes(other, secret), "both know it")
        assert new_world.store.process
        new_world.store.process.kill()
        new_world.store.process.wait()
        wait_until(lambda: not gateway.is_ready(), "it is known to be away")
        for key, status in ((secret, 503), (gateway.key, 503), ("kvg_wrong", 401)):
            assert (await ask(gateway.url, post(key, CALL))).status == status
        code, _, message = admin.refused("POST", "/keys", 503, json={"name": "b"})
        assert code == "store_unavailable"
        assert "is not known" in message
        assert admin.names() == ["filed", "team-a"]
        new_world.store.start()
        for each in (gateway, other):
            wait_until(lambda each=each: completes(each, secret), "it is served again")
            assert (await ask(each.url, post("kvg_wrong", CALL))).status == 401
        log = gateway.log.read_text() + other.log.read_text()
        assert "the store lost its keys" in log
        assert "cannot be followed" in log
        fresh = admin.create("b")
        await soon(lambda: completes(other, fresh), "edits go on")


def test_a_new_gateway_lets_nobody_wait_for_its_keys(new_world: World) -> None:
    """It is ready once it has read them."""
    (gateway,), _ = gateways_of(new_world)
    with admin_of(gateway) as admin:
        secret = admin.create("a")
    later = new_world.gateway(new_world.folder / "kvgate.yaml", gateway.key)
    assert completes(later, secret)


# -- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def command(
    one: tuple[GatewayProcess, Admin], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs a good command against that gateway; its lines."""
    monkeypatch.setenv("KVGATE_ADMIN_URL", one[0].url + "/")
    monkeypatch.setenv("KVGATE_ADMIN_TOKEN", ADMIN_TOKEN)

    def run(*arguments: str, status: int = 0) -> list[str]:
        assert main(arguments) == status
        output = capsys.readouterr()
        assert (output.err == "") == (status == 0)
        return (output.out if status == 0 else output.err).splitlines()

    return run


def test_the_command_line_speaks_to_the_store(one: tuple[GatewayProcess, Admin], command: Any) -> None:
    gateway, _ = one
    *_, secret = command("keys", "create", "team-a", "--limit", "requests_max=5", "--models", "demo")
    assert completes(gateway, secret)
    *_, renewed = command("keys", "rotate", "team-a")
    assert completes(gateway, renewed)
    assert not completes(gateway, secret)
    head, filed, stored = (re.split(r" {2,}", line) for line in command("keys", "list"))
    assert head == ["NAME", "CLASS", "WEIGHT", "GROUP", "LIMITS", "EXPIRES", "SHA256", "SOURCE"]
    assert (filed[0], filed[-1]) == ("filed", "file")
    assert [*stored[:6], stored[-1]] == ["team-a", "normal", "1", "-", "requests_max=5", "-", "store"]
    assert "running streams go on" in command("keys", "revoke", "team-a")[0]
    assert not completes(gateway, renewed)
    assert "0 calls of team-a ended" in command("cut", "--key", "team-a")[0]
    assert "No key is called team-a" in command("cut", "--key", "team-a")[1]
    assert len(command("cut", "--key", "filed")) == 1


def test_what_the_gateway_refuses_is_told_in_one_line(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, words in (
        (("keys", "create", "x", "--class", "gold"), "class: there is no class 'gold'"),
        (("keys", "create", "filed"), "name: 'filed' is a key of the keys file"),
        (("keys", "rotate", "nobody"), "the store has no key 'nobody'"),
        (("keys", "rotate", "no/body"), "no admin API"),
        (("keys", "revoke", "nobody", "--cut"), "the store has no key 'nobody'"),
        (("cut", "--key", "a b"), "key: the name of a key is needed, got 'a b'"),
    ):
        (line,) = command(*arguments, status=2)
        assert words in line, arguments
    monkeypatch.setenv("KVGATE_ADMIN_TOKEN", "wrong")
    (line,) = command("keys", "list", status=2)
    assert "KVGATE_ADMIN_TOKEN: is not the admin token of the gateway at http://" in line
    monkeypatch.setenv("KVGATE_ADMIN_URL", "http://admin:hunter2@127.0.0.1:9")
    (line,) = command("keys", "list", status=2)
    assert "KVGATE_ADMIN_URL: may have" in line
    assert "hunter2" not in line
    monkeypatch.setenv("KVGATE_ADMIN_URL", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be asked" in command("keys", "list", status=2)[0]
