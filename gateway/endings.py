"""How a call ends that was not answered whole: in which words, and what its client is still told."""

import math

from gateway.call import Call, Client
from gateway.core.lifecycle import Action, Event, Step
from gateway.core.outcomes import Code, Refusal
from gateway.core.rests import busy_seconds

WORDS = {
    Code.DRAINING: "this gateway is shutting down",
    Code.LEASE_LOST: "the place of this request was given to another one while the store was out of reach",
    Code.CUT: "an operator has ended the calls of this key",
    Code.RESPONSE_CANCELLED: "the response was cancelled, or took longer than upstream.background_seconds",
    Code.UPSTREAM_ERROR: "the engine failed or could not be reached",
    Code.UPSTREAM_TIMEOUT: "the engine did not answer in time",
}
RETRY_MS = {Code.DRAINING: 1000, Code.LEASE_LOST: 1000}
SHOULD_RETRY = {Code.CUT: False}
NOBODY_ANSWERS = Refusal(Code.NO_BACKEND, "no replica of the model answers", retry_ms=1000)


def refusal_of(code: Code) -> Refusal:
    """An ending from outside, in words."""
    return Refusal(code, WORDS[code], retry_ms=RETRY_MS.get(code), should_retry=SHOULD_RETRY.get(code))


async def tell(call: Call, client: Client, ending: Refusal | Step) -> None:
    """Write what the client is still owed; everything was given back before."""
    if isinstance(ending, Refusal):
        call.advance(Event.REFUSED)
        call.reason, call.waited = ending.code, ending.waited
        await client.refuse(call, ending)
    elif ending.code in WORDS:
        refusal = refusal_of(ending.code)
        if ending.action is Action.ERROR_EVENT:
            await client.fail(call, refusal)
        elif ending.action is Action.ANSWER:
            await client.refuse(call, refusal)


def no_room(rest_seconds: float | None) -> Refusal:
    """`rest_seconds`: for which the engine asks to be left alone, if it says."""
    words = "the engine has no room for this call, and no other one may be asked"
    return Refusal(Code.NO_BACKEND, words, retry_ms=math.ceil(busy_seconds(rest_seconds) * 1000))
