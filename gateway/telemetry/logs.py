"""Structured logs on stderr: one object or one line a record, and one record a finished call.

The event loop never waits for whoever reads stderr: records go through a bounded queue to a thread, and are dropped
and counted when it is full.  No record can forge another: control characters are escaped in both formats.
"""

import json
import logging
import queue
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from gateway.core.events import CacheDoubted, CallEnded, Event, Miscounted

RECORDS_MAX = 10_000
"""Records that wait for a slow reader of stderr."""

CLOSE_SECONDS = 2.0

CHATTY = ("httpcore", "httpx", "aiohttp", "asyncio", "uvicorn.access")
"""Libraries whose records below warning repeat what ours say, or name addresses."""

calls = logging.getLogger("kvgate.call")
prefixes = logging.getLogger("kvgate.prefixes")


class CallRecords:
    """An observer that makes one record of each finished call, and of what is shared no more."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallEnded):
            if calls.isEnabledFor(logging.INFO):
                calls.info("call ended", extra={"fields": _call_fields(event)})
        elif isinstance(event, CacheDoubted):
            text = "replica %s of fleet %s has less in its prefix cache than it should: nothing more is shared there"
            prefixes.warning(text, event.replica, event.fleet)
        elif isinstance(event, Miscounted):
            text = "fleet %s: its tokenizer does not count prompts of %s%s as the engines do: nothing is shared there"
            prefixes.warning(text, event.fleet, event.route, f" by key {event.key}" if event.key else "")


def _call_fields(event: CallEnded) -> dict[str, Any]:
    """What is unknown or empty is left out."""
    fields = {
        "request_id": event.request_id,
        "fleet": event.fleet,
        "pool": event.pool,
        "replica": event.replica,
        "key": event.key,
        "class": event.class_,
        "outcome": event.outcome.value,
        "reason": event.reason.value if event.reason is not None else None,
        "status": event.status,
        "refusal_ms": _rounded(event.refusal_ms),
        "queue_ms": _rounded(event.queue_ms),
        "predicted_ms": event.predicted_ms,
        "duration_ms": _rounded(event.duration_ms),
        "reserved_blocks": event.reserved_blocks,
        "shared_blocks": event.shared_blocks or None,
        "unused_blocks": event.unused_blocks,
        "prompt_tokens_estimated": event.prompt_tokens_estimated,
        "prompt_tokens": event.prompt_tokens,
        "output_tokens": event.output_tokens,
        "output_tokens_estimated": (event.output_tokens_estimated or None)
        if event.output_tokens is None
        else None,
    }
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)


class JsonFormatter(logging.Formatter):
    """One JSON object a record, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in _fields(record).items() if name not in line}
        if record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """One line a record for people; the lines of a traceback are indented, so none can pass for a record."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname:<7} {record.name}: {_escaped(record.getMessage())}"
        fields = "".join(f" {name}={_value(value)}" for name, value in _fields(record).items())
        traceback = record.exc_text.split("\n") if record.exc_text else []
        return "\n".join([head + fields, *(f"    {_escaped(line)}" for line in traceback)])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _value(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain and text else json.dumps(text)


class _BoundedHandler(logging.Handler):
    """Hands records to the thread, and drops what does not fit."""

    def __init__(self, records_max: int) -> None:
        super().__init__()
        self.waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(records_max)
        self.dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Reduces the record to text first: arguments may change, and a traceback keeps a request's body alive."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        try:
            self.waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def end(self) -> None:
        """Tell the thread to stop after what waits; the last record gives way where there is no room."""
        try:
            self.waiting.put_nowait(None)
        except queue.Full:
            with suppress(queue.Empty):
                self.waiting.get_nowait()
                self.dropped += 1
            self.waiting.put_nowait(None)


class _Writer(threading.Thread):
    """Writes records until it is given None; a daemon, so that a stalled stderr cannot keep the process."""

    def __init__(self, source: _BoundedHandler, output: logging.Handler) -> None:
        super().__init__(name="kvgate-log", daemon=True)
        self._source = source
        self._output = output

    def run(self) -> None:
        told = 0
        while (record := self._source.waiting.get()) is not None:
            self._output.handle(record)
            dropped = self._source.dropped
            if dropped > told:
                self._output.handle(_dropped_record(dropped - told))
                told = dropped


def _dropped_record(count: int) -> logging.LogRecord:
    text = f"{count} log records were dropped: stderr is not read fast enough"
    return logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": text})


class Logs:
    """The process's logging while it is open."""

    def __init__(
        self, level: str, format: str, stream: TextIO | None = None, records_max: int = RECORDS_MAX
    ) -> None:
        """`level`: debug, info, warning or error.  `format`: json or text.  `stream`: stderr if None."""
        output = logging.StreamHandler(stream if stream is not None else sys.stderr)
        output.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
        self._handler = _BoundedHandler(records_max)
        self._writer = _Writer(self._handler, output)
        root = logging.getLogger()
        self._before = root.handlers[:], root.level
        root.handlers[:] = [self._handler]
        root.setLevel(level.upper())
        for name in CHATTY:
            logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Records lost because nobody read stderr."""
        return self._handler.dropped

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_SECONDS`, and put the logging of before back."""
        root = logging.getLogger()
        root.handlers[:], level = self._before
        root.setLevel(level)
        self._handler.end()
        self._writer.join(CLOSE_SECONDS)
