"""Every file of the repository is tidy: text that any editor and any machine reads in the same way."""

import ast
import hashlib
import re
import stat

import pytest

from tests.repo.files import ROOT, VENDORED, repository_files, text_of

BYTES_MAX = 256 * 1024
FUNCTION_LINES_MAX = 60
BINARY = (".png", ".ico", ".gz")
TABS = ("Makefile",)
EXECUTABLE = {".ci/run"}
ENVIRONMENT_READERS = {"gateway/config.py", "gateway/cli.py"}
"""Where a variable may change what a process does: settings, and the command line that hands the mapping to them."""

FILES = [name for name in repository_files() if name not in VENDORED]
TEXTS = [name for name in FILES if not name.endswith(BINARY)]
SOURCES = [name for name in TEXTS if name.startswith("gateway/") and name.endswith(".py")]

# Spelled in two halves, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
CONFLICT = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
MACHINE = re.compile(r"(?<![\w.{}$])/(ho" r"me|ro" r"ot|Us" r"ers|wo" r"rk)/\w|pythonhos" r"ted\.org")


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_tidy(name: str) -> None:
    text = text_of(name)
    lines = text.split("\n")

    assert "\r" not in text, "CR line ends"
    assert not text or (text.endswith("\n") and not text.endswith("\n\n")), "ends in one line end"
    assert [n for n, line in enumerate(lines, 1) if line != line.rstrip()] == [], "blanks at line ends"
    assert name.endswith(TABS) or "\t" not in text, "tabs"
    assert not CONFLICT.search(text), "a merge was left half-way"


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_left_unfinished_or_tied_to_a_machine(name: str) -> None:
    text = text_of(name)

    assert UNFINISHED.findall(text) == []
    assert [found.group() for found in MACHINE.finditer(text)] == []


@pytest.mark.parametrize("name", FILES)
def test_size_and_mode(name: str) -> None:
    status = (ROOT / name).stat()

    assert status.st_size <= BYTES_MAX
    assert bool(status.st_mode & stat.S_IXUSR) is (name in EXECUTABLE)


@pytest.mark.parametrize("name", SOURCES)
def test_functions_are_short(name: str) -> None:
    """Not counting docstrings, which may say as much as is needed."""
    too_long = [
        f"{node.name}: {length}"
        for node in ast.walk(ast.parse(text_of(name)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := lines_of_code(node)) > FUNCTION_LINES_MAX
    ]

    assert too_long == []


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if documented and first.end_lineno else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring_lines


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ENVIRONMENT_READERS])
def test_the_environment_is_an_argument(name: str) -> None:
    readers = [node.lineno for node in ast.walk(ast.parse(text_of(name))) if reads_environment(node)]

    assert readers == []


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(imported.name in names for imported in node.names)
    return False


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "DEVELOPERS.md", "docs/fairness.md"])
def test_documents_name_files_that_exist(name: str) -> None:
    named = re.findall(r"`((?:gateway|lua|tests|deploy|docs)/[\w./-]*)`", text_of(name))

    assert [path for path in named if not (ROOT / path).exists()] == []


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".md")])
def test_links_lead_somewhere(name: str) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            lost.append(link)
    assert lost == []


def test_constraints_name_versions_and_nothing_else() -> None:
    lines = text_of("constraints.txt").splitlines()

    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    assert not any(line.lower().startswith("kvgate==") for line in lines)


def test_vendored_vocabulary_is_the_published_one() -> None:
    published = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
    data = (ROOT / "gateway/tokens/data/cl100k_base.tiktoken").read_bytes()

    assert hashlib.sha256(data).hexdigest() == published
