"""The mock engine over real sockets: routes and headers, disconnects, scripted failures, signals."""

import asyncio
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.integration.mock_world import CHAT, MESSAGES, TEXT, Answer, Client, Mock, body, serving, until


@pytest.fixture
async def mock() -> AsyncIterator[Mock]:
    async with serving() as running:
        yield running


async def test_a_stream_has_the_headers_and_events_of_vllm() -> None:
    async with serving(enable_request_id_headers=True) as mock:
        answer = await mock.call("POST", CHAT, body(stream=True), "x-request-id: my-req-42\r\n")
    names = ["date", "server", "content-type", "vary", "x-request-id", "connection", "transfer-encoding"]
    assert answer.names == names
    assert "content-type: text/event-stream; charset=utf-8" in answer.head
    assert "x-request-id: my-req-42" in answer.head
    chunks = [json.loads(event) for event in answer.events[:-1]]
    assert answer.events[-1] == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-my-req-42"}
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", " lorem", " ipsum", " dolor"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not answer.broken


async def test_a_whole_answer_and_its_headers(mock: Mock) -> None:
    answer = await mock.call("POST", TEXT, body(prompt=[[1] * 4, [2] * 2], n=2))
    assert answer.names == [
        "date",
        "server",
        "content-length",
        "content-type",
        "vary",
        "connection",
    ]
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert answer.json["id"].startswith("cmpl-")
    assert len(answer.json["id"]) == len("cmpl-") + 16
    assert answer.json["usage"]["total_tokens"] == 6 + 12
    assert mock.pool() == (0, 0, 0)


async def test_each_event_is_one_chunk(mock: Mock) -> None:
    client = await mock.begin(TEXT, body(stream=True, stream_options={"include_usage": True}))
    await client.head()
    raw = await client.reader.read()
    await client.leave()
    sizes = [int(part.rpartition(b"\r\n")[2], 16) for part in raw.split(b"\r\ndata: ")[:-1]]
    events = [b"data: " + part.partition(b"\r\n")[0] for part in (b"\r\n" + raw).split(b"\r\ndata: ")[1:]]
    assert sizes == [len(event) for event in events]
    assert len(events) == 3 + 1 + 1


async def test_errors_and_small_routes(mock: Mock) -> None:
    refused = await mock.call("POST", CHAT, body(model="nope", stream=True))
    assert (refused.status, refused.json["error"]["type"]) == (404, "NotFoundError")
    missing = await mock.call("POST", "/v1/nope", {})
    assert (missing.status, missing.body) == (404, b'{"detail":"Not Found"}')
    wrong = await mock.call("GET", CHAT)
    assert (wrong.status, wrong.body) == (405, b'{"detail":"Method Not Allowed"}')
    assert "allow: POST" in wrong.head
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await mock.call(method, path)
        assert (answer.status, answer.body) == (200, b"")
    assert (await mock.call("GET", "/version")).body == b'{"version":"0.32.0"}'
    assert (await mock.call("GET", "/v1/models")).json["data"][0]["max_model_len"] == 4096
    assert b'num_gpu_blocks="64"' in (await mock.call("GET", "/metrics")).body
    assert await mock.states() == ["refused"]


async def test_tokenize_and_detokenize(mock: Mock) -> None:
    answer = await mock.call(
        "POST", "/tokenize", {"model": "tiny", "prompt": "def foo", "return_token_strs": True}
    )
    assert list(answer.json) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (answer.json["count"], answer.json["token_strs"]) == (2, ["def", " foo"])
    back = await mock.call("POST", "/detokenize", {"model": "tiny", "tokens": answer.json["tokens"]})
    assert back.body == b'{"prompt":"def foo"}'
    chat = await mock.call("POST", "/tokenize", {"model": "tiny", "messages": MESSAGES})
    usage = (await mock.call("POST", CHAT, body())).json["usage"]
    assert chat.json["count"] == usage["prompt_tokens"]
    for fields in ({"model": "tiny"}, {"prompt": 5}, {"messages": 5}):
        assert (await mock.call("POST", "/tokenize", fields)).status == 400
    assert (await mock.call("POST", "/detokenize", {"tokens": [-1]})).status == 400


async def test_the_api_key_guards_v1_alone() -> None:
    async with serving(api_key="secret") as mock:
        refused = await mock.call("GET", "/v1/models")
        assert (refused.status, refused.body) == (401, b'{"error":"Unauthorized"}')
        assert (
            await mock.call("GET", "/v1/models", headers="authorization: Bearer secret\r\n")
        ).status == 200
        assert (await mock.call("GET", "/health")).status == 200


