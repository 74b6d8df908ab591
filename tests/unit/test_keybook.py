"""Keys of two sources as one."""

import hashlib
import json
from typing import Any

import pytest

from gateway import keybook
from gateway.config import ConfigError, parse_keys
from gateway.http.auth import Key, Keyring
from gateway.keybook import Entries, KeyBook
from gateway.ledger.api import printable


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def entry(name: str, **fields: Any) -> dict[str, Any]:
    """Its secret is its name where no other is given."""
    return {"name": name, "sha256": digest(fields.pop("secret", name)), **fields}


class Book(KeyBook):
    def __init__(self) -> None:
        self.ring = Keyring((), None)
        super().__init__(self.ring)

    def file_has(self, *entries: dict[str, Any]) -> None:
        self.use_file(Entries.of(parse_keys(json.dumps(entries), "keys.yaml", None)))

    def store_has(self, *entries: dict[str, Any]) -> None:
        self.read_stored({e["name"]: json.dumps(e).encode() for e in entries})()

    def find(self, secret: str) -> Key | None:
        return self.ring.find(b"Bearer " + secret.encode(), None, 0)


@pytest.fixture
def book() -> Book:
    return Book()


def test_keys_of_both_are_valid(book: Book) -> None:
    book.file_has(entry("a"))
    book.store_has(entry("b"))
    assert book.find("a")
    assert book.find("b")
    book.store_has(entry("c"))
    assert book.find("a")
    assert not book.find("b")
    assert book.find("c")
    book.file_has()
    assert not book.find("a")
    assert book.find("c")


