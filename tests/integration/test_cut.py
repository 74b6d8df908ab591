"""An operator ends a key's calls: on every worker of every gateway, what runs and what waits, once."""

import asyncio
import json

import pytest

from gateway.cli import main
from tests.integration.test_admin_keys import (
    ALL,
    Admin,
    admin_of,
    all_say,
    completes,
    gateways_of,
)
from tests.integration.test_workers import all_there, connection_to
from tests.processes import ADMIN_TOKEN, GatewayProcess, Mock, World
from tests.wire import Wire, completion, post, soon

pytestmark = pytest.mark.usefixtures("hang_up")

STREAM = completion(16, 1000, True, output_tokens=1000)
"""Twenty seconds of the mock engine: however busy the machine is, those that are not cut still run at the end."""
LOOKED_SECONDS = 1.5
"""By then every process has looked for cuts, unless its machine stands still."""


async def streaming(wire: Wire, key: str) -> Wire:
    """A stream of which the first event is there."""
    await wire.send(post(key, STREAM))
    assert (await wire.head())[0] == 200
    assert await wire.event()
    return wire


async def is_cut(wire: Wire) -> None:
    """The rest of a stream: its last event says so, then `[DONE]`."""
    *_, error, done = await wire.events()
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "cut"
    assert done == b"data: [DONE]"


async def goes_on(wire: Wire) -> None:
    for _ in range(3):
        assert b"error" not in (await wire.event() or b"error")


async def settled(gateway: GatewayProcess, mock: Mock, aborted: int) -> None:
    """Their engine's connections are closed, and what they held is given back."""
    await soon(lambda: mock.log()["aborted"] == aborted, "the engine heard of it")
    await soon(gateway.is_quiet, "all was given back")


async def test_a_cut_reaches_every_worker_of_every_gateway(new_world: World) -> None:
    """Of a key of the file; the streams of another key go on, and so does what came after the cut."""
    gateways, mock = gateways_of(new_world, 2, "--workers", "2")
    for gateway in gateways:
        await all_there(gateway)
    wires = [[await connection_to(gateways[n], worker) for _ in range(3)] for n, worker in ALL]
    with admin_of(gateways[0]) as admin:
        other = admin.create("other")
        await all_say([first for first, *_ in wires], other, 200)
        mine = [await streaming(first, gateways[0].key) for first, *_ in wires]
        others = [await streaming(second, other) for _, second, _ in wires]
        told = admin("POST", "/cut", json={"key": "filed"})
        assert told == {"key": "filed", "calls_cut_here": 1, "is_a_key": True}
        later = [await streaming(third, gateways[0].key) for *_, third in wires]
        await asyncio.gather(*map(is_cut, mine))
        await asyncio.sleep(LOOKED_SECONDS)
        for wire in [*others, *later]:
            await goes_on(wire)
            wire.reset()
    await settled(gateways[0], mock, aborted=12)
    cut = [line for line in gateways[1].metrics().splitlines() if 'reason="cut"' in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in cut) == 2


async def test_a_revoked_keys_streams_go_on_until_they_are_cut(new_world: World) -> None:
    """Or end with it: those under its secret of before too, and not those of a key that is made anew."""
    (gateway, other), mock = gateways_of(new_world, 2)
    with admin_of(gateway) as admin:
        secret = admin.create("a")
        await soon(lambda: completes(other, secret), "both know it")
        stream = await streaming(await Wire.open(other.url), secret)
        admin("DELETE", "/keys/a")
        await soon(lambda: not completes(other, secret), "nobody else gets in")
        await goes_on(stream)
        told = admin("POST", "/cut", json={"key": "a"})
        assert told == {"key": "a", "calls_cut_here": 0, "is_a_key": False}
        await is_cut(stream)
        anew = await _revoke_with_a_cut(gateway, other, admin)
        await goes_on(anew)
        anew.reset()
    await settled(gateway, mock, aborted=5)


