"""What README promises is what the code has: its settings load, its codes and headers exist."""

import re
from pathlib import Path

import pytest
import yaml

from gateway import config
from gateway.config import load, load_keys
from gateway.core.outcomes import STATUS, Code
from tests.repo.files import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
YAML = [text for kind, text in BLOCKS if kind == "yaml"]
SECTION_ANSWERS = README.split("## Answers")[1].split("## Not there yet")[0]


def test_the_example_configuration_loads(tmp_path: Path) -> None:
    config, keys = tmp_path / "kvgate.yaml", tmp_path / "keys.yaml"
    config.write_text(YAML[0])
    keys.write_text(YAML[1])
    settings = load(config, {})
    assert settings.auth.keys_file == str(keys)
    (entry,) = load_keys(keys, [class_.name for class_ in settings.classes])
    assert set(entry.models or ()) == set(settings.fleets[0].models)


def test_every_code_has_its_status_and_no_other_is_told() -> None:
    told = {}
    for statuses, codes in re.findall(r"^\| ([\d, ]+) \| (.*) \|$", SECTION_ANSWERS, re.MULTILINE):
        for code in re.findall(r"`(\w+)`", re.sub(r"\(`answers.*?\)", "", codes)):
            told[code] = {int(status) for status in statuses.split(",")}
    shown = {code.value: status for code, (status, _) in STATUS.items() if code is not Code.CLIENT_DISCONNECT}
    assert set(told) == set(shown)
    for code, status in shown.items():
        assert status in told[code], code


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(x-[a-z-]+)", SECTION_ANSWERS))))
def test_every_header_is_sent_or_read(name: str) -> None:
    """Of a family (`x-ratelimit-{...}`) the beginning."""
    sources = [
        path.read_text() for room in ("core", "http") for path in (ROOT / "gateway" / room).glob("*.py")
    ]
    end = "" if name.endswith("-") else '"'
    assert any(f'b"{name}{end}' in text for text in sources)


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "python"])
def test_python_compiles(text: str) -> None:
    compile(text, "README.md", "exec")


CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
SECTIONS = {
    "store.": config.Store,
    "auth.": config.Auth,
    "server.": config.Server,
    "routes.": config.Routes,
    "queue.": config.Queue,
    "upstream.": config.Upstream,
    "answers.": config.Answers,
    "admin.": config.Admin,
    "log.": config.Log,
    "": config.Fleet,
    "media.": config.Media,
    "limits.": config.Limits,
    "limits.all_fleets.": config.AllFleetsLimits,
}
SETTINGS = [prefix + name for prefix, kind in SECTIONS.items() for name in kind.__struct_fields__]


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```", CONFIGURATION, re.MULTILINE | re.DOTALL))
def test_an_example_of_a_fleet_loads(tmp_path: Path, text: str) -> None:
    """Also for a key that was promised `guaranteed`, which needs such a pool in every lane."""
    fleet = {"model": "m", **yaml.safe_load(text)}
    file = tmp_path / "kvgate.yaml"
    file.write_text(yaml.safe_dump({"fleets": [fleet], "auth": {"required": False}}))
    config.check_promises([config.KeyEntry(name="a", mode="guaranteed")], load(file, {}).fleets)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_documented(setting: str) -> None:
    """By its path, or alone in the section's own table."""
    section, _, name = setting.rpartition(".")
    alone = section in ("store", "auth", "")
    assert (
        f"`{setting}`" in CONFIGURATION
        or (alone and f"`{name}`" in CONFIGURATION)
        or f"`{name}[]" in CONFIGURATION
    )
