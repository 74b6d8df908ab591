"""The official clients of OpenAI and Anthropic against the gateway and a mock engine, all real processes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.processes import GatewayProcess, Mock, wait_until, world

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=["guaranteed", "elastic"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[GatewayProcess, Mock]]:
    with world() as here:
        mock = here.mock("--blocks", "1000", "--step-base-ms", "2")
        pools = [{"name": "short", "mode": request.param, "replicas": [mock.url]}]
        config, (key,) = here.config(pools, routes={"pass_through": ["/load"]})
        yield here.gateway(config, key), mock


@pytest.fixture
def client(running: tuple[GatewayProcess, Mock]) -> Iterator[openai.OpenAI]:
    gateway, _ = running
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 5


def test_chat_stream(client: openai.OpenAI) -> None:
    """A client that did not ask for usage gets no usage frame."""
    chunks = list(client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len([c for c in chunks if c.choices[0].delta.content]) == 5


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_stream_with_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
        )
    )
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [0, 1, 2, 3, 4, 5, 5]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="once")
    assert answer.usage
    assert answer.usage.completion_tokens == 16


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="demo", prompt=["once", "twice"], max_tokens=4, stream=True)
    )
    assert {c.choices[0].index for c in chunks} == {0, 1}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=0)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "max_tokens")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="kvg_wrong").models.list()


async def test_async_early_close(running: tuple[GatewayProcess, Mock]) -> None:
    """Closing a stream early aborts the engine's work and gives everything back."""
    gateway, mock = running
    mock.reset()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        for _ in range(5):
            stream = await client.chat.completions.create(
                model="demo", messages=MESSAGES, max_tokens=2000, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
    await asyncio.to_thread(wait_until, gateway.is_quiet, "nothing is held")
    await asyncio.to_thread(wait_until, lambda: mock.log()["aborted"] == 5, "the engine saw each abort")


def test_what_the_operator_allows_passes(running: tuple[GatewayProcess, Mock]) -> None:
    gateway, _ = running
    assert gateway.client.get("/load").json() == {"server_load": 0}
    assert gateway.client.post("/tokenize", json={"prompt": "one two"}).json()["count"] == 2
    assert gateway.client.get("/kv_event_sources").status_code == 404
    assert gateway.client.get("/load", headers={"authorization": ""}).status_code == 401


# -- Anthropic's ---------------------------------------------------------------------------------------------------


@pytest.fixture
def anthropics(running: tuple[GatewayProcess, Mock]) -> Iterator[anthropic.Anthropic]:
    gateway, _ = running
    with anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as made:
        yield made


def test_a_message(anthropics: anthropic.Anthropic) -> None:
    answer = anthropics.messages.create(model="demo", messages=MESSAGES, system="Be brief.", max_tokens=5)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 5)


def test_a_message_stream(anthropics: anthropic.Anthropic) -> None:
    with anthropics.messages.stream(model="demo", messages=MESSAGES, max_tokens=5) as stream:
        texts = list(stream.text_stream)
    assert len(texts) == 5
    assert stream.get_final_message().usage.output_tokens == 5


def test_anthropics_errors_are_typed(anthropics: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="`nope` does not exist"):
        anthropics.messages.create(model="nope", messages=MESSAGES, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="`max_tokens` must be"):
        anthropics.messages.create(model="demo", messages=MESSAGES, max_tokens=0)
    with pytest.raises(anthropic.AuthenticationError):
        anthropics.with_options(api_key="kvg_wrong").messages.create(
            model="demo", messages=MESSAGES, max_tokens=5
        )


def test_an_aborted_message_is_an_error(
    running: tuple[GatewayProcess, Mock], anthropics: anthropic.Anthropic
) -> None:
    """The engine says 200 and gives no `stop_reason`."""
    gateway, mock = running
    mock.reset()
    mock.fail("finish_abort:2", count=2)
    with (
        pytest.raises(anthropic.APIStatusError, match="upstream_error"),
        anthropics.messages.stream(model="demo", messages=MESSAGES, max_tokens=5) as stream,
    ):
        list(stream.text_stream)
    with pytest.raises(anthropic.InternalServerError, match="upstream_error"):
        anthropics.messages.create(model="demo", messages=MESSAGES, max_tokens=5)
    wait_until(gateway.is_quiet, "nothing is held")


def test_anthropics_tokens_are_counted(anthropics: anthropic.Anthropic) -> None:
    counted = anthropics.messages.count_tokens(model="demo", messages=MESSAGES)
    answer = anthropics.messages.create(model="demo", messages=MESSAGES, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError, match="`nope` does not exist"):
        anthropics.messages.count_tokens(model="nope", messages=MESSAGES)


@pytest.mark.parametrize("path", ["/v1/messages/", "/v1/messages/count_tokens/", "/v1/%6dessages"])
def test_what_is_not_there_for_anthropics_clients_is_told_in_their_words(
    running: tuple[GatewayProcess, Mock], path: str
) -> None:
    gateway, _ = running
    answer = gateway.client.post(path, json={})
    assert (answer.status_code, answer.json()["type"]) == (404, "error")
    assert answer.json()["error"]["type"] == "not_found_error"
    assert list(gateway.client.post("/v1/messagesx", json={}).json()) == ["error"]


def test_a_message_that_is_closed_early_is_aborted(
    running: tuple[GatewayProcess, Mock], anthropics: anthropic.Anthropic
) -> None:
    gateway, mock = running
    mock.reset()
    with anthropics.messages.stream(model="demo", messages=MESSAGES, max_tokens=2000) as stream:
        next(iter(stream.text_stream))
    wait_until(gateway.is_quiet, "nothing is held")
    wait_until(lambda: mock.log()["aborted"] == 1, "the engine saw it")
