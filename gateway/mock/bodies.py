"""Reading JSON bodies as vLLM's pydantic models do: lax coercions, and refusals with their exact texts.

Source: the answers of a real vLLM 0.32.0, recorded field by field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from gateway.mock.tokenizer import VOCABULARY

SHOWN_ERRORS_MAX = 10
"""vLLM lists so many validation errors and counts the rest."""
Item = TypeVar("Item")
ValidationError = tuple[str, str, str, str] | tuple[str, str, str, str, Mapping[str, object]]
"""pydantic's type, location, message, input and, of some types, context."""
_NOT_OURS = "Unsupported Media Type: Only 'application/json' is allowed"
_UNREADABLE = "There was an error parsing the body"
_VALIDATION = "Bad Request"
_INTEGER = "Input should be a valid integer"
_STRING = "Input should be a valid string"
_LIST = "Input should be a valid list"
_DICTIONARY = "Input should be a valid dictionary"
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")


class Refusal(Exception):
    """An error answer in vLLM's envelope."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": status}
        }

    @property
    def by_validation(self) -> bool:
        """True when FastAPI refused the body, before a handler of vLLM saw it."""
        return self.kind == _VALIDATION


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object.  Raises Refusal with vLLM's text for what it is instead."""
    if raw.strip() in (b"", b"null"):
        raise validation_error([("missing", "body", "Field required", "None")])
    try:
        body: Any = json.loads(raw)
    except json.JSONDecodeError as error:
        raise _json_invalid(error) from None
    except (ValueError, RecursionError):  # not UTF-8, an integer of thousands of digits, or too deep
        refusal = Refusal(400, _UNREADABLE, _VALIDATION)
        refusal.body = {"detail": _UNREADABLE}
        raise refusal from None
    if isinstance(body, dict):
        return body
    text = f"{_DICTIONARY} or object to extract fields from"
    raise validation_error([("model_attributes_type", "body", text, shown(body))])


def check_media_type(content_type: str) -> None:
    """Raises Refusal unless a body is announced as JSON."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise _validation([_NOT_OURS], None)


def validation_error(errors: Sequence[ValidationError]) -> Refusal:
    """vLLM's rendering of pydantic errors."""
    lines = [_line(*error) for error in errors]
    return _validation(lines, errors[0][1])


def missing(body: Mapping[str, Any], *names: str) -> Refusal:
    """The validation error for absent fields."""
    return validation_error([("missing", f"body.{name}", "Field required", shown(body)) for name in names])


def parameter_error(message: str, name: str, value: object = None) -> Refusal:
    """The refusal of one field by vLLM's own checks."""
    suffix = f"parameter={name}" if value is None else f"parameter={name}, value={value}"
    return Refusal(400, f"{message} ({suffix})", param=name)


def shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def integer(body: Mapping[str, Any], name: str) -> int | None:
    """An integer field as pydantic's lax mode reads it: "12", 3.0 and true are 12, 3 and 1."""
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    found, error = read_integer(value, f"body.{name}")
    if error is not None:
        raise validation_error([error])
    return found


def is_list_of(value: object, kind: type[Item]) -> TypeGuard[list[Item]]:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )


def check_token_ids(ids: Sequence[int]) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < VOCABULARY):
        wrong = next(number for number in ids if not 0 <= number < VOCABULARY)
        raise Refusal(400, f"Token id {wrong} is out of vocabulary")


def check_messages(body: Mapping[str, Any]) -> None:
    """Raises Refusal unless `messages` is a list of objects whose roles are strings."""
    if "messages" not in body:
        raise missing(body, "messages")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise validation_error([("list_type", "body.messages", _LIST, shown(messages))])
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong_message(message, f"body.messages.{number}")
        if not isinstance(message.get("role"), str):
            raise _wrong_role(message, f"body.messages.{number}")


def token_ids(body: Mapping[str, Any], name: str) -> list[int]:
    """A field that has to be a list of token ids.  Raises Refusal."""
    if name not in body:
        raise missing(body, name)
    errors = list(_integer_list_errors(body[name], f"body.{name}"))
    if errors:
        raise validation_error(errors)
    ids = [int(item) for item in body[name]]
    check_token_ids(ids)
    return ids


