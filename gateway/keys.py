"""The commands `kvgate keys create | list | rotate | revoke` on a keys file, which every gateway follows.

A secret is shown once, by itself on the last line of the output, and only after its digest is in the file.
"""

import argparse
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gateway import keysfile
from gateway.config import ConfigError, KeyEntry, Limits, load_keys, parse_keys
from gateway.http.auth import new_key

NUMBER = r"\d{1,12}(\.\d{1,4})?"
DIGEST_SHOWN = 8
"""Characters: enough to tell entries apart."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_MS = 253_402_300_799_000
"""The last second of the year 9999."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="command")
    create = commands.add_parser(
        "create", help="make a key: its entry goes into the file, its secret is shown once"
    )
    create.add_argument("name", metavar="NAME", help="what logs, metrics and the admin API call it")
    create.add_argument("--file", type=Path, help="the keys file (YAML); without it the entry is printed")
    create.add_argument("--class", dest="class_", metavar="C", help="its class (default normal)")
    create.add_argument(
        "--weight", type=int, metavar="N", help="its share among the keys of its class (default 1)"
    )
    create.add_argument("--group", metavar="G", help="keys of one group share their limits")
    create.add_argument("--models", metavar="A,B", help="names of models that it may ask for (default all)")
    create.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"one of {', '.join(_limit_names())}",
    )
    create.add_argument("--expires", metavar="DATE", help="2027-01-31, or 2027-01-31T12:00:00Z")
    create.set_defaults(run=_create)

    list_ = commands.add_parser("list", help="show the keys of a file, never a secret")
    list_.set_defaults(run=_list)
    rotate = commands.add_parser("rotate", help="a new secret under the same name; the old one ends at once")
    rotate.set_defaults(run=_rotate)
    revoke = commands.add_parser("revoke", help="take a key out; its running streams go on")
    revoke.set_defaults(run=_revoke)
    for command in (rotate, revoke):
        command.add_argument("name", metavar="NAME")
    for command in (list_, rotate, revoke):
        command.add_argument("--file", type=Path, required=True, help="the keys file (YAML)")


# Commands ---------------------------------------------------------------------------------------------------


def _create(parsed: argparse.Namespace) -> int:
    secret, digest = new_key()
    entry = _entry(parsed, digest)
    if parsed.file is None:
        print(f"the entry for the keys file:\n{keysfile.entry_line(entry)}\n")
        print(f"the secret of {parsed.name}, shown only now:\n{secret}")
        return 0
    file = parsed.file
    keysfile.edit(file, lambda text: keysfile.with_key(text, file.name, entry), create=True)
    print(f"{parsed.name} is in {file}; its secret is shown only now:\n{secret}")
    return 0


def _list(parsed: argparse.Namespace) -> int:
    rows = [_row(key) for key in load_keys(parsed.file, None)]
    print("\n".join(_table(["NAME", "CLASS", "WEIGHT", "GROUP", "LIMITS", "EXPIRES", "SHA256"], rows)))
    return 0


def _rotate(parsed: argparse.Namespace) -> int:
    secret, digest = new_key()
    file = parsed.file
    keysfile.edit(file, lambda text: keysfile.with_digest(text, file.name, parsed.name, digest))
    print(
        f"{parsed.name} has a new secret; calls with the old one are refused within a second, running streams go on."
    )
    print(f"The new one is shown only now:\n{secret}")
    return 0


def _revoke(parsed: argparse.Namespace) -> int:
    file = parsed.file
    keysfile.edit(file, lambda text: keysfile.without_key(text, file.name, parsed.name))
    print(f"{parsed.name} is out of {file}: new calls are refused within a second, running streams go on.")
    return 0


# The entry --------------------------------------------------------------------------------------------------


def _entry(parsed: argparse.Namespace, digest: str) -> dict[str, Any]:
    """What the file gets; raises ConfigError that names the option.  Which classes there are is not known here."""
    stated = {
        "name": parsed.name,
        "sha256": digest,
        "class": parsed.class_,
        "weight": parsed.weight,
        "group": parsed.group,
        "models": _models(parsed.models),
        "limits": dict(_limits(parsed.limit)) or None,
        "expires": parsed.expires,
    }
    entry = {name: value for name, value in stated.items() if value is not None}
    try:
        parse_keys(keysfile.entry_line(entry), "the entry", None)
    except ConfigError as error:
        raise ConfigError(error.path.removeprefix("keys[0]."), error.problem) from None
    return entry


def _models(option: str | None) -> list[str] | None:
    if option is not None and not option.isprintable():
        raise ConfigError("models", f"has characters that cannot be printed, got {option!r}")
    return None if option is None else option.split(",")


def _limit_names() -> tuple[str, ...]:
    return Limits.__struct_fields__


def _limits(options: Sequence[str]) -> list[tuple[str, int | float]]:
    found: dict[str, int | float] = {}
    for option in options:
        name, _, text = option.partition("=")
        if name not in _limit_names():
            raise ConfigError("--limit", f"there is no limit `{name}`; there are {', '.join(_limit_names())}")
        if name in found:
            raise ConfigError("--limit", f"{name} is given twice")
        if not re.fullmatch(NUMBER, text, re.ASCII):
            raise ConfigError(f"--limit {name}", f"a number like 50 or 0.5 is needed, got {text!r}")
        found[name] = float(text) if "." in text else int(text)
    return list(found.items())


# The table --------------------------------------------------------------------------------------------------


def _row(key: KeyEntry) -> list[str]:
    return [
        key.name,
        key.class_,
        str(key.weight),
        key.group or "-",
        _limits_text(key.limits),
        _date_text(key.expires_ms),
        key.sha256[:DIGEST_SHOWN],
    ]


def _limits_text(limits: Limits) -> str:
    """Those that differ from the defaults; of a key in a group they are the group's."""
    stated = [
        f"{name}={getattr(limits, name)}"
        for name in _limit_names()
        if getattr(limits, name) != getattr(Limits(), name)
    ]
    return ",".join(stated) or "-"


def _date_text(expires_ms: int | None) -> str:
    """To the second; what lies outside of the years 1970 to 9999 is shown as their end."""
    if expires_ms is None:
        return "-"
    moment = EPOCH + timedelta(milliseconds=min(max(expires_ms, 0), LATEST_MS))
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as what is in them."""
    lines = [head, *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
