"""A crowd's fingerprints: so much a turn of the event loop, and of long bodies one at a time beside it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.core.identity import INLINE_BYTES_MAX, Identity
from gateway.ledger.fingerprints import TURN_BYTES_MAX, Fingerprints

ROUTE = "/v1/completions"


def identities(count: int, body_bytes: int) -> list[Identity]:
    return [Identity("k", ROUTE, b"%d" % number + bytes(body_bytes - 1)) for number in range(count)]


async def test_what_fits_into_a_turn_is_made_at_once_and_the_rest_in_the_next_ones() -> None:
    fingerprints, made = Fingerprints(), list[int]()
    for number, identity in enumerate(identities(5, TURN_BYTES_MAX // 2)):
        fingerprints.make(identity, lambda number=number: made.append(number))
    for count in (2, 4, 5):
        assert made == list(range(count))
        await asyncio.sleep(0)


async def test_a_new_turn_has_room_again() -> None:
    fingerprints, made = Fingerprints(), list[str]()
    for identity in identities(3, TURN_BYTES_MAX):
        fingerprints.make(identity, lambda identity=identity: made.append(identity.known))
        assert made[-1] == identity.known != ""
        await asyncio.sleep(0)


async def test_what_is_known_waits_for_nobody() -> None:
    fingerprints, made = Fingerprints(), list[str]()
    first, waiting, known = identities(3, TURN_BYTES_MAX)
    known.fingerprint()
    for identity in (first, waiting, known):
        fingerprints.make(identity, lambda identity=identity: made.append(identity.known))
    assert made == [first.known, known.known]
    assert waiting.known == ""
    await asyncio.sleep(0)
    assert made[2] == waiting.known != ""


class Slow(Identity):
    """Its hash is ready when the test says so."""

    def __init__(self, name: str, begun: list[str]) -> None:
        super().__init__(name, ROUTE, bytes(INLINE_BYTES_MAX + 1))
        self.name, self.begun, self.ready = name, begun, threading.Event()

    def fingerprint(self) -> str:
        self.begun.append(self.name)
        self.ready.wait()
        return super().fingerprint()


@pytest.fixture
def slow() -> Iterator[list[Slow]]:
    begun: list[str] = []
    identities = [Slow(name, begun) for name in "ab"]
    yield identities
    for identity in identities:
        identity.ready.set()


async def test_long_ones_are_made_one_at_a_time_while_short_ones_go_on(slow: list[Slow]) -> None:
    fingerprints, made = Fingerprints(), asyncio.Queue[str]()
    for identity in slow:
        fingerprints.make(identity, lambda identity=identity: made.put_nowait(identity.name))
    (short,) = identities(1, 10)
    fingerprints.make(short, lambda: made.put_nowait("short"))
    assert await made.get() == "short"
    for number, identity in enumerate(slow, 1):
        assert len(identity.begun) <= number
        identity.ready.set()
        assert await made.get() == identity.name
