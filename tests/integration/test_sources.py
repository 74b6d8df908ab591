"""Replicas that are found: by a host's addresses, the API of Kubernetes, or a file, without a restart."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from gateway.upstream.sources import Dns, EndpointSlices, Follower, SourceAway
from tests.processes import QUICK_STORE, GatewayProcess, World
from tests.wire import Wire, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

PATIENCE_SECONDS = 30.0


# -- names -----------------------------------------------------------------------------------------------------------


async def test_this_hosts_name_is_resolved() -> None:
    found = await Dns("http://localhost:8000").find()
    assert "http://127.0.0.1:8000" in found


async def test_a_name_that_nobody_knows_is_told() -> None:
    with pytest.raises(SourceAway, match=r"no-such-host\.invalid is not resolved"):
        await Dns("http://no-such-host.invalid:8000").find()


# -- the API of Kubernetes -------------------------------------------------------------------------------------------


class Api:
    """Answers with pages of EndpointSlices, and keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.pages: list[Any] = [{"items": []}]
        self.asked: list[str] = []
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            self.asked.append(head.split()[1])
            number = int(parse_qs(urlsplit(self.asked[-1]).query).get("continue", ["0"])[0])
            page = self.pages[number]
            body = page if isinstance(page, bytes) else json.dumps(page).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, len(body)) + body)
            await writer.drain()
        writer.close()


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    here = Api()
    server = await asyncio.start_server(here.serve, "127.0.0.1", 0)
    here.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    yield here
    server.close()
    await server.wait_closed()


def pod(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": {"ready": True, "serving": True} | conditions}


def slice_of(*pods: dict[str, Any], ports: Sequence[tuple[str, int]] = (("http", 8000),), **more: Any) -> Any:
    """As the API of Kubernetes 1.33 has it, shortened."""
    return {
        "metadata": {"name": "vllm-abcde", "namespace": "models"},
        "addressType": "IPv4",
        "endpoints": list(pods),
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports],
    } | more


def listed(*slices: Any, continues: str = "") -> Any:
    return {
        "kind": "EndpointSliceList",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"resourceVersion": "1", "continue": continues},
        "items": list(slices),
    }


class Token:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("T1\n")

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def remove(self) -> None:
        self.path.unlink()


@pytest.fixture
def token(tmp_path: Path) -> Token:
    return Token(tmp_path / "token")


Find = Callable[..., Any]


@pytest.fixture
def find(api: Api, token: Token) -> Find:
    async def found(port: str | int = "", scheme: str = "http") -> Sequence[str]:
        return await EndpointSlices(api.url, "models", "vllm", port, scheme, token.path, None).find()

    return found


async def test_pods_that_are_ready_are_replicas(api: Api, find: Find) -> None:
    ending = pod("10.0.0.3", ready=True, terminating=True)
    first = slice_of(pod("10.0.0.1"), pod("10.0.0.2", ready=False), ending)
    second = slice_of({"addresses": ["fd00::5"]}, addressType="IPv6")
    api.pages = [listed(first, second)]
    assert await find() == ["http://10.0.0.1:8000", "http://[fd00::5]:8000"]
    assert api.asked[0].startswith("/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?")
    assert parse_qs(urlsplit(api.asked[0]).query)["labelSelector"] == ["kubernetes.io/service-name=vllm"]
    assert "authorization: Bearer T1\r\n" in api.heads[0]


async def test_all_pages_are_read(api: Api, find: Find) -> None:
    api.pages = [listed(slice_of(pod("10.0.0.1")), continues="1"), listed(slice_of(pod("10.0.0.2")))]
    assert await find() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("port", "urls"),
    [
        ("http", ["https://10.0.0.1:8000"]),
        ("metrics", ["https://10.0.0.1:9000"]),
        (9000, ["https://10.0.0.1:9000"]),
    ],
)
async def test_the_port_is_the_one_that_is_asked_for(
    api: Api, find: Find, port: str | int, urls: list[str]
) -> None:
    api.pages = [listed(slice_of(pod("10.0.0.1"), ports=[("http", 8000), ("metrics", 9000)]))]
    assert await find(port, "https") == urls


