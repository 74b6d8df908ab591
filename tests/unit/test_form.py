"""Forms with files: read as Starlette reads them, bounded, and written into without moving another byte."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import UploadFile
from starlette.requests import Request

from gateway.core.body import Refused, splice
from gateway.core.form import FIELD_BYTES_MAX, HEADERS_MAX, PARTS_MAX, Form, read_form
from gateway.core.outcomes import Code
from tests.forms import BOUNDARY, CONTENT_TYPE, form

KIND = CONTENT_TYPE.encode()
EDGE = f"--{BOUNDARY}".encode()


def read(body: bytes, kind: bytes = KIND) -> Form:
    return read_form(kind, body)


def refused(body: bytes, kind: bytes = KIND) -> tuple[Code, str | None, str]:
    with pytest.raises(Refused) as found:
        read(body, kind)
    refusal = found.value.refusal
    return refusal.code, refusal.param, refusal.message


def starlettes(body: bytes, kind: bytes = KIND) -> dict[str, Any]:
    """The fields as a vLLM server gets them."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def read_all() -> dict[str, Any]:
        request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}, receive)
        async with request.form() as found:
            return {
                name: await value.read() if isinstance(value, UploadFile) else value
                for name, value in found.multi_items()
            }

    return asyncio.run(read_all())


def test_fields_and_files_are_found_where_they_are() -> None:
    body = form(("model", "demo"), ("file", b"\r\n--\0\xff"), ("n", "3"))
    found = read(body)
    assert (found.text("model"), found.text("n"), found.text("none")) == ("demo", "3", None)
    file, number = found.get("file"), found.get("n")
    assert file is not None
    assert number is not None
    assert (file.is_file, file.size, bytes(found.value(file))) == (True, 6, b"\r\n--\0\xff")
    assert body[number.start : number.start + number.size] == b"3"


VALUES = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from([b"\r", b"\n", b"-", b"--", EDGE, EDGE[:-1], b"\r\n" + EDGE[:5], b"a"]), max_size=12
    ).map(b"".join),
).filter(lambda value: b"\r\n" + EDGE not in b"\r\n" + value)


@given(
    st.lists(VALUES, min_size=1, max_size=5), st.sampled_from([b"--\r\n", b"--", b"--\r\nepilogue " + EDGE])
)
def test_it_is_read_as_starlette_reads_it(values: list[bytes], end: bytes) -> None:
    body = form(*[(f"f{i}", value) for i, value in enumerate(values)], end=end)
    found, theirs = read(body), starlettes(body)
    ours = {name: part for name in theirs if (part := found.get(name)) is not None}
    assert {name: bytes(found.value(part)) for name, part in ours.items()} == theirs
    assert [part.size for part in ours.values()] == [len(value) for value in values]


@given(
    st.lists(VALUES, min_size=1, max_size=3),
    st.sampled_from([b"", b"\r\n", b"\n\r\n", b"\r\nwords before "]),
    st.sampled_from([b"--", b"--\r\nafter --" + EDGE + b"--"]),
    st.sampled_from(["", "12", "0"]),
)
def test_a_field_is_written_and_nothing_else_moves(
    values: list[bytes], before: bytes, end: bytes, present: str
) -> None:
    fields: list[tuple[str, str | bytes]] = [(f"f{i}", value) for i, value in enumerate(values)]
    fields += [("limit", present)] if present else []
    body = before + form(*fields, end=end)
    written = splice(body, [read(body).written("limit", b"64")])
    theirs = starlettes(written)
    assert theirs == {**starlettes(body), "limit": "64"}
    assert len(theirs) == len(values) + 1
    rest = (
        written.replace(b"64", present.encode(), 1)
        if present
        else written.replace(EDGE + b'\r\nContent-Disposition: form-data; name="limit"\r\n\r\n64\r\n', b"", 1)
    )
    assert rest == body


def test_two_fields_are_written_in_their_order() -> None:
    body = form(("a", "1"))
    found = read(body)
    written = splice(body, [found.written("x", b"1"), found.written("y", b"2")])
    assert starlettes(written) == {"x": "1", "y": "2", "a": "1"}


def part(*headers: bytes, value: bytes = b"1") -> bytes:
    return (
        EDGE
        + b"\r\n"
        + b"".join(header + b"\r\n" for header in headers)
        + b"\r\n"
        + value
        + b"\r\n"
        + EDGE
        + b"--"
    )


