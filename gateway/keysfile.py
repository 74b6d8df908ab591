"""The keys file, edited as text: what an edit is not about stays byte for byte.

`with_key`, `with_digest` and `without_key` are pure: the text of a file in, its new text out, or ConfigError with the
reason.  Each cuts and inserts where the parsed file says, reads the outcome back, and answers only if that is what
was asked for; so a layout that it does not understand is an error, never a broken file.  `edit` applies one of them
to a file as a whole or not at all.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.config import LOADER, ConfigError, KeyEntry, parse_keys, parse_yaml, text_of

Cut = tuple[int, int]
"""Characters to take out of a text: the first, and the one after the last."""


# Text in, text out ------------------------------------------------------------------------------------------


def with_key(text: str, file: str, entry: Mapping[str, Any]) -> str:
    """The text with an entry at the end of the list; `file` is what messages call it."""
    layout = _Layout.of(text, file)
    name = str(entry["name"])
    if name in layout.names:
        raise ConfigError(name, f"is in {file} already (line {layout.line_of(name)})")
    by_hand = "paste the entry that `kvgate keys create` prints without --file"
    return _checked(layout.appended(entry), [*layout.rows, dict(entry)], file, by_hand)


def with_digest(text: str, file: str, name: str, digest: str) -> str:
    """The text with another SHA-256 in the entry of that name."""
    layout = _Layout.of(text, file)
    number = layout.number_of(name)
    if layout.keys[number].sha256 is None:
        raise ConfigError(name, "has no secret that could be renewed: it is named from outside")
    rows = list(layout.rows)
    rows[number] = {**rows[number], "sha256": digest}
    by_hand = f"line {layout.line_of(name)} needs a sha256 that `kvgate keys create` prints without --file"
    return _checked(layout.redigested(number, digest), rows, file, by_hand)


def without_key(text: str, file: str, name: str) -> str:
    """The text without the entry of that name.

    An entry from which the other keys of its group have their limits stays: without it they would have none.
    """
    layout = _Layout.of(text, file)
    number = layout.number_of(name)
    rows = [row for other, row in enumerate(layout.rows) if other != number]
    by_hand = f"take the entry on line {layout.line_of(name)} out"
    edited = _checked(layout.removed(number), rows, file, by_hand)
    if not set(parse_keys(edited, file, None, secretless=True)) <= set(layout.keys):
        raise ConfigError(
            name,
            f"its group {layout.keys[number].group!r} has its limits from this entry: write them to another one of the "
            "group first (`keys rotate` ends the secret at once)",
        )
    return edited


def entry_line(entry: Mapping[str, Any]) -> str:
    """An entry as one line of a keys file."""
    return f"- {_flow(entry)}"


def _checked(edited: str | None, rows: Sequence[Any], file: str, by_hand: str) -> str:
    """The edited text, which is a valid keys file of exactly these rows; else raises ConfigError."""
    if edited is None or not _holds(edited, rows):
        raise ConfigError(file, f"is laid out in a way that is edited by hand only: {by_hand}")
    parse_keys(edited, file, None, secretless=True)
    return edited


def _holds(text: str, rows: Sequence[Any]) -> bool:
    try:
        return _rows(parse_yaml(text, "")[0]) == rows
    except ConfigError:
        return False


def _rows(value: Any) -> list[Any]:
    """The entries as the file has them; checked by `parse_keys`."""
    rows = value.get("keys") if isinstance(value, dict) else value
    return rows if isinstance(rows, list) else []


@dataclass(frozen=True)
class _Layout:
    """Where things are in the text of a valid keys file.  Edits answer None where they find no place."""

    text: str
    file: str
    keys: Sequence[KeyEntry]
    rows: Sequence[Mapping[str, Any]]
    """The same as the file has them."""
    top: yaml.Node | None
    places: "_Places"

    @classmethod
    def of(cls, text: str, file: str) -> "_Layout":
        keys = parse_keys(text, file, None, secretless=True)
        value, top = parse_yaml(text, file)
        return cls(text, file, keys, _rows(value), top, _Places.of(text))

    @property
    def names(self) -> list[str]:
        return [key.name for key in self.keys]

    def number_of(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(name, f"is not in {self.file}")
        return self.names.index(name)

    def line_of(self, name: str) -> int:
        keys = self._list
        node = keys.value[self.number_of(name)] if isinstance(keys, yaml.SequenceNode) else self.top
        return int(node.start_mark.line) + 1 if node else 1

    def appended(self, entry: Mapping[str, Any]) -> str | None:
        keys = self._list
        if isinstance(keys, yaml.SequenceNode):
            return self._into_flow(keys, entry) if keys.flow_style else self._after_block(keys, entry)
        indent = "" if keys is self.top else "  "
        return self._with_lines(f"{indent}{entry_line(entry)}") if _is_blank(keys) else None

    def redigested(self, number: int, digest: str) -> str | None:
        node = self._entry(number)
        if node is None:
            return None
        # What was merged in comes before what the entry itself says.
        *_, value = (value for key, value in node.value if key.value == "sha256")
        start, end = value.start_mark.index, value.end_mark.index
        return f'{self.text[:start]}"{digest}"{self.text[end:]}'

    def removed(self, number: int) -> str | None:
        keys = self._list
        if not isinstance(keys, yaml.SequenceNode):
            return None
        cuts = self._flow_cuts(keys, number) if keys.flow_style else self._block_cuts(keys, number)
        return _without(self.text, cuts)

    @property
    def _list(self) -> yaml.Node | None:
        """The node of the list, or what stands in its place."""
        if not isinstance(self.top, yaml.MappingNode):
            return self.top
        return next((value for key, value in self.top.value if key.value == "keys"), self.top)

    def _entry(self, number: int) -> yaml.MappingNode | None:
        keys = self._list
        node = keys.value[number] if isinstance(keys, yaml.SequenceNode) else None
        return node if isinstance(node, yaml.MappingNode) else None

    # Block style: each entry on lines of its own

    def _after_block(self, keys: yaml.SequenceNode, entry: Mapping[str, Any]) -> str:
        """At the end of the file, in the style of the last entry."""
        last = keys.value[-1]
        dash = self.places.dash_before(last)
        indent = self.text[self._line_start(dash) : dash]
        if last.flow_style:
            return self._with_lines(f"{indent}{entry_line(entry)}")
        between = self.text[dash + 1 : last.start_mark.index]
        gap = between if between.strip(" ") == "" else " "
        first, *others = (f"{key}: {_value(value)}" for key, value in entry.items())
        below = indent + " " * (1 + len(gap))
        return self._with_lines(f"{indent}-{gap}{first}", *(below + line for line in others))

    def _with_lines(self, *lines: str) -> str:
        end = "" if not self.text or self.text.endswith("\n") else self._newline
        return self.text + end + "".join(line + self._newline for line in lines)

    def _block_cuts(self, keys: yaml.SequenceNode, number: int) -> list[Cut]:
        """The lines from its dash to its last value; a comment below them may be about the next entry."""
        dash = self.places.dash_before(keys.value[number])
        rest = keys.value[number + 1 :]
        stop = self.places.dash_before(rest[0]) if rest else len(self.text)
        end = self.places.content_end_before(stop)
        return [(self._line_start(dash), end if self.text[end - 1] == "\n" else self._line_end(end))]

    # Flow style: entries between brackets

    def _into_flow(self, keys: yaml.SequenceNode, entry: Mapping[str, Any]) -> str:
        """After the last entry: on a line of its own where that is on one, else behind it."""
        new = _flow(entry, json_keys=_is_json(self.text))
        close = keys.end_mark.index - 1
        if not keys.value:
            return self.text[:close] + new + self.text[close:]
        last = keys.value[-1]
        start, end = last.start_mark.index, last.end_mark.index
        comma = self.places.comma_between(end, close)
        after = end if comma is None else comma + 1
        line_end = self._line_end(after)
        comma_before, comma_after = (",", "") if comma is None else ("", ",")
        indent = self.text[self._line_start(start) : start]
        if indent.strip() or line_end > close:
            return f"{self.text[:after]}{comma_before} {new}{self.text[after:]}"
        line = f"{indent}{new}{comma_after}{self._newline}"
        return f"{self.text[:after]}{comma_before}{self.text[after:line_end]}{line}{self.text[line_end:]}"

    def _flow_cuts(self, keys: yaml.SequenceNode, number: int) -> list[Cut]:
        """The entry with the comma behind it; of the last one without such a comma the one before it."""
        node, rest = keys.value[number], keys.value[number + 1 :]
        stop = rest[0].start_mark.index if rest else keys.end_mark.index - 1
        start, end = node.start_mark.index, node.end_mark.index
        comma = self.places.comma_between(end, stop)
        if comma is not None:
            return [self._widened(start, comma + 1)]
        if number == 0:
            return [(start, end)]
        before = self.places.comma_between(keys.value[number - 1].end_mark.index, start)
        cut = self._widened(start, end)
        return [cut] if before is None else [(before, before + 1), cut]

    def _widened(self, start: int, end: int) -> Cut:
        """Whole lines where nothing else is on them, else with the spaces behind or, at the end of a line, before."""
        line_start, line_end = self._line_start(start), self._line_end(end)
        before, behind = self.text[line_start:start], self.text[end:line_end].lstrip(" \t")
        if not before.strip() and (not behind.strip() or behind.startswith("#")):
            return line_start, line_end
        if behind.strip() and behind[0] not in "]#":
            return start, line_end - len(behind)
        return start - len(before) + len(before.rstrip(" \t")), end

    # Lines

    @property
    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def _line_start(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def _line_end(self, index: int) -> int:
        """After the line's end."""
        found = self.text.find("\n", index)
        return len(self.text) if found < 0 else found + 1


