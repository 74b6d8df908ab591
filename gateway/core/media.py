"""Images, sounds and videos in a request: their kind, where they come from, and what a fleet counts for one.

Their bytes say nothing of their tokens, so they are never counted as text.

Source: `_parse_chat_message_content_mm_part` and `MediaConnector` of vLLM 0.32.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.core.body import shorten
from gateway.core.outcomes import Code, Refusal

MEDIA_TOKENS = 4096
"""Of an image, audio or video part where the fleet has no rule of its own."""
CLIP_SECONDS, CUT_SECONDS = 30, 1
"""vLLM's `max_audio_clip_s` and `overlap_chunk_second`."""
AUDIO_SECONDS_MAX = 600
"""vLLM's `VLLM_MAX_AUDIO_DECODE_DURATION_S`."""
AUDIO_BYTES_PER_SECOND = 1000
"""8 kbit/s, the lowest rate of MP3; speech is seldom below twice that."""
INLINE = "data:"
"""In place of a host: the request holds the bytes themselves."""
TENSOR = "tensor:"
"""In place of a host: the request holds what the model would have made of a text or of media."""
NO_HOST = ""
"""In place of a host: a URL whose host two readers could read differently, or that has none (`file:`)."""
_HOST_CHARS_SHOWN = 64

_URL_CHARS_MAX = 8192
"""A longer one names no host that would be looked for in it."""
_PLAIN_URL = re.compile(
    r"https?://(?P<host>[a-z0-9._-]{1,253}+|\[[0-9a-f:.]{2,45}+\])(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*+)?",
    re.I,
)
"""Without a login, a backslash, or anything but printable ASCII: what parsers of URLs disagree about."""


IMAGE, AUDIO, VIDEO, OTHER, EMBEDS = range(5)
"""Kinds, in the order of the fields of `Media`; no enum, since what hashes one is Python."""
KINDS = 5

_KINDS = {
    "image_url": IMAGE,
    "input_image": IMAGE,
    "image_pil": IMAGE,
    "audio_url": AUDIO,
    "input_audio": AUDIO,
    "video_url": VIDEO,
}
"""By a part's type, or by the field that has it, in the order in which vLLM looks for one."""
_KINDS_BY_TYPE = {**_KINDS, "image": IMAGE, "computer_screenshot": IMAGE}
_EMBEDS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
"""Tensors.  How many tokens one is, its bytes do not bound: a sparse or an expanded one has few for many."""
_URLS = ("image_url", "audio_url", "video_url", "input_image", "file_url")
_DATA = ("input_audio", "file_data")
_GIVEN_BY = frozenset((*_URLS, *_DATA))
_TENSOR_REFUSED = "`%s` is not accepted: its tokens are unknown (the model has no `media.tensor_tokens`)."


class Media(msgspec.Struct, frozen=True):
    """What a prompt has of them."""

    images: int = 0
    audios: int = 0
    videos: int = 0
    others: int = 0
    """Parts of a kind that is not known here."""
    tensors: int = 0

    @property
    def count(self) -> int:
        return self.images + self.audios + self.videos + self.others + self.tensors


NO_MEDIA = Media()


class Sound(msgspec.Struct, frozen=True):
    """The file of a call that is speech alone."""

    size: int
    """In bytes."""
    seconds: int | None = None
    """None where only who decodes it could tell."""


Source = tuple[str, str]
"""The field that names it, and the host that it is at, or INLINE, or TENSOR, or NO_HOST."""


