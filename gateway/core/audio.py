"""Speech to text: a form with a sound, which an engine cuts into clips and generates from, all of them at once.

Source: `SpeechToTextBaseServing` and the routes' protocols of vLLM 0.32.
"""

import json
import re
from contextlib import suppress

from gateway.core.body import Edit, Refused, shorten
from gateway.core.form import Form, read_form
from gateway.core.media import Sound
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import PromptText, text_bytes
from gateway.core.request import (
    EXTRAS,
    INTEGER_MAX,
    LIMIT_FIELDS,
    Endpoint,
    GenerationRequest,
    check_extras,
)

PROMPT_TOKENS = 32
"""What a template has around a clip: start, language, task, an instruction of a few words."""
FILE = "file"
_TEXTS = ("prompt", "hotwords")
"""Fields that reach the prompt of every clip."""
_YES = frozenset({"1", "on", "t", "true", "y", "yes"})
_NO = frozenset({"0", "off", "f", "false", "n", "no"})
"""As pydantic reads the words of a form, in any case."""
_INTEGER = re.compile(r"\s*\+?0*([0-9]{1,10})(?:\.0*)?\s*")
_STREAMED = "stream_include_usage"
_STREAMED_ALONG = "stream_continuous_usage_stats"

_CHUNKS_MAX = 32
"""Of a RIFF file, that are looked at for its format."""
_PLAIN_FORMATS = frozenset({1, 3, 6, 7})
"""PCM, floats, A-law, mu-law: as many bytes for every sample."""
_EXTENSIBLE = 0xFFFE
"""The format proper stands further back."""


def parse_audio(
    endpoint: Endpoint, content_type: bytes, body: bytes, n_max: int
) -> GenerationRequest | Refusal:
    """As `request.parse`, of a form.  How many clips its sound is, a fleet's rule says (`by_rule`)."""
    try:
        return _parse(endpoint, read_form(content_type, body), body, n_max)
    except Refused as refused:
        return refused.refusal


def _parse(endpoint: Endpoint, form: Form, body: bytes, n_max: int) -> GenerationRequest:
    file = form.get(FILE)
    if file is None or not file.size:
        raise Refused(Code.MISSING_FIELD, f"`{FILE}` is missing, or has no bytes.", FILE)
    (limit_field,) = LIMIT_FIELDS[endpoint]
    output_limit = _integer(form, limit_field, INTEGER_MAX)
    stream, asked = _flag(form, "stream"), _flag(form, _STREAMED)
    limit_start, limit_end, *around = form.place(limit_field)
    _check_extras(form)
    prompt = _prompt(form)
    return GenerationRequest(
        path=endpoint.path,
        dialect=endpoint.dialect,
        endpoint=endpoint,
        body=body,
        model=form.text("model"),
        stream=stream,
        include_usage_asked=asked,
        output_limit=output_limit,
        limit_field=limit_field,
        limit_spans=((limit_start, limit_end),),
        limit_around=(around[0], around[1]),
        id_edit=None,
        usage_edits=_usage_edits(form) if stream and not asked else (),
        min_tokens=0,
        truncate_prompt_tokens=None,
        sequences_per_prompt=_sequences(form, n_max),
        prompts=(prompt,),
        prompt_field=FILE,
        sound=Sound(file.size, _wave_seconds(form.value(file), file.size)),
    )


def _check_extras(form: Form) -> None:
    """As an engine decodes them; what it cannot it refuses."""
    with suppress(ValueError, RecursionError):
        check_extras(json.loads(form.text(EXTRAS) or "null"))


def _prompt(form: Form) -> PromptText:
    texts = tuple(text for name in _TEXTS if (text := form.text(name)) is not None)
    return PromptText(texts, PROMPT_TOKENS, sum(map(text_bytes, texts)))


def _usage_edits(form: Form) -> tuple[Edit, ...]:
    """Alone `stream_continuous_usage_stats` means nothing to vLLM, beside our `stream_include_usage` it would."""
    along = (form.written(_STREAMED_ALONG, b"false"),) if _flag(form, _STREAMED_ALONG) else ()
    return form.written(_STREAMED, b"true"), *along


def _sequences(form: Form, n_max: int) -> int:
    """The beams of every clip; without beam search vLLM makes one answer, whatever `n` is."""
    beams = _integer(form, "n", INTEGER_MAX) or 1
    if beams > n_max:
        raise Refused(Code.TOO_MANY_SEQUENCES, f"`n` is {beams}; `server.n_max` is {n_max}.", "n")
    return beams if _flag(form, "use_beam_search") else 1


def _integer(form: Form, name: str, most: int) -> int | None:
    text = form.text(name)
    if text is None:
        return None
    found = _INTEGER.fullmatch(text)
    value = int(found[1]) if found else 0
    if not 1 <= value <= most:
        raise Refused(
            Code.INVALID_VALUE, f"`{name}` must be an integer from 1 to {most}, got {shorten(text)}.", name
        )
    return value


def _flag(form: Form, name: str) -> bool:
    text = (form.text(name) or "").lower()
    if text and text not in _YES | _NO:
        raise Refused(Code.INVALID_VALUE, f"`{name}` must be true or false, got {shorten(text)}.", name)
    return text in _YES


# The sound --------------------------------------------------------------------------------------------------


def _wave_seconds(data: memoryview, size: int) -> int | None:
    """Of a WAV file, rounded up, by all of its bytes; None for any other, or a compressed one.

    Its head binds whoever decodes it, too.
    """
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return None
    at = 12
    for _ in range(_CHUNKS_MAX):
        name, length = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            return _seconds(data[at + 8 : at + 8 + length], size)
        at += 8 + length + length % 2
    return None


def _seconds(format_: memoryview, size: int) -> int | None:
    if len(format_) < 16:
        return None
    kind, channels, rate, block, bits = (
        int.from_bytes(format_[start:end], "little")
        for start, end in ((0, 2), (2, 4), (4, 8), (12, 14), (14, 16))
    )
    if kind == _EXTENSIBLE:
        kind = int.from_bytes(format_[24:26], "little")
    if kind not in _PLAIN_FORMATS or not rate or not block or block * 8 != channels * bits:
        return None
    return -(-size // (rate * block))
