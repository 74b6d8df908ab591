"""`/v1/audio/transcriptions` and `/translations`: a form with a WAV file, cut into clips that run side by side.

Only WAV is understood: the length is all that matters here, and the standard library can tell it.

Source: the source of vLLM 0.32; nothing was recorded, for want of a model that listens.
"""

import io
import json
import wave
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from gateway.mock import tokenizer
from gateway.mock.bodies import Refusal, missing, parameter_error
from gateway.mock.calls import Api, Call, Server, check_model, resolved
from gateway.mock.engine import Token
from gateway.mock.exchange import Exchange
from gateway.mock.fields import AUDIO_FIELDS, check_ranges, coerced
from gateway.mock.openai import DONE, error_frame, frame, usage
from gateway.mock.progress import NO_EXTRAS, Extras, Json, Progress, text_of
from gateway.mock.prompts import Prompt, Reader

FILE_BYTES_MAX = 25 * 2**20
SECONDS_MAX = 600
CLIP_SECONDS, STEP_SECONDS = 30, 29
"""A clip ends within its last second, where it is quietest: here at the beginning of that."""
TOKENS_PER_SECOND = 8
"""In the prompt of a clip, as models have it that take a sound for words."""
_FORMATS = ("json", "text", "verbose_json")


async def read_form(exchange: Exchange, raw: bytes) -> dict[str, Any]:
    """The fields, the file as bytes.  Raises Refusal."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": exchange.headers}, receive)
    try:
        form = await request.form()
    except MultiPartException as error:
        raise Refusal(400, error.message) from None
    found: dict[str, Any] = {}
    for name, value in form.multi_items():
        found[name] = await value.read() if isinstance(value, UploadFile) else value
    await form.close()
    return {name: value for name, value in found.items() if value != ""}


def parse_audio(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """Raises Refusal as vLLM would answer."""
    file = body.get("file")
    if not isinstance(file, bytes):
        raise missing(dict.fromkeys(body, ""), "file")
    asked = {
        name: body[name] for name in ("stream_include_usage", "stream_continuous_usage_stats") if name in body
    }
    rest = {name: value for name, value in body.items() if name != "file" and name not in asked}
    rest = coerced(rest | {"mock": json.loads(rest["mock"])} if "mock" in rest else rest, AUDIO_FIELDS)
    if asked and not rest.get("stream"):
        raise parameter_error("Stream options can only be defined when `stream=True`.", next(iter(asked)))
    if len(file) > FILE_BYTES_MAX:
        raise parameter_error("Maximum file size exceeded", "audio_filesize_mb", len(file) / 2**20)
    check_model(rest, server)
    check_ranges(rest)
    if rest.get("response_format", "json") not in _FORMATS:
        raise Refusal(
            400, "Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`"
        )
    if rest.get("stream"):
        options = {"include_usage": asked.get("stream_include_usage")}
        options["continuous_usage_stats"] = asked.get("stream_continuous_usage_stats")
        rest = coerced(rest | {"stream_options": options}, AUDIO_FIELDS)
    if not rest.get("use_beam_search"):
        rest.pop("n", None)
    seconds = _seconds(file)
    prompts = _clips(rest, file, seconds, server)
    rest["seconds"] = seconds
    limits = ("max_completion_tokens",)
    return resolved(Api.AUDIO, rest, prompts, f"trsc-{call_id}", server, limits=limits)


def _seconds(file: bytes) -> float:
    try:
        with wave.open(io.BytesIO(file)) as sound:
            seconds = float(sound.getnframes() / sound.getframerate())
    except (wave.Error, EOFError, ZeroDivisionError):
        raise Refusal(400, "Invalid or unsupported audio file.") from None
    if seconds > SECONDS_MAX:
        raise Refusal(400, f"Audio duration ({seconds:.1f}s) exceeds the maximum of {SECONDS_MAX}s.")
    return seconds


def _clips(body: Mapping[str, Any], file: bytes, seconds: float, server: Server) -> tuple[Prompt, ...]:
    reader = Reader(body, server.engine, keep=False)
    shared = tokenizer.encode(" ".join(str(body.get(name, "")) for name in ("prompt", "hotwords")))
    lengths, left = list[float](), seconds
    while left > CLIP_SECONDS:
        lengths.append(STEP_SECONDS)
        left -= STEP_SECONDS
    lengths.append(left)
    heard = file[-1] if file else 0
    return tuple(
        reader.ids([*shared, *((heard + number) % 256 for _ in range(1 + int(length * TOKENS_PER_SECOND)))])
        for number, length in enumerate(lengths)
    )


def transcription(progress: Progress, created: int, extras: Extras = NO_EXTRAS) -> Json:
    """The body of an answer that is no stream."""
    text = " ".join(text_of(1, count) for count in progress.counts)
    seconds = progress.call.body["seconds"]
    if progress.call.body.get("response_format") == "verbose_json":
        return {"duration": seconds, "language": "en", "text": text, "segments": [], "words": None}
    return {"text": text, "usage": {"type": "duration", "seconds": -int(-seconds // 1)}}


class TranscriptionStream:
    """The events of one stream; of clips that are computed together here the tokens come as they are made."""

    def __init__(self, call: Call, created: int) -> None:
        self.progress = Progress(call)
        self._call = call
        self._head: Json = {"id": call.id, "object": "transcription.chunk", "created": created}

    def begin(self) -> list[bytes]:
        return []

    def tokens(self, tokens: Sequence[Token]) -> list[bytes]:
        for token in tokens:
            self.progress.see(token)
        return [self._chunk(index) for index in self.progress.due(token.index for token in tokens)]

    def abort(self) -> list[bytes]:
        events = []
        for index, reason in enumerate(self.progress.reasons):
            if reason is None and self.progress.started:
                self.progress.end(index, "abort")
                events.append(self._chunk(index))
        return events

    def close(self, extras: Extras = NO_EXTRAS) -> list[bytes]:
        if not self._call.include_usage:
            return [DONE]
        figures = usage(self._call.prompts[-1].tokens, sum(self.progress.counts))
        return [frame(self._head | {"model": self._call.model, "choices": [], "usage": figures}), DONE]

    def error(self, body: Json) -> list[bytes]:
        return [error_frame(body), DONE]

    def _chunk(self, index: int) -> bytes:
        first, last = self.progress.tell(index)
        choice: Json = {"delta": {"content": text_of(first, last)}}
        reason = self.progress.reasons[index]
        if reason is not None:
            choice |= {"finish_reason": reason, "stop_reason": None}
        chunk = self._head | {"model": self._call.model, "choices": [choice]}
        if self._call.continuous_usage:
            chunk["usage"] = usage(self._call.prompts[-1].tokens, sum(self.progress.counts))
        return frame(chunk)