@pytest.mark.parametrize(
    ("page", "status", "words"),
    [
        (listed(), 200, "service models/vllm has no pod that is ready"),
        (listed(slice_of(pod("10.0.0.1", ready=False))), 200, "has no pod that is ready"),
        (listed(slice_of(pod("10.0.0.1"), ports=[("a", 1), ("b", 2)])), 200, "has no pod that is ready"),
        (listed(slice_of(pod("vllm.example"), addressType="FQDN")), 200, "has no pod that is ready"),
        ({"kind": "Status", "code": 403}, 403, "answers 403"),
        (b"<html>", 200, "is no list of EndpointSlices"),
        ({"items": [{"endpoints": 5}]}, 200, "is no list of EndpointSlices"),
    ],
)
async def test_what_cannot_be_said_is_told_in_words(
    api: Api, find: Find, page: Any, status: int, words: str
) -> None:
    api.pages, api.status = [page], status
    with pytest.raises(SourceAway, match=words):
        await find()


async def test_a_token_that_changes_is_read_anew(api: Api, find: Find, token: Token) -> None:
    api.pages = [listed(slice_of(pod("10.0.0.1")))]
    await find()
    token.write("T2")
    await find()
    assert "authorization: Bearer T2\r\n" in api.heads[-1]
    token.remove()
    with pytest.raises(SourceAway, match="cannot be read"):
        await find()


async def test_an_endless_list_ends(api: Api, find: Find) -> None:
    api.pages = [listed(slice_of(pod("10.0.0.1")), continues="0")]
    with pytest.raises(SourceAway, match="has more than"):
        await find()


# -- following -------------------------------------------------------------------------------------------------------


class Told:
    """A source that says what a test wants."""

    def __init__(self) -> None:
        self.says: list[Sequence[str] | str] = []
        self.used: list[Sequence[str]] = []
        self.failures: list[str] = []
        self.refuses = False

    async def find(self) -> Sequence[str]:
        said = self.says.pop(0)
        if isinstance(said, str):
            raise SourceAway(said)
        return said

    def use(self, urls: Sequence[str]) -> None:
        if self.refuses:
            raise ValueError("too many")
        self.used.append(urls)


async def test_only_news_is_used_and_a_failure_changes_nothing() -> None:
    told = Told()
    follower = Follower(told, told.use, told.failures.append, 5)
    told.says = [["b", "a"], ["a", "b"], "away", "away", "gone", ["a", "b"], "away", ["a"]]
    while told.says:
        await follower.look()
    assert told.used == [["a", "b"], ["a"]]
    assert told.failures == ["away", "gone", "away"]


async def test_what_cannot_be_used_is_tried_again() -> None:
    told = Told()
    follower = Follower(told, told.use, told.failures.append, 5)
    told.says, told.refuses = [["a"], ["a"]], True
    await follower.look()
    told.refuses = False
    await follower.look()
    assert (told.used, told.failures) == ([["a"]], ["too many"])


# -- a gateway -------------------------------------------------------------------------------------------------------


def replicas(gateway: GatewayProcess) -> dict[str, Any]:
    pools = gateway.state()["fleets"]["demo"]["pools"]
    return dict(pools["only"]["replicas"]) if pools else {}


def up(gateway: GatewayProcess, count: int) -> Callable[[], bool]:
    def all_up() -> bool:
        states = [row["state"] for row in replicas(gateway).values()]
        return states == ["up"] * count

    return all_up


def is_alive(gateway: GatewayProcess) -> bool:
    with suppress(httpx.TransportError):
        return gateway.client.get("/health/live").status_code == 200
    return False


async def test_a_file_adds_replicas_and_drains_those_it_drops(new_world: World) -> None:
    """The stream on the replica that is dropped goes on to its end."""
    one, two = (new_world.mock("--step-base-ms", "5") for _ in range(2))
    path = new_world.folder / "replicas.yaml"
    path.write_text(json.dumps([one.url]))
    pool = {"name": "only", "replicas_from": {"file": "replicas.yaml", "max_num_seqs": 7}}
    config, (key,) = new_world.config([pool], store=QUICK_STORE)
    gateway = new_world.gateway(config, key)
    await soon(up(gateway, 1), "the first one is there", PATIENCE_SECONDS)
    assert next(iter(replicas(gateway).values()))["sequences_limit"] == 7
    stream = await Wire.open(gateway.url)
    await stream.send(post(key, completion(32, 600, stream=True)))
    status, _ = await stream.head()
    assert status == 200
    path.write_text(json.dumps({"replicas": [two.url]}))
    name_of_two = two.url.removeprefix("http://").replace(".", "-").replace(":", "-")
    await soon(
        lambda: replicas(gateway).get(name_of_two, {}).get("state") == "up",
        "the other one is there",
        PATIENCE_SECONDS,
    )
    events = await stream.events()
    assert events[-1] == b"data: [DONE]"
    assert not any(b'"error"' in event for event in events)
    answer = await (await Wire.open(gateway.url)).ask(post(key, completion(32, 4)))
    assert answer.status == 200
    assert two.log()["started"] == 1
    await soon(lambda: list(replicas(gateway)) == [name_of_two], "the first is forgotten", PATIENCE_SECONDS)