async def _revoke_with_a_cut(gateway: GatewayProcess, other: GatewayProcess, admin: Admin) -> Wire:
    first = admin.create("b")
    await soon(lambda: completes(other, first), "both know it")
    streams = [await streaming(await Wire.open(g.url), first) for g in (gateway, other)]
    second = admin("POST", "/keys/b/rotate")["secret"]
    streams.append(await streaming(await Wire.open(gateway.url), second))
    assert admin("DELETE", "/keys/b?cut=true") == {"name": "b", "calls_cut_here": 2}
    third = admin.create("b")
    anew = await streaming(await Wire.open(gateway.url), third)
    await asyncio.gather(*map(is_cut, streams))
    await soon(lambda: completes(other, third), "the new one is known")
    return anew


async def test_what_waits_and_what_is_being_read_ends_too(new_world: World) -> None:
    (gateway,), mock = gateways_of(new_world)
    with admin_of(gateway) as admin:
        secret, holder = admin.create("a"), gateway.key
        hog = await Wire.open(gateway.url)
        await hog.send(post(holder, completion(16, 15_000, True, output_tokens=15_000)))
        await hog.head()
        waiting = await Wire.open(gateway.url)
        await waiting.send(post(secret, completion(16, 15_000)))
        await soon(lambda: gateway.state()["queue"] == 1, "it waits")
        reading = await Wire.open(gateway.url)
        request = post(secret, completion(16, 2))
        await reading.send(request[:-5])
        await asyncio.sleep(0.2)
        assert admin("POST", "/cut", json={"key": "a"})["calls_cut_here"] == 1
        answer = await waiting.answer()
        assert (answer.status, answer.code, answer.headers["x-should-retry"]) == (503, "cut", "false")
        await reading.send(request[-5:])
        late = await reading.answer()
        assert (late.status, late.code) == (503, "cut")
        assert completes(gateway, secret)
        hog.reset()
    await settled(gateway, mock, aborted=1)


async def test_who_has_no_admin_api_hears_of_it_too(new_world: World) -> None:
    """The token is given to one gateway, and no keys are in the store."""
    (gateway,), mock = gateways_of(new_world, auth={"keys_in_store": False})
    other = new_world.gateway(new_world.folder / "kvgate.yaml", gateway.key, KVGATE_ADMIN_TOKEN="")
    stream = await streaming(await Wire.open(other.url), gateway.key)
    with admin_of(gateway) as admin:
        admin("POST", "/cut", json={"key": "filed"})
        await is_cut(stream)
    await settled(gateway, mock, aborted=1)


async def test_a_process_that_starts_later_does_not_repeat_it(new_world: World) -> None:
    (gateway,), mock = gateways_of(new_world)
    with admin_of(gateway) as admin:
        admin("POST", "/cut", json={"key": "filed"})
    later = new_world.gateway(new_world.folder / "kvgate.yaml", gateway.key)
    streams = [await streaming(await Wire.open(g.url), gateway.key) for g in (gateway, later)]
    await asyncio.sleep(LOOKED_SECONDS)
    for stream in streams:
        await goes_on(stream)
        stream.reset()
    await settled(gateway, mock, aborted=2)


async def test_a_gateway_whose_store_is_away_cuts_nothing_and_says_so(new_world: World) -> None:
    (gateway,), mock = gateways_of(new_world)
    stream = await streaming(await Wire.open(gateway.url), gateway.key)
    with admin_of(gateway) as admin:
        new_world.store.stop()
        await soon(lambda: not gateway.is_ready(), "it is known to be away")
        assert admin.refused("POST", "/cut", 503, json={"key": "filed"})[0] == "store_unavailable"
    await goes_on(stream)
    stream.reset()
    await soon(lambda: mock.log()["aborted"] == 1, "the client's leaving ends it")


async def test_the_command_line_says_how_many(
    new_world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gateway,), mock = gateways_of(new_world)
    monkeypatch.setenv("KVGATE_ADMIN_URL", gateway.url)
    monkeypatch.setenv("KVGATE_ADMIN_TOKEN", ADMIN_TOKEN)

    def said(*arguments: str) -> list[str]:
        assert main(arguments) == 0
        return capsys.readouterr().out.splitlines()

    secret = said("keys", "create", "a")[-1]
    streams = [await streaming(await Wire.open(gateway.url), secret) for _ in range(2)]
    told = await asyncio.to_thread(said, "keys", "revoke", "a", "--cut")
    assert told[-1].startswith("2 calls of a ended in the process that was asked")
    await asyncio.gather(*map(is_cut, streams))
    await settled(gateway, mock, aborted=2)
