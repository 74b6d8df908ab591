"""Bounds of an exchange with an engine."""

from dataclasses import dataclass

HEADER_BYTES_MAX = 16_384
"""The longest header of an answer, name and value together."""

HEADERS_MAX = 100
"""The most headers of an answer."""

HEAD_BYTES_MAX = 262_144
"""What may arrive of a head before it is complete, counted by the piece."""

KEEPALIVE_SECONDS = 4.0
"""Below the 5 s of uvicorn, which serves vLLM: a call must not start on a connection just being closed."""

IDLE_CONNECTIONS_MAX = 1024
"""Kept for one engine after a wave of calls; more are closed."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """How long an engine may take for each part of an answer; all in seconds."""

    connect_seconds: float = 2
    """Address look-up, TCP and TLS together."""
    headers_seconds: float = 120
    """From sending the request to the answer's head."""
    first_event_seconds: float = 120
    """From the head of a stream to its first data event; comments do not count."""
    idle_seconds: float = 60
    """Between two pieces of a body."""