async def test_the_log_shows_calls_as_they_came(mock: Mock) -> None:
    await mock.call("POST", CHAT, body(n=2), "x-own: 1\r\nx-own: 2\r\n")
    await until(lambda: mock.app.journal.shown()["finished"] == 1)
    log = (await mock.call("GET", "/mock/log")).json
    counts = [log[name] for name in ("received", "started", "finished", "aborted", "refused", "failed")]
    assert counts == [1, 1, 1, 0, 0, 0]
    (record,) = log["requests"]
    assert record["body"] == body(n=2)
    assert [value for name, value in record["headers"] if name == "x-own"] == ["1", "2"]
    assert record["id"].startswith("chatcmpl-")
    await mock.call("POST", "/mock/reset")
    assert (await mock.call("GET", "/mock/log")).json["received"] == 0


HELD = {"hold_seconds": 3600}


async def test_headers_leave_before_the_engine_has_room(mock: Mock) -> None:
    holder = await mock.begin(TEXT, body(prompt=[5] * 1000, mock=HELD))
    await until(lambda: mock.pool() == (1, 0, 63))
    waiting = await mock.begin(TEXT, body(stream=True))
    assert (await waiting.head()).startswith(b"HTTP/1.1 200 OK")
    assert mock.pool() == (1, 1, 63)
    await holder.leave()
    assert json.loads(await waiting.event())["choices"][0]["text"] == " lorem"
    await waiting.leave()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(mock: Mock, stream: bool) -> None:
    running = await mock.begin(TEXT, body(prompt=[5] * 100, stream=stream, n=3, mock=HELD))
    await until(lambda: mock.pool() == (3, 0, 21))
    waiting = await mock.begin(TEXT, body(prompt=[5] * 1000, stream=stream))
    await until(lambda: mock.pool() == (3, 1, 21))
    await waiting.leave()
    await until(lambda: mock.pool() == (3, 0, 21))
    await running.leave()
    await until(lambda: mock.pool() == (0, 0, 0))
    await until(lambda: mock.app.journal.shown()["aborted"] == 2)
    assert set(mock.app.driver.metrics.finished.values()) == {0}


async def test_a_client_that_leaves_mid_stream() -> None:
    async with serving(speed=1.0) as mock:
        client = await mock.begin(TEXT, body(max_tokens=4000, prompt=[5], stream=True))
        await client.event()
        await client.leave()
        await until(lambda: mock.app.journal.shown()["aborted"] == 1)
        assert mock.pool() == (0, 0, 0)


async def test_a_held_call_goes_on_after_its_time(mock: Mock) -> None:
    answer = await mock.call("POST", TEXT, body(mock={"hold_seconds": 0.01, "output_tokens": 2}))
    choice = answer.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" lorem ipsum", "stop")
    assert mock.app.driver.metrics.finished["stop"] == 1


async def fail(mock: Mock, kind: str, stream: bool, **fields: Any) -> Answer:
    answer = await mock.call("POST", TEXT, body(stream=stream, mock={"fail": kind}, **fields))
    await until(lambda: mock.app.journal.shown()["failed"] == 1)
    assert mock.pool() == (0, 0, 0)
    return answer


@pytest.mark.parametrize("stream", [True, False])
async def test_reset_before_headers(mock: Mock, stream: bool) -> None:
    answer = await fail(mock, "reset_before_headers", stream)
    assert (answer.head, answer.broken) == ("", True)


@pytest.mark.parametrize("stream", [True, False])
async def test_reset_after_headers(mock: Mock, stream: bool) -> None:
    answer = await fail(mock, "reset_after_headers", stream)
    assert (answer.status, answer.body, answer.broken) == (200, b"", True)


@pytest.mark.parametrize("how", ["reset", "cut"])
async def test_broken_off_after_events(mock: Mock, how: str) -> None:
    answer = await fail(mock, f"{how}_after_events:2", True)
    assert (answer.status, len(answer.events), answer.broken) == (200, 2, True)


async def test_a_reset_is_a_reset_and_a_cut_is_an_orderly_close(mock: Mock) -> None:
    for how, expected in (("reset", ConnectionResetError), ("cut", None)):
        client = await mock.begin(TEXT, body(stream=True, mock={"fail": f"{how}_after_events:1"}))
        await client.event()
        seen = None
        try:
            await client.reader.read()
        except ConnectionResetError as error:
            seen = type(error)
        await client.leave()
        assert seen is expected


async def test_error_event(mock: Mock) -> None:
    answer = await fail(mock, "error_event:1", True)
    assert json.loads(answer.events[1])["error"]["code"] == 503
    assert (len(answer.events), answer.events[-1], answer.broken) == (3, "[DONE]", False)
    await mock.call("POST", "/mock/reset")
    assert (await fail(mock, "error_event", False)).status == 503


async def test_done_only_and_finish_abort(mock: Mock) -> None:
    assert (await fail(mock, "done_only", True)).events == ["[DONE]"]
    await mock.call("POST", "/mock/reset")
    assert (await fail(mock, "done_only", False)).json["choices"][0]["finish_reason"] == "abort"
    await mock.call("POST", "/mock/reset")
    answer = await fail(mock, "finish_abort", True)
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in answer.events[:-1]]
    assert (reasons, answer.events[-1]) == ([None, "abort"], "[DONE]")


