"""Edits of the keys file: it holds what was asked for, and what an edit is not about stays byte for byte."""

import json
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import keysfile
from gateway.config import ConfigError, parse_keys

FILE = "keys.yaml"
Row = dict[str, Any]


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def row(name: str, **settings: Any) -> Row:
    return {"name": name, "sha256": digest(name), **settings}


def rows_of(text: str) -> list[Row]:
    """The entries by another reader than the product's, dates as text."""
    value = yaml.safe_load(text)
    found = value["keys"] if isinstance(value, dict) else value
    return [{name: _as_text(value) for name, value in entry.items()} for entry in found or []]


def _as_text(value: Any) -> Any:
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, date) else value


# Any commands on any file -----------------------------------------------------------------------------------

NAMES = ("alice", "1", "null", "team.a-b_C", "yes")
COMMENTS = ("# plain", "# - {name: x}, ] }", '# "é\U0001f600', "#", "#   - name: alice", "# a: b,")
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "class": st.sampled_from(["low", "no", "1"]),
        "weight": st.integers(1, 1_000),
        "models": st.lists(st.sampled_from(["demo", "a/b-3.1", "x:y", "é\U0001f600", "{a}"]), max_size=3),
        "limits": st.dictionaries(st.sampled_from(["requests_max", "blocks_max"]), st.integers(1, 9)),
        "expires": st.sampled_from(["2027-01-31", "2027-01-31T12:00:00Z"]),
    },
)


@dataclass
class Written:
    """A file in pieces: those of a name are its entry, the others are nobody's."""

    pieces: list[tuple[str | None, str]]
    rows: dict[str, Row]
    is_block: bool
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = "".join(text for _, text in self.pieces)


@st.composite
def block_files(draw: st.DrawFn) -> Written:
    """One entry below the other, each in a style of its own."""
    top = draw(st.sampled_from(["", "---\n", "keys:\n", "keys:  # none - yet\n", "# é\U0001f600\nkeys:\n"]))
    indent = draw(st.sampled_from(["", "  ", "    "])) if "keys:" in top else ""
    pieces: list[tuple[str | None, str]] = [(None, top)]
    rows = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        rows[name] = row(name, **draw(SETTINGS))
        pieces.append((None, _between(draw, indent)))
        pieces.append((name, _block_entry(draw, rows[name], indent)))
    pieces.append((None, _between(draw, indent)))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    pieces = [(name, text.replace("\n", newline)) for name, text in pieces]
    if draw(st.booleans()) and pieces[-1][1] == "" and len(pieces) > 2:
        name, text = pieces[-2]
        pieces[-2] = (name, text.removesuffix(newline))
    return Written(pieces, rows, is_block=True)


def _between(draw: st.DrawFn, indent: str) -> str:
    lines = draw(st.lists(st.sampled_from(["", *COMMENTS]), max_size=2))
    return "".join(f"{indent if line else ''}{line}\n" for line in lines)


def _block_entry(draw: st.DrawFn, entry: Row, indent: str) -> str:
    def end() -> str:
        return draw(st.sampled_from(["", *(f"  {comment}" for comment in COMMENTS)])) + "\n"

    if draw(st.booleans()):
        return f"{indent}- {_flow_entry(draw, entry)}{end()}"
    gap = draw(st.sampled_from(["", " ", "   "]))
    below = f"{indent}  {gap}"
    lines = [line for key in draw(st.permutations(list(entry))) for line in _field(draw, key, entry[key])]
    text = "".join(below + line + end() for line in lines)
    opened = draw(st.booleans())
    return f"{indent}-{end()}{text}" if opened else f"{indent}- {gap}{text.removeprefix(below)}"


def _field(draw: st.DrawFn, key: str, value: Any) -> list[str]:
    nested = isinstance(value, list | dict) and len(value) > 0 and draw(st.booleans())
    if nested and isinstance(value, list):
        return [f"{key}:", *(f"- {json.dumps(item, ensure_ascii=False)}" for item in value)]
    if nested:
        return [f"{key}:", *(f"  {name}: {item}" for name, item in value.items())]
    return [f"{key}: {_quoted(draw, value)}"]


def _quoted(draw: st.DrawFn, value: Any) -> str:
    if isinstance(value, str) and draw(st.booleans()):
        return f"'{value}'"
    if isinstance(value, str) and re.fullmatch(r"[a-z]{5}|2027-\S+", value):
        return value  # plain
    return json.dumps(value, ensure_ascii=False)


def _flow_entry(draw: st.DrawFn, entry: Row) -> str:
    fields = ", ".join(f"{key}: {_quoted(draw, entry[key])}" for key in draw(st.permutations(list(entry))))
    return f"{{{fields}}}"


