"""What langchain-openai documents, through the gateway: chats, batches, tools, structured output, embeddings."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.processes import QUICK_STORE, GatewayProcess, wait_until, world
from tests.sdk.model import CITY, PLACE, model


class Place(BaseModel):
    """A place and its people."""

    city: str
    people: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with world() as here:
        mock = here.mock("--blocks", "1000", "--speed", "inf")
        with model(mock.url) as engine:
            pools = [{"name": "only", "replicas": [engine.url]}]
            config, (key,) = here.config(pools, store=QUICK_STORE)
            yield here.gateway(config, key)


@pytest.fixture
def chat(gateway: GatewayProcess) -> ChatOpenAI:
    return chat_of(gateway)


def chat_of(gateway: GatewayProcess, **fields: Any) -> ChatOpenAI:
    usual: dict[str, Any] = {"max_completion_tokens": 5, "max_retries": 0}
    return ChatOpenAI(model="demo", base_url=f"{gateway.url}/v1", api_key=gateway.key, **usual | fields)  # type: ignore[arg-type]


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke([("system", "Be brief."), ("human", "hi")])
    assert len(str(answer.content).split()) == 5
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == 5
    assert answer.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("usage", [True, False])
def test_stream(gateway: GatewayProcess, usage: bool) -> None:
    """Who asks for usage gets it with the last chunk."""
    chunks = list(chat_of(gateway, stream_usage=usage).stream("hi"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert isinstance(whole, AIMessageChunk)
    assert len(str(whole.content).split()) == 5
    assert bool(whole.usage_metadata) is usage


def test_batch(chat: ChatOpenAI) -> None:
    answers = chat.batch(["one", "two", "three"])
    assert [len(str(answer.content).split()) for answer in answers] == [5] * 3


async def test_asynchronously(gateway: GatewayProcess) -> None:
    """Its own client of httpx would never be closed: it is kept for all models of the process."""
    async with httpx.AsyncClient(trust_env=False) as client:
        chat = chat_of(gateway, http_async_client=client)
        answer = await chat.ainvoke("hi")
        assert len(str(answer.content).split()) == 5
        texts = [str(chunk.content) async for chunk in chat.astream("hi")]
        assert len("".join(texts).split()) == 5
        assert len(await chat.abatch(["one", "two"])) == 2


def test_a_tool_and_its_result(chat: ChatOpenAI) -> None:
    knows = chat.bind_tools([weather])
    said: list[Any] = [HumanMessage("What is the weather in Rome?")]
    first = knows.invoke(said)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", CITY)
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "rain in Rome"
    assert knows.invoke([*said, first, result]).content


def test_a_streamed_tool(chat: ChatOpenAI) -> None:
    chunks = list(chat.bind_tools([weather]).stream("What is the weather in Rome?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert isinstance(whole, AIMessageChunk)
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", CITY)]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(gateway: GatewayProcess, method: Any) -> None:
    chat = chat_of(gateway, max_completion_tokens=60)
    assert chat.with_structured_output(Place, method=method).invoke("Rome?") == Place(**PLACE)


def test_errors(gateway: GatewayProcess) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        chat_of(gateway, max_completion_tokens=0).invoke("hi")
    assert wrong.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="nope", base_url=f"{gateway.url}/v1", api_key=gateway.key).invoke("hi")  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(model="demo", base_url=f"{gateway.url}/v1", api_key="kvg_wrong").invoke("hi")  # type: ignore[arg-type]
    wait_until(gateway.is_quiet, "nothing is held")


def test_responses(gateway: GatewayProcess) -> None:
    answer = chat_of(gateway, use_responses_api=True).invoke("hi")
    assert len(str(answer.text).split()) == 5


async def test_embeddings() -> None:
    """With `check_embedding_ctx_length=False`, as its documents say for models that are not OpenAI's."""
    with world() as here:
        mock = here.mock("--blocks", "1000", "--runner", "pooling", "--max-model-len", "4096")
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], store=QUICK_STORE)
        gateway = here.gateway(config, key)
        async with httpx.AsyncClient(trust_env=False) as client:
            embeddings = OpenAIEmbeddings(
                model="demo",
                base_url=f"{gateway.url}/v1",
                api_key=key,  # type: ignore[arg-type]
                check_embedding_ctx_length=False,
                http_async_client=client,
            )
            first, second = embeddings.embed_documents(["a b", "c"])
            assert len(first) == len(second) == 128
            assert embeddings.embed_query("a b") == pytest.approx(first)
            assert await embeddings.aembed_query("c") == pytest.approx(second)
