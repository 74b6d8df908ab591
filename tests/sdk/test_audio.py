"""OpenAI's client and its forms: what it sends is what a model that listens gets."""

from collections.abc import Iterator

import openai
import pytest

from tests.forms import wav
from tests.processes import GatewayProcess, world


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with world() as here:
        mock = here.mock("--listens", "--step-base-ms", "2", "--tokens", "4")
        fleet = {"media": {"audio_tokens": 250}}
        config, (key,) = here.config([{"name": "only", "replicas": [mock.url]}], fleet=fleet)
        yield here.gateway(config, key)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        yield client


def test_a_transcription(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.with_raw_response.create(
        model="demo", file=("a.wav", wav(40)), prompt="so far", language="en", temperature=0.2
    )
    assert len(answer.parse().text.split()) == 2 * 4
    assert int(answer.headers["x-kvgate-reserved-blocks"]) > 2 * 250 // 16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client warns of old models
def test_a_translation(client: openai.OpenAI) -> None:
    answer = client.audio.translations.create(model="demo", file=("a.wav", wav(1)))
    assert len(answer.text.split()) == 4


def test_a_stream(client: openai.OpenAI) -> None:
    """vLLM's events are not OpenAI's; the client passes them on."""
    events = list(client.audio.transcriptions.create(model="demo", file=("a.wav", wav(1)), stream=True))
    assert len(events) == 4


def test_a_file_without_a_sound_is_refused_in_the_engines_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Invalid or unsupported audio file"):
        client.audio.transcriptions.create(model="demo", file=("a.wav", b"no sound"))


def test_a_limit_that_is_not_one_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(
            model="demo", file=("a.wav", wav(1)), extra_body={"max_completion_tokens": 0}
        )
    assert (refused.value.param, refused.value.code) == ("max_completion_tokens", "invalid_value")
