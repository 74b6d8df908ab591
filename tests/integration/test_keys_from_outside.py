"""A trusted proxy's header and signed tokens name the key of a call, on real gateways."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.cli import main
from tests.integration.test_admin_keys import CALL, admin_of
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World, wait_until

HEADER = "x-consumer-username"
ISSUER, AUDIENCE = "https://login.example", "kvgate"
SECRETLESS = {"name": "outside", "limits": {"requests_per_minute": 100}}


def gateway_of(world: World, **auth: Any) -> tuple[GatewayProcess, Mock]:
    """Its file has a key with a secret, `key-0`, and one without, `outside`."""
    mock = world.mock("--blocks", "1001", "--step-base-ms", "2")
    config, (key,) = world.config(
        [{"name": "only", "replicas": [mock.url]}], {}, store=QUICK_STORE, auth=auth, log={"level": "info"}
    )
    rows = json.loads((world.folder / "keys.yaml").read_text())
    (world.folder / "keys.yaml").write_text(json.dumps([*rows, SECRETLESS]))
    return world.gateway(config, key), mock


def call(gateway: GatewayProcess, **headers: str) -> httpx.Response:
    """Without the client's own key."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(base_url=gateway.url, headers=sent, trust_env=False, timeout=10) as client:
        return client.post("/v1/completions", json=CALL)


def last_key(gateway: GatewayProcess) -> str:
    """Of the call that ended last, as the log has it; nothing before it has one."""
    records = [json.loads(line) for line in gateway.log.read_text().splitlines() if "call ended" in line]
    return str(records[-1]["key"]) if records else ""


def test_a_trusted_proxys_word(new_world: World) -> None:
    """It counts before a secret, it is the name of a key, and engines hear nothing of it."""
    gateway, mock = gateway_of(new_world, trusted_header={"name": HEADER, "from": ["127.0.0.0/8"]})
    secret = f"Bearer {gateway.key}"
    answer = call(gateway, x_consumer_username="outside")
    assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "100")
    wait_until(lambda: last_key(gateway) == "outside", "it is told by its name")
    assert call(gateway, x_consumer_username="outside", authorization=secret).status_code == 200
    assert call(gateway, x_consumer_username="nobody", authorization=secret).status_code == 401
    assert call(gateway, authorization=secret).status_code == 200
    assert call(gateway).status_code == 401
    with httpx.Client(base_url=gateway.url, trust_env=False) as client:
        twice = [(HEADER, "outside"), (HEADER, "key-0")]
        assert client.post("/v1/completions", json=CALL, headers=twice).status_code == 401
        listed = client.get("/v1/models", headers={HEADER: "outside"})
        assert [model["id"] for model in listed.json()["data"]] == ["demo"]
    sent = [name for request in mock.log()["requests"] for name, _ in request["headers"]]
    assert len(mock.log()["requests"]) == 3
    assert HEADER not in sent
    assert "authorization" not in sent


def test_anybody_elses_word(new_world: World) -> None:
    gateway, mock = gateway_of(new_world, trusted_header={"name": HEADER, "from": ["10.0.0.0/8", "::/1"]})
    assert call(gateway, x_consumer_username="outside").status_code == 401
    assert call(gateway, x_consumer_username="outside", x_forwarded_for="10.0.0.1").status_code == 401
    with_secret = call(gateway, x_consumer_username="outside", authorization=f"Bearer {gateway.key}")
    assert (with_secret.status_code, "x-ratelimit-limit-requests" in with_secret.headers) == (200, False)
    (request,) = mock.log()["requests"]
    assert HEADER not in [name for name, _ in request["headers"]]


# -- signed tokens -----------------------------------------------------------------------------------------------


