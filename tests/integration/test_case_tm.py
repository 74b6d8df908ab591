"""TM-01 to TM-04 and TM-07: what is reserved is what an engine may really use.

TM-07 asks that 99.9 % of calls reserve what they need.  Issue 7 sets another bound, which wins: of each class blocks
that were reserved too few are at most 0.5 % of those that were needed, once the estimate has learned.  TM-03's 5 ms are
not asserted here: a busy machine has no absolute times; what keeps them is that no byte of a payload is counted.
TM-04's (a) is charged in full, or shared where the fleet says so (DESIGN section 3).
"""

import asyncio
import base64
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.outcomes import Code, Refusal
from gateway.core.request import Endpoint, forward, parse
from tests.integration.front import Front, front, whole
from tests.integration.test_estimates import MODELS
from tests.processes import QUICK_STORE, GatewayProcess, Mock, World, world
from tests.wire import Answer, ask, blocks_of, post, soon

pytestmark = [pytest.mark.usefixtures("hang_up"), pytest.mark.timeout(120)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CONTEXT = 32_768
DEFAULT = 1024
"""`default_output_tokens` of a fleet that says nothing."""
Running = tuple[GatewayProcess, Mock]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with world() as here:
        mock = here.mock("--blocks", "4097", "--max-model-len", str(CONTEXT), "--speed", "inf")
        config, (key,) = here.config(
            [{"name": "only", "replicas": [{"url": mock.url, "prefill_tokens": CONTEXT}]}], store=QUICK_STORE
        )
        yield here.gateway(config, key), mock


async def one_call(running: Running, path: str, body: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """The answer, and what the engine has of the call in its journal."""
    gateway, mock = running
    mock.reset()
    answer = await ask(gateway.url, post(gateway.key, body, path))
    (record,) = mock.log()["requests"]
    return answer, record


def reserved(answer: Answer) -> int:
    return int(answer.headers["x-kvgate-reserved-blocks"])


def limit_of(answer: Answer) -> int:
    return int(answer.headers["x-kvgate-output-limit"])


def limits_in(body: dict[str, Any]) -> set[int]:
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    return {body[name] for name in names if body.get(name) is not None}


def chat(prompt: str = "word " * 100, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": prompt}], **fields}


# -- TM-01 ---------------------------------------------------------------------------------------------------------

SEVERAL: dict[str, tuple[dict[str, Any], int]] = {
    "a tiny one and a huge one": ({"max_tokens": 1, "max_completion_tokens": 8000}, 8000),
    "a huge one and a tiny one": ({"max_tokens": 8000, "max_completion_tokens": 1}, 1),
    "null and one": ({"max_completion_tokens": None, "max_tokens": 50}, 50),
    "one and null": ({"max_completion_tokens": 50, "max_tokens": None}, 50),
    "two nulls": ({"max_completion_tokens": None, "max_tokens": None}, DEFAULT),
    "at its least": ({"max_completion_tokens": 40, "min_tokens": 40}, 40),
}


@pytest.mark.parametrize(("fields", "limit"), SEVERAL.values(), ids=SEVERAL)
async def test_tm01_the_limit_that_the_engine_honours_is_reserved(
    running: Running, fields: dict[str, Any], limit: int
) -> None:
    """vLLM reads `max_completion_tokens` first; the forwarded body has one limit, however many fields say it."""
    answer, record = await one_call(running, CHAT, chat(**fields, ignore_eos=True))
    assert (answer.status, limit_of(answer)) == (200, limit)
    assert limits_in(record["body"]) == {limit}
    assert record["output_tokens"] == limit
    needed = blocks_of(record["prompt_tokens"], limit)
    assert needed <= reserved(answer) <= needed + blocks_of(record["prompt_tokens"], 1)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_tm01_more_than_may_be_is_no_least(running: Running, field: str) -> None:
    gateway, mock = running
    mock.reset()
    answer = await ask(gateway.url, post(gateway.key, chat(**{field: 10}, min_tokens=4000), CHAT))
    assert (answer.status, answer.code) == (400, Code.INVALID_VALUE)
    error = answer.json()["error"]
    assert error["param"] == "min_tokens"
    assert all(word in error["message"] for word in ("4000", f"`{field}`", "10"))
    assert mock.log()["received"] == 0


LIMITS = st.one_of(st.none(), st.just("absent"), st.integers(1, 9000))


@given(LIMITS, LIMITS, st.one_of(st.just("absent"), st.integers(0, 9000)), st.randoms(), st.integers(1, 8192))
def test_tm01_whatever_fields_say_a_limit_the_body_has_one(
    tokens: Any, completion: Any, least: Any, order: random.Random, reserved_for: int
) -> None:
    """The one that was reserved for, in whatever order the fields stand, and nothing else of the body differs."""
    said = {"max_tokens": tokens, "max_completion_tokens": completion, "min_tokens": least}
    fields = [(name, value) for name, value in said.items() if value != "absent"]
    fields += [("model", "demo"), ("messages", [{"role": "user", "content": '"max_tokens": 7'}])]
    order.shuffle(fields)
    body = dict(fields)
    winner = next((v for v in (body.get("max_completion_tokens"), body.get("max_tokens")) if v), None)
    request = parse(Endpoint.CHAT, json.dumps(body).encode(), 16)
    if winner is not None and body.get("min_tokens", 0) > winner:
        assert isinstance(request, Refusal)
        assert request.param == "min_tokens"
        return
    assert not isinstance(request, Refusal)
    assert request.output_limit == winner
    sent = json.loads(forward(request, reserved_for))
    assert limits_in(sent) == {reserved_for}
    assert {k: v for k, v in sent.items() if not k.startswith("max_")} == {
        k: v for k, v in body.items() if not k.startswith("max_")
    }


# -- TM-02 ---------------------------------------------------------------------------------------------------------

IDS = [7] * 1000
WORDS = "word " * 1000
WITHOUT: dict[str, tuple[str, dict[str, Any], int]] = {
    "a chat": (CHAT, chat(WORDS), DEFAULT),
    "a completion": (COMPLETIONS, {"model": "demo", "prompt": IDS}, 16),
    "a chat of null": (CHAT, chat(WORDS, max_tokens=None), DEFAULT),
    "a completion of null": (COMPLETIONS, {"model": "demo", "prompt": IDS, "max_tokens": None}, 16),
    "a response": (RESPONSES, {"model": "demo", "input": WORDS}, DEFAULT),
    "a response of null": (RESPONSES, {"model": "demo", "input": WORDS, "max_output_tokens": None}, DEFAULT),
    "a stream": (CHAT, chat(WORDS, stream=True), DEFAULT),
}


@pytest.mark.parametrize(("path", "body", "limit"), WITHOUT.values(), ids=WITHOUT)
async def test_tm02_a_call_without_a_limit_gets_one_and_is_reserved_for_that(
    running: Running, path: str, body: dict[str, Any], limit: int
) -> None:
    answer, record = await one_call(running, path, body | {"ignore_eos": True})
    assert (answer.status, limit_of(answer)) == (200, limit)
    assert limits_in(record["body"]) == {limit}
    assert record["output_tokens"] == limit, "the engine stops there"
    assert reserved(answer) >= blocks_of(record["prompt_tokens"], limit)
    if body.get("prompt") == IDS:
        assert reserved(answer) == blocks_of(1000, limit)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(WORDS, max_tokens=31_900)),
        (COMPLETIONS, {"model": "demo", "prompt": IDS, "max_tokens": 31_900}),
        (MESSAGES, chat(WORDS, max_tokens=31_900)),
        (RESPONSES, {"model": "demo", "input": WORDS, "max_output_tokens": 31_900}),
    ],
)
async def test_tm02_a_limit_above_the_room_left_is_clamped_in_sight(
    running: Running, path: str, body: dict[str, Any]
) -> None:
    answer, record = await one_call(running, path, body | {"mock": {"output_tokens": 1}})
    limit = limit_of(answer)
    assert answer.status == 200
    assert limit < 31_900
    assert limits_in(record["body"]) == {limit}
    assert record["prompt_tokens"] + limit <= CONTEXT
    assert reserved(answer) == CONTEXT // 16


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_tm02_a_limit_above_the_context_is_refused(running: Running, path: str) -> None:
    gateway, mock = running
    mock.reset()
    body = chat() if path == CHAT else {"model": "demo", "prompt": IDS}
    answer = await ask(gateway.url, post(gateway.key, body | {"max_tokens": CONTEXT + 1}, path))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert str(CONTEXT) in answer.json()["error"]["message"]
    assert mock.log()["received"] == 0


