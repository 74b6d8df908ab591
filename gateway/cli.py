"""The command line: `kvgate serve | mock | loadtest | check-config | verify | status | keys | ...`, see `COMMANDS`."""

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gateway import __version__
from gateway.core.outcomes import OperatorError

if TYPE_CHECKING:
    from gateway.config import KeyEntry, Settings
    from gateway.ledger.verify import Report

# Each command imports what it needs, in the functions below: all of it takes half a second of processor time.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = _parser(arguments[0] if arguments else "").parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (OperatorError, OSError) as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(command: str) -> argparse.ArgumentParser:
    """Knows the names of all commands, and the arguments of that one."""
    parser = argparse.ArgumentParser(
        prog="kvgate", description="Token-budgeted admission control for vLLM fleets."
    )
    parser.add_argument("--version", action="version", version=f"kvgate {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (text, add_arguments) in COMMANDS.items():
        added = commands.add_parser(name, help=text)
        if name == command:
            add_arguments(added)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="the configuration file (YAML)")
    what.add_argument(
        "--demo", action="store_true", help="embedded Valkey, two pools of mock engines, a new key"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument("--port", type=port_number, default=8080, help="0 takes a free one (default 8080)")
    parser.add_argument(
        "--workers", type=whole_number, default=1, help="processes that share the port (default 1)"
    )
    # How a parent tells a worker its place; the three go together.
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--embedded-store", help=argparse.SUPPRESS)
    parser.set_defaults(run=_serve)


def _add_mock(parser: argparse.ArgumentParser) -> None:
    from gateway.mock import serve as mock

    mock.add_arguments(parser)
    parser.set_defaults(run=mock.run)


def _add_loadtest(parser: argparse.ArgumentParser) -> None:
    from gateway.loadtest import command as loadtest

    loadtest.add_arguments(parser)
    parser.set_defaults(run=lambda parsed: loadtest.run(parsed, os.environ))


def _add_check_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.set_defaults(run=_check_config)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", type=Path, help="the configuration file: its store, and all its fleets")
    where.add_argument("--store", metavar="URL", help="the store; goes with --fleet")
    parser.add_argument("--fleet", metavar="NAME", help="this fleet only")
    parser.set_defaults(run=_verify)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    from gateway import keys

    keys.add_arguments(parser)
    parser.set_defaults(run=lambda parsed: keys.run(parsed, os.environ))


def _add_cut(parser: argparse.ArgumentParser) -> None:
    from gateway import keys

    keys.add_cut_arguments(parser)
    parser.set_defaults(run=lambda parsed: keys.cut(parsed, os.environ))


def _add_status(parser: argparse.ArgumentParser) -> None:
    from gateway import operate

    operate.add_status_arguments(parser)
    parser.set_defaults(run=lambda parsed: operate.status(parsed, os.environ))


def _add_gate(parser: argparse.ArgumentParser) -> None:
    from gateway import operate

    operate.add_gate_arguments(parser)
    parser.set_defaults(run=lambda parsed: operate.gate(parsed, os.environ))


def _add_drain(parser: argparse.ArgumentParser) -> None:
    from gateway import operate

    operate.add_replica_arguments(parser)
    parser.set_defaults(run=lambda parsed: operate.drain(parsed, os.environ))


def _add_undrain(parser: argparse.ArgumentParser) -> None:
    from gateway import operate

    operate.add_replica_arguments(parser)
    parser.set_defaults(run=lambda parsed: operate.undrain(parsed, os.environ))


def _add_usage(parser: argparse.ArgumentParser) -> None:
    from gateway import usage

    usage.add_arguments(parser)
    parser.set_defaults(run=lambda parsed: usage.run(parsed, os.environ))


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("run the gateway", _add_serve),
    "mock": ("run a mock vLLM engine", _add_mock),
    "loadtest": ("send the load of a scenario, and report what came of it", _add_loadtest),
    "check-config": ("check a configuration file and its keys file", _add_check_config),
    "verify": ("read the books of a live store, and say where they contradict themselves", _add_verify),
    "status": ("show every replica: its state, and what is reserved there", _add_status),
    "gate": ("close a fleet to new calls, on all gateways, or open it", _add_gate),
    "drain": ("give a replica no new calls, on all gateways; what runs there finishes", _add_drain),
    "undrain": ("let a replica have calls again", _add_undrain),
    "keys": ("make, list, rotate and revoke API keys, in a file or the store", _add_keys),
    "cut": ("end what runs and waits of a key, on all gateways", _add_cut),
    "usage": ("sum up call logs: tokens and blocks by key, group, fleet, ...", _add_usage),
}


def port_number(text: str) -> int:
    if not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError("a port is 0 (any free one) to 65535")
    return int(text)


