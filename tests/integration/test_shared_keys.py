"""Keys in the store and cuts, as processes follow them: on a real Valkey, each look at it made by the test."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from gateway.core.outcomes import Code, Refusal
from gateway.ledger.api import Cut, Edit
from gateway.ledger.embedded import EmbeddedStore
from gateway.ledger.scripts import CALLERS_KEYS, fleet_keys
from gateway.ledger.sharedkeys import POLL_SECONDS, FollowedKeys
from tests.faults.proxy import store_proxy
from tests.integration.ledger_world import eventually, running_store
from tests.repo.files import ROOT

Entries = Mapping[str, bytes]


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedStore]:
    with running_store() as found:
        yield found


@pytest.fixture
def data(store: EmbeddedStore) -> Iterator["redis.Redis[bytes]"]:
    """An empty store."""
    client = redis.Redis(unix_socket_path=str(store.socket), protocol=2)
    client.flushall()
    yield client
    client.close()


class Process:
    """What one process knows and was told."""

    def __init__(self, url: str, keys: bool = True) -> None:
        self.now = 1000.0
        self.entries: Entries = {}
        self.uses = 0
        self.cuts: list[Cut] = []
        self.wrong: Entries | None = None
        """Entries that cannot be read."""
        self.keys = FollowedKeys(url, self.read if keys else None, self.cut, lambda: self.now, 60)

    def read(self, entries: Entries) -> Callable[[], None]:
        if entries == self.wrong:
            raise RuntimeError("a bug")

        def use() -> None:
            self.entries = entries
            self.uses += 1

        return use

    def cut(self, cut: Cut) -> int:
        assert self.uses or not self.keys._read, "entries come first"
        self.cuts.append(cut)
        return 3

    async def put(self, name: str, entry: bytes = b"{}", cut: bool = False) -> int | Refusal:
        return await self.keys.change(lambda _: Edit(name, entry or None, cut))

    async def take_out(self, name: str, cut: bool = False) -> int | Refusal:
        return await self.put(name, b"", cut)


Join = Callable[..., Process]


@pytest.fixture
async def join(store: EmbeddedStore, data: "redis.Redis[bytes]") -> AsyncIterator[Join]:
    processes: list[Process] = []

    def begin(url: str = store.url, keys: bool = True) -> Process:
        processes.append(Process(url, keys))
        return processes[-1]

    yield begin
    for process in processes:
        process.keys.close()


async def look(*processes: Process) -> None:
    for process in processes:
        await process.keys.poll()


# -- entries -----------------------------------------------------------------------------------------------------


async def test_a_change_is_what_all_see(join: Join) -> None:
    one, other = join(), join()
    await look(one, other)
    assert (one.uses, one.keys.up_to_date) == (0, True)
    assert await one.put("a", b'{"x":1}') == 0
    assert one.entries == {"a": b'{"x":1}'}
    await look(other)
    assert other.entries == one.entries
    assert await other.put("b") == 0
    assert await other.take_out("a") == 0
    await look(one, one, one)
    assert (one.entries, one.uses) == ({"b": b"{}"}, 2)


async def test_an_edit_is_judged_by_what_is_there_now(join: Join) -> None:
    """Its own last look may be old."""
    one, other = join(), join()
    await one.put("a")
    seen: list[Entries] = []

    def decide(entries: Entries) -> Edit | Refusal:
        seen.append(entries)
        return Refusal(Code.NOT_FOUND, "no") if "a" in entries else Edit("a", b"2")

    assert await other.keys.change(decide) == Refusal(Code.NOT_FOUND, "no")
    assert seen == [{"a": b"{}"}]


async def test_edits_at_once_are_all_made(join: Join) -> None:
    """Each by a process of its own, judged with nobody else's between: a counter loses nothing."""
    processes = [join() for _ in range(5)]

    def more(entries: Entries) -> Edit:
        return Edit("n", b"%d" % (int(entries.get("n", b"0")) + 1))

    for _ in range(10):
        assert await asyncio.gather(*(p.keys.change(more) for p in processes)) == [0] * 5
    await look(processes[0])
    assert processes[0].entries == {"n": b"50"}