@dataclass(frozen=True)
class _Places:
    """Where the file's marks are; the nodes do not tell, and an alias has the place of what it names."""

    dashes: Sequence[int]
    commas: Sequence[int]
    contents: Sequence[Cut]

    @classmethod
    def of(cls, text: str) -> "_Places":
        tokens = list(yaml.scan(text, Loader=LOADER))
        spans = [(token, token.start_mark.index, token.end_mark.index) for token in tokens]
        return cls(
            [start for token, start, _ in spans if isinstance(token, yaml.BlockEntryToken)],
            [start for token, start, _ in spans if isinstance(token, yaml.FlowEntryToken)],
            [
                (start, end)
                for token, start, end in spans
                if end > start and not isinstance(token, _NO_CONTENT)
            ],
        )

    def dash_before(self, node: yaml.Node) -> int:
        return self.dashes[bisect_left(self.dashes, node.start_mark.index) - 1]

    def comma_between(self, start: int, stop: int) -> int | None:
        at = bisect_left(self.commas, start)
        return self.commas[at] if at < len(self.commas) and self.commas[at] < stop else None

    def content_end_before(self, stop: int) -> int:
        return self.contents[bisect_left(self.contents, (stop, 0)) - 1][1]


_NO_CONTENT = (yaml.BlockEndToken, yaml.DocumentEndToken, yaml.StreamEndToken)