@st.composite
def flow_files(draw: st.DrawFn) -> Written:
    """A list in brackets: on one line or on several, JSON or not, with a comma at its end or without."""
    is_json = draw(st.booleans())
    newline = draw(st.sampled_from(["", "\n", "\r\n"]))
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    rows = {name: row(name, **draw(SETTINGS)) for name in names}
    before, after = draw(st.sampled_from([("", ""), ('{"keys": ', "}") if is_json else ("keys: ", "")]))
    pieces: list[tuple[str | None, str]] = [(None, f"{before}[{newline}")]
    for number, name in enumerate(names):
        last = number == len(names) - 1
        comma = "," if not last or (not is_json and draw(st.booleans())) else ""
        body = json.dumps(rows[name], ensure_ascii=False) if is_json else _flow_entry(draw, rows[name])
        told = draw(st.sampled_from(COMMENTS)) if newline and not is_json and draw(st.booleans()) else ""
        pieces += [(None, "  " if newline else " " * bool(number)), (name, body)]
        pieces.append((None, f"{comma}{'  ' + told if told else ''}{newline}"))
    pieces.append((None, f"]{after}{newline}"))
    return Written(pieces, rows, is_block=False)


COMMANDS = st.lists(
    st.tuples(st.sampled_from(["create", "rotate", "revoke"]), st.sampled_from([*NAMES, "new"]), SETTINGS),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(written=block_files() | flow_files(), commands=COMMANDS)
def test_any_commands_leave_what_they_are_not_about(
    written: Written, commands: list[tuple[str, str, Row]]
) -> None:
    assert rows_of(written.text) == list(written.rows.values())
    for number, (command, name, changes) in enumerate(commands):
        new = digest(f"{name} {number}")
        if (name in written.rows) == (command == "create"):
            with pytest.raises(ConfigError, match=f"^{name}: is "):
                _do(command, written.text, name, new, changes)
            continue
        written = _after(written, command, name, _do(command, written.text, name, new, changes), new, changes)
        assert rows_of(written.text) == list(written.rows.values())
        assert [key.name for key in parse_keys(written.text, FILE, None)] == list(written.rows)


def _do(command: str, text: str, name: str, new: str, changes: Row) -> str:
    if command == "create":
        return keysfile.with_key(text, FILE, {"name": name, "sha256": new, **changes})
    if command == "rotate":
        return keysfile.with_digest(text, FILE, name, new)
    return keysfile.without_key(text, FILE, name)


def _after(old: Written, command: str, name: str, text: str, new: str, changes: Row) -> Written:
    """The file after a command, once it is clear that all other pieces are where they were."""
    rows = {other: entry for other, entry in old.rows.items() if other != name}
    if command == "create":
        rows[name] = {"name": name, "sha256": new, **changes}
        pieces = _with_new(old, name, text)
    elif command == "rotate":
        rows = {**old.rows, name: {**old.rows[name], "sha256": new}}
        pieces = [
            (owner, _with_digest(piece, new) if owner == name else piece) for owner, piece in old.pieces
        ]
        assert text == "".join(piece for _, piece in pieces)
    else:
        pieces = _without_old(old, name, text)
    return Written(pieces, rows, old.is_block)


def _with_digest(piece: str, new: str) -> str:
    return re.sub(r"""(['"]?)\b[0-9a-f]{64}\b\1""", f'"{new}"', piece)


def _with_new(old: Written, name: str, text: str) -> list[tuple[str | None, str]]:
    if old.is_block:
        newline = "\r\n" if "\r\n" in old.text else "\n"
        kept = old.text + ("" if old.text.endswith("\n") or not old.text else newline)
        assert text.startswith(kept)
        assert "\n" not in text.replace("\r\n", "") or newline == "\n", "one kind of line end"
        if kept != old.text:
            owner, last = next(piece for piece in reversed(old.pieces) if piece[1])
            old = Written(
                [*old.pieces[: old.pieces.index((owner, last))], (owner, last + newline)], old.rows, True
            )
        return [*old.pieces, (name, text.removeprefix(kept))]
    start = max(text.rfind('{name: "'), text.rfind('{"name": "'))
    body = text[start : text.rfind("}", 0, text.rfind("]")) + 1]
    return _flow_pieces(old, [*(piece for piece in old.pieces if piece[0]), (name, body)], text)


def _without_old(old: Written, name: str, text: str) -> list[tuple[str | None, str]]:
    if old.is_block:
        pieces = [piece for piece in old.pieces if piece[0] != name]
        assert text == "".join(piece for _, piece in pieces)
        return pieces
    return _flow_pieces(old, [p for p in old.pieces if p[0] and p[0] != name], text)


def _flow_pieces(
    old: Written, bodies: list[tuple[str | None, str]], text: str
) -> list[tuple[str | None, str]]:
    """The text cut at these bodies, which are all there and in order; between them only commas and spaces differ."""
    pieces: list[tuple[str | None, str]] = []
    rest = text
    for name, body in bodies:
        before, found, rest = rest.partition(body)
        assert found, f"{name} was changed"
        pieces += [(None, before), (name, body)]
    pieces.append((None, rest))
    free, was_free = _free(pieces), _free(old.pieces)
    assert re.sub(r"[\s,]|#.*", "", free) == re.sub(r"[\s,]|#.*", "", was_free)
    gone = [
        comment for comment in was_free.splitlines() if "#" in comment and comment.lstrip(", ") not in free
    ]
    assert len(gone) <= (len(bodies) < len(old.rows)), "only the comment behind a revoked entry goes"
    assert ("\r\n" in text) == ("\r\n" in old.text)
    return pieces


def _free(pieces: list[tuple[str | None, str]]) -> str:
    return "".join(text for name, text in pieces if name is None)


# Layouts ----------------------------------------------------------------------------------------------------

A, B, C = digest("a"), digest("b"), digest("c")
LINES = f"""[
  {{name: a, sha256: {A}}},  # first
  {{name: b, sha256: {B}}}  # second
]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", f'- {{name: "c", sha256: "{C}"}}\n'),
        ("# none yet", f'# none yet\n- {{name: "c", sha256: "{C}"}}\n'),
        ("---\n", f'---\n- {{name: "c", sha256: "{C}"}}\n'),
        ("keys:  # none\n", f'keys:  # none\n  - {{name: "c", sha256: "{C}"}}\n'),
        ("keys: []", f'keys: [{{name: "c", sha256: "{C}"}}]'),
        ('{"keys": []}', f'{{"keys": [{{"name": "c", "sha256": "{C}"}}]}}'),
        (
            f"-   sha256: {A}\n    name: a\n",
            f'-   sha256: {A}\n    name: a\n-   name: "c"\n    sha256: "{C}"\n',
        ),
        (f"[{{name: a, sha256: {A}}},]", f'[{{name: a, sha256: {A}}}, {{name: "c", sha256: "{C}"}}]'),
        (
            LINES,
            LINES.replace("}  # second\n", f'}},  # second\n  {{name: "c", sha256: "{C}"}}\n'),
        ),
    ],
)
def test_a_key_is_written_as_the_others_are(old: str, new: str) -> None:
    assert keysfile.with_key(old, FILE, {"name": "c", "sha256": C}) == new


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        (LINES, "a", f"[\n  {{name: b, sha256: {B}}}  # second\n]\n"),
        (LINES, "b", f"[\n  {{name: a, sha256: {A}}}  # first\n]\n"),
        (f"[{{name: a, sha256: {A}}}, {{name: b, sha256: {B}}}]", "a", f"[{{name: b, sha256: {B}}}]"),
        (f"[{{name: a, sha256: {A}}}, {{name: b, sha256: {B}}}]", "b", f"[{{name: a, sha256: {A}}}]"),
        (f"[\n  {{name: a, sha256: {A}}},\n  {{name: b, sha256: {B}}}]\n", "b", f"[\n  {{name: a, sha256: {A}}}\n]\n"),
        (f"[\n  {{name: a, sha256: {A}}}, {{name: b, sha256: {B}}}]\n", "a", f"[\n  {{name: b, sha256: {B}}}]\n"),
        (f"keys: [{{name: a, sha256: {A}}}]\n", "a", "keys: []\n"),
        (f"# a\n- name: a\n  sha256: |-\n    {A}\n# b\n- {{name: b, sha256: {B}}}\n", "a",
         f"# a\n# b\n- {{name: b, sha256: {B}}}\n"),
        (f"keys:\n- &x\n  name: a\n  sha256: {A}\n  group:\n# the end\n", "a", "keys:\n# the end\n"),
    ],
)  # fmt: skip
def test_a_key_goes_with_its_lines(old: str, name: str, new: str) -> None:
    assert keysfile.without_key(old, FILE, name) == new


@pytest.mark.parametrize(
    "text",
    ["null", "keys: null", "{}", f"- {{name: a, sha256: {A}}}\n...\n"],
)
def test_a_layout_that_it_cannot_edit_is_told(text: str) -> None:
    assert "by hand only: paste" in problem(keysfile.with_key, text, FILE, {"name": "c", "sha256": C})


def test_json_stays_json() -> None:
    rows = [row("a", limits={"blocks_max": 5})]
    new = row("c", models=["demo"], limits={"blocks_max": 6, "minute_burst": 0.5})
    assert json.loads(keysfile.with_key(json.dumps(rows), FILE, new)) == [*rows, new]


ANCHORED = (
    f"- {{name: a, sha256: {A}, limits: &l {{blocks_max: 5}}}}\n- {{name: b, sha256: {B}, limits: *l}}\n"
)


def test_an_entry_that_others_refer_to_is_not_taken_out() -> None:
    assert "take the entry on line 1 out" in problem(keysfile.without_key, ANCHORED, FILE, "a")
    assert keysfile.without_key(ANCHORED, FILE, "b") == ANCHORED.splitlines(keepends=True)[0]


def test_a_hash_that_stands_elsewhere_too_is_not_replaced() -> None:
    text = f'- {{name: a, models: [&x "{A}"], sha256: *x}}\n'
    assert "line 1 needs a sha256" in problem(keysfile.with_digest, text, FILE, "a", C)


def test_the_hash_that_counts_is_replaced() -> None:
    text = f'- {{<<: {{sha256: "{A}"}}, name: a, sha256: "{B}"}}\n'
    assert keysfile.with_digest(text, FILE, "a", C) == text.replace(B, C)


def test_a_group_keeps_the_limits_that_only_one_entry_states() -> None:
    text = f"- {{name: a, sha256: {A}, group: g, limits: {{blocks_max: 5}}}}\n- {{name: b, sha256: {B}, group: g}}\n"
    assert "its group 'g' has its limits from this entry" in problem(keysfile.without_key, text, FILE, "a")
    assert [entry["name"] for entry in rows_of(keysfile.without_key(text, FILE, "b"))] == ["a"]


@pytest.mark.parametrize(
    ("text", "entry", "told"),
    [
        ("- {name: a}}", {}, "keys.yaml line 1: not YAML"),
        ("- {class: a}", {}, "keys[0].name: missing"),
        ("", {"limits": {"blocks_max": 0}}, "keys[0].limits.blocks_max: expected whole number >= 1"),
        (f"- {{name: a, sha256: {C}}}", {}, "keys[1].sha256: is also that of keys[0]"),
        (f"- {{name: g, sha256: {A}}}", {"group": "g"}, "'g' is the name of a key outside of the group"),
        (
            f"- {{name: a, sha256: {A}, group: g, limits: {{blocks_max: 5}}}}",
            {"group": "g", "limits": {"blocks_max": 6}},
            "keys[1].limits: differ from those of keys[0] in group 'g'",
        ),
    ],
)
def test_a_bad_file_or_value_is_named(text: str, entry: Row, told: str) -> None:
    assert told in problem(keysfile.with_key, text, FILE, {"name": "c", "sha256": C, **entry})


def problem(change: Callable[..., str], *arguments: Any) -> str:
    """The one line in which an edit is refused."""
    with pytest.raises(ConfigError) as caught:
        change(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Files ------------------------------------------------------------------------------------------------------


def put(text: str) -> Callable[[str], str]:
    return lambda old: old + text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / FILE
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbf# old\r\n")
    return path


def test_mode_owner_mark_and_line_ends_stay(file: Path) -> None:
    """Only root may give a file to somebody else; whoever else runs the tests has one of its own."""
    owner = 12345 if os.geteuid() == 0 else os.geteuid()
    os.chown(file, owner, -1)
    file.chmod(0o640)
    keysfile.edit(file, put("# new\r\n"))
    assert file.read_bytes() == b"\xef\xbb\xbf# old\r\n# new\r\n"
    status = file.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o640, owner)


def test_a_new_file_is_its_owners_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keysfile.edit(tmp_path / FILE, put("# new\n"), create=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_file_that_is_missing_is_made_only_to_put_a_key_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        keysfile.edit(tmp_path / FILE, put("# new\n"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_goes_on_naming_the_file(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    keysfile.edit(link, put("# new\n"))
    assert link.is_symlink()
    assert file.read_text().endswith("# new\n")


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(ConfigError, match="is no regular file"):
        keysfile.edit(tmp_path / FILE, put("# new\n"))


@pytest.mark.parametrize("fails", ["change", "replace"])
def test_a_failed_edit_leaves_the_folder_as_it_was(
    file: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise OSError("no space")

    if fails == "replace":
        monkeypatch.setattr(os, "replace", fail)
    before = file.read_bytes()
    with pytest.raises(OSError, match="no space"):
        keysfile.edit(file, fail if fails == "change" else put("# new\n"))
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_readers_see_the_old_file_until_the_new_one_is_whole(file: Path) -> None:
    """Whoever has it open goes on reading what it was."""
    with file.open("rb") as reader:
        keysfile.edit(file, put("# new\n"))
        assert reader.read() == b"\xef\xbb\xbf# old\r\n"


def test_two_edits_at_once_lose_nothing(file: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        keysfile.edit(file, lambda text: (entered.set(), f"{text}# second\n")[1])

    other = threading.Thread(target=second)

    def first(text: str) -> str:
        other.start()
        assert not entered.wait(0.2), "the second one waits for the first"
        return f"{text}# first\n"

    keysfile.edit(file, first)
    other.join()
    assert file.read_text(encoding="utf-8-sig").splitlines() == ["# old", "# first", "# second"]
