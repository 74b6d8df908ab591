"""`kvgate loadtest`: run a scenario against targets, or compare finished runs."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from gateway.loadtest.page import page
from gateway.loadtest.plots import picture
from gateway.loadtest.report import terminal
from gateway.loadtest.run import FORMAT, Options, RunError, execute, show_on_stderr
from gateway.loadtest.scenario import Scenario, ScenarioError, load, names
from gateway.loadtest.targets import parse_target

KEYS_VARIABLE = "KVGATE_LOADTEST_KEYS"
ADMIN_TOKEN_VARIABLE = "KVGATE_ADMIN_TOKEN"
PROCESSES_MAX = 64
COMPARED_MAX = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvgate loadtest`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--scenario", metavar="NAME|FILE", help=f"one of {', '.join(names())}, or a YAML file")
    what.add_argument(
        "--compare", nargs="+", type=Path, metavar="report.json", help="finished runs, side by side"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a gateway, or one engine")
    where.add_argument(
        "--target",
        action="append",
        metavar="URL[,max_prompt_tokens=N]",
        help="engines without a gateway, balanced by what is outstanding (repeat)",
    )
    parser.add_argument(
        "--key", action="append", default=[], metavar="NAME=SECRET", help=f"repeat, or set {KEYS_VARIABLE}"
    )
    parser.add_argument(
        "--engine", action="append", metavar="URL", help="an engine to watch (repeat; default: the targets)"
    )
    parser.add_argument("--admin", metavar="URL", help=f"a kvgate to watch; needs {ADMIN_TOKEN_VARIABLE}")
    parser.add_argument("--processes", type=_processes, default=1, help="that send calls (default 1)")
    parser.add_argument("--seconds-scale", type=_scale, default=1.0, help="shortens or stretches the phases")
    parser.add_argument("--label", default="", help="what the report calls this run")
    parser.add_argument("--report", type=Path, metavar="DIR", help="writes report.json and report.html there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="writes the main plots as one SVG")


def run(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The exit status: 0 for a finished run whatever its figures, 2 where there was none."""
    try:
        documents = _compared(parsed.compare) if parsed.compare else [_measured(parsed, environ)]
    except (ScenarioError, RunError, OSError) as error:
        print(f"kvgate loadtest: {error}", file=sys.stderr)
        return 2
    except httpx.HTTPError as error:
        print(f"kvgate loadtest: {parsed.admin}: {error}", file=sys.stderr)
        return 2
    print(terminal(documents))
    if parsed.report:
        _write(parsed.report, documents, single=not parsed.compare)
    if parsed.picture:
        parsed.picture.write_text(picture(documents), encoding="utf-8")
    return 0


def _measured(parsed: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    scenario, trace = load(parsed.scenario, parsed.seconds_scale)
    options = _options(parsed, environ, scenario)
    document = execute(scenario, trace, options, show_on_stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return document


def _options(parsed: argparse.Namespace, environ: Mapping[str, str], scenario: Scenario) -> Options:
    urls = parsed.target or ([parsed.url] if parsed.url else [])
    if not urls:
        raise ScenarioError("--url or --target says where the calls go")
    if parsed.admin and not environ.get(ADMIN_TOKEN_VARIABLE):
        raise ScenarioError(f"--admin needs the token in {ADMIN_TOKEN_VARIABLE}")
    targets = [parse_target(text) for text in urls]
    watched = parsed.engine or ([] if parsed.admin else [target.url for target in targets])
    return Options(
        targets=targets,
        secrets=read_secrets([*environ.get(KEYS_VARIABLE, "").split(","), *parsed.key], scenario),
        engines=[url.rstrip("/") for url in watched],
        admin=parsed.admin.rstrip("/") if parsed.admin else None,
        admin_token=environ.get(ADMIN_TOKEN_VARIABLE),
        processes=parsed.processes,
        label=parsed.label,
    )


def read_secrets(texts: Sequence[str], scenario: Scenario) -> dict[str, str]:
    """`NAME=SECRET` each.  All keys of the scenario have one, or none has.  Raises ScenarioError without secrets."""
    secrets: dict[str, str] = {}
    for text in filter(None, (text.strip() for text in texts)):
        name, equals, secret = text.partition("=")
        if not (name and equals and secret and secret.isascii() and secret.isprintable()):
            raise ScenarioError("a key is given as NAME=SECRET")
        secrets[name] = secret
    used = [key.name for key in scenario.weighted_keys]
    missing = [name for name in used if name not in secrets]
    if secrets and missing:
        raise ScenarioError(f"no secret for the key {missing[0]!r} of the scenario")
    return secrets


def _compared(files: Sequence[Path]) -> list[dict[str, Any]]:
    if len(files) > COMPARED_MAX:
        raise ScenarioError(f"--compare: {len(files)} runs; {COMPARED_MAX} are the most")
    return [_read(file) for file in files]


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("kvgate_loadtest") != FORMAT:
        raise ScenarioError(f"{file}: not a report.json of this version")
    return document


def _write(folder: Path, documents: Sequence[dict[str, Any]], *, single: bool) -> None:
    """A comparison has a page but no figures of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    if single:
        (folder / "report.json").write_text(json.dumps(documents[0], indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(documents), encoding="utf-8")
    print(f"\n{folder / 'report.html'}")


def _processes(text: str) -> int:
    if not 1 <= int(text) <= PROCESSES_MAX:
        raise argparse.ArgumentTypeError(f"1 to {PROCESSES_MAX}")
    return int(text)


def _scale(text: str) -> float:
    if not 0 < float(text) <= 1_000:
        raise argparse.ArgumentTypeError("above 0, at most 1000")
    return float(text)
