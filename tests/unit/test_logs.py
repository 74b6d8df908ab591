"""Logs: one line a finished call, no forged lines, and a reader that never holds the event loop."""

import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.core.events import CallEnded, StoreUp
from gateway.core.outcomes import Code, Outcome
from gateway.telemetry.logs import CallRecords, Logs

REFUSED = CallEnded(
    request_id="r-1", route="/v1/completions", fleet="llama", key="team-a", group="", class_="normal",
    outcome=Outcome.REFUSED, reason=Code.QUEUE_FULL, status=429, refusal_ms=1.23456,
    prompt_tokens_estimated=12, duration_ms=2.0,
)  # fmt: skip


@contextmanager
def logging_to(stream: io.StringIO, level: str = "info", format: str = "json", **more: Any) -> Iterator[Logs]:
    logs = Logs(level, format, stream, **more)
    try:
        yield logs
    finally:
        logs.close()


def test_a_finished_call_is_one_object() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        CallRecords()(REFUSED)
        CallRecords()(StoreUp(True))
    (line,) = stream.getvalue().splitlines()
    written = json.loads(line)
    time = written.pop("time")
    assert time.endswith("Z")
    assert written == {
        "level": "info", "logger": "kvgate.call", "message": "call ended", "request_id": "r-1", "fleet": "llama",
        "key": "team-a", "class": "normal", "outcome": "refused", "reason": "queue_full", "status": 429,
        "refusal_ms": 1.235, "queue_ms": 0.0, "duration_ms": 2.0, "reserved_blocks": 0,
        "prompt_tokens_estimated": 12,
    }  # fmt: skip


def test_a_finished_call_is_one_line_of_text() -> None:
    stream = io.StringIO()
    with logging_to(stream, format="text"):
        CallRecords()(REFUSED)
    (line,) = stream.getvalue().splitlines()
    assert " INFO    kvgate.call: call ended request_id=r-1 fleet=llama key=team-a class=normal" in line


@pytest.mark.parametrize("format", ["json", "text"])
def test_levels_are_kept(format: str) -> None:
    stream = io.StringIO()
    with logging_to(stream, "warning", format):
        CallRecords()(REFUSED)
        logging.getLogger("kvgate.x").warning("seen %d", 1)
        logging.getLogger("httpx").info("chatter")
    assert "seen 1" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\x1b[31mred", "a\u2028b", "\x85", "\ud800", "\x00"])
@pytest.mark.parametrize("format", ["json", "text"])
def test_no_record_forges_another(format: str, text: str) -> None:
    stream = io.StringIO()
    with logging_to(stream, format=format):
        logging.getLogger("kvgate").info("%s", text, extra={"fields": {"field": text, "other": 'x y="1"'}})
    written = stream.getvalue()
    assert written.endswith("\n")
    assert written[:-1].isprintable()
    if format == "json":
        line = json.loads(written)
        assert (line["message"], line["field"]) == (text, text)
    else:
        assert r'other="x y=\"1\""' in written


@pytest.mark.parametrize("format", ["json", "text"])
def test_tracebacks_are_kept_and_cannot_pass_for_records(format: str) -> None:
    stream = io.StringIO()
    with logging_to(stream, format=format):
        try:
            raise ValueError("first\n2027-01-01T00:00:00.000Z INFO kvgate: forged")
        except ValueError:
            logging.getLogger("kvgate").exception("failed")
    head, *rest = stream.getvalue().splitlines()
    assert "failed" in head
    if format == "json":
        assert "forged" in json.loads(head)["exception"]
        assert rest == []
    else:
        assert any("forged" in line for line in rest)
        assert all(line.startswith("    ") for line in rest)


class Stalled(io.StringIO):
    """A stderr that nobody reads until `gone_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.gone_on = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.gone_on.wait()
        return super().write(text)


def test_a_stalled_reader_costs_records_and_no_time() -> None:
    stream = Stalled()
    with logging_to(stream, records_max=5) as logs:
        log = logging.getLogger("kvgate")
        log.info("first")
        assert stream.reached.wait(10)
        for i in range(20):
            log.info("record %d", i)
        assert logs.dropped == 15
        stream.gone_on.set()
    written = stream.getvalue()
    assert "record 3" in written
    assert "record 7" not in written
    assert "log records were dropped" in written


def test_closing_puts_the_logging_of_before_back() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with logging_to(io.StringIO(), "debug"):
        assert root.handlers != before[0]
    assert (root.handlers[:], root.level) == before
