"""Speech to text: how many clips a sound is, what each of them holds, and what is written into the form."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.audio import PROMPT_TOKENS, parse_audio
from gateway.core.blocks import BlockShape, demand_blocks
from gateway.core.estimate import Demand
from gateway.core.media import MediaRule, Sound
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import PromptText
from gateway.core.request import Endpoint, GenerationRequest, forward
from gateway.core.route import FleetShape, KeyLimits, PoolShape, route
from tests.forms import CONTENT_TYPE, form, wav
from tests.unit.test_form import starlettes

RULE = MediaRule(audio_tokens=100)
SHORT = wav(2)


def read(*fields: tuple[str, str | bytes], endpoint: Endpoint = Endpoint.TRANSCRIPTIONS) -> GenerationRequest:
    request = parse_audio(endpoint, CONTENT_TYPE.encode(), form(*fields), 16)
    assert isinstance(request, GenerationRequest), request
    return request


def prompts(request: GenerationRequest) -> list[int]:
    counts = [
        p.fixed_tokens + p.utf8_bytes if isinstance(p, PromptText) else p.tokens for p in request.prompts
    ]
    return list(request.prompt_tokens(counts))


# -- clips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "clips"),
    [(0.1, 1), (30, 1), (31, 2), (59, 2), (60, 3), (88, 3), (89, 4), (600, 21), (700, 21)],
)
def test_a_longer_sound_is_cut_into_clips(seconds: float, clips: int) -> None:
    """Each a second shorter than the longest, as it may be cut anywhere in its last one; as long as engines take."""
    request = read(("file", wav(seconds - 0.02))).by_rule(RULE)
    assert request.prompt_count == request.sequences == clips
    assert prompts(request) == [PROMPT_TOKENS + 100] * clips


@given(st.integers(1, 10**8), st.integers(0, 60), st.integers(1, 7200), st.integers(100, 10**6))
def test_never_fewer_clips_than_an_engine_makes(size: int, clip: int, longest: int, rate: int) -> None:
    rule = MediaRule(clip_seconds=clip, audio_seconds_max=longest, audio_bytes_per_second=rate)
    seconds = min(size / rate, longest)
    made = 1
    while clip and seconds > clip:
        made, seconds = made + 1, seconds - max(1, clip - 1)
    assert rule.clips(Sound(size)) >= made
    assert rule.clips(Sound(size, seconds=1)) == 1


def test_a_compressed_sound_is_as_long_as_its_bytes_may_be() -> None:
    assert RULE.clips(Sound(30_000)) == 1
    assert RULE.clips(Sound(30_001)) == 2
    assert MediaRule(audio_bytes_per_second=4000).clips(Sound(120_000)) == 1
    assert MediaRule(clip_seconds=0).clips(Sound(10**9)) == 1


@pytest.mark.parametrize(
    ("rate", "width", "channels"),
    [(8000, 1, 1), (16_000, 2, 1), (44_100, 2, 2), (48_000, 4, 2), (96_000, 3, 6)],
)
def test_a_wav_says_how_long_it_is(rate: int, width: int, channels: int) -> None:
    sound = read(("file", wav(3, rate=rate, width=width, channels=channels))).sound
    assert sound is not None
    assert sound.seconds in (3, 4), "rounded up, with its head"


def patched(at: int, value: bytes) -> bytes:
    file = wav(300)
    return file[:at] + value + file[at + len(value) :]


@pytest.mark.parametrize(
    "file",
    [
        b"RIFF",
        b"RIFF\0\0\0\0WAVE",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"RIFF\0\0\0\0WAVE" + b"junk\xff\xff\xff\xff",
        b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 100 + wav(1)[12:],
        b"ID3\4" + b"\0" * 100,
        patched(20, b"\x11\0"),  # ADPCM: four bits a sample, or fewer
        patched(32, b"\xff\0"),  # a block of 255 bytes for one sample of one byte
        patched(24, b"\0\0\0\0"),
        patched(22, b"\0\0"),
    ],
)
def test_what_a_head_does_not_tell_its_bytes_do(file: bytes) -> None:
    sound = read(("file", file)).sound
    assert sound == Sound(len(file), None)


def extensible(kind: int) -> bytes:
    """A WAV whose format proper stands behind the usual fields."""
    plain = wav(300)
    guid = kind.to_bytes(2, "little") + bytes.fromhex("000000001000800000aa00389b71")
    fields = b"\xfe\xff" + plain[22:36] + (22).to_bytes(2, "little") + bytes(6) + guid
    return plain[:16] + len(fields).to_bytes(4, "little") + fields + plain[36:]


@pytest.mark.parametrize("kind", [1, 3, 6, 7])
def test_an_extensible_format_is_read(kind: int) -> None:
    sound = read(("file", extensible(kind))).sound
    assert sound is not None
    assert sound.seconds == 301


@pytest.mark.parametrize("kind", [2, 0x11, 0x55, 0xFFFE])
def test_an_extensible_format_may_be_a_compressed_one(kind: int) -> None:
    """Its usual fields then say what they like."""
    file = extensible(kind)
    assert read(("file", file)).sound == Sound(len(file), None)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", ["1", '"x"', "[1]", "NaN", "{}"])
def test_extras_hold_no_transfer(name: str, value: str) -> None:
    body = form(("file", SHORT), ("vllm_xargs", f'{{"a": 1, "{name}": {value}}}'))
    refusal = parse_audio(Endpoint.TRANSCRIPTIONS, CONTENT_TYPE.encode(), body, 16)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, "vllm_xargs")
    assert name in refusal.message


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "7", '{"a": 1}'])
def test_other_extras_are_for_the_engine_to_judge(text: str) -> None:
    read(("file", SHORT), ("vllm_xargs", text))


def test_a_head_that_lies_of_its_data_lies_in_vain() -> None:
    """All bytes count: decoders go on where the head says that nothing is."""
    file = wav(100)
    at = file.index(b"data")
    lying = file[: at + 4] + (8).to_bytes(4, "little") + file[at + 8 :]
    sound = read(("file", lying)).sound
    assert sound is not None
    assert sound.seconds is not None
    assert sound.seconds >= 100


# -- fields ----------------------------------------------------------------------------------------------------------


def test_what_is_read_of_a_form() -> None:
    request = read(
        ("model", "m"),
        ("file", SHORT),
        ("prompt", "so far"),
        ("hotwords", "kv"),
        ("max_completion_tokens", "12"),
    )
    assert (request.model, request.output_limit, request.limit_field) == ("m", 12, "max_completion_tokens")
    assert prompts(request.by_rule(RULE)) == [PROMPT_TOKENS + 100 + 6 + 2]
    assert (request.stream, request.sequences_per_prompt, request.prompt_field) == (False, 1, "file")
    assert request.by_rule(RULE).prompts[0].is_text_alone is False  # type: ignore[union-attr]


@pytest.mark.parametrize("endpoint", [Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS])
@pytest.mark.parametrize("given", [{}, {"max_completion_tokens": "500"}, {"max_completion_tokens": " 7.0 "}])
def test_the_limit_is_written_and_the_sound_is_untouched(endpoint: Endpoint, given: dict[str, str]) -> None:
    fields: dict[str, str | bytes] = {"model": "m", "file": SHORT + b"\r\n--", **given}
    request = read(*fields.items(), endpoint=endpoint)
    assert starlettes(forward(request, 64)) == {**fields, "max_completion_tokens": "64"}
    assert request.path == endpoint.value


@pytest.mark.parametrize(
    ("given", "asked", "sent"),
    [
        ({}, False, {}),
        ({"stream": "false", "stream_include_usage": "false"}, False, {}),
        ({"stream": "true"}, False, {"stream_include_usage": "true"}),
        ({"stream": "1", "stream_include_usage": "True"}, True, {}),
        ({"stream": "on", "stream_include_usage": "no"}, False, {"stream_include_usage": "true"}),
        (
            {"stream": "true", "stream_continuous_usage_stats": "true"},
            False,
            {"stream_include_usage": "true", "stream_continuous_usage_stats": "false"},
        ),
        ({"stream": "true", "stream_include_usage": "1", "stream_continuous_usage_stats": "1"}, True, {}),
    ],
)
def test_usage_is_asked_for_on_streams(given: dict[str, str], asked: bool, sent: dict[str, str]) -> None:
    request = read(("file", SHORT), *given.items())
    assert request.include_usage_asked is asked
    written = starlettes(forward(request, 64))
    assert written == {"file": SHORT, **given, **sent, "max_completion_tokens": "64"}


def test_beams_are_sequences_of_each_clip_and_n_alone_is_not() -> None:
    long = wav(40)
    assert read(("file", long), ("n", "3")).by_rule(RULE).sequences == 2
    assert read(("file", long), ("n", "3"), ("use_beam_search", "true")).by_rule(RULE).sequences == 6


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ([], Code.MISSING_FIELD, "file"),
        ([("file", b"")], Code.MISSING_FIELD, "file"),
        ([("file", "")], Code.MISSING_FIELD, "file"),
        ([("file", b"x"), ("file", b"y")], Code.DUPLICATE_FIELD, "file"),
        ([("file", b"x"), ("model", "a"), ("model", "b")], Code.DUPLICATE_FIELD, "model"),
        ([("file", b"x"), ("model", b"a")], Code.INVALID_VALUE, "model"),
        ([("file", b"x"), ("prompt", b"a")], Code.INVALID_VALUE, "prompt"),
        ([("file", b"x"), ("max_completion_tokens", "")], Code.INVALID_VALUE, "max_completion_tokens"),
        ([("file", b"x"), ("max_completion_tokens", "0")], Code.INVALID_VALUE, "max_completion_tokens"),
        ([("file", b"x"), ("max_completion_tokens", "-1")], Code.INVALID_VALUE, "max_completion_tokens"),
        ([("file", b"x"), ("max_completion_tokens", "1.5")], Code.INVALID_VALUE, "max_completion_tokens"),
        ([("file", b"x"), ("max_completion_tokens", "1e3")], Code.INVALID_VALUE, "max_completion_tokens"),
        (
            [("file", b"x"), ("max_completion_tokens", "9" * 4000)],
            Code.INVALID_VALUE,
            "max_completion_tokens",
        ),
        (
            [("file", b"x"), ("max_completion_tokens", "2147483648")],
            Code.INVALID_VALUE,
            "max_completion_tokens",
        ),
        ([("file", b"x"), ("max_completion_tokens", b"5")], Code.INVALID_VALUE, "max_completion_tokens"),
        ([("file", b"x"), ("max_completion_tokens", "\r\n5")], None, None),
        ([("file", b"x"), ("max_completion_tokens", "٣")], Code.INVALID_VALUE, "max_completion_tokens"),
        ([("file", b"x"), ("stream", "maybe")], Code.INVALID_VALUE, "stream"),
        ([("file", b"x"), ("n", "17")], Code.TOO_MANY_SEQUENCES, "n"),
        ([("file", b"x"), ("use_beam_search", "2")], Code.INVALID_VALUE, "use_beam_search"),
    ],
)
def test_refusals(fields: list[tuple[str, Any]], code: Code | None, param: str | None) -> None:
    found = parse_audio(Endpoint.TRANSCRIPTIONS, CONTENT_TYPE.encode(), form(*fields), 16)
    if code is None:
        assert isinstance(found, GenerationRequest)
        return
    assert isinstance(found, Refusal)
    assert (found.code, found.param) == (code, param)
    assert len(found.message) < 200


@pytest.mark.parametrize("kind", [b"", b"application/json", b"application/x-www-form-urlencoded"])
def test_a_body_of_another_type(kind: bytes) -> None:
    found = parse_audio(Endpoint.TRANSCRIPTIONS, kind, json.dumps({"file": "x"}).encode(), 16)
    assert isinstance(found, Refusal)
    assert (found.code, found.param) == (Code.INVALID_VALUE, "content-type")


# -- what an engine holds --------------------------------------------------------------------------------------------


def whisper() -> FleetShape:
    """448 tokens of context, and 1,500 of the sound beside it."""
    pool = PoolShape("all", None, 448, 16, 4000, 256)
    return FleetShape(
        name="w", model="w", names=frozenset({"w"}), default_output_tokens=1024, max_output_tokens=None,
        token_factor=1.0, speculative_tokens=0, share_prompt_of_n=False, pools=(pool,), encoder_tokens=1500,
        media=MediaRule(audio_tokens=0),
    )  # fmt: skip


def test_a_sound_that_is_kept_beside_the_context_takes_blocks_and_no_context() -> None:
    shape = whisper()
    request = read(("file", wav(45))).by_rule(shape.media)
    demand = route(shape, request, prompts(request), KeyLimits())
    assert isinstance(demand, Demand)
    assert demand.output_tokens == 448 - PROMPT_TOKENS
    assert demand.sequences == 2
    assert demand.blocks == 2 * (-(-447 // 16) + -(-1500 // 16))


def test_a_sound_that_stands_in_the_context_is_a_long_prompt() -> None:
    shape = whisper()
    request = read(("file", SHORT)).by_rule(MediaRule())
    refusal = route(shape, request, prompts(request), KeyLimits())
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == (Code.CONTEXT_LENGTH_EXCEEDED, "file")


def test_more_clips_than_an_engine_runs_never_fit() -> None:
    shape = whisper()
    request = read(("file", b"x" * 10_000)).by_rule(
        MediaRule(audio_tokens=0, clip_seconds=2, audio_bytes_per_second=100, audio_seconds_max=7200)
    )
    assert request.sequences == 99
    many = read(("file", b"x" * 100_000)).by_rule(
        MediaRule(audio_tokens=0, clip_seconds=2, audio_bytes_per_second=100, audio_seconds_max=7200)
    )
    refusal = route(shape, many, prompts(many), KeyLimits())
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.TOO_MANY_SEQUENCES


@given(st.integers(0, 70_000), st.integers(1, 128), st.integers(1, 400))
def test_each_sequence_has_blocks_of_its_own_for_what_is_beside(beside: int, size: int, tokens: int) -> None:
    plain, encoder = BlockShape(8192, size), BlockShape(8192, size, 0, beside)
    more = -(-beside // size)
    for count in (1, 3):
        without = demand_blocks([tokens], count, 9, plain, share_prompt_of_n=False)
        assert demand_blocks([tokens], count, 9, encoder, share_prompt_of_n=False) == without + count * more
