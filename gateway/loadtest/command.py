"""`kvgate loadtest`: run a scenario against targets, or compare finished runs."""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.loadtest.observe import AdminError
from gateway.loadtest.page import page
from gateway.loadtest.plots import picture
from gateway.loadtest.report import terminal, why_none_admitted
from gateway.loadtest.run import FORMAT, Options, RunError, execute, show_on_stderr
from gateway.loadtest.scenario import Scenario, ScenarioError, load, names
from gateway.loadtest.targets import parse_target

KEYS_VARIABLE = "KVGATE_LOADTEST_KEYS"
ADMIN_TOKEN_VARIABLE = "KVGATE_ADMIN_TOKEN"
PROCESSES_MAX = 64
COMPARED_MAX = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvgate loadtest`."""
    parser.epilog = (
        "Exit status: 0 for a finished run whatever its figures, 1 for one in which no call was admitted, "
        "2 where there was no run or its results could not be written."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--scenario", metavar="NAME|FILE", help=f"one of {', '.join(names())}, or a YAML file")
    what.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="report.json",
        help=f"finished runs side by side, {COMPARED_MAX} at most",
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
        "--key",
        action="append",
        default=[],
        metavar="NAME=SECRET",
        help=f"a key of the scenario (repeat; or {KEYS_VARIABLE}=NAME=SECRET,NAME=SECRET)",
    )
    parser.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="an engine to watch (repeat; default without --admin: the targets)",
    )
    parser.add_argument("--admin", metavar="URL", help=f"a kvgate to watch; needs {ADMIN_TOKEN_VARIABLE}")
    parser.add_argument(
        "--processes", type=_processes, default=1, metavar="N", help="send the calls (default 1)"
    )
    parser.add_argument(
        "--seconds-scale",
        type=_scale,
        default=1.0,
        metavar="FACTOR",
        help="shortens or stretches the phases at the same rates; of a trace, below 1, the first such share is sent",
    )
    parser.add_argument("--label", default="", help="what the report calls this run")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="writes report.json and report.html there; with --compare report.html only",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="writes the main plots as one SVG")


def run(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The exit status, as the help tells it."""
    try:
        _prepare(parsed.report, parsed.picture)
        documents = _compared(parsed.compare) if parsed.compare else [_measured(parsed, environ)]
        try:
            _write(parsed.report, parsed.picture, documents, single=not parsed.compare)
        finally:
            print(terminal(documents))  # last: whoever reads it may be gone
        if parsed.report:
            print(f"\n{parsed.report / 'report.html'}")
    except (ScenarioError, RunError, AdminError, OSError) as error:
        print(f"kvgate loadtest: {error}", file=sys.stderr)
        return 2
    none_admitted = not parsed.compare and why_none_admitted(documents[0]["figures"]) is not None
    return 1 if none_admitted else 0


def _prepare(report: Path | None, drawing: Path | None) -> None:
    """Make the folders of the results and try them before the run.  Raises ScenarioError."""
    for option, folder in (("--report", report), ("--picture", drawing.parent if drawing else None)):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ScenarioError(f"{option}: cannot write into {folder}: {error.strerror}") from None
    if drawing is not None and drawing.is_dir():
        raise ScenarioError(f"--picture: {drawing} is a folder")


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
    token = environ.get(ADMIN_TOKEN_VARIABLE, "")
    if parsed.admin and not (token.isascii() and token.isprintable()):
        raise ScenarioError(f"{ADMIN_TOKEN_VARIABLE}: a token of plain ASCII is needed")
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
        raise ScenarioError(
            f"{scenario.name} wants the keys {', '.join(used)}; without a secret: {', '.join(missing)}. "
            f"Give --key NAME=SECRET for each, or {KEYS_VARIABLE}=NAME=SECRET,NAME=SECRET"
        )
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


def _write(
    report: Path | None, drawing: Path | None, documents: Sequence[dict[str, Any]], *, single: bool
) -> None:
    """A comparison has a page but no figures of its own."""
    if report and single:
        (report / "report.json").write_text(json.dumps(documents[0], indent=1) + "\n", encoding="utf-8")
    if report:
        (report / "report.html").write_text(page(documents), encoding="utf-8")
    if drawing:
        drawing.write_text(picture(documents), encoding="utf-8")


def _processes(text: str) -> int:
    if not 1 <= int(text) <= PROCESSES_MAX:
        raise argparse.ArgumentTypeError(f"1 to {PROCESSES_MAX}")
    return int(text)


def _scale(text: str) -> float:
    if not 0 < float(text) <= 1_000:
        raise argparse.ArgumentTypeError("above 0, at most 1000")
    return float(text)
