"""What a client can be told: one enum of codes, each with its HTTP status and error type.

A refusal is a value, not an exception: `core` and the rooms return it, `http` turns it into an answer.
"""

from enum import StrEnum

import msgspec


class OperatorError(Exception):
    """Something that an operator has to mend: told in one line, without a traceback and without secrets."""


class Code(StrEnum):
    """The stable `error.code` of an answer; also the `reason` label of metrics and the ledger's refusals."""

    INVALID_VALUE = "invalid_value"
    MISSING_FIELD = "missing_field"
    DUPLICATE_FIELD = "duplicate_field"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    OUTPUT_LIMIT_EXCEEDED = "output_limit_exceeded"
    TOO_MANY_SEQUENCES = "too_many_sequences"
    KEY_CAP_EXCEEDED = "key_cap_exceeded"
    INVALID_JSON = "invalid_json"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    CONTEXT_NOT_CLEARED = "context_not_cleared"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    DUPLICATE_IN_PROGRESS = "duplicate_in_progress"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    RESPONSE_CANCELLED = "response_cancelled"
    BODY_TIMEOUT = "body_timeout"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    QUOTA_EXCEEDED = "quota_exceeded"
    CAPACITY_EXCEEDED = "capacity_exceeded"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    PREDICTED_WAIT = "predicted_wait"
    GATE_CLOSED = "gate_closed"
    CLIENT_DISCONNECT = "client_disconnect"
    LEASE_LOST = "lease_lost"
    CUT = "cut"
    INTERNAL_ERROR = "internal_error"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    NO_BACKEND = "no_backend"
    STORE_UNAVAILABLE = "store_unavailable"
    DRAINING = "draining"


INVALID = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
API = "api_error"
OVERLOADED = "overloaded_error"

STATUS: dict[Code, tuple[int, str]] = {
    Code.INVALID_VALUE: (400, INVALID),
    Code.MISSING_FIELD: (400, INVALID),
    Code.DUPLICATE_FIELD: (400, INVALID),
    Code.CONTEXT_LENGTH_EXCEEDED: (400, INVALID),
    Code.OUTPUT_LIMIT_EXCEEDED: (400, INVALID),
    Code.TOO_MANY_SEQUENCES: (400, INVALID),
    Code.KEY_CAP_EXCEEDED: (400, INVALID),
    Code.INVALID_JSON: (400, INVALID),
    Code.INVALID_API_KEY: (401, "authentication_error"),
    Code.MODEL_NOT_ALLOWED: (403, "permission_error"),
    Code.CONTEXT_NOT_CLEARED: (403, "permission_error"),
    Code.MODEL_NOT_FOUND: (404, INVALID),
    Code.NOT_FOUND: (404, INVALID),
    Code.METHOD_NOT_ALLOWED: (405, INVALID),
    Code.BODY_TIMEOUT: (408, INVALID),
    Code.DUPLICATE_IN_PROGRESS: (409, INVALID),
    Code.RESPONSE_CANCELLED: (409, INVALID),
    Code.BODY_TOO_LARGE: (413, INVALID),
    Code.UNSUPPORTED_ENCODING: (415, INVALID),
    Code.IDEMPOTENCY_KEY_REUSED: (422, INVALID),
    Code.QUOTA_EXCEEDED: (429, RATE_LIMIT),
    Code.CAPACITY_EXCEEDED: (429, RATE_LIMIT),
    Code.QUEUE_FULL: (429, RATE_LIMIT),
    Code.QUEUE_TIMEOUT: (429, RATE_LIMIT),
    Code.PREDICTED_WAIT: (429, RATE_LIMIT),
    Code.GATE_CLOSED: (429, RATE_LIMIT),
    Code.CLIENT_DISCONNECT: (499, INVALID),
    Code.LEASE_LOST: (503, API),
    Code.CUT: (503, API),
    Code.INTERNAL_ERROR: (500, API),
    Code.UPSTREAM_ERROR: (502, API),
    Code.UPSTREAM_TIMEOUT: (504, API),
    Code.NO_BACKEND: (503, OVERLOADED),
    Code.STORE_UNAVAILABLE: (503, OVERLOADED),
    Code.DRAINING: (503, OVERLOADED),
}

FLEET_OVERLOAD = frozenset(
    {Code.CAPACITY_EXCEEDED, Code.QUEUE_FULL, Code.QUEUE_TIMEOUT, Code.PREDICTED_WAIT, Code.GATE_CLOSED}
)
"""Codes whose status the operator may choose (`answers.overload_status`: 429, 503 or 529)."""


class Outcome(StrEnum):
    """How a call ended; every call ends in exactly one of them."""

    COMPLETED = "completed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Refusal(msgspec.Struct, frozen=True):
    """Why a call is not served, in words a client can act on."""

    code: Code
    message: str
    """Names the knob, the measured value and the limit; never a key or a prompt."""
    param: str | None = None
    """The request field at fault."""
    retry_ms: int | None = None
    """Milliseconds until a retry makes sense; None where repeating the call cannot help."""
    should_retry: bool | None = None
    """Sent as `x-should-retry` when set; False for a call that can never fit, or that an operator ended."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Further ones of the answer."""
    waited: bool = False
    """The call had a ticket: this is no refusal at once."""
    cached: bool = False
    """Given from this process's memory of the store's last answer (`x-kvgate-refused-by: cache`)."""