NAMED = b'Content-Disposition: form-data; name="a"'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "closing boundary is missing"),
        (b"{}", "not a form"),
        (EDGE, "closing boundary is missing"),
        (form(("a", "1"), end=b""), "closing boundary is missing"),
        (form(("a", "1"), end=b"\r\n"), "closing boundary is missing"),
        (form(("a", "1"), boundary="other"), "not a form"),
        (part(b"Content-Type: text/plain"), "has no name"),
        (part(b"Content-Disposition: form-data"), "has no name"),
        (part(), "has no name"),
        (part(NAMED, NAMED), "two `content-disposition`"),
        (part(NAMED, *[b"x: y"] * HEADERS_MAX), "not a form"),
        (part(NAMED, b"x: " + b"y" * 1100), "not a form"),
        (part(NAMED + b"; a=b" * 200), "not a form"),
        (part(b"x y: z", NAMED), "not a form"),
        (form(*[(f"f{i}", "") for i in range(PARTS_MAX + 1)]), f"more than {PARTS_MAX} parts"),
        (
            form(("a", "x" * (FIELD_BYTES_MAX // 2)), ("b", "x" * FIELD_BYTES_MAX)),
            f"more than {FIELD_BYTES_MAX}",
        ),
    ],
)
def test_what_is_no_form_or_too_much_of_one(body: bytes, words: str) -> None:
    code, _, message = refused(body)
    assert code is Code.INVALID_VALUE
    assert words in message


DISPOSITION = b"Content-Disposition: form-data; "


@pytest.mark.parametrize(
    "parameters",
    [
        b"name=a; name*=utf-8''b",
        b"name*=utf-8''b; name=a",
        b"name=a; name*0=b; name*1=c",
        b"name=a; NAME * = utf-8''b",
        b"name=a; name=b",
        b'name="a"; filename="x"; Name="b"',
        b'name="a"; filename="x"; filename=y',
        b'name="a"; x="b\\"',
        b'name="a"; x=b"',
    ],
)
def test_parameters_that_releases_of_the_parser_read_in_two_ways(parameters: bytes) -> None:
    """Older ones took the name after the star, and with it an output limit that nobody else saw."""
    code, param, message = refused(part(DISPOSITION + parameters))
    assert (code, param) == (Code.INVALID_VALUE, "content-disposition")
    assert "two ways" in message


@pytest.mark.parametrize(
    ("parameters", "is_file"),
    [
        (b"name=a", False),
        (b'name="a";filename="x.wav"', True),
        (b"name=a; filename=x.wav; filename*=utf-8''x.wav", True),
        (b'name="a"; filename="; name*=b"', True),
        (b'name="a"; filename="C:\\dir\\x.wav"', True),
        (b'name="a"; filename="say \\"hi\\".wav"', True),
        (b'name="a"; ; x', False),
    ],
)
def test_parameters_that_clients_send(parameters: bytes, is_file: bool) -> None:
    found = read(part(DISPOSITION + parameters)).get("a")
    assert found is not None
    assert found.is_file is is_file


@pytest.mark.parametrize(
    "kind", [KIND + b"; boundary*=utf-8''other", KIND + b"; boundary=other", KIND + b'; x="']
)
def test_a_boundary_that_may_be_read_in_two_ways(kind: bytes) -> None:
    assert refused(form(("a", "1")), kind)[:2] == (Code.INVALID_VALUE, "content-type")


@pytest.mark.parametrize("after", [b" ", b"\t ", b"-", b"x", b"\r", b"\n"])
@pytest.mark.parametrize("before", [True, False])
def test_an_edge_that_only_some_releases_see(after: bytes, before: bool) -> None:
    """Behind it stands what is a field to one reader, and the middle of a file to the other."""
    hidden = b"\r\n" + EDGE + after + b"\r\n" + DISPOSITION + b'name="limit"\r\n\r\n9\r\n' + EDGE + b"--\r\n"
    body = form(("file", b"x" + hidden) if before else ("a", "1"))
    if not before:
        body = body.replace(EDGE, EDGE + after, 1)
    assert refused(body)[0] is Code.INVALID_VALUE


def test_a_field_may_come_once() -> None:
    body = form(("a", "1"), ("b[]", "1"), ("b[]", "2"), ("a", "2"))
    assert refused(body)[:2] == (Code.DUPLICATE_FIELD, "a")
    assert read(form(("b[]", "1"), ("b[]", "2"))).text("b[]") == "2"


@pytest.mark.parametrize(
    "kind",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/mixed; boundary=x",
        KIND + b"; charset=utf-16",
        b"multipart/form-data; boundary=" + b"x" * 300,
        KIND + b"; a=b" * 200,
    ],
)
def test_another_type_of_body_is_refused(kind: bytes) -> None:
    assert refused(form(("a", "1")), kind)[0] is Code.INVALID_VALUE


def test_a_boundary_may_be_quoted_and_is_only_bytes() -> None:
    kind = b'Multipart/Form-Data; charset=UTF-8; boundary="50%d off"'
    body = form(("a", "1"), boundary="50%d off")
    found = read(body, kind)
    written = splice(body, [found.written("limit", b"7")])
    assert starlettes(written, kind) == {"limit": "7", "a": "1"}


def test_text_has_to_be_text() -> None:
    found = read(form(("file", b"x"), ("a", "")))
    assert found.text("a") is None
    with pytest.raises(Refused, match="plain field"):
        found.text("file")
    with pytest.raises(Refused, match="empty"):
        found.place("a")
    with pytest.raises(Refused, match="UTF-8"):
        read(part(NAMED, value=b"\xff")).text("a")


def test_the_library_reads_a_file_of_zeros_as_soon_as_any() -> None:
    """Nothing is done for each byte of a file."""
    found = read(form(("file", bytes(2**23))))
    file = found.get("file")
    assert file is not None
    assert file.size == 2**23
