"""OpenAI's client asks for embeddings, others for scores, of a gateway in front of a model that pools."""

from collections.abc import Iterator

import openai
import pytest

from tests.processes import GatewayProcess, Mock, wait_until, world


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[GatewayProcess, Mock]]:
    with world() as here:
        mock = here.mock("--blocks", "1000", "--runner", "pooling", "--max-model-len", "4096")
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}])
        yield here.gateway(config, key), mock


@pytest.fixture
def client(running: tuple[GatewayProcess, Mock]) -> Iterator[openai.OpenAI]:
    gateway, _ = running
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("value", ["one two", ["one", "two"], [1, 2, 3], [[1, 2], [3]]])
@pytest.mark.parametrize("encoding", [openai.NOT_GIVEN, "float", "base64"])
def test_embeddings(client: openai.OpenAI, value: list[str], encoding: str) -> None:
    answer = client.embeddings.create(model="demo", input=value, encoding_format=encoding)  # type: ignore[arg-type]
    count = 2 if isinstance(value, list) and not isinstance(value[0], int) else 1
    assert [item.index for item in answer.data] == list(range(count))
    assert answer.usage.prompt_tokens > 0
    if encoding != "base64":
        assert len(answer.data[0].embedding) == 128


def test_equal_inputs_have_equal_vectors(client: openai.OpenAI) -> None:
    one, two, three = client.embeddings.create(model="demo", input=["a b", "a b", "c"]).data
    assert one.embedding == two.embedding != three.embedding


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.embeddings.create(model="demo", input=[[7] * 4097])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as many:
        client.embeddings.create(model="demo", input=["x"] * 2049)
    assert many.value.code == "too_many_sequences"


def test_a_model_that_pools_generates_nothing(client: openai.OpenAI) -> None:
    """The engine's own 404."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="demo", prompt="x")
    assert unknown.value.response.json() == {"detail": "Not Found"}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(running: tuple[GatewayProcess, Mock], path: str) -> None:
    gateway, _ = running
    asked = {"model": "demo", "query": "b", "documents": ["a", "b"], "top_n": 1}
    answer = gateway.client.post(path, json=asked)
    assert answer.status_code == 200
    (best,) = answer.json()["results"]
    assert (best["index"], best["document"]["text"]) == (1, "b")
    wait_until(gateway.is_quiet, "nothing is held")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(running: tuple[GatewayProcess, Mock], path: str) -> None:
    gateway, _ = running
    answer = gateway.client.post(path, json={"model": "demo", "text_1": "b", "text_2": ["a", "b"]})
    assert [item["score"] for item in answer.json()["data"]] == [0.0, 1.0]