# -- TM-03 ---------------------------------------------------------------------------------------------------------

MEDIA_MOST = 4096
"""Tokens of one part."""
KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "image": lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    "audio": lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    "video": lambda data: {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
    "unknown": lambda data: {"type": "hologram", "hologram": {"data": data}},
}


def payload(size: int) -> str:
    return base64.b64encode(random.Random(size).randbytes(size * 3 // 4)).decode()


def looking(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": "look"}, *parts]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 8}


async def blocks_for(running: Running, body: dict[str, Any]) -> int:
    """That were reserved; the body arrived as it was sent, whatever this engine of texts makes of it."""
    answer, record = await one_call(running, CHAT, body)
    assert "x-kvgate-reason" not in answer.headers, answer
    assert record["sha256"] == hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return reserved(answer)


@pytest.mark.parametrize("kind", KINDS)
async def test_tm03_a_part_counts_by_its_kind_and_never_by_its_bytes(running: Running, kind: str) -> None:
    make = KINDS[kind]
    text = await blocks_for(running, looking())
    small, large = [await blocks_for(running, looking(make(payload(size)))) for size in (300, 400_000)]
    assert text < small == large <= text + MEDIA_MOST // 16
    four = await blocks_for(running, looking(*[make(payload(100_000))] * 4))
    each = small - text
    assert 4 * each - 4 <= four - text <= 4 * each + 4


async def test_tm03_a_url_counts_as_its_data_would(running: Running) -> None:
    at = {"type": "image_url", "image_url": {"url": "https://host.example/a.png"}}
    data = await blocks_for(running, looking(KINDS["image"](payload(400_000))))
    assert await blocks_for(running, looking(at)) == data


# -- TM-04 ---------------------------------------------------------------------------------------------------------

EACH = blocks_of(1600, 160)
SEQUENCES: dict[str, tuple[dict[str, Any], int]] = {
    "n": ({"n": 8}, 8),
    "best_of": ({"best_of": 4, "n": 1}, 4),
    "n above best_of": ({"best_of": 2, "n": 3}, 3),
    "prompts": ({"prompt": [[7] * 1600] * 5}, 5),
    "prompts and n": ({"prompt": [[7] * 1600] * 5, "n": 2}, 10),
    "a beam": ({"n": 4, "use_beam_search": True}, 4),
}


@pytest.mark.parametrize(("fields", "sequences"), SEQUENCES.values(), ids=SEQUENCES)
async def test_tm04_each_sequence_has_blocks_of_its_own(
    running: Running, fields: dict[str, Any], sequences: int
) -> None:
    gateway, _ = running
    body = {"model": "demo", "prompt": [7] * 1600, "max_tokens": 160, **fields}
    answer, record = await one_call(running, COMPLETIONS, body)
    assert answer.status == 200
    assert reserved(answer) == sequences * EACH >= 100 + sequences * 10
    assert record["output_tokens"] <= sequences * 160
    await soon(gateway.is_quiet, "all of them were given back, once")


async def test_tm04_a_shared_prompt_counts_once_where_the_fleet_says_so(new_world: World) -> None:
    mock = await asyncio.to_thread(new_world.mock, "--blocks", "1001", "--speed", "inf")
    pools = [{"name": "only", "replicas": [mock.url]}]
    config, (key,) = new_world.config(pools, store=QUICK_STORE, fleet={"share_prompt_of_n": True})
    gateway = await asyncio.to_thread(new_world.gateway, config, key)
    body = {"model": "demo", "prompt": [7] * 1600, "max_tokens": 160, "n": 8}
    answer = await ask(gateway.url, post(key, body))
    assert answer.status == 200
    shared = (1600 - 1) // 16
    assert reserved(answer) == shared + 8 * (EACH - shared) >= 180
    assert mock.metric("vllm:num_preemptions_total") == 0
    await soon(gateway.is_quiet, "all of it was given back, once")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["n", "best_of"])
@pytest.mark.parametrize("value", [100_000, 17, 0, -1, "3", 1.5, True, 2**31, 10**30])
async def test_tm04_a_number_that_cannot_be_is_refused(
    running: Running, path: str, field: str, value: object
) -> None:
    gateway, mock = running
    mock.reset()
    body = chat() if path == CHAT else {"model": "demo", "prompt": IDS}
    answer = await ask(gateway.url, post(gateway.key, body | {field: value}, path))
    too_many = value in (100_000, 17)
    assert (answer.status, answer.code) == (
        400,
        Code.TOO_MANY_SEQUENCES if too_many else Code.INVALID_VALUE,
    )
    assert answer.json()["error"]["param"] == field
    assert mock.log()["received"] == 0


# -- TM-07 ---------------------------------------------------------------------------------------------------------

CHARS = 20_000
LEARNED, JUDGED = 12, 12
"""Calls of each class before and while it is judged."""
UNDER_MOST, OVER_MOST = 0.005, 0.30
ENGLISH = "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word"


def prose(chance: random.Random) -> str:
    return " ".join(chance.choices(ENGLISH.split(), k=CHARS // 2))[:CHARS]


def minified(chance: random.Random) -> str:
    rows = [
        {"id": chance.randrange(10**6), "name": chance.choice(ENGLISH.split()), "ok": chance.random() < 0.5}
        for _ in range(600)
    ]
    return json.dumps(rows, separators=(",", ":"))[:CHARS]


CLASSES: dict[str, Callable[[random.Random], str]] = {
    "English": prose,
    "CJK": lambda chance: "".join(chr(chance.randrange(0x4E00, 0x9FA6)) for _ in range(CHARS)),
    "emoji": lambda chance: "".join(chr(chance.randrange(0x1F600, 0x1F650)) for _ in range(CHARS)),
    "base64": lambda chance: base64.b64encode(chance.randbytes(CHARS)).decode()[:CHARS],
    "digits": lambda chance: "".join(chance.choices("0123456789", k=CHARS)),
    "JSON": minified,
    "spaces": lambda _: " " * CHARS,
}
CONTEXT_LONG = 131_072


@asynccontextmanager
async def learning(here: World) -> AsyncIterator[tuple[GatewayProcess, Front]]:
    """A gateway that learns how a model counts, in front of an engine that answers as it is told."""
    mock = await asyncio.to_thread(
        here.mock, "--blocks", "16385", "--max-model-len", str(CONTEXT_LONG), "--speed", "inf"
    )
    async with front(mock.url) as door:
        row = {"url": door.url, "prefill_tokens": CONTEXT_LONG}
        config, (key,) = here.config(
            [{"name": "only", "replicas": [row]}], store=QUICK_STORE, fleet={"token_factor": None}
        )
        gateway = await asyncio.to_thread(here.gateway, config, key)
        try:
            yield gateway, door
        finally:
            await asyncio.to_thread(gateway.stop)


def told(prompt_tokens: int) -> bytes:
    """An answer of one token."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 1,
        "total_tokens": prompt_tokens + 1,
    }
    shown = {"id": "c", "object": "chat.completion", "created": 1, "model": "demo", "choices": [choice]}
    return whole(200, json.dumps(shown | {"usage": usage}).encode())


@pytest.mark.parametrize("model", MODELS)
async def test_tm07_every_class_of_text_has_what_it_needs(new_world: World, model: str) -> None:
    real, chance = MODELS[model]().count, random.Random(11)
    over: dict[str, float] = {}
    async with learning(new_world) as (gateway, door):
        for number in range(LEARNED + JUDGED):
            for name, make in CLASSES.items():
                text = make(chance)
                needs = await asyncio.to_thread(real, text) + 8  # what a template writes around it
                door.answers["POST"] = told(needs)
                answer = await ask(gateway.url, post(gateway.key, chat(text, max_tokens=1), CHAT))
                assert answer.status == 200, answer
                needed = blocks_of(needs, 1)
                if number >= LEARNED:
                    missing = needed - reserved(answer)
                    assert missing <= UNDER_MOST * needed + 1, (name, reserved(answer), needed)
                    over[name] = over.get(name, 0.0) + max(0, -missing) / needed / JUDGED
        print(f"\n{model}: {', '.join(f'{name} {part:.1%}' for name, part in over.items())} too many")
        assert over["English"] <= OVER_MOST
        page = gateway.metrics()
        assert (
            f'kvgate_estimate_error_ratio_bucket{{fleet="demo",le="+Inf"}} {len(CLASSES) * (LEARNED + JUDGED)}.0'
            in page
        )
