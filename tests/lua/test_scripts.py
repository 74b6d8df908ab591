"""The scripts as text: what is spliced, what their headers promise, and what Python believes about them."""

import hashlib
import re
from pathlib import Path

import msgspec
import pytest

from gateway.core import elastic, lengths, order
from gateway.core.estimate import PREFILL_TOKENS_MIN
from gateway.core.segments import SEGMENTS_MAX
from gateway.ledger.records import FIELDS, NODE_WIDTH
from gateway.ledger.scripts import KEY_NAMES, fleet_keys, library, script_folder, splice

FOLDER = script_folder()
FRAGMENTS = sorted((FOLDER / "commands").glob("*.lua"))


def constant(name: str, text: str = "") -> float:
    """The number that the spliced library gives a constant, alone or in a list of names."""
    for names, values in re.findall(
        r"^local ([A-Z_, ]+?) = ([0-9., ]+)$", text or library().text, re.MULTILINE
    ):
        table = dict(zip(names.split(", "), values.split(", "), strict=True))
        if name in table:
            return float(table[name])
    raise AssertionError(f"no constant {name}")


@pytest.mark.parametrize(
    ("lua", "python"),
    [
        ("LAYOUT", order.LAYOUT),
        ("WORK", order.WORK),
        ("LOOKAHEAD", order.LOOKAHEAD),
        ("SLICE", order.SLICE),
        ("OUTBOX_MAX", order.OUTBOX),
        ("TAG_SCALE", order.TAG_SCALE),
        ("CREDIT_SCALE", order.CREDIT_SCALE),
        ("DIGEST_MODULUS", order.DIGEST_MODULUS),
        ("FORECAST_ENDS", order.FORECAST_ENDS),
        ("FORECAST_REACH_MS", order.FORECAST_REACH_MS),
        ("FORECAST_WAITING", order.FORECAST_WAITING),
        ("FORECAST_MARGIN_PERCENT", order.FORECAST_MARGIN_PERCENT),
        ("FORECAST_PLAYED", order.FORECAST_PLAYED),
        ("APPOINTMENT_MAX_MS", order.APPOINTMENT_MAX_MS),
        ("DRAIN_WINDOW_MS", order.DRAIN_WINDOW_MS),
        ("DRAIN_SETTLING_MS", order.DRAIN_SETTLING_MS),
        ("FIRST_APPOINTMENT_MS", order.FIRST_APPOINTMENT_MS),
        ("SHUT_RETRY_MS", order.SHUT_RETRY_MS),
        ("KEPT_PART", order.KEPT_PART),
        ("PLACE_ONLY", order.PLACE_ONLY),
        ("ASKED_BACK", order.ASKED_BACK),
        ("PLACE_MS", order.PLACE_MS),
        ("PLACES", order.PLACES),
        ("PLACES_OF_FLOW", order.PLACES_OF_FLOW),
        ("HOLD_MS", order.HOLD_MS),
        ("HOLDS_MAX", order.HOLDS_MAX),
        ("HOLDS_ENDED", order.HOLDS_ENDED),
        ("HOLD_PART", order.HOLD_PART),
        ("HISTORIES", order.HISTORIES),
        ("HISTORY_WEIGHT", order.HISTORY_WEIGHT),
        ("YIELD_MS", order.YIELD_MS),
        ("SEGMENTS_MAX", SEGMENTS_MAX),
        ("PREFILL_TOKENS_MIN", PREFILL_TOKENS_MIN),
        ("WIDTH", NODE_WIDTH),
        ("NARROWED_MAX", elastic.NARROWED_MAX),
    ],
)
def test_constants_are_the_specifications(lua: str, python: int) -> None:
    assert constant(lua) == python


@pytest.mark.parametrize(
    "name",
    [
        *("BUCKETS", "PRIOR", "HALF", "ENTRIES_MAX", "HAZARD_MAX"),
        *("SURPRISE_DECAY", "SURPRISE_SIGMAS", "SURPRISE_ENDS", "SURPRISE_LEFT"),
    ],
)
def test_constants_of_lengths_are_the_cores(name: str) -> None:
    assert constant(name, (FOLDER / "lengths.lua").read_text()) == getattr(lengths, name)


KINDS = {
    "replica": "replicas",
    "call": "calls",
    "key": "keys",
    "flow": "flows",
    "session": "sessions",
    "line": "lines",
    "lane": "lanes",
    "once": "once",
    "node": "nodes",
    "hold": "holds",
    "drain": "drains",
    "capacity": "capacities",
    "forecast": "forecasts",
}
"""Python's name of a record and Lua's of all of its kind."""


