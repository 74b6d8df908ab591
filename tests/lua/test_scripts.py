"""The scripts as text: what is spliced, what their headers promise, and what Python believes about them."""

import re
from pathlib import Path

import pytest

from gateway.core import order
from gateway.ledger.records import FIELDS
from gateway.ledger.scripts import KEY_NAMES, fleet_keys, load, script_folder, splice

SCRIPTS = ("step", "hello", "configure", "page", "snapshot")
FOLDER = script_folder()
FRAGMENTS = sorted((FOLDER / "commands").glob("*.lua"))


def constant(name: str) -> int:
    """The number that the spliced step script gives a constant, alone or in a list of names."""
    for names, values in re.findall(r"^local ([A-Z_, ]+?) = ([0-9, ]+)$", load("step").text, re.MULTILINE):
        table = dict(zip(names.split(", "), values.split(", "), strict=True))
        if name in table:
            return int(table[name])
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
        ("APPOINTMENT_MAX_MS", order.APPOINTMENT_MAX_MS),
        ("DRAIN_WINDOW_MS", order.DRAIN_WINDOW_MS),
        ("DRAIN_SETTLING_MS", order.DRAIN_SETTLING_MS),
        ("FIRST_APPOINTMENT_MS", order.FIRST_APPOINTMENT_MS),
    ],
)
def test_constants_are_the_specifications(lua: str, python: int) -> None:
    assert constant(lua) == python


def test_records_have_the_same_fields_in_both_languages() -> None:
    text = (FOLDER / "lib/records.lua").read_text()
    found = {
        name.lower(): tuple(re.findall(r"'(\w+)'", fields))
        for name, fields in re.findall(r"^local ([A-Z]+) = \{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    }
    assert found == FIELDS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_whole(name: str) -> None:
    """The flags line is first, nothing is left to splice, and no fragment is in it twice."""
    text = load(name).text
    assert text.startswith("#!lua flags=")
    assert "@include" not in text
    functions = re.findall(r"^local function (\w+)", text, re.MULTILINE)
    assert len(functions) == len(set(functions))


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.stem)
def test_a_commands_header_names_its_arguments_and_answers(fragment: Path) -> None:
    """`-- K id: ...` has as many arguments as the function after its owner, and every answer is named."""
    text = fragment.read_text()
    head = "\n".join(line for line in text.splitlines() if line.startswith("--") and "@include" not in line)
    promised = re.search(r"^-- [A-Z]((?: \w+|\n-- \w+)*):", head, re.MULTILINE)
    assert promised, head
    parameters = re.search(rf"local function command_{fragment.stem}\(([^)]*)\)", text)
    assert parameters
    taken = [p.strip() for p in parameters[1].split(",")][1:]
    assert len(promised[1].replace("--", " ").split()) == len(taken)
    body = text[parameters.end() :]
    for answer in re.findall(r"return \{'(\w+)'", body):
        assert answer in head, answer


def test_the_steps_signatures_match_the_commands() -> None:
    """The table of kinds has one kind for every argument."""
    text = load("step").text
    for name, kinds in re.findall(r"= \{command_(\w+), '([^']*)'\}", text):
        parameters = re.search(rf"local function command_{name}\(([^)]*)\)", text)
        assert parameters
        assert len(kinds.split()) == len(parameters[1].split(",")) - 1, name


def test_a_fragment_is_spliced_once(tmp_path: Path) -> None:
    (tmp_path / "a.lua").write_text('--- @include "b"\n--- @include "c"\nreturn x\n')
    (tmp_path / "b.lua").write_text('--- @include "c"\nlocal b = x\n')
    (tmp_path / "c.lua").write_text("local x = 1\n")
    assert splice(tmp_path, "a").split("\n") == ["local x = 1", "local b = x", "", "return x", ""]


def test_a_missing_fragment_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.lua").write_text('--- @include "gone"\n')
    with pytest.raises(FileNotFoundError):
        splice(tmp_path, "a")


def test_all_keys_of_a_fleet_share_a_hash_tag() -> None:
    keys = fleet_keys("llama-70b")
    assert keys[0] == "{kvgate:llama-70b}:meta"
    assert len(keys) == len(KEY_NAMES) == 15
    assert {key.split("}")[0] for key in keys} == {"{kvgate:llama-70b"}
