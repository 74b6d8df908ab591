"""Where calls go: a gateway, one engine, or several engines behind a kind, plain load balancer."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gateway.loadtest.scenario import ScenarioError


@dataclass(slots=True)
class Target:
    """One server."""

    url: str
    host: str
    port: int
    secure: bool
    prefix: str
    """Of every path."""
    prompt_tokens_max: int | None = None
    outstanding: int = field(default=0, compare=False)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.secure else None


def parse_target(text: str) -> Target:
    """`URL` or `URL,max_prompt_tokens=N`.  Raises ScenarioError."""
    url, _, option = text.partition(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ScenarioError(f"target {url!r}: a URL like http://host:port is needed")
    name, _, number = option.partition("=")
    if option and (name != "max_prompt_tokens" or not number.isdecimal() or int(number) < 1):
        raise ScenarioError(f"target {text!r}: after the comma only max_prompt_tokens=N is known")
    secure = parts.scheme == "https"
    return Target(
        url=url.rstrip("/"),
        host=parts.hostname,
        port=parts.port or (443 if secure else 80),
        secure=secure,
        prefix=parts.path.rstrip("/"),
        prompt_tokens_max=int(number) if option else None,
    )


def choose(targets: Sequence[Target], prompt_tokens: int, avoid: int | None = None) -> int:
    """The index of the least busy target among those of the shortest range that takes the prompt.

    `avoid` is the one that has just failed the call; another is taken if the range has one.  A prompt that is too
    long for all goes to the longest range, whose engine refuses it.
    """
    limits = [target.prompt_tokens_max or _ANY for target in targets]
    takes = [limit for limit in limits if limit >= prompt_tokens]
    range_ = min(takes) if takes else max(limits)
    fitting = [index for index, limit in enumerate(limits) if limit == range_]
    others = [index for index in fitting if index != avoid]
    return min(others or fitting, key=lambda index: targets[index].outstanding)


_ANY = 2**63