@pytest.mark.parametrize("kind", FIELDS)
def test_records_have_the_same_fields_in_both_languages(kind: str) -> None:
    """What Lua reads by position it writes in the same order, under the header of an array of that size."""
    text = (FOLDER / "lib/records.lua").read_text()
    record = re.search(rf"^  {KINDS[kind]} = \{{(.*?)^  \}},$", text, re.MULTILINE | re.DOTALL)
    assert record
    taken = re.search(r"function\(_, ([^)]*)\)", record[1])
    made = re.search(r"return \{(.*?)\}", record[1], re.DOTALL)
    header = re.search(r"header = '([^']*)'", record[1])
    assert taken
    assert made
    assert header
    assert tuple(re.split(r",\s+", taken[1])) == FIELDS[kind]
    assert re.findall(r"(\w+) = (\w+)", made[1]) == [(field, field) for field in FIELDS[kind]]
    assert tuple(re.findall(r"row\.(\w+)", record[1])) == FIELDS[kind]
    mark = bytes(int(number) for number in header[1].split("\\")[1:])
    assert msgspec.msgpack.encode([0] * len(FIELDS[kind])).startswith(mark)
    assert len(mark) == (1 if len(FIELDS[kind]) < 16 else 3)


def test_the_library_is_whole() -> None:
    """Its name comes first and says what is in it, nothing is left to splice, and no function is in it twice."""
    text = library().text
    first, second, spliced = text.split("\n", 2)
    assert (first, second) == (f"#!lua name={library().name}", f"local LIBRARY = '{library().name}'")
    assert (
        library().name == "kvgate_" + hashlib.sha1(spliced.encode(), usedforsecurity=False).hexdigest()[:16]
    )
    assert "@include" not in text
    functions = re.findall(r"^function (\w+\.\w+)", text, re.MULTILINE)
    assert len(functions) == len(set(functions))


def test_what_a_run_changes_is_made_anew_by_the_next() -> None:
    """The library stays loaded: a module's own variable would be the last run's, of any fleet."""
    kept = {
        "books": {"meta_key", "pools", "limits", "run", "last_config", "last_rows", "whole"},
        "fronts": {"known", "changes", "some"},
        "records": {"kinds"},
        "order": {"lines"},
    }
    for path in FOLDER.glob("lib/*.lua"):
        text = path.read_text()
        for names in re.findall(r"^local ([a-z_, ]+?)(?: =| --|$)", text, re.MULTILINE):
            if names.startswith("function"):
                continue
            assert set(names.split(", ")) <= kept.get(path.stem, set()), f"{path.name}: {names}"


def test_a_module_fills_its_own_table_only() -> None:
    for path in [*FRAGMENTS, *(FOLDER / "lib").glob("*.lua")]:
        tables = set(re.findall(r"^function (\w+)\.", path.read_text(), re.MULTILINE))
        assert tables <= {path.stem}, path.name


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.stem)
def test_a_commands_header_names_its_arguments_and_answers(fragment: Path) -> None:
    """`-- K id: ...` has as many arguments as the function after its owner, and every answer is named."""
    text = fragment.read_text()
    head = "\n".join(line for line in text.splitlines() if line.startswith("--") and "@include" not in line)
    promised = re.search(r"^-- [A-Z]((?: \w+|\n-- \w+)*):", head, re.MULTILINE)
    assert promised, head
    parameters = re.search(rf"function {fragment.stem}\.run\(([^)]*)\)", text)
    assert parameters
    taken = [p.strip() for p in parameters[1].split(",")][1:]
    assert len(promised[1].replace("--", " ").split()) == len(taken)
    body = text[parameters.end() :]
    for answer in re.findall(r"return \{'(\w+)'", body):
        assert answer in head, answer


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.stem)
def test_a_command_checks_as_many_values_as_it_takes(fragment: Path) -> None:
    """An op is its letter and the arguments; the owner comes from the batch."""
    text = fragment.read_text()
    parameters = re.search(rf"function {fragment.stem}\.run\(([^)]*)\)", text)
    length = re.search(r"check\.length\(op, (\d+)[,)]", text)
    assert parameters
    assert length
    assert int(length[1]) == len(parameters[1].split(","))


def test_a_module_is_spliced_once_after_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "a.lua").write_text('-- head\n--- @include "b"\n--- @include "c"\nreturn b.x\n')
    (tmp_path / "b.lua").write_text('--- @include "c"\nfunction b.x() end\n')
    (tmp_path / "c.lua").write_text('--- @include "b"\nlocal y = 1\n')
    assert splice(tmp_path, "a").split("\n") == [
        "-- head", "local c, b = {}, {}",
        "do", "local y = 1", "end",
        "do", "function b.x() end", "end",
        "", "return b.x", "",
    ]  # fmt: skip


def test_a_missing_fragment_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.lua").write_text('--- @include "gone"\n')
    with pytest.raises(FileNotFoundError):
        splice(tmp_path, "a")


def test_all_keys_of_a_fleet_share_a_hash_tag() -> None:
    keys = fleet_keys("llama-70b")
    assert keys[0] == "{kvgate:llama-70b}:meta"
    assert len(keys) == len(KEY_NAMES) == 21
    assert {key.split("}")[0] for key in keys} == {"{kvgate:llama-70b"}
