"""The Lua scripts: spliced from `lua/` at load, run by EVALSHA.

`--- @include "lib/x"` puts `lua/lib/x.lua` there, once; a cycle cannot be, because a fragment that is being spliced
already counts as present.  The wheel carries the files as `gateway/_lua`; in a checkout they are `./lua`.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^--- @include "([a-z_/]+)"$', re.MULTILINE)

KEY_NAMES = (
    "meta",
    "replicas",
    "calls",
    "queue",
    "order",
    "flows",
    "keys",
    "parked",
    "owners",
    "sessions",
    "owned",
    "outbox",
    "deadlines",
    "prefixes",
    "forecast",
)
"""Every script declares all of them, in this order; `docs/ledger.md` says what each holds."""


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: str
    sha: str


def key_prefix(fleet: str) -> str:
    """All keys of a fleet live in one hash slot."""
    return f"{{kvgate:{fleet}}}:"


def fleet_keys(fleet: str) -> tuple[str, ...]:
    return tuple(key_prefix(fleet) + name for name in KEY_NAMES)


def script_folder() -> Path:
    package = Path(__file__).resolve().parent.parent
    shipped = package / "_lua"
    return shipped if shipped.is_dir() else package.parent / "lua"


@cache
def load(name: str) -> Script:
    """Raises FileNotFoundError where the installation lacks its scripts."""
    text = splice(script_folder(), name)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def splice(folder: Path, name: str) -> str:
    present: set[str] = set()

    def text_of(fragment: str) -> str:
        present.add(fragment)
        source = (folder / f"{fragment}.lua").read_text()
        return _INCLUDE.sub(
            lambda found: "" if found[1] in present else text_of(found[1]).rstrip("\n"), source
        )

    return text_of(name)
