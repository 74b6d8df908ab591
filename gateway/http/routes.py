"""The paths that lead to an engine, and how a request there is read.  Every other one is 404, or kvgate's own."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qs

from gateway.core.audio import parse_audio
from gateway.core.outcomes import Code, Refusal
from gateway.core.request import UNRESERVED, Dialect, Endpoint, Request, parse, read_passed
from gateway.http.body import Scope

READS_ONLY = ("GET", "HEAD", "OPTIONS")
_YES = frozenset({"1", "on", "t", "true", "y", "yes"})
"""As vLLM reads the words of a query."""


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    """In logs and sums: without what differs from call to call."""
    dialect: Dialect = Dialect.OPENAI
    methods: tuple[str, ...] = ("POST",)
    endpoint: Endpoint | None = None
    """What is done there with blocks, which a call then has to reserve; None: nothing."""
    known: bool = True
    """False for a path that an operator has allowed: what a request there does is not known."""
    takes_form: bool = False
    """Its body is a form with a file."""

    @property
    def of_responses(self) -> bool:
        return self in _STORED

    def read(self, scope: Scope, body: bytes, n_max: int) -> Request | Refusal:
        if self.takes_form:
            assert self.endpoint is not None
            kinds = [value for name, value in scope["headers"] if name == b"content-type"]
            kind = kinds[0] if len(kinds) == 1 else b""
            return parse_audio(self.endpoint, kind, body, n_max)
        if self.endpoint is not None:
            return parse(self.endpoint, body, n_max)
        if self.of_responses:
            return self._read_stored(scope, body)
        if self.known:
            return read_passed(self.name, self.dialect, body)
        return self._read_unknown(scope, body)

    def _read_stored(self, scope: Scope, body: bytes) -> Request | Refusal:
        """To cancel a response again changes nothing."""
        query = _query(scope)
        if isinstance(query, Refusal):
            return query
        path: str = scope["path"]
        return Request(
            path=f"{path}?{query}" if query else path,
            dialect=self.dialect,
            body=body,
            model=None,
            method=scope["method"],
            stream=any(value.lower() in _YES for value in parse_qs(query).get("stream", ())),
            response_id=path.split("/")[3],
        )

    def _read_unknown(self, scope: Scope, body: bytes) -> Request | Refusal:
        """The model stands in the query where the body is no JSON."""
        text = _query(scope)
        if isinstance(text, Refusal):
            return text
        method, target = scope["method"], f"{self.name}?{text}" if text else self.name
        repeatable = method in READS_ONLY
        if body and _is_json(scope):
            return read_passed(target, self.dialect, body, method=method, repeatable=repeatable)
        models = parse_qs(text).get("model", [None])
        return Request(
            path=target,
            dialect=self.dialect,
            body=body,
            model=models[0],
            method=method,
            repeatable=repeatable,
        )


ROUTES = {
    endpoint.encode(): Route(
        endpoint.path, endpoint.dialect, endpoint=endpoint, takes_form=endpoint.takes_form
    )
    for endpoint in Endpoint
}
ROUTES |= {path.encode(): Route(path, dialect) for path, dialect in UNRESERVED.items()}
"""By raw path: a variant that only decodes to one of them is an unknown path."""


_STORED = (Route("/v1/responses/{id}", methods=("GET",)), Route("/v1/responses/{id}/cancel"))
_STORED_PATH = re.compile(rb"/v1/responses/[A-Za-z0-9_-]{1,128}(/cancel)?").fullmatch


def find_route(raw_path: bytes, pass_through: Collection[str]) -> Route | None:
    """`pass_through`: paths that the operator allows beside the known ones."""
    route = ROUTES.get(raw_path)
    if route is None and (stored := _STORED_PATH(raw_path)):
        return _STORED[stored[1] is not None]
    if route is None and pass_through and (path := raw_path.decode("latin-1")) in pass_through:
        return Route(path, methods=("GET", "POST"), known=False)
    return route


def _query(scope: Scope) -> str | Refusal:
    query: bytes = scope["query_string"]
    if query.isascii() and query.decode("ascii").isprintable():
        return query.decode("ascii")
    return Refusal(Code.INVALID_VALUE, "the query of the request is not printable ASCII")


def _is_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return any(kind.partition(b";")[0].strip().lower() == b"application/json" for kind in kinds)
