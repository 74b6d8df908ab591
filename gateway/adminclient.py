"""The command line's way to a gateway's admin API: `KVGATE_ADMIN_URL` says where, `KVGATE_ADMIN_TOKEN` lets in."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from gateway.core.outcomes import OperatorError

URL = "KVGATE_ADMIN_URL"
TOKEN = "KVGATE_ADMIN_TOKEN"
ANSWER_SECONDS = 10.0


class AdminError(OperatorError):
    """The admin API could not be asked, or said no; one line for whoever asked."""


class AdminClient:
    """Asks one gateway.  Every method raises AdminError."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.url = environ.get(URL, "").rstrip("/")
        token = environ.get(TOKEN, "")
        if not self.url.startswith(("http://", "https://")):
            raise AdminError(f"{URL}: the URL of a gateway is needed, such as http://127.0.0.1:8080")
        if re.search(
            r"[@?#]", self.url
        ):  # a name and a password would go in the token's place, and into messages
            raise AdminError(f"{URL}: may have scheme, host, port and path only")
        if not token or not token.isascii() or not token.isprintable():
            raise AdminError(f"{TOKEN}: the gateway's admin token is needed")
        self._headers = {"authorization": f"Bearer {token}"}

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def post(self, path: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._ask("POST", path, fields)

    def delete(self, path: str) -> dict[str, Any]:
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self.url}/admin/v1{path}"
        try:
            with httpx.Client(headers=self._headers, timeout=ANSWER_SECONDS, trust_env=False) as client:
                answer = client.request(method, url, json=fields)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdminError(f"{self.url} cannot be asked: {str(error) or type(error).__name__}") from None
        told = _object_of(answer)
        if told is None:
            raise AdminError(f"{self.url} does not answer as a gateway does (status {answer.status_code})")
        if answer.is_success:
            return told
        raise AdminError(self._refusal_of(told, answer.status_code))

    def _refusal_of(self, told: Mapping[str, Any], status: int) -> str:
        error = told.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        if status == 401:
            return f"{TOKEN}: is not the admin token of the gateway at {self.url}"
        if status == 404 and isinstance(error, dict) and error.get("param") is None:
            return f"no admin API at {self.url}: the gateway needs the admin token in its own environment"
        return str(message or f"the gateway refused (status {status})")


def field(told: Mapping[str, Any], name: str) -> Any:
    """Of an answer.  Raises AdminError where it is none of a gateway that has this command."""
    if name not in told:
        raise AdminError(f"the answer has no `{name}`: is this a gateway of the same version?")
    return told[name]


def segment(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")


def _object_of(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        told = answer.json()
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
