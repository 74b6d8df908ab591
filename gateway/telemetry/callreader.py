"""Reading a call log, line by line: of any size, packed or not, with what a killed process left unfinished."""

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedReader

import msgspec

from gateway.core.outcomes import OperatorError
from gateway.telemetry.calllog import CallLine, LostLine

LINE_BYTES_MAX = 64 * 1024
"""A call's line is shorter than 2 KB; what is longer cannot be one and is not kept in memory."""
TOO_LONG = b"...\n"
GZIP_MAGIC = b"\x1f\x8b"
Unpacked = BufferedReader | gzip.GzipFile
_CALLS = msgspec.json.Decoder(CallLine)
_LOST = msgspec.json.Decoder(LostLine)


class NotACallLog(OperatorError):
    """A file is something else, or cannot be read; one line for the operator."""


def read_calls(name: str, source: BufferedReader) -> Iterator[CallLine | LostLine | None]:
    """What each line of a log says; None for one that cannot be read.

    `name` is what messages call it.  Raises NotACallLog, in the end too: where lines were read, but none as a call's.
    """
    understood = strange = 0
    try:
        for line in _lines(_unpacked(source)):
            found = _decoded(line)
            understood += found is not None
            strange += found is None and line.endswith(b"\n")
            yield found
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise NotACallLog(f"{name}: is packed by gzip, but damaged or not complete") from None
    except OSError as error:
        raise NotACallLog(f"{name}: cannot be read: {error.strerror}") from None
    if strange and not understood:
        raise NotACallLog(f"{name}: no line of it is a call log's")


def _unpacked(source: BufferedReader) -> Unpacked:
    return gzip.open(source) if source.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC) else source


def _lines(stream: Unpacked) -> Iterator[bytes]:
    """Without the empty ones; the last one may have no end, and in place of one that is too long comes `TOO_LONG`."""
    while line := stream.readline(LINE_BYTES_MAX):
        rest = line
        while len(rest) == LINE_BYTES_MAX and not rest.endswith(b"\n"):
            rest = stream.readline(LINE_BYTES_MAX)
        if rest is not line:
            yield TOO_LONG
        elif line != b"\n":
            yield line


def _decoded(line: bytes) -> CallLine | LostLine | None:
    try:
        return _CALLS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _LOST.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
