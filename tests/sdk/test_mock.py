"""What the official clients make of the mock's answers."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI

from tests.processes import Mock

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    mock = Mock("--model", "tiny", "--speed", "inf", "--api-key", "secret")
    yield mock
    mock.stop()


@pytest.fixture
def openai(mock: Mock) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{mock.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(mock: Mock) -> Iterator[Anthropic]:
    headers = {"authorization": "Bearer secret"}
    with Anthropic(base_url=mock.url, api_key="unused", default_headers=headers, max_retries=0) as client:
        yield client


def test_chats(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (
        " lorem ipsum dolor",
        "length",
    )
    stream = openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(filter(None, texts)) == " lorem ipsum dolor"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": None, "completion_tokens_details": None}
    )
    assert chunks[1].choices[0].logprobs.content[0].token == " lorem"


def test_completions_and_models(openai: OpenAI) -> None:
    whole = openai.completions.create(model="tiny", prompt=[[1], [2]], max_tokens=2, n=2, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    stream = openai.completions.create(model="tiny", prompt="hi", max_tokens=2, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hi lorem ipsum"
    assert [model.id for model in openai.models.list()] == ["tiny"]
    with pytest.raises(BadRequestError, match="n must be at least 1"):
        openai.completions.create(model="tiny", prompt="hi", n=0)


def test_responses(openai: OpenAI) -> None:
    whole = openai.responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert (whole.output_text, whole.status) == (" lorem ipsum dolor", "incomplete")
    with openai.responses.stream(model="tiny", input="hello", max_output_tokens=3) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_messages(anthropic: Anthropic) -> None:
    whole = anthropic.messages.create(model="tiny", messages=MESSAGES, max_tokens=3)
    assert (whole.content[0].text, whole.stop_reason) == (" lorem ipsum dolor", "max_tokens")
    with anthropic.messages.stream(model="tiny", messages=MESSAGES, max_tokens=3) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == " lorem ipsum dolor"
    assert final.usage.output_tokens == 3
    count = anthropic.messages.count_tokens(model="tiny", messages=MESSAGES)
    assert count.input_tokens == whole.usage.input_tokens
