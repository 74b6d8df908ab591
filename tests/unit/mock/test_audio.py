"""The mock's speech to text: clips of a sound, and refusals in vLLM's words."""

from typing import Any

import pytest

from gateway.mock.audio import TranscriptionStream, parse_audio, transcription
from gateway.mock.bodies import Refusal
from gateway.mock.calls import Call, Server
from gateway.mock.engine import EngineConfig, Token
from gateway.mock.options import Options
from gateway.mock.progress import Progress
from tests.forms import wav

SERVER = Server(EngineConfig(), Options(listens=True))


def call_of(**fields: Any) -> Call:
    return parse_audio({"file": wav(2)} | fields, "rid", SERVER)


@pytest.mark.parametrize(("seconds", "clips"), [(0.5, 1), (30, 1), (30.1, 2), (59, 2), (59.1, 3), (600, 21)])
def test_a_sound_is_cut_into_clips(seconds: float, clips: int) -> None:
    call = call_of(file=wav(seconds), max_completion_tokens="7", prompt="so far")
    assert (len(call.prompts), call.limits) == (clips, (7,) * clips)
    assert max(prompt.tokens for prompt in call.prompts) <= 30 * 8 + 1 + 10


def test_fields_are_words_of_a_form() -> None:
    call = call_of(stream="true", stream_include_usage="1", n="3")
    assert (call.stream, call.include_usage, call.continuous_usage, call.choices) == (True, True, False, 1)
    assert call_of(n="3", use_beam_search="yes").choices == 3
    assert call_of().limits == (SERVER.engine.max_model_len - call_of().prompts[0].tokens,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"file": "a.wav"}, "Field required"),
        ({"file": b"x"}, "Invalid or unsupported audio file."),
        ({"file": wav(601)}, "exceeds the maximum of 600s"),
        ({"file": b"x" * (25 * 2**20 + 1)}, "Maximum file size exceeded"),
        ({"max_completion_tokens": "many"}, "unable to parse string as an integer"),
        ({"max_completion_tokens": "999999"}, "cannot be greater than max_model_len"),
        ({"stream_include_usage": "true"}, "Stream options can only be defined"),
        ({"response_format": "srt"}, "Currently only support response_format"),
        ({"model": "nope"}, "does not exist"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        call_of(**fields)


def test_answers() -> None:
    call = call_of(file=wav(40), max_completion_tokens="1")
    progress = Progress(call)
    for index in range(2):
        progress.see(Token("r", index, 1, True))
    body = transcription(progress, 0)
    assert body["usage"] == {"type": "duration", "seconds": 40}
    assert len(body["text"].split()) == 2
    verbose = call_of(response_format="verbose_json")
    assert transcription(Progress(verbose), 0)["duration"] == 2.0
    stream = TranscriptionStream(call_of(stream="true", stream_include_usage="true"), 0)
    events = stream.tokens([Token("r", 0, 1, True)]) + stream.close()
    assert [b"finish_reason" in event for event in events] == [True, False, False]
    assert b'"choices":[],"usage"' in events[1]
