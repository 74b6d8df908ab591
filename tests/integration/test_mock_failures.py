"""Engines in trouble: full, draining, crashed, asleep, slow; clients that are.  As recorded from a real vLLM."""

import ast
import asyncio
import json
import re
import signal
import socket
from typing import Any

import pytest

from gateway.mock.engine import EngineConfig
from tests.integration.captured import FOLDER
from tests.integration.mock_world import CHAT, SMALL, TEXT, Answer, Client, Mock, body, serving, until
from tests.integration.test_mock import SERVE, ports, start

MESSAGES_ROUTE = "/v1/messages"
HELD = {"hold_seconds": 3600}
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def recorded_limits(path: str, kind: str) -> bytes:
    """The first body that limits.txt has of such a call."""
    text = (FOLDER / "limits.txt").read_text()
    found = re.search(rf"^{re.escape(path)} {kind} .*?\}} (b'.*') ", text, re.MULTILINE)
    assert found is not None
    return bytes(ast.literal_eval(found[1]))


async def state(mock: Mock, **fields: Any) -> dict[str, Any]:
    answer = await mock.call("POST", "/mock/state", fields)
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


def count(mock: Mock, name: str) -> int:
    found: int = mock.app.journal.shown()[name]
    return found


# -- queue limits --------------------------------------------------------------------------------------------------


async def test_beyond_its_queue_the_engine_refuses_as_vllm_does() -> None:
    async with serving(EngineConfig(model="tiny", max_num_queued_reqs=6)) as mock:
        held = [await mock.begin(TEXT, body(mock=HELD)) for _ in range(6)]
        await until(lambda: count(mock, "started") == 6)
        for path, stream in ((TEXT, False), (TEXT, True), (CHAT, True), (MESSAGES_ROUTE, False)):
            answer = await mock.call("POST", path, body(stream=stream))
            assert answer.status == 503
            assert answer.body == recorded_limits(path, "stream" if stream else "nonstream")
        for client in held:
            await client.leave()
        await until(lambda: mock.pool() == (0, 0, 0))
        assert (await mock.call("POST", TEXT, body(n=7))).status == 503
        assert (await mock.call("POST", TEXT, body(prompt=[[5]] * 7))).status == 503
        page = (await mock.call("GET", "/metrics")).body.decode()
        assert 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 6.0' in page
        assert count(mock, "refused") == 6


@pytest.mark.parametrize("script", [{"late_busy": True}, {}])
async def test_racing_streams_hear_of_the_limit_after_their_headers(script: dict[str, Any]) -> None:
    config = EngineConfig(model="tiny", max_num_queued_tokens=100)
    async with serving(config, late_busy=not script) as mock:
        held = await mock.begin(TEXT, body(prompt=[5] * 200, mock=HELD))
        await until(lambda: count(mock, "started") == 1)
        answer = await mock.call("POST", TEXT, body(stream=True, mock=script))
        assert answer.status == 200
        text = (FOLDER / "limits.txt").read_text()
        assert f"b{answer.body.decode()!r}" in text
        whole = await mock.call("POST", TEXT, body(mock=script))
        assert (whole.status, "backlog" in whole.json["error"]["message"]) == (503, True)
        await held.leave()


# -- the end of the engine -----------------------------------------------------------------------------------------


async def refused(port: int) -> bool:
    try:
        await (await Client.connect(port)).leave()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("how", ["state", "fault"])
