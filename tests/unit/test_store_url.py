"""What the settings accept as `store.url` is what the ledger can read, and it reads what was meant."""

from pathlib import Path

import pytest
import yaml

from gateway.config import load
from gateway.ledger.address import Address, Kind, Server, parse
from gateway.ledger.connection import new_client

SENTINELS = (Server("h1", 26379), Server("h2", 7000))
NODES = (Server("h1", 6379), Server("::1", 7000))

URLS = {
    "redis://h1": Address(Kind.STORE, (Server("h1"),)),
    "redis://h1:7000/3": Address(Kind.STORE, (Server("h1", 7000),), database=3),
    "redis://me:p%40ss@h1?db=2": Address(
        Kind.STORE, (Server("h1"),), username="me", password="p@ss", database=2
    ),
    "rediss://:pw7@h1:7000": Address(Kind.STORE, (Server("h1", 7000),), password="pw7", tls=True),
    "unix:///run/a%20b.sock?db=1": Address(Kind.STORE, (Server(path="/run/a b.sock"),), database=1),
    "redis+sentinel://h1,h2:7000/main": Address(Kind.SENTINEL, SENTINELS, primary="main"),
    "redis+sentinel://h1,h2:7000/main/": Address(Kind.SENTINEL, SENTINELS, primary="main"),
    "redis+sentinel://me:p%40s%2Cs%2F@h1,h2:7000/my.main-1/4": Address(
        Kind.SENTINEL, SENTINELS, primary="my.main-1", username="me", password="p@s,s/", database=4
    ),
    "redis+sentinel://:pw7@h1,h2:7000/main/0": Address(
        Kind.SENTINEL, SENTINELS, primary="main", password="pw7"
    ),
    "redis+cluster://h1,[::1]:7000": Address(Kind.CLUSTER, NODES),
    "redis+cluster://me:pw7@h1:6379,[::1]:7000/": Address(Kind.CLUSTER, NODES, username="me", password="pw7"),
}


def accepted(tmp_path: Path, store: dict[str, str]) -> str:
    """As the settings pass it on."""
    fleets = [{"model": "m", "pools": [{"name": "p", "replicas": ["http://e:1"]}]}]
    path = tmp_path / "kvgate.yaml"
    path.write_text(yaml.safe_dump({"store": store, "fleets": fleets}))
    return load(path, {}).store.url


@pytest.mark.parametrize(("url", "meant"), URLS.items(), ids=URLS)
def test_an_accepted_url_is_read_as_it_is_meant(tmp_path: Path, url: str, meant: Address) -> None:
    assert parse(accepted(tmp_path, {"url": url})) == meant


def test_certificates_travel_with_the_url(tmp_path: Path) -> None:
    ca_file = tmp_path / "our & ca.pem"
    ca_file.write_text("")
    url = accepted(tmp_path, {"url": "rediss://h1/3", "ca_file": ca_file.name})
    assert parse(url) == Address(Kind.STORE, (Server("h1"),), database=3, tls=True, ca_file=str(ca_file))
    options = new_client(url).connection_pool.connection_kwargs
    assert options["ssl_ca_certs"] == str(ca_file)
    assert options["ssl_check_hostname"] is True


@pytest.mark.parametrize("url", URLS)
def test_an_address_is_shown_without_its_password(url: str) -> None:
    address = parse(url)
    assert not address.password or address.password not in repr(address)


@pytest.mark.parametrize("url", ["redis+cluster://", "redis+sentinel://h1,:7000/main", "http://h1"])
def test_what_names_no_store_is_an_error(url: str) -> None:
    with pytest.raises(ValueError):
        parse(url)
    with pytest.raises(ValueError):
        new_client(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:Sec/ret@h:6379/0",
        "redis+sentinel://u:Sec/ret@h:1/name",
        "redis+sentinel://u:pw@h:1/n/Se?cret@x",
        "redis+cluster://u:pw@h:cret",
    ],
)
def test_a_url_that_is_not_understood_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="not the URL of a store") as failure:
        parse(url)
    assert "ret" not in str(failure.value)