@pytest.mark.parametrize(("status", "kind"), [(400, "BadRequestError"), (503, "Service Unavailable")])
async def test_status(mock: Mock, status: int, kind: str) -> None:
    answer = await fail(mock, f"status:{status}", True)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, kind)


async def test_garbage(mock: Mock) -> None:
    for stream in (True, False):
        answer = await fail(mock, "garbage", stream)
        assert answer.status == 200
        with pytest.raises(ValueError, match=r"."):
            json.loads(answer.body)
        await mock.call("POST", "/mock/reset")


@pytest.mark.parametrize("stream", [True, False])
async def test_gzip(mock: Mock, stream: bool) -> None:
    answer = await mock.call("POST", TEXT, body(stream=stream, mock={"fail": "gzip"}))
    assert "content-encoding: gzip" in answer.head
    assert b" dolor" in gzip.decompress(answer.body)


@pytest.mark.parametrize(("kind", "head"), [("hang", b""), ("hang:1", b"HTTP/1.1 200 OK")])
async def test_hang_until_the_client_leaves(mock: Mock, kind: str, head: bytes) -> None:
    client = await mock.begin(TEXT, body(stream=True, mock={"fail": kind}))
    await until(lambda: mock.app.journal.shown()["received"] == 1)
    if head:
        assert (await client.head()).startswith(head)
        await client.event()
    assert await mock.states() in (["received"], ["started"])
    await client.leave()
    await until(lambda: mock.app.journal.shown()["aborted"] == 1)


async def test_global_faults_strike_the_next_calls(mock: Mock) -> None:
    added = await mock.call("POST", "/mock/faults", {"fail": "status:500", "count": 2})
    assert added.json == {"waiting": 2}
    statuses = [(await mock.call("POST", path, body())).status for path in (CHAT, TEXT, CHAT)]
    assert statuses == [500, 500, 200]
    for wrong in ({"fail": "nope"}, {"fail": "gzip", "count": 0}, {"fail": "gzip", "count": "2"}, {}):
        assert (await mock.call("POST", "/mock/faults", wrong)).status == 400


async def test_stopping_ends_streams_as_vllm_does() -> None:
    async with serving() as mock:
        started = await mock.begin(
            TEXT, body(prompt=[5], max_tokens=4000, stream=True, mock={"fail": "hang:9999"})
        )
        running = await mock.begin(TEXT, body(stream=True, mock=HELD))
        whole = await mock.begin(CHAT, body(mock=HELD))
        await until(lambda: mock.app.journal.shown()["started"] == 3)
        await started.leave()
        mock.server.stop()
        assert (await running.answer()).events == ["[DONE]"]
        assert (await whole.answer()).json["choices"][0]["finish_reason"] == "abort"
        for client in (running, whole):
            await client.leave()
        await until(lambda: mock.app.journal.shown()["aborted"] == 3)


SERVE = [sys.executable, "-m", "gateway.mock.serve"]


@contextmanager
def start(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own, of which nothing is left afterwards."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def ports(process: subprocess.Popen[str], engines: int = 1) -> list[int]:
    assert process.stdout is not None
    lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(engines)]
    assert all(line.startswith("mock engine ready on http://127.0.0.1:") for line in lines)
    return [int(line.rsplit(":", 1)[1]) for line in lines]


async def test_the_program_serves_engines_and_ends_streams_on_sigterm() -> None:
    with start(*SERVE, "--port", "0", "--engines", "2", "--model", "tiny") as process:
        first, second = await ports(process, 2)
        clients = [await Client.connect(port) for port in (first, second)]
        for client in clients:
            await client.ask("POST", CHAT, body(max_tokens=4000, stream=True))
            await client.event()
        process.send_signal(signal.SIGTERM)
        for client in clients:
            answer = await client.answer()
            assert b'"finish_reason":"abort"' in answer.head.encode() + answer.body
            assert b"data: [DONE]" in answer.head.encode() + answer.body
            await client.leave()
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_a_taken_port_is_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with start(*SERVE, "--port", port) as process:
            assert await asyncio.to_thread(process.wait, 20) == 1
    assert capfd.readouterr().err.startswith(f"cannot listen on 127.0.0.1:{port}")


async def test_it_dies_with_its_parent() -> None:
    """A parent that is killed takes its engine along; the pipe both write to then reads its end."""
    child = f"import subprocess, sys; subprocess.run({SERVE!r} + sys.argv[1:])"
    with start(sys.executable, "-c", child, "--port", "0", "--die-with-parent") as parent:
        await ports(parent)
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout is not None
        assert await asyncio.wait_for(asyncio.to_thread(parent.stdout.read), 20) == ""
