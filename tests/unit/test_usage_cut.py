"""Usage that was asked for by kvgate alone is taken out of events, and nothing else is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.sse import StreamInspector, Usage
from gateway.core.usage_cut import cut_usage, without_usage

CAPTURES = Path(__file__).parents[1] / "fixtures" / "vllm"
_ID = re.compile(rb'"(?:chatcmpl|cmpl)-[0-9a-f]+"|"created":\d+')


def captured(name: str) -> bytes:
    """The body of a recorded stream, out of its chunks."""
    raw = (CAPTURES / name).read_bytes().partition(b"chunked")[2]
    return (
        b"".join(re.findall(rb"^data: [^\r\n]*", raw, re.MULTILINE)).replace(b"}data: ", b"}\n\ndata: ")
        + b"\n\n"
    )


def events(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def shown(stream: bytes, **options: bool) -> tuple[bytes, StreamInspector]:
    """As the relay gives an inspector what comes: the quick way where that takes it."""
    inspector = StreamInspector(metered=True, cut_usage=True, **options)
    out = []
    for event in events(stream):
        quick = inspector.passes_metered(b"12\r\n" + event + b"\r\n", 4, 4 + len(event))
        out.append(inspector.feed(event) if quick is None else quick)
    return b"".join(out) + inspector.finish(), inspector


def plain(stream: bytes) -> bytes:
    """But for the id and the time of what was recorded."""
    return _ID.sub(b"X", stream)


@pytest.mark.parametrize("route", ["chat", "comp"])
def test_a_recorded_stream_becomes_the_one_without(route: str) -> None:
    """vLLM tells the fingerprint in the closing count where one was asked for, else in the last choice."""
    metered, without = captured(f"{route}_stream_usage_cont.txt"), captured(f"{route}_stream_usage.txt")
    seen, inspector = shown(metered)
    assert plain(seen) == plain(without)
    assert inspector.usage == Usage(11 if route == "chat" else 7, 5)
    assert (inspector.finish_reason, inspector.unmetered, inspector.done) == ("length", False, True)
    dropped, _ = shown(metered, drop_usage=True)
    assert plain(dropped) == plain(b"".join(e for e in events(without) if b'"usage"' not in e))


def test_most_events_go_the_quick_way() -> None:
    inspector = StreamInspector(metered=True, cut_usage=True)
    stream = events(captured("chat_stream_usage_cont.txt"))
    quick = [inspector.passes_metered(event, 0, len(event)) is not None for event in stream]
    assert quick == [False, True, True, True, True, False, False, False]


def test_it_stays_for_a_client_that_asked() -> None:
    stream = captured("chat_stream_usage_cont.txt")
    inspector = StreamInspector(metered=True)
    out = [
        inspector.passes_metered(event, 0, len(event)) or inspector.feed(event) for event in events(stream)
    ]
    assert b"".join(out) == stream
    assert inspector.usage == Usage(11, 5)


def test_a_stream_that_tells_none_is_noticed() -> None:
    for name, unmetered in (("chat_stream.txt", True), ("chat_stream_usage_cont.txt", False)):
        _, inspector = shown(captured(name))
        assert inspector.unmetered == unmetered
    _, later = shown(captured("chat_stream.txt")[:0] + captured("chat_stream_usage_cont.txt").replace(
        b'"usage":{"prompt_tokens":11,"total_tokens":13', b'"other":{"prompt_tokens":11,"total_tokens":13'
    ))  # fmt: skip
    assert later.unmetered


TRICKY = (
    b'{"a":"}","usage":{"x":1}}',
    b'{"a":{"b":1,"usage":{"x":"{"}}}',
    b'{"a":{"b":1,"usage":{"x":"}"}}}',
    b'{"a":{"b":1,"usage":{"x":{"y":1}}}}',
    b'{"a":[{"b":1,"usage":{"x":1}}]}',
    b'{"a":",\\"usage\\":{}}","b":1}',
    b'{"usage":{"x":1},"a":2}',
    b'{"usage":{"x":1}}',
    b'{"a":1,"usage":{"x":{"y":{"z":1}}}}',
    b'{"a":1,"usage":{"x":"\\\\"}}',
    b'{"a":1,"usage":{"x":"\\"}"}}',
    b'{"a":1,"usage":{"x":[1,{"y":"}"}]}}',
    b'{"c":1,"usage":{"y":1},"a":{"b":1,"usage":{"x":"\\"{\\""}}}',
    b'{"a":1,"usage":null}',
    b'{"a":1,"usage":{"x":1},"usage":{"x":2}}',
    b'{"a":1 , "usage" : {"x":1} ,"b":2}',
    b'{"a":"usage","b":{"usage":1}}',
    b'{"a":NaN,"usage":{"x":1}}',
    b"[1]",
    b"not json",
)


def check(payload: bytes) -> None:
    event = b"data: " + payload + b"\n\n"
    try:
        given = json.loads(payload)
    except ValueError:
        given = None
    names = (
        [name for name, _ in json.loads(payload, object_pairs_hook=list)] if isinstance(given, dict) else []
    )
    cut = cut_usage(event)
    if cut != event:
        left = json.loads(cut[6:])
        assert left == {name: value for name, value in given.items() if name != "usage"}
        assert list(left) == [name for name in names if name != "usage"]
    quick = without_usage(event, 0, len(event))
    if quick is not None and "usage" in names and names.count("usage") == 1:
        assert quick == cut


@pytest.mark.parametrize("payload", TRICKY)
def test_only_usage_of_the_event_itself_is_taken_out(payload: bytes) -> None:
    check(payload)


NAMES = st.sampled_from(["usage", "choices", "a", ',"usage":{', "}", "é\u2028"])
LEAVES = (
    st.none()
    | st.integers()
    | st.sampled_from(["", "}", "{", '"', "\\", ',"usage":{"x":1}}', "é\u2028", "🙂"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_of_any_object(value: dict[str, Any], spaced: bool, ascii_only: bool) -> None:
    separators = None if spaced else (",", ":")
    check(json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode())


@given(st.dictionaries(NAMES, VALUES, max_size=3), VALUES)
def test_an_event_of_one_line_goes_either_way(value: dict[str, Any], usage: Any) -> None:
    """Where the last member is one whose value holds no deeper objects both ways know it."""
    given = {"choices": 1} | {name: value[name] for name in value if name != "usage"} | {"usage": usage}
    payload = json.dumps(given, separators=(",", ":")).encode()
    event = b"data: " + payload + b"\n\n"
    without = json.dumps({n: v for n, v in given.items() if n != "usage"}, separators=(",", ":")).encode()
    assert cut_usage(event) == b"data: " + without + b"\n\n"
    quick = without_usage(event, 0, len(event))
    assert quick in (None, b"data: " + without + b"\n\n")
    if isinstance(usage, dict) and not any(isinstance(inner, dict | list) for inner in usage.values()):
        assert quick is not None