def _is_blank(node: yaml.Node | None) -> bool:
    """Nothing at all is there, as in `keys:`; a `null` that is written out is something."""
    if node is None:
        return True
    return isinstance(node, yaml.ScalarNode) and node.start_mark.index == node.end_mark.index


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _without(text: str, cuts: Sequence[Cut]) -> str:
    """`cuts` are in order and do not overlap."""
    for start, end in reversed(cuts):
        text = text[:start] + text[end:]
    return text


def _flow(entry: Mapping[str, Any], json_keys: bool = False) -> str:
    return (
        "{"
        + ", ".join(f"{_key(key, json_keys)}: {_value(value, json_keys)}" for key, value in entry.items())
        + "}"
    )


def _key(key: str, json_keys: bool) -> str:
    return json.dumps(key) if json_keys else key


def _value(value: Any, json_keys: bool = False) -> str:
    """All text is quoted: a name like `1` or `null` would be no text."""
    if isinstance(value, Mapping):
        return _flow(value, json_keys)
    return json.dumps(value, ensure_ascii=False)


# Files ------------------------------------------------------------------------------------------------------

NEW_FILE_MODE = 0o600
BYTE_ORDER_MARK = "\ufeff"


def edit(path: Path, change: Callable[[str], str], create: bool = False) -> None:
    """Put `change` of what a file holds in its place, as a whole or not at all; whoever edits at once waits.

    Owner and mode stay, and a symbolic link goes on naming the file.  `create` takes a missing file for an empty one.
    Raises ConfigError or OSError; then nothing was changed.
    """
    target = Path(os.path.realpath(path))
    with _locked(target.parent):
        if create and not target.exists():
            _put(target, change(""), None)
            return
        if target.exists() and not target.is_file():  # reading a pipe would wait for ever
            raise ConfigError(str(path), "is no regular file")
        text = text_of(target)
        mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
        _put(target, mark + change(text.removeprefix(mark)), target.stat())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder's lock: one of the file itself would go with the file that is replaced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # the new name is on the disk before anybody is told of it
    finally:
        os.close(descriptor)


def _put(target: Path, text: str, status: os.stat_result | None) -> None:
    """Written beside its place and moved there; `status` is that of the file that it replaces."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            _own(descriptor, status)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _own(descriptor: int, status: os.stat_result | None) -> None:
    if status is None:
        os.fchmod(descriptor, NEW_FILE_MODE)
        return
    own = os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (status.st_uid, status.st_gid):
        os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
