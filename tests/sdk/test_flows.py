"""The basic flows that OpenAI and Anthropic document for their clients, through the gateway: tools, structured output,
async clients, exceptions, retries.  Plain chats, streams, responses and embeddings are in the files beside this one.
"""

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.processes import QUICK_STORE, GatewayProcess, Mock, wait_until, world
from tests.sdk.model import CITY, PLACE, Model, model

HI = [{"role": "user", "content": "hi"}]
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ANTHROPICS_TOOL = {"name": "weather", "description": "of a city", "input_schema": PARAMETERS}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


class Place(BaseModel):
    city: str
    people: int


class Scene:
    def __init__(self, gateway: GatewayProcess, keys: list[str], engine: Model) -> None:
        self.gateway = gateway
        self.keys = keys
        self.engine = engine


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Keys: one without limits, one for another model, one of no calls, one of short outputs."""
    with world() as here:
        mock = here.mock("--blocks", "1000", "--speed", "inf", "--responses-store")
        with model(mock.url) as engine:
            keys: list[dict[str, Any]] = [
                {},
                {"models": ["another"]},
                {"limits": {"requests_max": 0}},
                {"limits": {"max_output_tokens": 10}},
            ]
            pools = [{"name": "only", "replicas": [engine.url]}]
            config, secrets = here.config(pools, *keys, store=QUICK_STORE, server={"body_bytes_max": 100_000})
            yield Scene(here.gateway(config, secrets[0]), secrets, engine)


@pytest.fixture
def sdk(scene: Scene) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scene.gateway.url}/v1", api_key=scene.keys[0], max_retries=0) as made:
        yield made


@pytest.fixture
def claude(scene: Scene) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scene.gateway.url, api_key=scene.keys[0], max_retries=0) as made:
        yield made


# -- tools, and their results ----------------------------------------------------------------------------------------


def test_a_chat_with_a_tool(sdk: openai.OpenAI, scene: Scene) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": ASKED, "tools": [TOOL], "max_tokens": 20}
    first = sdk.chat.completions.create(**asked)
    (call,) = first.choices[0].message.tool_calls or []
    assert first.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CITY)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    said = first.choices[0].message.model_dump(exclude_none=True)
    second = sdk.chat.completions.create(**asked | {"messages": [*ASKED, said, result]})
    assert second.choices[0].message.content
    assert scene.engine.bodies[-1]["messages"] == [*ASKED, said, result]
    assert scene.engine.bodies[-1]["tools"] == [TOOL]


def test_a_stream_with_a_tool(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="demo", messages=ASKED, tools=[TOOL], max_tokens=20) as stream:  # type: ignore[list-item]
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == CITY


def test_a_message_with_a_tool(claude: anthropic.Anthropic, scene: Scene) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": [ANTHROPICS_TOOL], "max_tokens": 20}
    first = claude.messages.create(**asked, messages=ASKED)
    (use,) = first.content
    assert (first.stop_reason, use.type) == ("tool_use", "tool_use")
    assert (use.name, use.input) == ("weather", CITY)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    said = {"role": "assistant", "content": [use.model_dump(exclude_none=True)]}
    after = [*ASKED, said, {"role": "user", "content": [result]}]
    second = claude.messages.create(**asked, messages=after)
    assert second.content[0].type == "text"
    assert scene.engine.bodies[-1]["messages"] == after
    counted = claude.messages.count_tokens(model="demo", messages=after, tools=[ANTHROPICS_TOOL])  # type: ignore[arg-type,list-item]
    assert counted.input_tokens == second.usage.input_tokens


def test_a_message_stream_with_a_tool(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="demo", messages=ASKED, tools=[ANTHROPICS_TOOL], max_tokens=20
    ) as stream:  # type: ignore[list-item]
        final = stream.get_final_message()
    (use,) = final.content
    assert use.type == "tool_use"
    assert (use.input, final.stop_reason) == (CITY, "tool_use")


def test_a_response_with_a_tool(sdk: openai.OpenAI, scene: Scene) -> None:
    first = sdk.responses.create(
        model="demo", input=ASKED, tools=[RESPONSES_TOOL], max_output_tokens=20, store=False
    )  # type: ignore[arg-type,list-item]
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == CITY
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after: Any = [*ASKED, call.model_dump(exclude_none=True), result]
    sdk.responses.create(model="demo", input=after, tools=[RESPONSES_TOOL], max_output_tokens=5, store=False)  # type: ignore[list-item]
    assert scene.engine.bodies[-1]["input"] == after


# -- structured output -----------------------------------------------------------------------------------------------


def test_a_chat_of_a_form(sdk: openai.OpenAI) -> None:
    parsed = sdk.chat.completions.parse(model="demo", messages=ASKED, response_format=Place, max_tokens=40)
    assert parsed.choices[0].message.parsed == Place(**PLACE)


def test_a_stream_of_a_form(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="demo", messages=ASKED, response_format=Place, max_tokens=40
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == Place(**PLACE)


def test_a_response_of_a_form(sdk: openai.OpenAI) -> None:
    parsed = sdk.responses.parse(model="demo", input="Rome?", text_format=Place, max_output_tokens=40)
    assert parsed.output_parsed == Place(**PLACE)


# -- asynchronous clients ----------------------------------------------------------------------------------------------


@pytest.fixture
async def async_sdk(scene: Scene) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{scene.gateway.url}/v1", api_key=scene.keys[0], max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def async_claude(scene: Scene) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=scene.gateway.url, api_key=scene.keys[0], max_retries=0
    ) as made:
        yield made


async def test_openais_asynchronous_client(async_sdk: openai.AsyncOpenAI) -> None:
    whole = await async_sdk.chat.completions.create(model="demo", messages=HI, max_tokens=5)
    assert whole.usage
    assert whole.usage.completion_tokens == 5
    stream = await async_sdk.chat.completions.create(model="demo", messages=HI, max_tokens=5, stream=True)
    assert len([chunk async for chunk in stream if chunk.choices[0].delta.content]) == 5
    text = await async_sdk.completions.create(model="demo", prompt="once", max_tokens=4)
    assert text.usage
    assert text.usage.completion_tokens == 4
    made = await async_sdk.responses.create(model="demo", input="hi", max_output_tokens=4)
    assert (await async_sdk.responses.retrieve(made.id)).output_text == made.output_text
    went_on = await async_sdk.responses.create(
        model="demo", input="and?", max_output_tokens=4, previous_response_id=made.id
    )
    assert went_on.previous_response_id == made.id
    assert [each.id async for each in async_sdk.models.list()] == ["demo"]


async def test_anthropics_asynchronous_client(async_claude: anthropic.AsyncAnthropic) -> None:
    whole = await async_claude.messages.create(model="demo", messages=HI, max_tokens=5)
    assert whole.usage.output_tokens == 5
    async with async_claude.messages.stream(model="demo", messages=HI, max_tokens=5) as stream:
        assert len([text async for text in stream.text_stream]) == 5
    counted = await async_claude.messages.count_tokens(model="demo", messages=HI)
    assert counted.input_tokens == whole.usage.input_tokens


# -- exceptions ------------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"model": "demo", "messages": HI, "max_tokens": 5}
LONG = [{"role": "user", "content": "x" * 120_000}]
WRONG: dict[str, tuple[int | str, dict[str, Any], str, type[Exception], type[Exception]]] = {
    "a number": (0, {"max_tokens": 0}, "invalid_value", openai.BadRequestError, anthropic.BadRequestError),
    "too much output": (
        3, {"max_tokens": 11}, "output_limit_exceeded", openai.BadRequestError, anthropic.BadRequestError,
    ),
    "no key": (
        "kvg_wrong", {}, "invalid_api_key", openai.AuthenticationError, anthropic.AuthenticationError,
    ),
    "no right": (
        1, {}, "model_not_allowed", openai.PermissionDeniedError, anthropic.PermissionDeniedError,
    ),
    "no model": (
        0, {"model": "nope"}, "model_not_found", openai.NotFoundError, anthropic.NotFoundError,
    ),
    "too large": (
        0, {"messages": LONG}, "body_too_large", openai.APIStatusError, anthropic.RequestTooLargeError,
    ),
    "no calls": (2, {}, "quota_exceeded", openai.RateLimitError, anthropic.RateLimitError),
}  # fmt: skip


@pytest.mark.parametrize(("key", "fields", "code", "theirs", "anthropics"), WRONG.values(), ids=WRONG)
def test_a_refusal_is_an_exception_of_its_kind(
    scene: Scene,
    sdk: openai.OpenAI,
    claude: anthropic.Anthropic,
    key: int | str,
    fields: dict[str, Any],
    code: str,
    theirs: type[Exception],
    anthropics: type[Exception],
) -> None:
    secret = scene.keys[key] if isinstance(key, int) else key
    with pytest.raises(theirs) as raised:
        sdk.with_options(api_key=secret).chat.completions.create(**CHAT | fields)
    assert isinstance(raised.value, openai.APIStatusError)
    assert (raised.value.code, bool(raised.value.request_id)) == (code, True)
    with pytest.raises(anthropics) as told:
        claude.with_options(api_key=secret).messages.create(**CHAT | fields)
    assert isinstance(told.value, anthropic.APIStatusError)
    assert isinstance(told.value.body, dict)
    assert told.value.body["error"]["code"] == code
    with pytest.raises(openai.APIStatusError) as streamed:
        sdk.with_options(api_key=secret).chat.completions.create(**CHAT | fields, stream=True)
    assert streamed.value.code == code


def test_an_engine_that_fails_is_an_exception_of_its_kind() -> None:
    with world() as here:
        mock = here.mock("--blocks", "100", "--speed", "inf")
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
        gateway = here.gateway(config, key)
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as sdk,
            anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0) as claude,
        ):
            mock.fail("status:500", 2)
            with pytest.raises(openai.InternalServerError) as failed:
                sdk.chat.completions.create(**CHAT)
            assert (failed.value.status_code, failed.value.code) == (502, "upstream_error")
            with pytest.raises(anthropic.InternalServerError):
                claude.messages.create(**CHAT)
            mock.stop()
            wait_until(lambda: gateway.client.get("/health/ready").status_code == 503, "it is gone")
            with pytest.raises(openai.InternalServerError) as gone:
                sdk.chat.completions.create(**CHAT)
            assert (gone.value.status_code, gone.value.code) == (503, "no_backend")


# -- retries ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> Iterator[tuple[GatewayProcess, Mock]]:
    """One engine, of which a call may have all, and no queue."""
    with world() as here:
        mock = here.mock("--blocks", "64", "--max-model-len", "1024", "--step-base-ms", "1")
        pools = [{"name": "only", "replicas": [mock.url]}]
        config, (key,) = here.config(pools, store=QUICK_STORE, queue={"depth_max": 0})
        yield here.gateway(config, key), mock


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_a_client_comes_back_when_it_was_told_to(full: tuple[GatewayProcess, Mock], client: str) -> None:
    """It is refused, waits as long as `Retry-After` says, and is served; nobody but it knows."""
    gateway, _ = full
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as sdk,
        anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key, max_retries=9) as claude,
    ):
        held = _hold(gateway)
        with pytest.raises(openai.RateLimitError) as refused:
            sdk.chat.completions.create(**CHAT)
        assert refused.value.code == "capacity_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        before = gateway.metric("kvgate_refusal_seconds_count")
        answers: list[Any] = []
        ask = (
            sdk.with_options(max_retries=9).chat.completions.create
            if client == "openai"
            else claude.messages.create
        )
        thread = threading.Thread(target=lambda: answers.append(ask(**CHAT)))
        thread.start()
        wait_until(lambda: gateway.metric("kvgate_refusal_seconds_count") > before, "it was refused")
        held.close()
        thread.join()
        assert len(answers) == 1
    wait_until(gateway.is_quiet, "nothing is held")


def _hold(gateway: GatewayProcess) -> Any:
    """All blocks, until it is closed."""
    body = {"model": "demo", "prompt": [7] * 16, "max_tokens": 63 * 16 - 15, "stream": True}
    stack = contextlib.ExitStack()
    stack.enter_context(gateway.client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}))
    return stack
