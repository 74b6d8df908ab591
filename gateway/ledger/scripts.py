"""The Lua scripts: functions of one library, spliced from `lua/`, run by FCALL.

The store makes a library's functions once, when it is loaded; those of a script of EVALSHA at every run, which was
half of a small step.  A library outlives the store's restart where its data does, and follows it to its replicas.

`--- @include "lib/x"` puts the module `lua/lib/x.lua` there, once; a cycle cannot be, because a module that is being
spliced already counts as present.  The wheel carries the files as `gateway/_lua`; in a checkout they are `./lua`.
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
    "backlog",
    "places",
    "place_ends",
    "once",
    "holds",
    "hold_ends",
)
"""Every script declares all of them, in this order; `docs/ledger.md` says what each holds."""


def key_prefix(fleet: str) -> str:
    """All keys of a fleet live in one hash slot."""
    return f"{{kvgate:{fleet}}}:"


def fleet_keys(fleet: str) -> tuple[str, ...]:
    return tuple(key_prefix(fleet) + name for name in KEY_NAMES)


CALLERS_KEYS = ("{kvgate:keys}:state", "{kvgate:keys}:entries", "{kvgate:keys}:cuts")
"""Of the scripts `callers_*`.  A fleet may be called `keys`: it has no keys of these names."""


def script_folder() -> Path:
    package = Path(__file__).resolve().parent.parent
    shipped = package / "_lua"
    return shipped if shipped.is_dir() else package.parent / "lua"


@dataclass(frozen=True, slots=True)
class Library:
    """The name says which text it is: gateways of two versions call their own functions in one store."""

    name: str
    text: str

    def function(self, script: str) -> str:
        return f"{self.name}_{script}"


@cache
def library() -> Library:
    """Raises FileNotFoundError where the installation lacks its scripts."""
    return assemble(splice(script_folder(), "kvgate"))


@cache
def snapshot_script() -> str:
    """`snapshot` for EVAL: who only reads must not have to load anything.  Raises FileNotFoundError."""
    module = (script_folder() / "snapshot.lua").read_text()
    return (
        f"#!lua flags=no-writes,allow-oom\nlocal snapshot = {{}}\n{module}return snapshot.run(KEYS, ARGV)\n"
    )


def assemble(spliced: str) -> Library:
    name = "kvgate_" + hashlib.sha1(spliced.encode(), usedforsecurity=False).hexdigest()[:16]
    return Library(name, f"#!lua name={name}\nlocal LIBRARY = '{name}'\n{spliced}")


def splice(folder: Path, root: str) -> str:
    """The file `root` with the modules that it and they name, in the place of its first such line.

    A module is a table of its file's name; what else its file declares is its own.  All tables are declared before the
    first module: two may use each other's functions.
    """
    modules: dict[str, str] = {}

    def add(fragment: str) -> None:
        if fragment in modules:
            return
        modules[fragment] = ""  # present, so that a cycle ends; its place comes after what it needs
        text = (folder / f"{fragment}.lua").read_text()
        for found in _INCLUDE.findall(text):
            add(found)
        del modules[fragment]
        body = _INCLUDE.sub("", text).strip("\n")
        modules[fragment] = f"do\n{body}\nend"

    text = (folder / f"{root}.lua").read_text()
    for found in _INCLUDE.findall(text):
        add(found)
    tables = [Path(fragment).name for fragment in modules]
    declared = f"local {', '.join(tables)} = {', '.join('{}' for _ in tables)}\n"
    spliced = declared + "\n".join(modules.values())
    return _INCLUDE.sub("", _INCLUDE.sub(lambda _: spliced, text, count=1))