def wrong_prompt(value: object) -> Refusal:
    """The refusal of a `prompt` that is none of vLLM's four forms: the errors of each form in turn."""
    errors = [*_integer_list_errors(value, "body.prompt")]
    if isinstance(value, list):
        for number, item in enumerate(value):
            errors += _integer_list_errors(item, f"body.prompt.{number}")
        errors.append(("string_type", "body.prompt", _STRING, shown(value)))
        errors += [
            ("string_type", f"body.prompt.{number}", _STRING, shown(item))
            for number, item in enumerate(value)
            if not isinstance(item, str)
        ]
    else:
        errors.append(("list_type", "body.prompt", _LIST, shown(value)))
        errors.append(("string_type", "body.prompt", _STRING, shown(value)))
        errors.append(("list_type", "body.prompt", _LIST, shown(value)))
    return validation_error(errors)


def _integer_list_errors(value: object, place: str) -> Iterator[ValidationError]:
    if not isinstance(value, list):
        yield ("list_type", place, _LIST, shown(value))
        return
    for number, item in enumerate(value):
        found, error = read_integer(item, f"{place}.{number}")
        if error is not None:
            yield error
        elif found is not None and found < 0:
            text = "Input should be greater than or equal to 0"
            yield ("greater_than_equal", f"{place}.{number}", text, str(item), {"ge": 0})


def read_integer(value: object, place: str) -> tuple[int | None, ValidationError | None]:
    """The integer that pydantic's lax mode makes of the value, or its error."""
    if isinstance(value, int):
        return int(value), None
    if isinstance(value, float):
        if value.is_integer():
            return int(value), None
        text = f"{_INTEGER}, got a number with a fractional part"
        return None, ("int_from_float", place, text, str(value))
    if not isinstance(value, str):
        return None, ("int_type", place, _INTEGER, shown(value))
    try:
        return int(value), None
    except ValueError:
        return None, ("int_parsing", place, f"{_INTEGER}, unable to parse string as an integer", value)


def _wrong_role(message: Mapping[str, Any], place: str) -> Refusal:
    """A role that is no string fails every kind of message that vLLM knows, so all of them are listed."""
    whole = shown(message)
    lines = [
        *(
            _wrong_literal(kind, message, place)
            for kind in ("developer", "system", "user", "assistant", "tool")
        ),
        _line("missing", f"{place}.ChatCompletionToolMessageParam.tool_call_id", "Field required", whole),
        _line("missing", f"{place}.ChatCompletionFunctionMessageParam.name", "Field required", whole),
        _wrong_literal("function", message, place),
        _wrong_custom(message, f"{place}.CustomChatCompletionMessageParam.role"),
        _line("missing", f"{place}.Message.author", "Field required", whole),
    ]
    return _validation(lines, f"{place}.ChatCompletionDeveloperMessageParam.role", unseen=1)


def _wrong_literal(kind: str, message: Mapping[str, Any], place: str) -> str:
    place = f"{place}.ChatCompletion{kind.capitalize()}MessageParam.role"
    if "role" not in message:
        return _line("missing", place, "Field required", shown(message))
    expected = f"'{kind}'"
    context = {"expected": expected}
    return _line("literal_error", place, f"Input should be {expected}", shown(message["role"]), context)


def _wrong_custom(message: Mapping[str, Any], place: str) -> str:
    if "role" not in message:
        return _line("missing", place, "Field required", shown(message))
    return _line("string_type", place, _STRING, shown(message["role"]))


def _wrong_message(message: object, place: str) -> Refusal:
    """What is no object is none of the kinds of message either."""
    kinds = [f"ChatCompletion{kind.capitalize()}MessageParam" for kind in _ROLES]
    errors: list[ValidationError] = [
        ("dict_type", f"{place}.{kind}", _DICTIONARY, shown(message))
        for kind in (*kinds, "CustomChatCompletionMessageParam")
    ]
    text = f"{_DICTIONARY} or object to extract fields from"
    errors.append(("model_attributes_type", f"{place}.Message", text, shown(message)))
    return validation_error(errors)


def _json_invalid(error: json.JSONDecodeError) -> Refusal:
    place = f"body.{error.pos}"
    line = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": "<dict of 0 items>"}
    return _validation([str(line | {"ctx": {"error": error.msg}})], place)


def _line(kind: str, place: str, text: str, given: str, context: Mapping[str, object] | None = None) -> str:
    error = {"type": kind, "loc": place, "msg": text, "input": given}
    return str(error if context is None else error | {"ctx": context})


def _validation(lines: Sequence[str], param: str | None, unseen: int = 0) -> Refusal:
    total = len(lines) + unseen
    heading = f"{total} validation error{'s' if total > 1 else ''}:"
    rest = total - min(len(lines), SHOWN_ERRORS_MAX)
    tail = [f"...and {rest} more errors"] if rest else []
    return Refusal(400, "\n  ".join([heading, *lines[:SHOWN_ERRORS_MAX], *tail]), _VALIDATION, param)
