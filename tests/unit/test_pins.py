"""When a named prefix is asked for again, when it is let go, and which calls begin with it."""

import json
from typing import Any

import pytest

from benchmarks.pinning import QUIET, SYSTEM_TOKENS, Thrash
from gateway.core.outcomes import Refusal
from gateway.core.pins import CALL_TOKENS, PART_MAX, PART_MIN, Kept, Page, Pin, PinBook, pin_of
from gateway.core.request import Endpoint, GenerationRequest, parse

ROOM, TOKENS = 10_000, 1_000


def page(passed: int, found: int = 0, room: int = ROOM) -> Page:
    return Page(passed, found, room)


def used(times: int = 4) -> Kept:
    """A prefix that the engine has counted and that calls have found."""
    kept = Kept()
    kept.use(page(0), 0)
    kept.asked(page(0), 0, TOKENS, TOKENS - 16)
    for _ in range(times - 1):
        kept.use(page(TOKENS), TOKENS)
    assert kept.left_at == TOKENS
    return kept


def test_it_is_due_before_what_was_free_has_passed() -> None:
    kept = used()
    due = [passed for passed in range(0, ROOM, 100) if kept.is_due(page(TOKENS + passed), 0)]
    assert (due[0], due[-1]) == (PART_MAX * ROOM, ROOM - 100)


def test_what_will_pass_until_the_next_page_counts() -> None:
    assert used().is_due(page(TOKENS + 3_000), passing=4_000)
    assert not used().is_due(page(TOKENS + 3_000), passing=3_900)


def test_what_nobody_uses_is_never_asked_for() -> None:
    assert not Kept().is_due(page(10**9), 0)
    never_used = Kept()
    never_used.asked(page(0), 0, TOKENS, 0)
    assert not never_used.is_due(page(PART_MAX * ROOM + TOKENS), 0)  # type: ignore[arg-type]


def test_it_is_let_go_when_its_uses_are_long_ago() -> None:
    kept, passed, asked = used(), TOKENS, 0
    while kept.is_due(page(passed := passed + ROOM), 0):
        kept.asked(page(passed), passed, TOKENS, TOKENS - 16)
        asked += 1
        assert asked < 1_000
    assert 8 < asked < 80
    kept.use(page(passed), 0)
    kept.use(page(passed), TOKENS)
    assert kept.is_due(page(passed + ROOM), 0)


def test_a_short_prefix_earns_less_than_a_long_one() -> None:
    short, long = used(1), used(1)
    short.tokens, long.tokens = 2 * CALL_TOKENS, 200 * CALL_TOKENS
    assert (short.earns(page(TOKENS)), long.earns(page(TOKENS))) == (False, True)


def test_what_others_find_in_its_place_is_a_cost() -> None:
    kept = used(4)
    assert kept.earns(page(100_000, found=10_000))
    assert not kept.earns(page(100_000, found=90_000))


def test_an_engine_that_has_less_room_than_it_needs_is_not_asked() -> None:
    kept = used()
    kept.use(page(TOKENS, room=TOKENS - 1), TOKENS)
    assert not kept.is_due(page(2 * TOKENS, room=TOKENS - 1), 0)


def test_an_engine_that_began_anew_has_nothing() -> None:
    kept = used()
    assert not kept.is_due(page(10), 10**9)
    assert (kept.left_at, kept.uses) == (None, 0.0)


def test_one_that_was_lost_too_early_is_asked_for_sooner_from_then_on_and_slowly_less_soon() -> None:
    kept = used()
    for expected in (PART_MAX / 2, PART_MAX / 4, PART_MAX / 8, PART_MIN, PART_MIN):
        kept.use(page(TOKENS), 0)
        assert kept.part == pytest.approx(expected)
    passed, before = TOKENS, kept.part
    kept.asked(page(passed), passed - TOKENS, TOKENS, TOKENS)
    assert kept.part == before  # nothing had passed that could have pushed it out
    for _ in range(200):
        passed += ROOM
        kept.asked(page(passed), passed - TOKENS, TOKENS, TOKENS)
    assert kept.part == PART_MAX


def test_one_that_was_lost_because_it_was_not_asked_for_in_time_teaches_nothing() -> None:
    kept = used()
    kept.use(page(TOKENS + ROOM), 0)
    assert kept.part == PART_MAX


def test_an_engine_that_tells_nothing_of_its_cache_teaches_nothing() -> None:
    kept = used()
    kept.use(page(2 * TOKENS), None)
    assert (kept.part, kept.left_at) == (PART_MAX, 2 * TOKENS)


def test_its_own_calls_do_not_push_it_out() -> None:
    kept = used()
    kept.asked(page(5_000), 5_000, TOKENS, TOKENS)
    assert kept.left_at == 5_000 + TOKENS