async def test_a_broken_file_changes_nothing(new_world: World) -> None:
    mock = new_world.mock()
    path = new_world.folder / "replicas.yaml"
    path.write_text(json.dumps([mock.url]))
    pool = {"name": "only", "replicas_from": {"file": "replicas.yaml"}}
    config, (key,) = new_world.config([pool], store=QUICK_STORE)
    gateway = new_world.gateway(config, key)
    path.write_text("- ftp://nowhere")
    await soon(lambda: gateway.metric("kvgate_reload_failures_total") == 1, "it is counted", PATIENCE_SECONDS)
    assert "replicas[0].url: has to start with http" in gateway.log.read_text()
    answer = await (await Wire.open(gateway.url)).ask(post(key, completion(32, 4)))
    assert answer.status == 200


async def test_a_gateway_that_does_not_know_its_replicas_takes_them_from_nobody(new_world: World) -> None:
    """The other one serves on; this one is ready once its source says something."""
    mock = new_world.mock()
    pool: dict[str, Any] = {"name": "only", "replicas": [mock.url]}
    config, (key,) = new_world.config([pool], store=QUICK_STORE)
    serving = new_world.gateway(config, key)
    path = new_world.folder / "replicas.yaml"
    other = json.loads(config.read_text())
    other["fleets"][0]["pools"] = [{"name": "only", "replicas_from": {"file": str(path)}}]
    blind_config = new_world.folder / "blind.yaml"
    blind_config.write_text(json.dumps(other))
    blind = new_world.gateway(blind_config, key, wait=False)
    await soon(
        lambda: "cannot be told" in blind.log.read_text(), "it looked for its replicas", PATIENCE_SECONDS
    )
    await soon(lambda: is_alive(blind), "it serves what needs no replica", PATIENCE_SECONDS)
    for _ in range(20):
        answer = await (await Wire.open(serving.url)).ask(post(key, completion(32, 4)))
        assert answer.status == 200
        await asyncio.sleep(0.05)
    assert not blind.is_ready()
    path.write_text(json.dumps([mock.url]))
    await soon(blind.is_ready, "it is ready", PATIENCE_SECONDS)


async def test_the_addresses_of_a_name_are_replicas(new_world: World) -> None:
    mock = new_world.mock()
    pool = {"name": "only", "replicas_from": {"dns": mock.url.replace("127.0.0.1", "localhost")}}
    config, (key,) = new_world.config([pool], store=QUICK_STORE)
    gateway = new_world.gateway(config, key)
    answer = await (await Wire.open(gateway.url)).ask(post(key, completion(32, 4)))
    assert answer.status == 200


async def test_pods_that_come_and_go_are_followed(new_world: World, api: Api, token: Token) -> None:
    one, two = new_world.mock(), new_world.mock()
    addresses = [urlsplit(mock.url) for mock in (one, two)]
    slices = [
        slice_of(pod(str(address.hostname)), ports=[("http", address.port or 0)]) for address in addresses
    ]
    api.pages = [listed(slices[0])]
    found = {"service": "vllm", "namespace": "models", "api": api.url, "token_file": str(token.path)}
    pool = {"name": "only", "replicas_from": {"endpoint_slices": found, "seconds": 0.2}}
    config, (key,) = new_world.config([pool], store=QUICK_STORE)
    gateway = await asyncio.to_thread(new_world.gateway, config, key)
    await soon(up(gateway, 1), "the first one is there", PATIENCE_SECONDS)
    api.pages = [listed(*slices)]
    await soon(up(gateway, 2), "both are there", PATIENCE_SECONDS)
    api.pages = [listed(slices[1])]
    await soon(up(gateway, 1), "the first one is gone", PATIENCE_SECONDS)
    api.status = 503
    await soon(lambda: gateway.metric("kvgate_reload_failures_total") >= 1, "it is told", PATIENCE_SECONDS)
    await soon(up(gateway, 1), "those known stay", PATIENCE_SECONDS)