def test_the_files_name_goes_first(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    book.store_has(entry("a", secret="stored"), entry("b"))
    assert book.find("stored")
    book.file_has(entry("a", secret="filed"))
    assert not book.find("stored")
    assert book.find("filed")
    book.store_has(entry("a", secret="stored"), entry("b"))
    assert caplog.text.count("key a of the store is not used") == 1
    book.file_has()
    assert book.find("stored")


def test_the_files_secret_goes_first(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    book.file_has(entry("a", secret="same"))
    book.store_has(entry("b", secret="same"))
    found = book.find("same")
    assert found
    assert found.name == "a"
    assert caplog.text.count("key b of the store is not used") == 1


def test_a_wrong_entry_is_left_out_and_told(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps(entry("good")).encode()
    wrong = {
        "class": json.dumps(entry("class", **{"class": "No!"})).encode(),
        "field": json.dumps(entry("field", unheard=1)).encode(),
        "list": b"[]",
        "name": good,
        "nested": b'{"limits": ' + b"[" * 5_000,
        "text": b"{",
        "\udcff": b"{}",
    }
    book.read_stored({**wrong, "good": good})()
    assert [row["name"] for row in book.rows()] == ["good"]
    assert book.find("good")
    for name in wrong:
        assert f"key {printable(name)} of the store is not used" in caplog.text
    assert digest("good") not in caplog.text


def test_a_group_shares_its_limits_over_both(book: Book) -> None:
    """The file's go first; of the store's those of the key that states them."""
    book.store_has(entry("a", group="g", limits={"requests_max": 2}), entry("b", group="g"))
    assert [(key.name, key.requests_max) for key in map(book.find, "ab") if key] == [("a", 2), ("b", 2)]
    book.file_has(entry("c", group="g", limits={"requests_max": 5}))
    assert [key.requests_max for key in map(book.find, "abc") if key] == [5, 5, 5]
    assert [row["limits"] for row in book.rows()] == [{"requests_max": 5}] * 3
    book.file_has(entry("c", group="g"))
    assert [key.requests_max for key in map(book.find, "abc") if key] == [2, 2, 2]
    assert [row["limits"] for row in book.rows()] == [{"requests_max": 2}] * 3
    with pytest.raises(ConfigError, match="the group 'g' has its limits from 'a'"):
        book.check_removal("a")
    book.store_has()
    assert [key.requests_max for key in map(book.find, "abc") if key] == [None]


def test_the_event_loop_has_no_work_with_each_key(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the limits of the other source make of keys is ready with what was read."""
    limited = Entries.of(
        parse_keys(json.dumps([entry("c", group="g", limits={"requests_max": 5})]), "", None)
    )
    book.use_file(book.read_file(limited))
    use_stored = book.read_stored({"a": json.dumps(entry("a", group="g")).encode()})
    with monkeypatch.context() as patch:
        patch.setattr(keybook, "key_of", None)
        use_stored()
    assert [key.requests_max for key in map(book.find, "ac") if key] == [5, 5]
    other = Entries.of(parse_keys(json.dumps([entry("c", group="g", limits={"requests_max": 7})]), "", None))
    filed = book.read_file(other)
    with monkeypatch.context() as patch:
        patch.setattr(keybook, "key_of", None)
        book.use_file(filed)
    assert [key.requests_max for key in map(book.find, "ac") if key] == [7, 7]


def test_a_source_that_changed_while_the_other_was_read(book: Book) -> None:
    use_stored = book.read_stored({"a": json.dumps(entry("a", group="g")).encode()})
    book.file_has(entry("c", group="g", limits={"requests_max": 5}))
    use_stored()
    assert [key.requests_max for key in map(book.find, "ac") if key] == [5, 5]


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (entry("filed"), "name: 'filed' is a key of the keys file"),
        (entry("x", group="filed"), "group: 'filed' is the name of a key outside"),
        (entry("x", group="stored"), "group: 'stored' is the name of a key outside"),
        (entry("g"), "name: 'g' is the name of a group that the key is not in"),
        (entry("x", group="g", limits={"requests_max": 3}), "limits: differ from those of the group 'g'"),
        (entry("x", group="f", limits={"blocks_max": 3}), "limits: differ from those of the group 'f'"),
    ],
)
def test_what_a_new_key_must_not_be(book: Book, new: dict[str, Any], told: str) -> None:
    book.file_has(entry("filed"), entry("file-2", group="f", limits={"blocks_max": 9}))
    book.store_has(entry("stored"), entry("store-2", group="g", limits={"requests_max": 2}))
    (parsed,) = parse_keys(json.dumps([new]), "", None)
    with pytest.raises(ConfigError) as wrong:
        book.check_new(parsed)
    assert str(wrong.value).startswith(told)


@pytest.mark.parametrize(
    "new",
    [
        entry("x"),
        entry("g", group="g"),
        entry("x", group="g"),
        entry("x", group="g", limits={"requests_max": 2}),
        entry("x", group="new", limits={"requests_max": 3}),
    ],
)
def test_what_a_new_key_may_be(book: Book, new: dict[str, Any]) -> None:
    book.store_has(entry("a", group="g", limits={"requests_max": 2}))
    (parsed,) = parse_keys(json.dumps([new]), "", None)
    book.check_new(parsed)


def test_the_key_that_a_group_has_its_limits_from_stays(book: Book) -> None:
    limits = {"requests_max": 2}
    book.store_has(entry("a", group="g", limits=limits), entry("b", group="g"))
    book.check_removal("b")
    with pytest.raises(ConfigError, match="the group 'g' has its limits from 'a'"):
        book.check_removal("a")
    book.store_has(entry("a", group="g", limits=limits))
    book.check_removal("a")
    book.store_has(entry("a", group="g", limits=limits), entry("b", group="g", limits=limits))
    book.check_removal("a")
    book.file_has(entry("c", group="g", limits=limits))
    book.store_has(entry("a", group="g", limits=limits), entry("b", group="g"))
    book.check_removal("a")


def test_what_operators_see(book: Book) -> None:
    book.file_has(entry("a", expires="2027-01-31", limits={"requests_max": 2, "minute_burst": 0.5}))
    book.store_has(entry("b", models=["m"], group="g", weight=3, cache_salt="secret", **{"class": "low"}))
    plain = {
        "class": "normal",
        "mode": None,
        "weight": 1,
        "group": None,
        "models": None,
        "limits": {},
        "cache_salt": False,
        "expires": None,
    }
    limits = {"requests_max": 2, "minute_burst": 0.5}
    expires = "2027-01-31T00:00:00Z"
    a = {
        **plain,
        "name": "a",
        "sha256": digest("a")[:8],
        "limits": limits,
        "expires": expires,
        "source": "file",
    }
    b = {**plain, "name": "b", "sha256": digest("b")[:8], "models": ("m",), "group": "g", "weight": 3}
    assert book.rows() == [a, {**b, "class": "low", "cache_salt": True, "source": "store"}]
