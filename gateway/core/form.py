"""A form with files, `multipart/form-data` (RFC 7578), read in place: what its fields say, and where.

By the parser of Starlette, which vLLM reads it with: a second opinion on where a part ends would be a second request.
Releases of that parser have had different ones, and an engine may have another release: what they disagree about is
refused.
"""

import re
from dataclasses import dataclass
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.core.body import Edit, Refused, shorten
from gateway.core.outcomes import Code

PARTS_MAX = 64
"""Of one form; one of vLLM's has about thirty fields."""
HEADER_BYTES_MAX = 1024
"""Of one header of a part, and of the type of the body: what reads their parameters takes a time that grows with the
square of their length."""
HEADERS_MAX = 8
"""Of one part."""
FIELD_BYTES_MAX = 1024 * 1024
"""Of all fields together that are no files, as Starlette bounds each."""
_TYPE = b"multipart/form-data"
_DISPOSITION = b"content-disposition"
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')
_PARAMETER = re.compile(rb";[ \t]*([^;=]*?)[ \t]*(?==|;|$)")


@dataclass(slots=True)
class Part:
    """One field of a form; a file where it has a file name."""

    name: str = ""
    is_file: bool = False
    size: int = 0
    """Bytes of its value."""
    start: int = 0
    """Where the value begins in the body."""


class Form:
    """The parts of a body by their names, of which each may come once."""

    def __init__(self, body: bytes, boundary: bytes, parts: list[Part]) -> None:
        self._view = memoryview(body)
        self._boundary = boundary
        self._begin = body.index(b"--" + boundary)
        self._parts: dict[str, Part] = {}
        for part in parts:
            if part.name in self._parts and not part.name.endswith("[]"):
                raise Refused(
                    Code.DUPLICATE_FIELD,
                    f"`{shorten(part.name)}` is given more than once.",
                    shorten(part.name),
                )
            self._parts[part.name] = part

    def get(self, name: str) -> Part | None:
        return self._parts.get(name)

    def value(self, part: Part) -> memoryview:
        return self._view[part.start : part.start + part.size]

    def text(self, name: str) -> str | None:
        """A field that is no file; None where it is not given or empty, as FastAPI reads it.  Raises Refused."""
        part = self._parts.get(name)
        if part is None or (not part.is_file and not part.size):
            return None
        if part.is_file:
            raise Refused(
                Code.INVALID_VALUE, f"`{name}` must be a plain field of the form, not a file.", name
            )
        try:
            return bytes(self.value(part)).decode()
        except UnicodeDecodeError:
            raise Refused(Code.INVALID_VALUE, f"`{name}` is not UTF-8.", name) from None

    def place(self, name: str) -> tuple[int, int, bytes, bytes]:
        """Where the value of a field is to be written, and what comes before and after it there.

        Its own place, or a part before all others.  Raises Refused for a field that is there without a value.
        """
        part = self._parts.get(name)
        if part is not None and part.size:
            return part.start, part.start + part.size, b"", b""
        if part is not None:
            raise Refused(Code.INVALID_VALUE, f"`{name}` is empty.", name)
        head = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (self._boundary, name.encode())
        return self._begin, self._begin, head, b"\r\n"

    def written(self, name: str, value: bytes) -> Edit:
        """The edit that gives a field this value."""
        start, end, before, after = self.place(name)
        return start, end, before + value + after


def read_form(content_type: bytes, body: bytes) -> Form:
    """Raises Refused for what is no such form, or has more than the bounds above."""
    boundary = _boundary(content_type)
    reader = _Reader(body)
    try:
        parser = MultipartParser(
            boundary, reader.callbacks(), max_header_count=HEADERS_MAX, max_header_size=HEADER_BYTES_MAX
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refused(Code.INVALID_VALUE, f"The body is not a form: {shorten(str(error))}.") from None
    if not reader.is_complete:
        raise Refused(Code.INVALID_VALUE, "The body is not a form: its closing boundary is missing.")
    _check_edges(body, b"--" + boundary)
    return Form(body, boundary, reader.parts)


def _boundary(content_type: bytes) -> bytes:
    if len(content_type) > HEADER_BYTES_MAX:
        message = f"`content-type` has {len(content_type)} bytes; a form's may have {HEADER_BYTES_MAX}."
        raise Refused(Code.INVALID_VALUE, message, "content-type")
    kind, options = _options(content_type, "content-type")
    boundary = options.get(b"boundary")
    if kind != _TYPE or not boundary:
        message = "The body has to be `multipart/form-data` with a boundary."
        raise Refused(Code.INVALID_VALUE, message, "content-type")
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() != b"utf-8":
        raise Refused(Code.INVALID_VALUE, "The charset of a form has to be utf-8.", "content-type")
    return boundary


def _check_edges(body: bytes, edge: bytes) -> None:
    """Raises Refused for a line that begins as an edge of a part and is none to every reader."""
    at = body.index(edge)
    while True:
        at += len(edge)
        after = body[at : at + 2]
        if after == b"--":
            return
        at = body.find(b"\r\n" + edge, at)
        if after != b"\r\n" or at < 0:
            raise Refused(Code.INVALID_VALUE, "A line of the form begins with its boundary and goes on.")
        at += len(b"\r\n")


def _options(header: bytes, name: str) -> tuple[bytes, dict[bytes, bytes]]:
    """The value of a header and its parameters.  Raises Refused where these may be read in two ways."""
    bare = _QUOTED.sub(b"", header)
    names = [parameter.lower() for parameter in _PARAMETER.findall(bare)]
    extended = [
        parameter for parameter in names if b"*" in parameter and not parameter.startswith(b"filename*")
    ]
    if b'"' in bare or extended or len(set(names)) < len(names):
        message = f"`{name}` of a form has parameters that may be read in two ways."
        raise Refused(Code.INVALID_VALUE, message, name)
    return parse_options_header(header)


class _Reader:
    """Takes the parser's callbacks."""

    def __init__(self, body: bytes) -> None:
        self.parts: list[Part] = []
        self.is_complete = False
        self._body = body
        self._part = Part()
        self._field_bytes = 0
        self._name, self._value = b"", b""
        self._disposition: bytes | None = None

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        if len(self.parts) >= PARTS_MAX:
            raise Refused(Code.INVALID_VALUE, f"The form has more than {PARTS_MAX} parts.")
        self._part, self._disposition = Part(), None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == _DISPOSITION:
            if self._disposition is not None:
                raise Refused(Code.INVALID_VALUE, "A part of the form has two `content-disposition`.")
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        _, options = _options(self._disposition or b"", "content-disposition")
        name = options.get(b"name")
        if name is None:
            raise Refused(Code.INVALID_VALUE, "A part of the form has no name.")
        self._part.name = name.decode("utf-8", "replace")
        self._part.is_file = b"filename" in options

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Of a body that is written at once `data` is that, and what is called here follows on each other."""
        part = self._part
        if not part.size:
            part.start = start
        assert data is self._body
        assert start == part.start + part.size
        part.size = end - part.start
        if not part.is_file:
            self._field_bytes += end - start
            if self._field_bytes > FIELD_BYTES_MAX:
                message = f"The fields of the form have more than {FIELD_BYTES_MAX} bytes."
                raise Refused(Code.INVALID_VALUE, message)

    def _on_part_end(self) -> None:
        self.parts.append(self._part)

    def _on_end(self) -> None:
        self.is_complete = True
