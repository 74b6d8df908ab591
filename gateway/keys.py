"""The commands `kvgate keys create | list | rotate | revoke` and `kvgate cut`.

With `--file` they edit a keys file, which every gateway follows; else they ask the gateway of `KVGATE_ADMIN_URL` for
the keys in the store.  A secret is shown once, by itself on the last line of the output, and only after its digest is
where it counts.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway import adminclient, keysfile
from gateway.adminclient import AdminClient, AdminError, field, segment
from gateway.config import AllFleetsLimits, ConfigError, Limits, load_keys, parse_keys
from gateway.core.quota import ALL_FLEETS
from gateway.http.auth import new_key
from gateway.keybook import row_of
from gateway.table import table

NUMBER = r"\d{1,12}(\.\d{1,4})?"
IN_STORE = "in the store"
GO_ON = "running streams go on"

Environ = Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="command")
    create = commands.add_parser("create", help="make a key; its secret is shown once")
    create.add_argument("name", metavar="NAME", help="what logs, metrics and the admin API call it")
    create.add_argument("--class", dest="class_", metavar="C", help="its class (default normal)")
    create.add_argument("--mode", metavar="M", help="guaranteed or elastic (default as its class)")
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
    create.add_argument(
        "--no-secret", action="store_true", help="only auth.trusted_header and auth.jwt can name it"
    )
    create.set_defaults(act=_create)

    list_ = commands.add_parser("list", help="show the keys, never a secret")
    list_.set_defaults(act=_list)
    rotate = commands.add_parser("rotate", help="a new secret under the same name; the old one ends at once")
    rotate.set_defaults(act=_rotate)
    revoke = commands.add_parser("revoke", help="end a key; its running streams go on")
    revoke.add_argument("--cut", action="store_true", help="they end too; for keys in the store")
    revoke.set_defaults(act=_revoke)
    for command in (rotate, revoke):
        command.add_argument("name", metavar="NAME")
    for command in (create, list_, rotate, revoke):
        command.add_argument(
            "--file",
            type=Path,
            help=f"a keys file (YAML); without it the keys in the store, by {adminclient.URL} and {adminclient.TOKEN}",
        )


def run(parsed: argparse.Namespace, environ: Environ) -> int:
    """The exit status.  Raises ConfigError, AdminError or OSError; then nothing was changed."""
    parsed.act(parsed, environ)
    return 0


def add_cut_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", required=True, metavar="NAME", help="a key of the file or the store")


def cut(parsed: argparse.Namespace, environ: Environ) -> int:
    """As `run`."""
    told = AdminClient(environ).post("/cut", {"key": parsed.key})
    print(_cut_text(parsed.key, field(told, "calls_cut_here")))
    if not field(told, "is_a_key"):
        print(f"No key is called {parsed.key} now.")
    return 0


# Commands ---------------------------------------------------------------------------------------------------


def _create(parsed: argparse.Namespace, environ: Environ) -> None:
    secret, digest = new_key()
    entry = _entry(parsed, None if parsed.no_secret else digest)
    if parsed.file is not None:
        file = parsed.file
        keysfile.edit(file, lambda text: keysfile.with_key(text, file.name, entry), create=True)
        print(f"{parsed.name} is in {file}.")
    elif environ.get(adminclient.URL):
        fields = {name: value for name, value in entry.items() if name != "sha256"}
        made = AdminClient(environ).post("/keys", fields | ({"secret": False} if parsed.no_secret else {}))
        secret = "" if parsed.no_secret else field(made, "secret")
        print(f"{parsed.name} is {IN_STORE}.")
    else:
        print(f"the entry for the keys file:\n{keysfile.entry_line(entry)}")
    if not parsed.no_secret:
        print(f"The secret of {parsed.name} is shown only now:\n{secret}")


def _list(parsed: argparse.Namespace, environ: Environ) -> None:
    head = ["NAME", "CLASS", "WEIGHT", "GROUP", "LIMITS", "EXPIRES", "SHA256"]
    if parsed.file is not None:
        rows = [_cells(row_of(key)) for key in load_keys(parsed.file, None, secretless=True)]
    else:
        head.append("SOURCE")
        rows = [[*_cells(row), row["source"]] for row in field(_client(environ).get("/keys"), "keys")]
    print("\n".join(table(head, rows)))


def _rotate(parsed: argparse.Namespace, environ: Environ) -> None:
    if parsed.file is not None:
        secret, digest = new_key()
        file = parsed.file
        keysfile.edit(file, lambda text: keysfile.with_digest(text, file.name, parsed.name, digest))
    else:
        secret = field(_client(environ).post(f"/keys/{segment(parsed.name)}/rotate"), "secret")
    print(
        f"{parsed.name} has a new secret; calls with the old one are refused within a second, {GO_ON}.\n"
        f"The new one is shown only now:\n{secret}"
    )


def _revoke(parsed: argparse.Namespace, environ: Environ) -> None:
    file = parsed.file
    if file is not None and parsed.cut:
        raise ConfigError(
            "--cut", "is for keys in the store; here `kvgate cut --key NAME` a second later ends them"
        )
    if file is not None:
        keysfile.edit(file, lambda text: keysfile.without_key(text, file.name, parsed.name))
        print(f"{parsed.name} is out of {file}: new calls are refused within a second, {GO_ON}.")
        return
    wanted = "?cut=true" if parsed.cut else ""
    told = _client(environ).delete(f"/keys/{segment(parsed.name)}{wanted}")
    goes_on = "" if parsed.cut else f", {GO_ON}"
    print(f"{parsed.name} is not {IN_STORE} any more: new calls are refused within a second{goes_on}.")
    if parsed.cut:
        print(_cut_text(parsed.name, field(told, "calls_cut_here")))


def _client(environ: Environ) -> AdminClient:
    if not environ.get(adminclient.URL):
        raise AdminError(f"--file is needed, or {adminclient.URL} for the keys {IN_STORE}")
    return AdminClient(environ)


def _cut_text(name: str, count: int) -> str:
    calls = "1 call" if count == 1 else f"{count} calls"
    return (
        f"{calls} of {name} ended in the process that was asked; all other processes end theirs within a second, "
        "which are not counted here."
    )


# The entry --------------------------------------------------------------------------------------------------


def _entry(parsed: argparse.Namespace, digest: str | None) -> dict[str, Any]:
    """What the file gets; raises ConfigError that names the option.  Which classes there are is not known here."""
    stated = {
        "name": parsed.name,
        "sha256": digest,
        "class": parsed.class_,
        "mode": parsed.mode,
        "weight": parsed.weight,
        "group": parsed.group,
        "models": _models(parsed.models),
        "limits": _nested(_limits(parsed.limit)) or None,
        "expires": parsed.expires,
    }
    entry = {name: value for name, value in stated.items() if value is not None}
    try:
        parse_keys(keysfile.entry_line(entry), "the entry", None, secretless=True)
    except ConfigError as error:
        raise ConfigError(error.path.removeprefix("keys[0]."), error.problem) from None
    return entry


def _models(option: str | None) -> list[str] | None:
    if option is not None and not option.isprintable():
        raise ConfigError("models", f"has characters that cannot be printed, got {option!r}")
    return None if option is None else option.split(",")


def _limit_names() -> tuple[str, ...]:
    """Those that hold over all fleets as `all_fleets.requests_max`."""
    own = (name for name in Limits.__struct_fields__ if name != ALL_FLEETS)
    return (*own, *(f"{ALL_FLEETS}.{name}" for name in AllFleetsLimits.__struct_fields__))


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


def _nested(limits: Sequence[tuple[str, int | float]]) -> dict[str, Any]:
    """As the file has them."""
    found: dict[str, Any] = {}
    for name, value in limits:
        section, _, inner = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[inner] = value
    return found


# The table --------------------------------------------------------------------------------------------------


def _flat(limits: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """As `--limit` takes them."""
    for name, value in limits.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Of the limits those that differ from the defaults; of a key in a group they are the group's."""
    limits = ",".join(f"{name}={value}" for name, value in _flat(row["limits"]))
    return [
        row["name"],
        row["class"],
        str(row["weight"]),
        row["group"] or "-",
        limits or "-",
        row["expires"] or "-",
        row["sha256"] or "-",
    ]