class Issuer:
    """Signs with its newest key; its file has the public ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        self.renew()

    def renew(self) -> None:
        """Another key: what was signed before is worth nothing."""
        self._number += 1
        self._key = ec.generate_private_key(ec.SECP256R1())
        row = jwt.get_algorithm_by_name("ES256").to_jwk(self._key.public_key(), as_dict=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"keys": [{**row, "kid": str(self._number)}]}))
        fresh.replace(self.path)

    def token(self, name: str, **changes: Any) -> str:
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": name, "exp": int(time.time()) + 300, **changes}
        return f"Bearer {jwt.encode(claims, self._key, 'ES256', {'kid': str(self._number)})}"


def settings_of(issuer: Issuer) -> dict[str, Any]:
    return {"issuer": ISSUER, "audience": AUDIENCE, "algorithms": ["ES256"], "jwks_file": str(issuer.path)}


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


def test_a_signed_tokens_word(new_world: World, issuer: Issuer) -> None:
    """As long as its key is in the file; a file that is wrong leaves things as they are."""
    gateway, mock = gateway_of(new_world, jwt=settings_of(issuer))
    old = issuer.token("outside")
    answer = call(gateway, authorization=old)
    assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "100")
    wait_until(lambda: last_key(gateway) == "outside", "it is told by its name")
    assert call(gateway, authorization=f"Bearer {gateway.key}").status_code == 200
    for wrong in (
        issuer.token("nobody"),
        issuer.token("outside", exp=int(time.time()) - 60),
        issuer.token("outside", aud="another"),
        old[:-8] + "AAAAAAAA",
    ):
        assert call(gateway, authorization=wrong).status_code == 401
    issuer.renew()
    wait_until(
        lambda: call(gateway, authorization=issuer.token("outside")).status_code == 200,
        "the new key is followed",
    )
    assert call(gateway, authorization=old).status_code == 401, "though it was remembered"
    issuer.path.write_text("{}")
    failures = 'kvgate_reload_failures_total{file="jwt"} 1.0'
    wait_until(lambda: failures in gateway.metrics(), "it is told")
    assert call(gateway, authorization=issuer.token("outside")).status_code == 200
    sent = [name for request in mock.log()["requests"] for name, _ in request["headers"]]
    assert "authorization" not in sent


def test_a_key_of_the_store_is_named_too(new_world: World, issuer: Issuer) -> None:
    """And without a secret there is none to renew; where nobody names keys it would be of no use."""
    gateway, _ = gateway_of(new_world, jwt=settings_of(issuer), keys_in_store=True)
    with admin_of(gateway) as admin:
        assert admin("POST", "/keys", 201, json={"name": "stored", "secret": False}) == {"name": "stored"}
        assert call(gateway, authorization=issuer.token("stored")).status_code == 200
        assert "has no secret" in admin.refused("POST", "/keys/stored/rotate", 400)[2]
        assert admin.refused("POST", "/keys", 400, json={"name": "x", "secret": "no"})[1] == "secret"
        assert admin("GET", "/keys")["keys"][-1]["sha256"] is None
        admin("DELETE", "/keys/stored")
        assert call(gateway, authorization=issuer.token("stored")).status_code == 401


def test_a_key_without_a_secret_where_nobody_names_keys(new_world: World) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config(
        [{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE, auth={"keys_in_store": True}
    )
    gateway = new_world.gateway(config, key)
    with admin_of(gateway) as admin:
        code, param, _ = admin.refused("POST", "/keys", 400, json={"name": "x", "secret": False})
        assert (code, param) == ("invalid_value", "secret")


# -- checking a configuration --------------------------------------------------------------------------------------


def written(folder: Path, auth: dict[str, Any]) -> Path:
    document = {
        "auth": {"required": False, **auth},
        "fleets": [{"model": "demo", "pools": [{"name": "only", "replicas": ["http://127.0.0.1:9"]}]}],
    }
    path = folder / "kvgate.yaml"
    path.write_text(json.dumps(document))
    return path


def test_a_file_of_keys_that_is_wrong_is_told_in_one_line(
    tmp_path: Path, issuer: Issuer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, {"jwt": settings_of(issuer)})
    assert main(["check-config", str(config)]) == 0
    capsys.readouterr()
    issuer.path.write_text('{"keys": []}')
    for command in (["check-config"], ["serve", "--config"]):
        assert main([*command, str(config)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("kvgate: auth.jwt.jwks_file: jwks.json has 0 keys for signatures")
    issuer.path.unlink()
    assert main(["check-config", str(config)]) == 2
    assert "auth.jwt.jwks_file" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["jwks_file", "public_key_file"])
def test_without_the_extra_one_line_says_what_to_install(
    tmp_path: Path,
    issuer: Issuer,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {**settings_of(issuer), "jwks_file": None, file: str(issuer.path)}
    for module in ("jwt", "cryptography", "cryptography.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    for auth, status in (({"jwt": settings}, 2), ({}, 0)):
        config = written(tmp_path, auth)
        assert main(["check-config", str(config)]) == status
    assert capsys.readouterr().err == "kvgate: auth.jwt: needs PyJWT: pip install 'kvgate[jwt]'\n"


def test_a_keys_file_with_a_key_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made, listed and taken out as others are; it has no secret to renew."""
    file = tmp_path / "keys.yaml"
    for arguments, status in (
        (["create", "named", "--no-secret"], 0),
        (["create", "plain"], 0),
        (["list"], 0),
        (["rotate", "named"], 2),
    ):
        assert main(["keys", *arguments, "--file", str(file)]) == status
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == f"named is in {file}."
    assert [line.split()[-1] for line in output.out.splitlines() if line.startswith("named ")][-1] == "-"
    assert "has no secret that could be renewed" in output.err
    header = {"trusted_header": {"name": HEADER, "from": ["10.0.0.0/8"]}}
    for auth, status in (({}, 2), (header, 0)):
        config = written(tmp_path, {"keys_file": str(file), **auth})
        assert main(["check-config", str(config)]) == status
    assert "keys[0].sha256: missing; only a key that auth.trusted_header" in capsys.readouterr().err
    assert main(["keys", "revoke", "named", "--file", str(file)]) == 0
