"""Edits of keys in a store of a state of its own; the rest is in `tests/integration/test_admin_keys.py`."""

import json
from collections.abc import Callable, Mapping

import pytest

from gateway.config import Auth
from gateway.core.outcomes import Code, Refusal
from gateway.http.auth import Keyring
from gateway.keybook import KeyBook
from gateway.keydesk import ENTRIES_MAX, KeyDesk
from gateway.ledger.api import Edit

DIGEST = "0" * 64


class Shared:
    """The store's entries, and what was made of them."""

    def __init__(self, book: KeyBook, entries: Mapping[str, bytes]) -> None:
        self.entries = dict(entries)
        self.made: list[Edit] = []
        book.read_stored(self.entries)()

    async def change(self, decide: Callable[[Mapping[str, bytes]], Edit | Refusal]) -> int | Refusal:
        edit = decide(self.entries)
        if isinstance(edit, Refusal):
            return edit
        self.made.append(edit)
        return 0

    async def cut(self, name: str) -> int | Refusal:
        raise AssertionError(name)


def desk_of(entries: Mapping[str, bytes]) -> tuple[KeyDesk, Shared]:
    book = KeyBook(Keyring((), None))
    shared = Shared(book, entries)
    return KeyDesk(book, shared, Auth(keys_in_store=True), ["normal"], ["demo"]), shared


def entry(name: str, **fields: object) -> bytes:
    return json.dumps({"name": name, "sha256": DIGEST, **fields}).encode()


def refusal_of(answer: object) -> str:
    assert isinstance(answer, Refusal)
    assert answer.code is Code.INVALID_VALUE
    return answer.message


@pytest.mark.parametrize(("count", "full"), [(ENTRIES_MAX, True), (ENTRIES_MAX - 1, False)])
async def test_so_many_are_kept(count: int, full: bool) -> None:
    """Those that cannot be read count too."""
    desk, shared = desk_of({f"k{number}": b"" for number in range(count)})
    answer = await desk.create({"name": "one-more"})
    if full:
        assert f"the store has {ENTRIES_MAX} keys" in refusal_of(answer)
    assert [edit.name for edit in shared.made] == ([] if full else ["one-more"])


async def test_a_new_secret_leaves_the_rest_as_it_was() -> None:
    """Also what another version wrote differently, such as a default that is stated."""
    desk, shared = desk_of({"a": entry("a", weight=1, expires="2099-01-31", limits={})})
    await desk.rotate("a")
    (edit,) = shared.made
    made = json.loads(edit.entry or b"")
    assert made.pop("sha256") != DIGEST
    assert made == {"name": "a", "weight": 1, "expires": "2099-01-31", "limits": {}}


async def test_a_wrong_entry_can_only_be_taken_out() -> None:
    desk, shared = desk_of({"a": b"{", "b": entry("b", unheard=1)})
    for name in ("a", "b"):
        assert "is wrong" in refusal_of(await desk.rotate(name))
        assert "is a key already" in refusal_of(await desk.create({"name": name}))
        assert await desk.revoke(name, cut=False) == {"name": name}
    assert shared.made == [Edit("a", None), Edit("b", None)]