def whole_number(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return int(text)


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """For imports: all that they make stays, and the collector would look through it again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _serve(parsed: argparse.Namespace) -> int:
    with _nothing_is_garbage():
        from gateway.config import ConfigError, load, load_secrets
        from gateway.serve import serve, serve_demo, serve_inherited
        from gateway.telemetry.workers import Place

    if parsed.demo:
        if parsed.workers > 1:
            raise ConfigError("--workers", "goes with --config; the demo is one process")
        return serve_demo(parsed.host, parsed.port, os.environ)
    settings = load(parsed.config, os.environ)
    secrets = load_secrets(settings, os.environ)
    if parsed.listen_fd is not None:
        place = Place(parsed.workers_folder, parsed.worker, parsed.workers)
        store_url = parsed.embedded_store
        return serve_inherited(
            parsed.config, settings, secrets, parsed.listen_fd, place, store_url, os.environ
        )
    return serve(parsed.config, settings, secrets, parsed.host, parsed.port, parsed.workers, os.environ)


def _check_config(parsed: argparse.Namespace) -> int:
    from gateway.config import check_promises, load, load_keys, without_password

    settings = load(parsed.file, os.environ)
    counted = ""
    if settings.auth.keys_file:
        classes = [class_.name for class_ in settings.classes]
        found = load_keys(Path(settings.auth.keys_file), classes, settings.auth.names_from_outside)
        _check_models(found, settings)
        check_promises(found, settings.fleets)
        counted = f", {len(found)} {'key' if len(found) == 1 else 'keys'}"
    if settings.auth.jwt:
        from gateway.app import read_signature_keys

        read_signature_keys(settings.auth.jwt)
    if any(
        pool.upstream.ca_file or pool.upstream.client_cert_file for f in settings.fleets for pool in f.pools
    ):
        from gateway.app import read_certificates

        read_certificates(settings)
    fleets = ", ".join(fleet.name for fleet in settings.fleets)
    print(f"{parsed.file}: good. Fleets: {fleets}; store: {without_password(settings.store.url)}{counted}")
    return 0


def _check_models(entries: "Sequence[KeyEntry]", settings: "Settings") -> None:
    """A key for a model that no fleet has would be of no use; while the gateway runs it does no harm either."""
    from gateway.config import ConfigError

    known = {model for fleet in settings.fleets for model in fleet.models}
    for number, key in enumerate(entries):
        for model in set(key.models or ()) - known:
            raise ConfigError(f"keys[{number}].models", f"no fleet has the model `{model}`")


def _verify(parsed: argparse.Namespace) -> int:
    """0: the books hold; 1: they do not, one line for each violation; 2: nothing can be said.

    There are books of the limits over all fleets once a key has had some.
    """
    from gateway.core.quota import ALL_FLEETS
    from gateway.ledger.verify import NotKnown, verify

    url, fleets = _books_to_verify(parsed)
    broken = False
    for fleet in fleets:
        try:
            report = asyncio.run(verify(url, fleet))
        except NotKnown:
            if fleet != ALL_FLEETS or parsed.fleet is not None:
                raise
            continue
        broken = broken or bool(report.violations)
        print("\n".join(_report_lines(report)))
    return 1 if broken else 0


def _books_to_verify(parsed: argparse.Namespace) -> tuple[str, Sequence[str]]:
    """The store's URL and the names of the fleets."""
    from gateway.config import EMBEDDED, ConfigError, load
    from gateway.core.quota import ALL_FLEETS

    if parsed.store is not None:
        if parsed.fleet is None:
            raise ConfigError("--store", "needs --fleet, the name of the fleet")
        return parsed.store, [parsed.fleet]
    settings = load(parsed.config, os.environ)
    if settings.store.url == EMBEDDED:
        raise ConfigError(
            "store.url",
            "an embedded store is reached by --store and --fleet only; the log of `kvgate serve` has its URL",
        )
    names = [*(fleet.name for fleet in settings.fleets), ALL_FLEETS]
    if parsed.fleet is None:
        return settings.store.url, names
    if parsed.fleet not in names:
        raise ConfigError("--fleet", f"the configuration has no fleet `{parsed.fleet}`")
    return settings.store.url, [parsed.fleet]


def _report_lines(report: "Report") -> list[str]:
    """Debts are told, but are no violations."""
    told = [f"fleet {report.fleet}: {violation}" for violation in report.violations]
    for replica, blocks in report.debts.items():
        told.append(f"fleet {report.fleet}: note: replica {replica} holds {blocks} blocks above its limit")
    if not report.violations:
        told.append(
            f"fleet {report.fleet}: the books hold: {report.held} calls on {report.replicas} replicas, "
            f"{report.waiting} waiting"
        )
    return told