async def test_what_a_decision_raises_changes_nothing(join: Join, data: "redis.Redis[bytes]") -> None:
    one = join()
    await one.put("a")
    before = data.hgetall(CALLERS_KEYS[0])

    def wrong(_: Entries) -> Edit:
        raise ValueError("no such class")

    with pytest.raises(ValueError, match="no such class"):
        await one.keys.change(wrong)
    assert data.hgetall(CALLERS_KEYS[0]) == before
    assert await one.put("b") == 0


def test_a_fleet_may_be_called_keys() -> None:
    assert not set(CALLERS_KEYS) & set(fleet_keys("keys"))
    assert {name.split("}")[0] for name in CALLERS_KEYS} == {"{kvgate:keys"}


async def test_entries_that_cannot_be_read_are_tried_again(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = join(), join()
    await one.put("a")
    other.wrong = {"a": b"{}"}
    await look(other, other)
    assert caplog.text.count("could not be followed") == 1
    assert not other.keys.up_to_date
    other.wrong = None
    await look(other)
    assert other.entries == {"a": b"{}"}


async def test_a_name_that_is_no_text_hides_no_other(join: Join, data: "redis.Redis[bytes]") -> None:
    """And comes back with the others, byte for byte."""
    state, entries, _ = CALLERS_KEYS
    one = join()
    await one.put("a")
    data.hset(entries, b"\xff", b"{}")
    data.hset(state, "mark", "another")
    await one.put("b")
    assert one.entries == {"a": b"{}", "b": b"{}", "\udcff": b"{}"}
    data.flushall()
    await look(one)
    assert set(data.hkeys(entries)) == {b"a", b"b", b"\xff"}
    await one.take_out("\udcff")
    assert one.entries == {"a": b"{}", "b": b"{}"}


# -- a store that is away, or lost its data ----------------------------------------------------------------------


async def test_while_the_store_is_away_the_last_known_stay(
    join: Join, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_store() as store:
        one = join(store.url)
        await one.put("a")
        store.stop()
        await look(one, one, one)
        assert one.entries == {"a": b"{}"}
        assert caplog.text.count("cannot be followed") == 1, "told once"
        refusal = await one.put("b")
        assert isinstance(refusal, Refusal)
        assert (refusal.code, refusal.retry_ms) == (Code.STORE_UNAVAILABLE, 1000)
        assert one.entries == {"a": b"{}"}


@pytest.mark.parametrize("lost", ["all", "the last change"])
async def test_a_store_that_lost_its_data_is_told_and_filled_again(
    join: Join, data: "redis.Redis[bytes]", lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it, or what a replica had not heard of when it took over."""
    one, other = join(), join()
    await one.put("a")
    saved = {name: data.dump(name) for name in CALLERS_KEYS[:2]}
    await one.put("b")
    await look(other)
    data.flushall()
    if lost != "all":
        for name, content in saved.items():
            data.restore(name, 0, content or b"")
    await look(one, other, one, other)
    assert one.entries == other.entries == {"a": b"{}", "b": b"{}"}
    assert (one.uses, other.uses) == (2, 1), "nobody was without in between"
    assert caplog.text.count("the store lost its keys") == 1, "by the one that put them back"
    fresh = join()
    await look(fresh)
    assert fresh.entries == one.entries


async def test_the_newest_that_is_known_comes_back(join: Join, data: "redis.Redis[bytes]") -> None:
    """Whoever looks first: here one that had missed a revocation."""
    late, one = join(), join()
    await one.put("a")
    await one.put("revoked")
    await look(late)
    await one.take_out("revoked")
    data.flushall()
    await look(late, one, late)
    assert one.entries == late.entries == {"a": b"{}"}


async def test_who_puts_less_back_is_too_late_once_more_is_there(
    join: Join, data: "redis.Redis[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the store empty; the one that knows less comes second."""
    late, one = join(), join()
    await one.put("a")
    await look(late)
    await one.put("b")
    data.flushall()
    ask = late.keys._ask

    async def ask_after_the_other(script: str, *arguments: str | bytes | int) -> Any:
        if script == "callers_restore":
            await look(one)
        return await ask(script, *arguments)

    monkeypatch.setattr(late.keys, "_ask", ask_after_the_other)
    await look(late, late, one)
    assert late.entries == one.entries == {"a": b"{}", "b": b"{}"}


async def test_an_edit_on_a_store_that_lost_its_data_comes_after_its_return(
    join: Join, data: "redis.Redis[bytes]"
) -> None:
    one = join()
    await one.put("a")
    data.flushall()
    assert await one.put("b") == 0
    assert one.entries == {"a": b"{}", "b": b"{}"}


async def test_a_change_that_another_primary_never_had_is_told(
    join: Join, data: "redis.Redis[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    """A revocation that was answered, and is undone by the next change."""
    state, entries, _ = CALLERS_KEYS
    one, other = join(), join()
    await one.put("revoked")
    await look(other)
    before = data.hgetall(state)
    await one.take_out("revoked")
    data.hset(state, mapping=before)
    data.hset(entries, "revoked", b"{}")
    await other.put("b")
    await look(one, other)
    assert one.entries == other.entries == {"b": b"{}", "revoked": b"{}"}
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told.endswith("may be undone: b, revoked")


async def test_who_does_not_keep_keys_there_puts_none_back(join: Join, data: "redis.Redis[bytes]") -> None:
    one, without = join(), join(keys=False)
    assert without.keys.up_to_date
    await one.put("a")
    await look(without)
    data.flushall()
    await look(without)
    assert data.keys() == []


# -- cuts --------------------------------------------------------------------------------------------------------


async def test_a_cut_is_heard_once_by_every_process(join: Join) -> None:
    asked, other, without = join(), join(), join(keys=False)
    await asked.put("a")
    await look(other, without)
    assert await asked.keys.cut("a") == 3
    await look(*[asked, other, without] * 3)
    assert [[cut.name for cut in p.cuts] for p in (asked, other, without)] == [["a"]] * 3
    assert await other.keys.cut("b") == 3
    await look(*[asked, other, without] * 3)
    assert [[cut.name for cut in p.cuts] for p in (asked, other, without)] == [["a", "b"]] * 3


async def test_who_starts_later_is_not_concerned(join: Join) -> None:
    asked = join()
    await asked.put("a")
    await asked.keys.cut("a")
    later = join()
    await look(later, later)
    assert later.cuts == []
    await asked.keys.cut("a")
    await look(later)
    assert [cut.name for cut in later.cuts] == ["a"]


async def test_a_cut_is_of_what_arrived_before_it(join: Join, data: "redis.Redis[bytes]") -> None:
    """By each process's own clock, however late it looks: the age of the cut counts, as the store tells it."""
    asked, other = join(), join()
    await asked.put("a")
    await look(other)
    await asked.keys.cut("a")
    (member,) = data.zrange(CALLERS_KEYS[2], 0, -1)
    data.zincrby(CALLERS_KEYS[2], -7e6, member)
    await look(other)
    (cut,) = other.cuts
    assert 7.0 <= 1000.0 - cut.before < 7.0 + 5, "7 s ago, and what passed meanwhile"
    assert 1000.0 - 5 < asked.cuts[0].before <= 1000.0


async def test_a_slow_connection_makes_no_cut_older(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, other = join(keys=False), join(keys=False)
    await look(asked, other)
    await asked.keys.cut("a")
    other.keys._connection.close()
    await look(other)  # finds it closed
    connect = other.keys._connection.open

    async def slowly() -> None:
        await connect()
        other.now += 100

    monkeypatch.setattr(other.keys._connection, "open", slowly)
    await look(other)
    assert 1100 - 5 < other.cuts[0].before <= 1100


async def test_a_store_whose_clock_went_back_cuts_nothing_of_the_future(
    join: Join, data: "redis.Redis[bytes]"
) -> None:
    asked, other = join(), join()
    await look(other)
    await asked.put("a")
    await asked.keys.cut("a")
    (member,) = data.zrange(CALLERS_KEYS[2], 0, -1)
    data.zincrby(CALLERS_KEYS[2], 60e6, member)
    await look(other)
    assert other.cuts == [Cut("a", 1000.0)]


async def test_a_revocation_with_a_cut_is_of_all_that_got_in(join: Join) -> None:
    """Also of what arrived after it, before the process knew."""
    asked, other = join(), join()
    await asked.put("a")
    await look(other)
    assert await asked.take_out("a", cut=True) == 3
    other.now = 1009.0
    await look(other, other)
    assert other.cuts == [Cut("a", 1009.0)]
    assert other.entries == {}


async def test_a_cut_on_a_store_that_lost_its_data_is_heard_too(
    join: Join, data: "redis.Redis[bytes]"
) -> None:
    asked, other = join(keys=False), join(keys=False)
    await look(asked, other)
    await asked.keys.cut("a")
    await look(other)
    data.flushall()
    await asked.keys.cut("b")
    await look(other)
    assert [cut.name for cut in other.cuts] == ["a", "b"]


async def test_a_cut_that_comes_back_with_older_data_is_not_repeated(
    join: Join, data: "redis.Redis[bytes]"
) -> None:
    """It would end the calls of a key that was made anew meanwhile."""
    one, other = join(), join()
    await one.put("a")
    await look(other)
    await one.take_out("a", cut=True)
    await look(other)
    older = {name: kept for name in CALLERS_KEYS if (kept := data.dump(name))}
    data.flushall()
    await look(one, other)
    await one.put("a")
    await look(other)
    for name, kept in older.items():
        data.restore(name, 0, kept, replace=True)
    await look(one, other)
    assert len(one.cuts) == len(other.cuts) == 1


async def test_cuts_are_kept_within_a_bound(join: Join, data: "redis.Redis[bytes]") -> None:
    asked = join(keys=False)
    for number in range(1005):
        await asked.keys.cut(f"k{number}")
    assert data.zcard(CALLERS_KEYS[2]) == 1000
    assert [cut.name for cut in asked.cuts] == [f"k{number}" for number in range(1005)]


async def test_a_late_reply_leaves_nothing_for_the_next_question(join: Join, store: EmbeddedStore) -> None:
    """It is not known what became of the edit, and that is what is said; it is made once all the same."""
    async with store_proxy(str(store.socket), tcp=True) as proxy:
        slow, other = join(proxy.url), join()
        await look(slow)
        proxy.swallow = b"callers_change"
        refusal = await slow.put("a")
        assert isinstance(refusal, Refusal)
        assert "is not known" in refusal.message
        await look(slow)
        assert slow.entries == {"a": b"{}"}
        assert await slow.put("b") == 0
        await look(other)
        assert other.entries == slow.entries == {"a": b"{}", "b": b"{}"}


async def test_the_documented_rights_are_enough(
    join: Join, store: EmbeddedStore, data: "redis.Redis[bytes]"
) -> None:
    text = (ROOT / "docs" / "ledger.md").read_text()
    rights = re.search(r"^ACL SETUSER kvgate on >PASSWORD (.*)$", text, re.MULTILINE)
    assert rights
    data.execute_command("ACL", "SETUSER", "kvgate", "on", ">PASSWORD", *rights[1].split())
    asked = join(f"unix://kvgate:PASSWORD@{store.socket}")
    await look(asked)
    assert await asked.put("a") == 0
    assert await asked.take_out("a", cut=True) == 3
    assert await asked.put("b") == 0
    assert await asked.keys.cut("b") == 3
    data.flushall()
    await look(asked)
    assert data.hgetall(CALLERS_KEYS[1]) == {b"b": b"{}"}
    data.acl_deluser("kvgate")


async def test_a_change_counts_everywhere_within_a_second(
    store: EmbeddedStore, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key and a cut, by the task's own pauses; a machine that has no time for it is no matter of ours."""
    pauses: list[float] = []
    paused, goes_on = asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        paused.set()
        await goes_on.wait()
        goes_on.clear()

    one, other = join(), Process(store.url)
    other.keys._poll_seconds = POLL_SECONDS
    monkeypatch.setattr(
        "gateway.ledger.sharedkeys.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause})
    )
    task = asyncio.create_task(other.keys.run())
    try:
        await paused.wait()
        paused.clear()
        await one.put("a")
        await one.keys.cut("b")
        goes_on.set()
        await paused.wait()
        assert other.entries == {"a": b"{}"}
        assert [cut.name for cut in other.cuts] == ["b"]
        assert pauses[0] < 1, "the one in which both were made"
    finally:
        task.cancel()
        await asyncio.wait([task])
        other.keys.close()


async def test_followed_all_the_time(store: EmbeddedStore, join: Join) -> None:
    one = join()
    other = Process(store.url)
    other.keys._poll_seconds = 0.01
    task = asyncio.create_task(other.keys.run())
    try:
        await one.put("a")
        await eventually(lambda: other.entries == {"a": b"{}"})
    finally:
        task.cancel()
        await asyncio.wait([task])
        other.keys.close()


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvgate.keys")
