"""An engine whose model calls tools and keeps to schemas, which the mock's does not: in front of a mock, which does the
rest.  Its answers have the form of vLLM 0.32's own.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx

CITY = {"city": "Rome"}
PLACE = {"city": "Rome", "people": 2_800_000}
USAGE = {"prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49, "prompt_tokens_details": None}
ANTHROPICS_USAGE = {"input_tokens": 40, "output_tokens": 9}
_SHOWN = ("content-type", "x-request-id")


def calls_a_tool(body: dict[str, Any]) -> bool:
    """The client has told of tools, and of no answer of one yet."""
    said = body.get("messages", body.get("input"))
    text = json.dumps(said)
    answered = '"tool_result"' in text or '"role": "tool"' in text or '"function_call_output"' in text
    return bool(body.get("tools")) and not answered


def chat(body: dict[str, Any]) -> dict[str, Any] | list[bytes] | None:
    wants_schema = (body.get("response_format") or {}).get("type") == "json_schema"
    if not (calls_a_tool(body) or wants_schema):
        return None
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    if calls_a_tool(body):
        name = body["tools"][0]["function"]["name"]
        arguments = json.dumps(PLACE if "people" in json.dumps(body["tools"]) else CITY)
        call = {
            "id": "chatcmpl-tool-1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        said, reason = {"content": None, "tool_calls": [call]}, "tool_calls"
        parts = [
            {"tool_calls": [{"index": 0, **call, "function": {"name": name, "arguments": ""}}]},
            *({"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in halves(arguments)),
        ]
    else:
        said, reason = {"content": json.dumps(PLACE), "tool_calls": []}, "stop"
        parts = [{"content": part} for part in halves(json.dumps(PLACE))]
    if body.get("stream"):
        chunk = head | {"object": "chat.completion.chunk"}
        events = [{"role": "assistant", "content": ""}, *parts]
        frames = [chunk | {"choices": [choice(delta=delta)]} for delta in events]
        last = chunk | {"choices": [choice(delta={}, finish_reason=reason)]}
        counted = chunk | {"choices": [], "usage": USAGE}
        return [*map(data, [*frames, last, counted]), b"data: [DONE]\n\n"]
    message = {"role": "assistant", **said}
    return head | {
        "object": "chat.completion",
        "choices": [choice(message=message, finish_reason=reason)],
        "usage": USAGE,
    }


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "logprobs": None, "finish_reason": None, **fields}


def messages(body: dict[str, Any]) -> dict[str, Any] | list[bytes] | None:
    if not calls_a_tool(body):
        return None
    use = {"type": "tool_use", "id": "chatcmpl-tool-1", "name": body["tools"][0]["name"]}
    head = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": body["model"]}
    if not body.get("stream"):
        said = {"content": [use | {"input": CITY}], "stop_reason": "tool_use", "stop_sequence": None}
        return head | said | {"usage": ANTHROPICS_USAGE}
    begun = head | {"content": [], "stop_reason": None, "stop_sequence": None}
    deltas = [{"type": "input_json_delta", "partial_json": part} for part in halves(json.dumps(CITY))]
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    return [
        named(
            {"type": "message_start", "message": begun | {"usage": {"input_tokens": 40, "output_tokens": 0}}}
        ),
        named({"type": "content_block_start", "index": 0, "content_block": use | {"input": {}}}),
        *(named({"type": "content_block_delta", "index": 0, "delta": delta}) for delta in deltas),
        named({"type": "content_block_stop", "index": 0}),
        named({"type": "message_delta", "delta": end, "usage": ANTHROPICS_USAGE}),
        named({"type": "message_stop"}),
    ]


def responses(body: dict[str, Any]) -> dict[str, Any] | None:
    """Not streamed."""
    schema = ((body.get("text") or {}).get("format") or {}).get("type") == "json_schema"
    if calls_a_tool(body):
        name = body["tools"][0]["name"]
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name}
        item |= {"arguments": json.dumps(CITY), "status": "completed"}
    elif schema:
        text = {"type": "output_text", "text": json.dumps(PLACE), "annotations": []}
        item = {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
    else:
        return None
    usage = {"input_tokens": 40, "output_tokens": 9, "total_tokens": 49}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": body.get("request_id", "resp_1"), "object": "response", "created_at": 1, "status": "completed",
        "model": body["model"], "output": [item], "usage": usage, "error": None, "incomplete_details": None,
        "instructions": None, "metadata": None, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0,
        "tool_choice": "auto", "tools": body.get("tools", []),
    }  # fmt: skip


ANSWERS = {"/v1/chat/completions": chat, "/v1/messages": messages, "/v1/responses": responses}


def halves(text: str) -> tuple[str, str]:
    middle = len(text) // 2
    return text[:middle], text[middle:]


def data(frame: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def named(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\n" + data(event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: ClassVar[httpx.Client]
    bodies: ClassVar[list[dict[str, Any]]]

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(raw)
        self.bodies.append(body)
        answer = ANSWERS.get(self.path, lambda _: None)(body)
        if answer is None:
            self._pass_on(raw)
        elif isinstance(answer, list):
            self._say(200, "text/event-stream; charset=utf-8", b"".join(answer))
        else:
            self._say(200, "application/json", json.dumps(answer).encode())

    def _pass_on(self, body: bytes) -> None:
        headers = {"content-type": self.headers.get("content-type", "application/json")}
        found = self.engine.request(self.command, self.path, content=body, headers=headers)
        self._say(found.status_code, found.headers.get("content-type", ""), found.content)

    def _say(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: what matters is in `bodies`."""


class Model:
    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.url = url
        self.bodies = bodies
        """What it was asked, by the gateway."""


@contextmanager
def model(engine_url: str) -> Iterator[Model]:
    with httpx.Client(base_url=engine_url, trust_env=False, timeout=30) as client:
        handler = type("Handler", (_Handler,), {"engine": client, "bodies": []})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield Model(f"http://127.0.0.1:{server.server_port}", handler.bodies)
            finally:
                server.shutdown()
                thread.join()
