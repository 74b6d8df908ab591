"""An ASGI server of one request: it can leave and stop reading at a chosen moment, which httpx's transport cannot.

It keeps uvicorn's manners: `receive` gives the body and then waits until the client has left or the answer is
complete; `send` suspends until the client has read what was sent before, and does nothing once the client has left.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Coroutine[Any, Any, None],
]

CHAT = "/v1/chat/completions"
NEVER = 1 << 30


class Visitor:
    """One request and what came back.  `run` is its whole life, in the task of whoever awaits it."""

    def __init__(
        self,
        app: App,
        body: Mapping[str, Any] | bytes,
        *,
        path: str = CHAT,
        method: str = "POST",
        query: str = "",
        headers: Mapping[str, str] | None = None,
        pieces: int = 1,
        leave_after_receives: int = NEVER,
        leave_after_sends: int = NEVER,
        read_sends: int = NEVER,
        pause_seconds: float = 0.0,
    ) -> None:
        """`pieces` the body arrives in; the client leaves after so many calls of `receive` or `send` have returned,
        reads no more after `read_sends` messages, and takes `pause_seconds` to read each."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.complete = False
        self.unread = False
        """The next message of the answer waits until the last one was read."""
        self.begun = asyncio.Event()
        """The first byte of the answer's body is there."""
        self._app = app
        self._scope = _scope(path, headers or {}) | {
            "method": method,
            "query_string": query.encode("latin-1"),
        }
        self._pieces = _cut(body if isinstance(body, bytes) else json.dumps(body).encode(), pieces)
        self._left = asyncio.Event()
        self._over = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._receives_left = leave_after_receives
        self._sends_left = leave_after_sends
        self._reads_left = read_sends
        self._pause_seconds = pause_seconds

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """The payloads of the answer's events; comments are left out."""
        return [part[6:] for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]

    def header(self, name: str) -> str | None:
        """The only value of a header; None where it is missing."""
        found = [value.decode() for key, value in self.headers if key == name.encode()]
        assert len(found) < 2, f"{name} is there {len(found)} times"
        return found[0] if found else None

    async def run(self) -> "Visitor":
        await self._app(self._scope, self._receive, self._send)
        return self

    def leave(self) -> None:
        """The connection is gone: nobody reads or writes any more."""
        self._left.set()
        self._over.set()
        self._reading.set()

    def stop_reading(self) -> None:
        self._reading.clear()

    def read_on(self) -> None:
        self._reads_left = NEVER
        self._reading.set()

    async def _receive(self) -> Message:
        if self._receives_left <= 0:
            self.leave()
        self._receives_left -= 1
        if not self._left.is_set() and self._pieces:
            await asyncio.sleep(0)
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._until_read()
        if self._left.is_set():
            return
        self._note(message)
        self._sends_left -= 1
        if self._sends_left <= 0:
            self.leave()
        self._reads_left -= 1
        if self._reads_left <= 0:
            self.stop_reading()
        elif self._pause_seconds:
            self.stop_reading()
            asyncio.get_running_loop().call_later(self._pause_seconds, self._reading.set)

    async def _until_read(self) -> None:
        """What was sent before has been taken.  May run outside of any task."""
        if not self._reading.is_set():
            self.unread = True
            await self._reading.wait()
            self.unread = False

    def _note(self, message: Message) -> None:
        """Take a message; the order of messages is ASGI's or the test fails."""
        assert not self.complete, f"{message['type']} after the answer's end"
        if message["type"] == "http.response.start":
            assert not self.status, "a second start of the answer"
            self.status, self.headers = message["status"], list(message["headers"])
            assert all(name == name.lower() for name, _ in self.headers)
            return
        assert message["type"] == "http.response.body"
        assert self.status, "a body without a start"
        if message.get("body"):
            self.chunks.append(bytes(message["body"]))
            self.begun.set()
        if not message.get("more_body", False):
            self.complete = True
            self._over.set()


class Suspensions:
    """Runs a coroutine and counts how often it suspends; `strike` is called once, at the chosen suspension.

    It runs inside the task, between the suspension and the loop, so a `task.cancel()` in it hits exactly there.
    """

    def __init__(
        self, work: Coroutine[Any, Any, Any], at: int = NEVER, strike: Callable[[], None] | None = None
    ) -> None:
        self.count = 0
        self._work = work
        self._at = at
        self._strike = strike

    @property
    def struck(self) -> bool:
        return self.count >= self._at

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                waited_for = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self._at and self._strike is not None:
                self._strike()
            error = None
            try:
                yield waited_for
            except BaseException as thrown:
                error = thrown


def _scope(path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    given = {"content-type": "application/json", **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


def _cut(body: bytes, pieces: int) -> list[bytes]:
    size = max(1, -(-len(body) // pieces))
    return [body[start : start + size] for start in range(0, len(body), size)] or [b""]
