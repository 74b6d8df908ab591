"""Tokenizer, fault scripts, metrics page and journal of the mock."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock import tokenizer
from gateway.mock.engine import Engine, EngineConfig, Request, Sizes
from gateway.mock.faults import SCRIPTS_MAX, Fault, Faults, Kind, parse_fault, parse_script
from gateway.mock.journal import BODY_BYTES_KEPT, RECORDS_MAX, Journal, Record, State
from gateway.mock.metrics import Metrics


@given(st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode("utf-8", "replace").decode()
    assert len(ids) == tokenizer.count(text) >= (len(text.encode("utf-8", "replace")) + 5) // 6
    assert all(0 <= number < tokenizer.VOCABULARY for number in ids)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("def foo(x):", ["def", " foo", "(", "x", "):"]),
        ("implementation 2026", ["imple", "menta", "tion", " ", "202", "6"]),
        ("äöü", ["ä", "ö", "ü"]),
        ("\0\0\n\n\n\n\n", ["\0", "\0", "\n\n\n\n", "\n"]),
        ("", []),
    ],
)
def test_pieces(text: str, pieces: list[str]) -> None:
    assert tokenizer.pieces(text) == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_counts_messages_parts_and_tools() -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ]
    expected = 3 * 4 + 3 + 2 + 1 + tokenizer.PART_TOKENS + 3
    assert tokenizer.count_chat(messages) == len(tokenizer.encode_chat(messages)) == expected
    assert tokenizer.count_chat(messages, [1]) == expected + 3


def test_faults_are_read_strictly() -> None:
    assert parse_fault("status:503") == Fault(Kind.STATUS, 503)
    assert parse_fault("reset_after_events:2").strikes_after_events == 2
    assert parse_fault("finish_abort").strikes_after_events == 1
    assert parse_fault("error_event").strikes_after_events == 0
    assert parse_fault("hang").strikes_after_events is None
    assert parse_fault("hang:0").strikes_after_events == 0
    for text in (
        "",
        "nope",
        "status",
        "status:200",
        "gzip:1",
        "hang:x",
        "hang:",
        "reset_after_events",
        None,
        5,
    ):
        with pytest.raises(ValueError, match="fail"):
            parse_fault(text)
    for script in ([], {"x": 1}, {"output_tokens": True}, {"hold_seconds": -1}, {"hold_seconds": "1"}):
        with pytest.raises(ValueError, match="mock"):
            parse_script(script)


def test_global_faults_are_taken_once_each_and_bounded() -> None:
    faults = Faults()
    faults.add(Fault(Kind.GZIP), 2)
    faults.add(Fault(Kind.GARBAGE), 1)
    assert [fault and fault.kind for fault in (faults.take() for _ in range(4))] == [
        Kind.GZIP,
        Kind.GZIP,
        Kind.GARBAGE,
        None,
    ]
    for count in (0, SCRIPTS_MAX + 1):
        with pytest.raises(ValueError, match="count"):
            faults.add(Fault(Kind.GZIP), count)


def test_the_metrics_page_has_the_recorded_names_and_labels() -> None:
    engine = Engine(EngineConfig(model='a"b', blocks=256, block_size=32))
    metrics = Metrics(engine, 5.0)
    engine.add(Request("1", (Sizes(40, 3),)))
    metrics.see_step(engine.step())
    metrics.first_token.observe(0.02)
    page = metrics.render().decode()
    labels = r'{engine="0",model_name="a\"b"}'
    for line in (
        f"vllm:num_requests_running{labels} 1.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} {2 / 255}",
        f"vllm:num_preemptions_total{labels} 0.0",
        f"vllm:prompt_tokens_total{labels} 40.0",
        f"vllm:generation_tokens_total{labels} 1.0",
        r'vllm:request_success_total{engine="0",finished_reason="length",model_name="a\"b"} 0.0',
        r'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.01",model_name="a\"b"} 0.0',
        r'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="a\"b"} 1.0',
        r'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="a\"b"} 1.0',
        f"vllm:iteration_tokens_total_sum{labels} 40.0",
        "process_start_time_seconds 5.0",
    ):
        assert line in page.splitlines()
    info = re.search(r"^vllm:cache_config_info\{(.*)\} 1\.0$", page, re.M)
    assert info is not None
    assert {'block_size="32"', 'num_gpu_blocks="256"', 'engine="0"', 'num_cpu_blocks="None"'} <= set(
        info[1].split(",")
    )
    assert 'model_name="' not in info[1]


def test_the_journal_keeps_the_last_calls_and_hashes_large_bodies() -> None:
    journal = Journal()
    for number in range(RECORDS_MAX + 1):
        journal.receive(Record("/v1/completions", [], json.dumps({"n": number}).encode()))
    large = Record("/v1/completions", [("a", "b")], b"1" * (BODY_BYTES_KEPT + 1))
    journal.receive(large)
    journal.move(large, State.ABORTED)
    shown = journal.shown()
    assert (shown["received"], shown["aborted"], len(shown["requests"])) == (RECORDS_MAX + 2, 1, RECORDS_MAX)
    assert shown["requests"][0]["body"] == {"n": 2}
    last = shown["requests"][-1]
    assert (last["body"], last["body_bytes"], last["state"]) == (None, BODY_BYTES_KEPT + 1, "aborted")
    assert len(last["sha256"]) == 64
