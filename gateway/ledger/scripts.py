"""The Lua scripts: spliced from `lua/` at load, run by EVALSHA.

`--- @include "lib/x"` puts the module `lua/lib/x.lua` there, once; a cycle cannot be, because a module that is being
spliced already counts as present.  The wheel carries the files as `gateway/_lua`; in a checkout they are `./lua`.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^--- @(include|late) "([a-z_/]+)"$', re.MULTILINE)

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
    """The script with the modules that it and they name, in the place of its first such line.

    A module is a table of its file's name; what else its file declares is its own.  The store makes all functions of a
    script at each run, so the block of an included module ends the life of its locals, and a late one is a function
    that makes its module when it is called.  Tables are declared before all modules: two may use each other's.
    """
    modules: dict[str, str] = {}

    def add(how: str, fragment: str) -> None:
        if fragment in modules:
            return
        modules[fragment] = ""  # present, so that a cycle ends; its place comes after what it needs
        text = (folder / f"{fragment}.lua").read_text()
        for found in _INCLUDE.findall(text):
            add(*found)
        del modules[fragment]
        modules[fragment] = _module(how, Path(fragment).name, _INCLUDE.sub("", text).strip("\n"))

    script = (folder / f"{name}.lua").read_text()
    for found in _INCLUDE.findall(script):
        add(*found)
    tables = ", ".join(Path(fragment).name for fragment in modules)
    spliced = f"local {tables}\n" + "\n".join(modules.values())
    return _INCLUDE.sub("", _INCLUDE.sub(lambda _: spliced, script, count=1))


def _module(how: str, table: str, body: str) -> str:
    functions = re.findall(rf"^function {table}\.(\w+)", body, re.MULTILINE)
    room = ", ".join(
        f"{name} = 0" for name in functions
    )  # a table that has to grow is made anew at each doubling
    if how == "late":
        return f"{table} = function()\nlocal {table} = {{{room}}}\n{body}\nreturn {table}\nend"
    return f"{table} = {{{room}}}\ndo\n{body}\nend"