async def test_a_crash_ends_everything_and_then_the_server(how: str) -> None:
    async with serving() as mock:
        running = await mock.begin(TEXT, body(stream=True, mock=HELD))
        message = await mock.begin(MESSAGES_ROUTE, body(stream=True, mock=HELD))
        whole = await mock.begin(CHAT, body(mock=HELD))
        await until(lambda: count(mock, "started") == 3)
        if how == "state":
            mock.app.control.on_exit = lambda: None
            assert (await state(mock, state="crash"))["dead"]
            assert (await mock.call("GET", "/health")).status == 503
            new = await mock.call("POST", TEXT, body(stream=True))
            assert (new.status, new.json["error"]["message"]) == (500, DEAD)
        else:
            answer = await mock.call("POST", TEXT, body(stream=True, max_tokens=50, mock={"fail": "crash:2"}))
            assert [json.loads(event)["choices"][0]["text"] for event in answer.events[:2]] == [
                " lorem",
                " ipsum",
            ]
            assert json.loads(answer.events[-2])["error"]["message"] == DEAD
            assert answer.events[-1] == "[DONE]"
        error, done = (await running.answer()).events
        assert json.loads(error)["error"] == {
            "message": DEAD,
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        assert done == "[DONE]"
        told = (await message.answer()).body.decode()
        assert told.startswith('event: error\ndata: {"type":"error","error":{"type":"InternalServerError"')
        answer = await whole.answer()
        assert (answer.status, answer.body.decode()) == (500, recorded_crash())
        for client in (running, message, whole):
            await client.leave()
        if how == "fault":
            async with asyncio.timeout(30):
                while not await refused(mock.port):
                    await asyncio.sleep(0.01)
            assert mock.server.crashed


def recorded_crash() -> str:
    lines = (FOLDER / "kill9_engine.jsonl").read_text().splitlines()
    whole = next(line for line in map(json.loads, lines) if line.get("req") == "nonstream")
    return str(whole["last_line"])


async def test_a_draining_engine_turns_new_calls_away_and_finishes_the_others() -> None:
    async with serving() as mock:
        running = await mock.begin(TEXT, body(stream=True, mock=HELD))
        await until(lambda: count(mock, "started") == 1)
        assert (await state(mock, state="drain"))["draining"]
        whole = await mock.call("POST", TEXT, body())
        choice = whole.json["choices"][0]
        assert (whole.status, choice["text"], choice["finish_reason"]) == (200, "", "abort")
        assert whole.json["usage"]["completion_tokens"] == 0
        assert (await mock.call("POST", TEXT, body(stream=True))).body == b"data: [DONE]\n\n"
        chat = await mock.call("POST", CHAT, body())
        assert chat.status == 500
        recorded = (FOLDER / "drain_newreq.txt").read_text()
        assert f"nonstream chat in drain: 500 b'{chat.body.decode()}'" in recorded
        stream = await mock.call("POST", CHAT, body(stream=True))
        assert (stream.head, stream.broken) == ("", True)
        assert (await mock.call("POST", MESSAGES_ROUTE, body())).json["type"] == "error"
        for path in ("/health", "/ping", "/v1/models", "/load"):
            assert (await mock.call("GET", path)).status == 200
        assert mock.app.driver.metrics.finished["abort"] == 2
        assert mock.pool()[0] == 1
        await running.leave()


async def test_sigterm_with_a_timeout_drains_and_then_closes_the_port() -> None:
    options = ("--port", "0", "--model", "tiny", "--shutdown-timeout", "60")
    with start(*SERVE, *options) as process:
        (port,) = await ports(process)
        running = await Client.connect(port)
        await running.ask("POST", TEXT, body(max_tokens=30, stream=True))
        await running.event()
        process.send_signal(signal.SIGTERM)
        late = await turned_away(port)
        assert late.body == b"data: [DONE]\n\n"
        answer = await running.answer()
        assert b'"finish_reason":"length"' in answer.head.encode() + answer.body
        await running.leave()
        assert await asyncio.to_thread(process.wait, 20) == 0


async def turned_away(port: int) -> Answer:
    """What a new stream gets once the signal has arrived."""
    while True:
        client = await Client.connect(port)
        await client.ask("POST", TEXT, body(max_tokens=1, stream=True))
        answer = await client.answer()
        await client.leave()
        if b"choices" not in answer.body:
            return answer


async def test_the_second_sigterm_ends_at_once() -> None:
    with start(*SERVE, "--port", "0", "--model", "tiny", "--shutdown-timeout", "60") as process:
        (port,) = await ports(process)
        running = await Client.connect(port)
        await running.ask("POST", TEXT, body(max_tokens=4000, stream=True))
        await running.event()
        process.send_signal(signal.SIGTERM)
        await turned_away(port)
        process.send_signal(signal.SIGTERM)
        answer = await running.answer()
        assert b'"finish_reason":"abort"' in answer.head.encode() + answer.body
        await running.leave()
        assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_crash_ends_the_program_with_status_1() -> None:
    with start(*SERVE, "--port", "0", "--model", "tiny") as process:
        (port,) = await ports(process)
        client = await Client.connect(port)
        await client.ask("POST", "/mock/state", {"state": "crash"})
        assert (await client.answer()).status == 200
        await client.leave()
        assert await asyncio.to_thread(process.wait, 20) == 1


# -- an engine that stands still -----------------------------------------------------------------------------------


async def silent(client: Client) -> bool:
    """True when not a byte comes."""
    try:
        await asyncio.wait_for(client.reader.read(1), 0.05)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(
    ("stop", "go"),
    [
        ({"state": "sleep"}, {"state": "wake"}),
        ({"state": "pause"}, {"state": "resume"}),
        ({"state": "sleep", "level": 2, "mode": "abort"}, {"state": "wake"}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_calls_to_an_engine_that_stands_still_get_no_token(
    stop: dict[str, Any], go: dict[str, Any], stream: bool
) -> None:
    async with serving() as mock:
        told = await state(mock, **stop)
        assert (told["paused"], told["sleeping_level"]) == (True, stop.get("level", stop["state"] == "sleep"))
        waiting = await mock.begin(TEXT, body(stream=stream))
        await until(lambda: count(mock, "received") == 1)
        assert (await mock.call("GET", "/health")).status == 200
        if stream:
            assert (await waiting.head()).startswith(b"HTTP/1.1 200 OK")
        assert await silent(waiting)
        assert mock.pool() == (0, 0, 0), "it is not counted as waiting"
        await state(mock, **go)
        answer = await waiting.answer()
        assert (answer.head.encode() + answer.body).count(b" dolor") == 1
        await waiting.leave()


async def test_a_call_can_put_its_engine_to_sleep() -> None:
    async with serving() as mock:
        client = await mock.begin(TEXT, body(stream=True, max_tokens=500, mock={"fail": "sleep:2"}))
        await client.event()
        await until(lambda: mock.app.driver.sleeping_level == 1)
        await state(mock, state="wake")
        answer = await client.answer()
        assert b'"finish_reason":"length"' in answer.head.encode() + answer.body
        await client.leave()
        await until(lambda: count(mock, "finished") == 1)


async def test_a_call_can_slow_its_engine_down_and_drain_it() -> None:
    async with serving() as mock:
        await mock.call("POST", TEXT, body(mock={"fail": "slow:3"}))
        assert (await mock.call("GET", "/mock/state")).json["slow"] == 3
        assert (await state(mock, state="slow", factor=0.5))["slow"] == 0.5
        answer = await mock.call("POST", TEXT, body(stream=True, mock={"fail": "drain:1"}))
        assert (len(answer.events), answer.events[-1]) == (4, "[DONE]")
        assert (await mock.call("GET", "/mock/state")).json["draining"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"state": "explode"},
        {"state": "sleep", "level": 3},
        {"state": "sleep", "mode": "x"},
        {"state": "slow"},
        {"state": "slow", "factor": 0},
        {"state": "pause", "mode": 5},
    ],
)
async def test_a_state_that_there_is_not_is_refused(fields: dict[str, Any]) -> None:
    async with serving() as mock:
        assert (await mock.call("POST", "/mock/state", fields)).status == 400
        told = (await mock.call("GET", "/mock/state")).json
        assert told == {"draining": False, "paused": False, "sleeping_level": 0, "dead": False, "slow": 1.0}


async def test_the_dev_mode_stops_and_ends_calls_by_id() -> None:
    async with serving(dev_mode=True) as mock:
        running = await mock.begin(TEXT, body(stream=True, request_id="one", mock=HELD))
        await until(lambda: count(mock, "started") == 1)
        wrong = await mock.call("POST", "/abort_requests", {"request_ids": "cmpl-one"})
        assert wrong.status == 400
        answer = await mock.call("POST", "/abort_requests", {"request_ids": ["cmpl-one", "nope"]})
        assert (answer.status, answer.json) == (200, {"status": "aborted", "aborted": 2})
        assert (await running.answer()).events == ["[DONE]"]
        await running.leave()
        assert (await mock.call("POST", "/pause?mode=keep")).json == {"status": "paused"}
        assert (await mock.call("GET", "/is_paused")).json == {"is_paused": True}
        assert (await mock.call("POST", "/pause?mode=x")).status == 400
        assert (await mock.call("POST", "/sleep?level=9")).status == 400
    async with serving() as mock:
        assert (await mock.call("POST", "/pause")).status == 404


# -- clients -------------------------------------------------------------------------------------------------------


async def test_a_slow_reader_gets_merged_chunks_and_costs_no_memory() -> None:
    """8,000 tokens would be 2 MB of events; unread, they wait as tokens behind a full buffer."""
    config = EngineConfig(model="tiny", blocks=1000, max_model_len=10000)
    tokens = 8000
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        async with serving(config, send_buffer_bytes=16384) as mock:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", mock.port))
            client = Client(*await asyncio.open_connection(sock=raw, limit=1024))
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            options = {"include_usage": True}
            wanted = body(prompt=[5], max_tokens=tokens, stream=True, stream_options=options)
            await client.ask("POST", TEXT, wanted)
            await until(lambda: mock.app.driver.engine.generation_tokens == tokens)
            (connection,) = mock.server.server_state.connections
            assert connection.transport.get_write_buffer_size() < 256 * 1024  # type: ignore[union-attr]
            client.reader._transport.resume_reading()  # type: ignore[attr-defined]
            answer = await client.answer()
            await client.leave()
    documents = [json.loads(event) for event in answer.events[:-1]]
    assert documents[-1]["usage"]["completion_tokens"] == tokens
    texts = [document["choices"][0]["text"] for document in documents[:-1]]
    assert len("".join(texts).split()) == tokens
    assert len(texts) < tokens


async def test_a_silent_stream_gets_keep_alive_comments() -> None:
    async with serving(sse_keep_alive_interval_seconds=0.01) as mock:
        client = await mock.begin(TEXT, body(stream=True, mock=HELD))
        await client.head()
        for _ in range(2):
            assert (await client.reader.readuntil(b"\r\n")).strip() == b"e"
            assert await client.reader.readexactly(16) == b": keep-alive\n\n\r\n"
        await client.leave()
        await until(lambda: count(mock, "aborted") == 1)


async def test_the_rank_header_chooses_the_engine() -> None:
    config = EngineConfig(model="tiny", data_parallel_size=2)
    async with serving(config) as mock:
        clients = []
        for number in (1, 1, 0):
            client = await Client.connect(mock.port)
            await client.ask("POST", TEXT, body(mock=HELD), f"x-data-parallel-rank: {number}\r\n")
            clients.append(client)
        await until(lambda: count(mock, "started") == 3)
        assert [len(engine.running) for engine in mock.app.driver.engines] == [1, 2]
        wrong = await mock.call("POST", TEXT, body(), "x-data-parallel-rank: 2\r\n")
        assert wrong.json["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."
        for client in clients:
            await client.leave()


async def test_the_log_tells_tokens_and_times() -> None:
    config = EngineConfig(model="tiny", block_size=16)
    async with serving(config, enable_server_load_tracking=True) as mock:
        await mock.call("POST", TEXT, body(prompt=[5] * 40))
        held = await mock.begin(TEXT, body(prompt=[5] * 40, n=2, mock=HELD))
        await until(lambda: count(mock, "started") == 2)
        assert (await mock.call("GET", "/load")).json == {"server_load": 1}
        first, second = (await mock.call("GET", "/mock/log")).json["requests"]
        assert [first[name] for name in ("prompt_tokens", "output_tokens", "cached_tokens")] == [40, 3, 0]
        times = first["times"]
        assert list(times) == ["received", "started", "first_token", "ended"]
        assert sorted(times.values()) == list(times.values())
        assert (second["output_tokens"], list(second["times"])) == (0, ["received", "started"])
        await held.leave()
        await until(lambda: count(mock, "aborted") == 1)
        second = mock.app.journal.shown()["requests"][1]
        assert (second["state"], second["cached_tokens"]) == ("aborted", 64)


async def test_several_names_are_served() -> None:
    async with serving(SMALL, aliases=("small", "other"), root="weights") as mock:
        cards = (await mock.call("GET", "/v1/models")).json["data"]
        assert [(card["id"], card["root"]) for card in cards] == [
            ("tiny", "weights"),
            ("small", "weights"),
            ("other", "weights"),
        ]
        assert (await mock.call("POST", TEXT, body(model="other"))).json["model"] == "tiny"
        wrong = await mock.call("POST", TEXT, body(model="nope"))
        text = "The model `nope` does not exist. Valid aliases: tiny, small, other."
        assert wrong.json["error"]["message"] == text
