"""The command line: `kvgate serve | mock | loadtest | check-config | verify | keys | cut | usage`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway import __version__, keys, usage
from gateway.adminclient import AdminError
from gateway.app import read_signature_keys
from gateway.config import (
    ConfigError,
    KeyEntry,
    Settings,
    load,
    load_keys,
    load_secrets,
    without_password,
)
from gateway.ledger.embedded import EmbeddedStoreError
from gateway.ledger.verify import NotVerified, Report, verify
from gateway.loadtest import command as loadtest
from gateway.mock import serve as mock
from gateway.serve import DemoError, serve, serve_demo, serve_inherited
from gateway.telemetry.callreader import NotACallLog
from gateway.telemetry.workers import Place
from gateway.tokens.tiktoken_counter import VocabularyError

OPERATOR_ERRORS = (
    ConfigError, EmbeddedStoreError, VocabularyError, DemoError, NotVerified, NotACallLog, AdminError, OSError,
)  # fmt: skip
"""Told in one line, without a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except OPERATOR_ERRORS as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvgate", description="Token-budgeted admission control for vLLM fleets."
    )
    parser.add_argument("--version", action="version", version=f"kvgate {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    serve_ = commands.add_parser("serve", help="run the gateway")
    what = serve_.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="the configuration file (YAML)")
    what.add_argument(
        "--demo", action="store_true", help="embedded Valkey, two pools of mock engines, a new key"
    )
    serve_.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    serve_.add_argument("--port", type=port_number, default=8080, help="0 takes a free one (default 8080)")
    serve_.add_argument(
        "--workers", type=whole_number, default=1, help="processes that share the port (default 1)"
    )
    # How a parent tells a worker its place; the three go together.
    serve_.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    serve_.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    serve_.add_argument("--workers-folder", type=Path, help=argparse.SUPPRESS)
    serve_.set_defaults(run=_serve)

    mock_ = commands.add_parser("mock", help="run a mock vLLM engine")
    mock.add_arguments(mock_)
    mock_.set_defaults(run=mock.run)

    loadtest_ = commands.add_parser(
        "loadtest", help="send the load of a scenario, and report what came of it"
    )
    loadtest.add_arguments(loadtest_)
    loadtest_.set_defaults(run=_loadtest)

    check = commands.add_parser("check-config", help="check a configuration file and its keys file")
    check.add_argument("file", type=Path)
    check.set_defaults(run=_check_config)

    verify_ = commands.add_parser(
        "verify", help="read the books of a live store, and say where they contradict themselves"
    )
    where = verify_.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", type=Path, help="the configuration file: its store, and all its fleets")
    where.add_argument("--store", metavar="URL", help="the store; goes with --fleet")
    verify_.add_argument("--fleet", metavar="NAME", help="this fleet only")
    verify_.set_defaults(run=_verify)

    keys_ = commands.add_parser("keys", help="make, list, rotate and revoke API keys, in a file or the store")
    keys.add_arguments(keys_)
    keys_.set_defaults(run=lambda parsed: keys.run(parsed, os.environ))
    cut = commands.add_parser("cut", help="end what runs and waits of a key, on all gateways")
    keys.add_cut_arguments(cut)
    cut.set_defaults(run=lambda parsed: keys.cut(parsed, os.environ))

    usage_ = commands.add_parser(
        "usage", help="sum up call logs: tokens and blocks by key, group, fleet, ..."
    )
    usage.add_arguments(usage_)
    usage_.set_defaults(run=_usage)
    return parser


def port_number(text: str) -> int:
    if not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError("a port is 0 (any free one) to 65535")
    return int(text)


def whole_number(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return int(text)


def _serve(parsed: argparse.Namespace) -> int:
    if parsed.demo:
        if parsed.workers > 1:
            raise ConfigError("--workers", "goes with --config; the demo is one process")
        return serve_demo(parsed.host, parsed.port, os.environ)
    settings = load(parsed.config, os.environ)
    secrets = load_secrets(settings, os.environ)
    if parsed.listen_fd is not None:
        place = Place(parsed.workers_folder, parsed.worker, parsed.workers)
        return serve_inherited(parsed.config, settings, secrets, parsed.listen_fd, place, os.environ)
    return serve(parsed.config, settings, secrets, parsed.host, parsed.port, parsed.workers, os.environ)


def _loadtest(parsed: argparse.Namespace) -> int:
    return loadtest.run(parsed, os.environ)


def _usage(parsed: argparse.Namespace) -> int:
    return usage.run(parsed, os.environ)


def _check_config(parsed: argparse.Namespace) -> int:
    settings = load(parsed.file, os.environ)
    counted = ""
    if settings.auth.keys_file:
        classes = [class_.name for class_ in settings.classes]
        found = load_keys(Path(settings.auth.keys_file), classes, settings.auth.names_from_outside)
        _check_models(found, settings)
        counted = f", {len(found)} {'key' if len(found) == 1 else 'keys'}"
    if settings.auth.jwt:
        read_signature_keys(settings.auth.jwt)
    fleets = ", ".join(fleet.name for fleet in settings.fleets)
    print(f"{parsed.file}: good. Fleets: {fleets}; store: {without_password(settings.store.url)}{counted}")
    return 0


def _check_models(entries: Sequence[KeyEntry], settings: Settings) -> None:
    """A key for a model that no fleet has would be of no use; while the gateway runs it does no harm either."""
    known = {model for fleet in settings.fleets for model in fleet.models}
    for number, key in enumerate(entries):
        for model in set(key.models or ()) - known:
            raise ConfigError(f"keys[{number}].models", f"no fleet has the model `{model}`")


def _verify(parsed: argparse.Namespace) -> int:
    """0: the books hold; 1: they do not, one line for each violation; 2: nothing can be said."""
    url, fleets = _books_to_verify(parsed)
    broken = False
    for fleet in fleets:
        report = asyncio.run(verify(url, fleet))
        broken = broken or bool(report.violations)
        print("\n".join(_report_lines(report)))
    return 1 if broken else 0


def _books_to_verify(parsed: argparse.Namespace) -> tuple[str, Sequence[str]]:
    """The store's URL and the names of the fleets."""
    if parsed.store is not None:
        if parsed.fleet is None:
            raise ConfigError("--store", "needs --fleet, the name of the fleet")
        return parsed.store, [parsed.fleet]
    settings = load(parsed.config, os.environ)
    if settings.store.url == "embedded":
        raise ConfigError("store.url", "an embedded store is reached by --store unix://... and --fleet only")
    names = [fleet.name for fleet in settings.fleets]
    if parsed.fleet is None:
        return settings.store.url, names
    if parsed.fleet not in names:
        raise ConfigError("--fleet", f"the configuration has no fleet `{parsed.fleet}`")
    return settings.store.url, [parsed.fleet]


def _report_lines(report: Report) -> list[str]:
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
