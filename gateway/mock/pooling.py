"""Models that pool: `/v1/embeddings`, `/pooling`, `/score` and `/rerank`, over sequences that sample nothing.

Source: answers recorded from vLLM 0.32.0 with `--runner pooling`, once with `--convert embed` and once with
`--convert classify`.  What a vector or a score is made of is the mock's own.
"""

import base64
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.mock.bodies import Refusal, is_list_of, missing, shown, validation_error
from gateway.mock.calls import Api, Call, Server, pooled
from gateway.mock.fields import POOLING_FIELDS, coerced
from gateway.mock.progress import NO_EXTRAS, Extras, Json, Progress
from gateway.mock.prompts import Prompt, Reader

DIMENSIONS = 128
"""Of a vector."""
BYTES_FORMATS = ("bytes", "bytes_only")
_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The names of a score's two sides; the first pair that is there counts."""
_UNEVEN = "Input lengths must be either 1:1, 1:N or N:N"
_CUT_TOO_LONG = (
    "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
)
_EMBEDDING_MISSING = ("input", "messages", "messages", "messages", "input", "messages", "input")
"""vLLM lists what each of its five kinds of embedding request lacks."""
_POOLING_MISSING = ("input", "messages", "data")


def parse_embedding(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """A body of /v1/embeddings.  Raises Refusal as vLLM would answer."""
    body = _checked(body, server)
    return pooled(Api.EMBEDDING, body, _inputs(body, server, _EMBEDDING_MISSING), f"embd-{call_id}", server)


def parse_pooling(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """A body of /pooling."""
    body = _checked(body, server)
    api = Api.POOLING if server.options.convert == "embed" else Api.LABELS
    return pooled(api, body, _inputs(body, server, _POOLING_MISSING), f"pooling-{call_id}", server)


def parse_score(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """A body of /score."""
    body = _checked(body, server)
    pair = next((pair for pair in _PAIRS if all(name in body for name in pair)), None)
    if pair is None:
        raise missing(body, *(name for names in _PAIRS for name in names))
    return pooled(Api.SCORE, body, _scored(body, pair, server), f"score-{call_id}", server)


def parse_rerank(body: Mapping[str, Any], call_id: str, server: Server) -> Call:
    """A body of /rerank."""
    body = _checked(body, server)
    absent = [name for name in ("query", "documents") if name not in body]
    if absent:
        raise missing(body, *absent)
    if not isinstance(body["query"], str):
        raise _not_text(body["query"], "query")
    return pooled(Api.RERANK, body, _scored(body, ("query", "documents"), server), f"score-{call_id}", server)


def answer(progress: Progress, created: int, extras: Extras = NO_EXTRAS) -> Json:
    """The body of a pooled call."""
    del extras
    call = progress.call
    if call.api is Api.RERANK:
        return _ranking(call)
    head = {"id": call.id, "object": "list", "created": created, "model": call.model}
    return head | {"data": _data(call), "usage": _usage(call)}


def answers_bytes(call: Call) -> bool:
    return call.api in (Api.EMBEDDING, Api.POOLING) and call.body.get("encoding_format") in BYTES_FORMATS


def metadata(call: Call, created: int) -> list[tuple[bytes, bytes]]:
    """The header that describes an answer of bytes, where it is asked for."""
    if call.body["encoding_format"] == "bytes_only":
        return []
    size = 4 * DIMENSIONS
    data = [
        {
            "index": index,
            "embed_dtype": "float32",
            "endianness": "native",
            "start": index * size,
            "end": (index + 1) * size,
            "shape": [DIMENSIONS],
        }
        for index in range(len(call.prompts))
    ]
    head = {"id": call.id, "created": created, "model": call.model, "data": data}
    usage = {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}
    return [(b"metadata", json.dumps(head | {"usage": usage}).encode())]


def vectors(call: Call) -> list[bytes]:
    """The vectors of a call as numbers of four bytes."""
    return [struct.pack(f"{DIMENSIONS}f", *_vector(prompt)) for prompt in call.prompts]


# -- reading -------------------------------------------------------------------------------------------------------


def _checked(body: Mapping[str, Any], server: Server) -> Mapping[str, Any]:
    body = coerced(body, POOLING_FIELDS)
    model = body.get("model")
    if model is not None and model not in server.names:
        raise Refusal(404, f"The model `{model}` does not exist.", "NotFoundError")
    if (body.get("truncate_prompt_tokens") or 0) > server.engine.max_model_len:
        raise Refusal(400, _CUT_TOO_LONG)
    return body


def _inputs(body: Mapping[str, Any], server: Server, absent: Sequence[str]) -> tuple[Prompt, ...]:
    given = body.get("messages") or body.get("input")
    if "messages" not in body and "input" not in body:
        raise missing(body, *absent)
    reader = Reader(body, server.engine, keep=True, pooled=True)
    if is_list_of(given, dict) and given:
        return (reader.chat(given, None),)
    if isinstance(given, list) and given and all(is_list_of(one, dict) and one for one in given):
        return tuple(reader.chat(messages, None) for messages in given)
    if given == "":
        return (reader.text(""),)
    return reader.completion(given if given is not None else [])


def _scored(body: Mapping[str, Any], pair: tuple[str, str], server: Server) -> tuple[Prompt, ...]:
    """The prompts of the engine: queries and documents each for themselves, or in pairs."""
    reader = Reader(body, server.engine, keep=True, pooled=True)
    queries, documents = (_side(body, name) for name in pair)
    for side, what in ((queries, "text"), (documents, "text_pair")):
        if not side:
            raise Refusal(400, f"At least one {what} element must be given")
    if len(queries) not in (1, len(documents)):
        raise Refusal(400, _UNEVEN)
    most = [int(body.get(name) or 0) for name in ("max_tokens_per_query", "max_tokens_per_doc")]
    if server.options.convert == "embed":
        return tuple(
            reader.text(text, cut)
            for side, cut in zip((queries, documents), most, strict=True)
            for text in side
        )
    if len(queries) == 1:
        queries *= len(documents)
    return tuple(reader.pair(q, d, *most) for q, d in zip(queries, documents, strict=True))


def _side(body: Mapping[str, Any], name: str) -> list[str]:
    value = body[name]
    side = value if isinstance(value, list) else [value]
    for number, text in enumerate(side):
        if not isinstance(text, str):
            raise _not_text(text, f"{name}.{number}" if isinstance(value, list) else name)
    return side


def _not_text(value: object, place: str) -> Refusal:
    """The tiny model that was recorded takes no parts either."""
    if isinstance(value, dict):
        return Refusal(400, "MultiModalParam is not supported for LlamaForCausalLM")
    texts = (
        ("string_type", "Input should be a valid string"),
        ("dict_type", "Input should be a valid dictionary"),
    )
    places = (f"body.{place}", f"body.{place}.ScoreMultiModalParam")
    return validation_error(
        [(kind, where, text, shown(value)) for (kind, text), where in zip(texts, places, strict=True)]
    )


# -- answering -----------------------------------------------------------------------------------------------------


def _data(call: Call) -> list[Json]:
    if call.api is Api.SCORE:
        return [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(_scores(call))
        ]
    field, kind = ("embedding", "embedding") if call.api is Api.EMBEDDING else ("data", "pooling")
    show: Callable[[Prompt], object] = _label if call.api is Api.LABELS else _vector
    if call.body.get("encoding_format") == "base64" and call.api is not Api.LABELS:
        show = _vector_base64
    return [
        {"index": index, "object": kind, field: show(prompt)} for index, prompt in enumerate(call.prompts)
    ]


def _ranking(call: Call) -> Json:
    documents = _side(call.body, "documents")
    results = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": score}
        for index, (text, score) in enumerate(zip(documents, _scores(call), strict=True))
    ]
    results.sort(key=lambda result: -float(str(result["relevance_score"])))
    shown_max = int(call.body.get("top_n") or 0) or len(results)
    tokens = {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}
    return {"id": call.id, "model": call.model, "usage": tokens, "results": results[:shown_max]}


def _usage(call: Call) -> Json:
    tokens = call.prompt_tokens
    counts = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return counts | {"prompt_tokens_details": None, "completion_tokens_details": None}


def _scores(call: Call) -> Iterator[float]:
    """How much of a query is in its document: 1 where all of it is."""
    pair = ("query", "documents")
    if call.api is Api.SCORE:
        pair = next(pair for pair in _PAIRS if all(name in call.body for name in pair))
    queries, documents = (_side(call.body, name) for name in pair)
    if len(queries) == 1:
        queries *= len(documents)
    for query, document in zip(queries, documents, strict=True):
        words = set(query.split())
        yield len(words & set(document.split())) / len(words) if words else 0.0


def _vector(prompt: Prompt) -> list[float]:
    """Of length one; equal prompts have equal vectors."""
    digest = hashlib.shake_128(repr(prompt.ids).encode()).digest(2 * DIMENSIONS)
    numbers = [number / 32768 for number in struct.unpack(f"<{DIMENSIONS}h", digest)]
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def _label(prompt: Prompt) -> list[float]:
    """One label, and no training."""
    return [0.5]


def _vector_base64(prompt: Prompt) -> str:
    return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *_vector(prompt))).decode()