class MediaRule(msgspec.Struct, frozen=True):
    """What a fleet counts for each, and whence it takes them."""

    image_tokens: int = MEDIA_TOKENS
    audio_tokens: int = MEDIA_TOKENS
    video_tokens: int = MEDIA_TOKENS
    hosts: frozenset[str] | None = None
    """Lower case; None = any.  An engine fetches what a URL names from where it stands."""
    inline: bool = True
    """Bytes in the request itself are taken."""
    clip_seconds: int = CLIP_SECONDS
    """A longer sound is cut into clips of this length; 0: it is not."""
    audio_seconds_max: int = AUDIO_SECONDS_MAX
    """Of a sound: engines refuse a longer one."""
    audio_bytes_per_second: int = AUDIO_BYTES_PER_SECOND
    """The least that a second of a compressed sound has."""
    tensor_tokens: int | None = None
    """Of a tensor, the most that one has; None: none is taken."""

    def clips(self, sound: Sound) -> int:
        """How many an engine makes of it, each a prompt of its own; too many rather than too few.

        It cuts where a clip's last second is quietest.
        """
        seconds = -(-sound.size // self.audio_bytes_per_second) if sound.seconds is None else sound.seconds
        seconds = min(seconds, self.audio_seconds_max)
        if not self.clip_seconds or seconds <= self.clip_seconds:
            return 1
        return 1 + -(-(seconds - self.clip_seconds) // max(1, self.clip_seconds - CUT_SECONDS))

    def tokens(self, media: Media) -> int:
        """A part of an unknown kind counts as the dearest."""
        dearest = max(self.image_tokens, self.audio_tokens, self.video_tokens)
        return (
            media.images * self.image_tokens
            + media.audios * self.audio_tokens
            + media.videos * self.video_tokens
            + media.others * dearest
            + media.tensors * (self.tensor_tokens or 0)
        )

    def refusal(self, sources: tuple[Source, ...], param: str) -> Refusal | None:
        """Of the first one that is not taken; `param` is the field of the request that has them."""
        for field, host in sources:
            if host == TENSOR:
                if self.tensor_tokens is None:
                    return Refusal(Code.INVALID_VALUE, _TENSOR_REFUSED % field, field)
            elif host == INLINE:
                if not self.inline:
                    message = f"`{field}` holds the data itself; `media.inline` of the model is false."
                    return Refusal(Code.INVALID_VALUE, message, param)
            elif self.hosts is not None and host not in self.hosts:
                return Refusal(Code.INVALID_VALUE, _not_allowed(field, host, len(self.hosts)), param)
        return None


USUAL = MediaRule()


def kind_of(part: Mapping[str, Any]) -> int:
    """Of a part that is no text, or not only.

    With a `uuid`, or without a type, the first field counts that holds media, whatever else there is.
    """
    type_ = str(part.get("type"))
    by_type = _KINDS_BY_TYPE.get(type_)
    if by_type is not None and part.get("uuid") is None:
        return by_type
    if type_ in _EMBEDS or not _EMBEDS.isdisjoint(part):
        return EMBEDS
    by_field = next((kind for name, kind in _KINDS.items() if name in part), by_type)
    return OTHER if by_field is None else by_field


def sources_of(part: Mapping[str, Any]) -> Iterator[Source]:
    """Whence a part has its data, by every field that may say so."""
    if kind_of(part) == EMBEDS:
        type_ = str(part.get("type"))
        yield type_ if type_ in _EMBEDS else next(name for name in part if name in _EMBEDS), TENSOR
    for name in _GIVEN_BY.intersection(part):
        value = part[name]
        if name in _DATA:
            if value is not None:
                yield name, INLINE
            continue
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str):
            yield name, host_of(url)
    source = part.get("source")
    if isinstance(source, dict):
        by_url = source.get("type") == "url"
        yield "source", host_of(str(source.get("url", ""))) if by_url else INLINE


def host_of(url: str) -> str:
    """In lower case; INLINE for a `data:` URL, NO_HOST for one whose host is not certain."""
    if url[: len(INLINE)].lower() == INLINE:
        return INLINE
    found = _PLAIN_URL.fullmatch(url) if len(url) <= _URL_CHARS_MAX else None
    return found["host"].lower() if found else NO_HOST


def _not_allowed(field: str, host: str, count: int) -> str:
    allowed = f"`media.hosts` of the model, which names {count} {'host' if count == 1 else 'hosts'}"
    if host == NO_HOST:
        return f"`{field}` has to be a data: URL, or a plain http(s) URL of a host in {allowed}."
    return f"`{field}` names the host {shorten(host[:_HOST_CHARS_SHOWN])}, which is not in {allowed}."
