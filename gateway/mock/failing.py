"""Playing the scripted failures of one call (see `faults`)."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from gateway.mock import openai
from gateway.mock.bodies import Refusal
from gateway.mock.exchange import JSON, Exchange
from gateway.mock.faults import Fault, Kind
from gateway.mock.progress import Extras
from gateway.mock.telling import Shape, Teller

GARBAGE = b'\x00\xff not an event\n{"id": \ndata {]\n\n'
BUSY = (
    "The engine is currently busy and cannot accept new requests."
    " Please try again later or on a different instance."
)
BACKLOG = (
    "The engine has reached its prefill token backlog limit."
    " Please try again later or on a different instance."
)
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_ERRORS = {
    400: ("The request was refused by a script.", "BadRequestError"),
    500: (DEAD, "InternalServerError"),
    503: (BUSY, "Service Unavailable"),
}


def error_body(status: int) -> dict[str, Any]:
    """The envelope of an error, worded as vLLM does where it has that status."""
    message, kind = _ERRORS.get(status, (HTTPStatus(status).phrase, HTTPStatus(status).phrase))
    return Refusal(status, message, kind).body


async def fail_early(exchange: Exchange, fault: Fault, stopped: asyncio.Event) -> bool:
    """Faults before the headers; False when the call goes on.  `stopped` ends a silence."""
    if fault.kind is Kind.STATUS and fault.number is not None:
        await exchange.json(fault.number, error_body(fault.number))
    elif fault.kind is Kind.RESET_BEFORE_HEADERS:
        exchange.reset()
    elif fault.silent:
        await _hang(exchange, stopped)
    else:
        exchange.gzip = fault.kind is Kind.GZIP
        return False
    return True


async def fail_stream(teller: Teller, fault: Fault, stopped: asyncio.Event) -> None:
    """Faults within a stream, after the events that were to go before."""
    exchange = teller.job.exchange
    if fault.kind is Kind.CUT_AFTER_EVENTS:
        exchange.cut()
    elif fault.kind in (Kind.RESET_AFTER_HEADERS, Kind.RESET_AFTER_EVENTS):
        exchange.reset()
    elif fault.kind is Kind.HANG:
        await _hang(exchange, stopped)
    else:
        await teller.say(_last_events(teller.shape, fault.kind))
        await exchange.end()


async def fail_whole(
    exchange: Exchange, fault: Fault, stopped: asyncio.Event, empty: Callable[[], dict[str, Any]]
) -> None:
    """The faults of a stream where there are no events to count; `empty` makes an answer without a token."""
    if fault.kind is Kind.GARBAGE:
        await exchange.answer(200, JSON, GARBAGE)
    elif fault.kind is Kind.ERROR_EVENT:
        await exchange.json(503, error_body(503))
    elif fault.kind in (Kind.DONE_ONLY, Kind.FINISH_ABORT):
        await exchange.json(200, empty())
    else:
        await exchange.start_promising(JSON, length=1000)
        if fault.number:
            await exchange.write(b'{"id":"')
        if fault.kind is Kind.HANG:
            await _hang(exchange, stopped)
        elif fault.kind is Kind.CUT_AFTER_EVENTS:
            exchange.cut()
        else:
            exchange.reset()


async def _hang(exchange: Exchange, stopped: asyncio.Event) -> None:
    """Silence until the client leaves, which cancels this, or the server stops."""
    await stopped.wait()
    exchange.reset()


def _last_events(shape: Shape, kind: Kind) -> list[bytes]:
    if kind is Kind.GARBAGE:
        return [GARBAGE]
    if kind is Kind.ERROR_EVENT:
        return shape.error(error_body(503))
    if kind is Kind.FINISH_ABORT:
        return [*shape.abort(), *shape.close(Extras())]
    return [openai.DONE]
