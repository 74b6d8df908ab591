"""The plain fields of a call: coerced as pydantic's lax mode does, and within the ranges of vLLM's sampling parameters.

Source: the answers of a real vLLM 0.32.0, asked field by field.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.mock.bodies import (
    Refusal,
    ValidationError,
    parameter_error,
    read_integer,
    shown,
    validation_error,
)

Json = Mapping[str, Any]
Kind = type[bool] | type[int] | type[float] | type[str]
Read = tuple[Any, ValidationError | None]
"""A value as the field's type, or why it is none."""

_SAMPLING: Mapping[str, Kind] = {
    "use_beam_search": bool,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "ignore_eos": bool,
    "min_tokens": int,
    "truncate_prompt_tokens": int,
    "echo": bool,
    "request_id": str,
    "priority": int,
    "return_token_ids": bool,
}
CHAT_FIELDS: Mapping[str, Kind] = {
    "model": str,
    "frequency_penalty": float,
    "logprobs": bool,
    "max_tokens": int,
    "max_completion_tokens": int,
    "n": int,
    "presence_penalty": float,
    "seed": int,
    "stream": bool,
    "temperature": float,
    "top_p": float,
    "user": str,
    **_SAMPLING,
}
"""In the order in which vLLM lists their errors."""
TEXT_FIELDS: Mapping[str, Kind] = {
    "model": str,
    "frequency_penalty": float,
    "logprobs": int,
    "max_tokens": int,
    "n": int,
    "presence_penalty": float,
    "seed": int,
    "stream": bool,
    "temperature": float,
    "top_p": float,
    "user": str,
    **_SAMPLING,
}
POOLING_FIELDS: Mapping[str, Kind] = {
    "model": str,
    "user": str,
    "truncate_prompt_tokens": int,
    "request_id": str,
    "priority": int,
    "dimensions": int,
    "top_n": int,
    "max_tokens_per_query": int,
    "max_tokens_per_doc": int,
}
AUDIO_FIELDS: Mapping[str, Kind] = {
    "model": str,
    "prompt": str,
    "language": str,
    "hotwords": str,
    "response_format": str,
    "stream": bool,
    "use_beam_search": bool,
    "n": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "max_completion_tokens": int,
}
_USAGE_FIELDS: Mapping[str, Kind] = {"include_usage": bool, "continuous_usage_stats": bool}
_BOOLEAN = "Input should be a valid boolean"
_NUMBER = "Input should be a valid number"
_YES = {"1", "on", "t", "true", "y", "yes"}
_NO = {"0", "off", "f", "false", "n", "no"}


def coerced(body: Json, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The body with these fields, and those of `stream_options`, as what they must be.  Raises Refusal."""
    found, errors = _coerced(body, kinds, "body")
    options = body.get("stream_options")
    if isinstance(options, dict):
        found["stream_options"], more = _coerced(options, _USAGE_FIELDS, "body.stream_options")
        errors += more
    elif options is not None:
        text = "Input should be a valid dictionary or object to extract fields from"
        errors.append(("model_attributes_type", "body.stream_options", text, shown(options)))
    cut = found.get("truncate_prompt_tokens")
    if type(cut) is int and cut < -1:
        text = "Input should be greater than or equal to -1"
        errors.append(("greater_than_equal", "body.truncate_prompt_tokens", text, str(cut), {"ge": -1}))
    if errors:
        raise validation_error(errors)
    return found


def check_ranges(body: Json) -> None:
    """Raises Refusal for a coerced body whose sampling parameters vLLM does not allow."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (penalty := _number_of(body, name, 0.0)) <= 2:
            raise Refusal(400, f"{name} must be in [-2, 2], got {penalty}.")
    if (penalty := _number_of(body, "repetition_penalty", 1.0)) <= 0:
        raise Refusal(400, f"repetition_penalty must be greater than zero, got {penalty}.")
    temperature = _number_of(body, "temperature", 1.0)
    if temperature < 0:
        text = f"temperature must be non-negative, got {temperature}."
        raise parameter_error(text, "temperature", temperature)
    if temperature > 2:
        raise parameter_error(
            f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature
        )
    if not 0 < (top_p := _number_of(body, "top_p", 1.0)) <= 1:
        raise parameter_error(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if (top_k := body.get("top_k") or 0) < -1:
        raise Refusal(400, f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    if not 0 <= (min_p := _number_of(body, "min_p", 0.0)) <= 1:
        raise Refusal(400, f"min_p must be in [0, 1], got {min_p}.")


def _number_of(body: Json, name: str, default: float) -> float:
    value = body.get(name)
    return default if value is None else float(value)


def _coerced(
    body: Json, kinds: Mapping[str, Kind], place: str
) -> tuple[dict[str, Any], list[ValidationError]]:
    found, errors = dict(body), list[ValidationError]()
    for name, kind in kinds.items():
        value = body.get(name)
        if value is None or type(value) is kind:
            continue
        found[name], error = _READERS[kind](value, f"{place}.{name}")
        if error is not None:
            errors.append(error)
    return found, errors


def read_boolean(value: object, place: str) -> Read:
    """A boolean in one of the forms that pydantic takes for one."""
    if not isinstance(value, int | float | str):
        return None, ("bool_type", place, _BOOLEAN, shown(value))
    word = value.lower() if isinstance(value, str) else f"{value:g}"
    if word in _YES | _NO:
        return word in _YES, None
    return None, ("bool_parsing", place, f"{_BOOLEAN}, unable to interpret input", str(value))


def _read_number(value: object, place: str) -> Read:
    if not isinstance(value, int | float | str):
        return None, ("float_type", place, _NUMBER, shown(value))
    try:
        return float(value), None
    except ValueError:
        return None, ("float_parsing", place, f"{_NUMBER}, unable to parse string as a number", str(value))


def _read_string(value: object, place: str) -> Read:
    if isinstance(value, str):
        return value, None
    return None, ("string_type", place, "Input should be a valid string", shown(value))


_READERS: Mapping[Kind, Callable[[object, str], Read]] = {
    bool: read_boolean,
    int: read_integer,
    float: _read_number,
    str: _read_string,
}
