"""uvicorn's HTTP/1.1, with the error envelope also for bytes that are not HTTP and so never become a request."""

import secrets

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.core.outcomes import Code, Refusal
from gateway.http.errors import answer_of

NOT_HTTP = Refusal(Code.INVALID_VALUE, "what arrived on this connection is not a valid HTTP/1.1 request")


class ProxyProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`."""

    def send_400_response(self, msg: str) -> None:
        """End the connection; bytes that follow a request whose answer has begun get no answer of their own.

        A 400 in the middle of another answer would be read as a part of it.
        """
        if not _is_under_way(self.cycle):
            self.transport.write(_not_http())
        self.transport.close()


def _is_under_way(answer: RequestResponseCycle | None) -> bool:
    """None before a connection's first request."""
    return answer is not None and answer.response_started and not answer.response_complete


def _not_http() -> bytes:
    answer = answer_of(NOT_HTTP, overload_status=429, jitter=1)
    request_id = (b"x-request-id", secrets.token_hex(16).encode())
    lines = [b"%b: %b\r\n" % header for header in (*answer.headers, request_id, (b"connection", b"close"))]
    return b"".join((STATUS_LINE[answer.status], *lines, b"\r\n", answer.body))