def test_the_book_asks_for_what_is_used_where_it_is_used() -> None:
    book = PinBook()
    book.use("early", "a", 0)  # before a page of its engine: nothing is known of the time
    assert list(book.turn("a", page(0))) == []
    for replica in ("a", "b"):
        book.turn(replica, page(0))
    book.use("one", "a", 0)
    assert [list(book.turn(replica, page(ROOM))) for replica in ("a", "b")] == [["one"], []]
    book.asked("one", "a", book.passed("a"), TOKENS, 0)
    assert (book.tokens("one", "a"), book.tokens("one", "b")) == (TOKENS, 0)
    book.keep_only(["other"], ["a", "b"])
    assert list(book.turn("a", page(2 * ROOM))) == []


def test_what_calls_find_of_it_is_not_what_others_find() -> None:
    book = PinBook()
    book.turn("a", page(0))
    for _ in range(4):
        book.use("one", "a", TOKENS)
    book.asked("one", "a", 0, TOKENS, TOKENS)
    assert list(book.turn("a", page(ROOM, found=5 * TOKENS))) == ["one"]
    assert list(book.turn("a", page(ROOM, found=ROOM))) == []


def test_under_thrash_the_time_to_the_first_token_stays_flat_where_plain_lru_does_not() -> None:
    """Counted by an engine of virtual time: with more strangers than it has room for, and with none for a while."""
    lru, kept = (Thrash(1, pinned=pinned).play(130.0) for pinned in (False, True))
    assert [use.at for use in lru.uses] == [use.at for use in kept.uses]
    crowded = [use for use in lru.uses if not QUIET[0] < use.at < QUIET[1] + 1]
    assert all(use.cached_tokens == 0 for use in crowded)
    assert all(use.cached_tokens == SYSTEM_TOKENS for use in kept.uses[1:])
    assert 3 * max(use.ttft_ms for use in kept.uses[1:]) < min(use.ttft_ms for use in crowded)
    assert not [at for at in kept.asked_at if QUIET[0] + 4 < at < QUIET[1]]
    assert (
        kept.asked_tokens < SYSTEM_TOKENS
    )  # all of its own calls together, where each crowded one cost as much


SYSTEM = {
    "role": "system",
    "content": "You are a careful clerk. " * 40,
}  # long enough to stay as it stands in a body
SHORT = {"role": "user", "content": "caf\u00e9"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def made(**fields: Any) -> Pin:
    wanted = {"prompt": None, "messages": None, "tools": None} | fields
    pin = pin_of("clerk", "demo", **wanted)
    assert isinstance(pin, Pin)
    return pin


def call(endpoint: Endpoint = Endpoint.CHAT, *, ascii_only: bool = True, **fields: Any) -> GenerationRequest:
    request = parse(endpoint, json.dumps(fields, ensure_ascii=ascii_only).encode(), n_max=4)
    assert isinstance(request, GenerationRequest)
    return request


LATER = {"role": "user", "content": "and now"}


@pytest.mark.parametrize(
    ("messages", "begins"),
    [
        ([SYSTEM, SHORT, LATER], True),
        ([SYSTEM, SHORT], True),
        ([SYSTEM], False),
        ([SYSTEM, LATER], False),
        ([SHORT, SYSTEM], False),
        ([{**SYSTEM, "content": SYSTEM["content"] + "!"}, SHORT], False),
        ([{**SYSTEM, "content": SYSTEM["content"][:-1] + "!"}, SHORT], False),
        ([{"role": "system", "content": [{"type": "text", "text": SYSTEM["content"]}]}, SHORT, LATER], True),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_chats_that_begin_with_its_messages(
    messages: list[dict[str, Any]], begins: bool, ascii_only: bool
) -> None:
    beginning = made(messages=[SYSTEM, SHORT]).beginning
    assert beginning.is_of(call(messages=messages, ascii_only=ascii_only)) == begins


def test_chats_that_begin_with_its_tools_as_well() -> None:
    beginning = made(messages=[SYSTEM], tools=[TOOL]).beginning
    assert beginning.is_of(call(messages=[SYSTEM, LATER], tools=[TOOL]))
    assert not beginning.is_of(call(messages=[SYSTEM, LATER], tools=[TOOL, TOOL]))
    assert not beginning.is_of(call(messages=[SYSTEM, LATER]))


def test_texts_that_begin_with_its_prompt() -> None:
    beginning = made(prompt="Once upon a time").beginning
    texts = Endpoint.COMPLETIONS
    for prompt, begins in (("Once upon a time there was", True), ("Once upon", False), ([1, 2, 3], False)):
        assert beginning.is_of(call(texts, prompt=prompt)) == begins
    assert not beginning.is_of(call(texts, prompt=["Once upon a time", "Once upon a time"]))
    assert not beginning.is_of(call(messages=[{"role": "user", "content": "Once upon a time there was"}]))


def test_its_call_asks_for_one_token() -> None:
    body = json.loads(made(messages=[SYSTEM], tools=[TOOL]).request.body)
    assert (body["model"], body["max_tokens"], body["messages"], body["tools"]) == (
        "demo",
        1,
        [SYSTEM],
        [TOOL],
    )


def test_what_no_engine_takes_is_refused_by_its_field() -> None:
    refused = pin_of("clerk", "demo", None, [{"role": "user", "content": 7}], None)
    assert isinstance(refused, Refusal)
    assert refused.param == "messages"
