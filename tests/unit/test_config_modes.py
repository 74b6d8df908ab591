"""Modes of pools, classes and keys: what is refused before it could not be kept, and what classes inherit."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import ConfigError, Settings, check_promises, load, load_keys

SHA = "3b1f0c6a52e97d488a0d25c4f917e6b3805fd2914ce7a06bd83f195c2e64a7d0"


def content(short: str | None, long: str | None, lanes: Any = None, **more: Any) -> dict[str, Any]:
    pools: list[dict[str, Any]] = [
        {"name": "short", "max_prompt_tokens": 4096, "replicas": ["http://s:8000"]},
        {"name": "long", "replicas": ["http://l:8000"]},
    ]
    for pool, mode in zip(pools, (short, long), strict=True):
        if mode is not None:
            pool["mode"] = mode
    return {"fleets": [{"model": "demo", "pools": pools, "lanes": lanes or {}}], **more}


def loaded(tmp_path: Path, settings: Any) -> Settings:
    path = tmp_path / "kvgate.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return load(path, {})


def problem(tmp_path: Path, settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, settings)
    return str(caught.value)


def promised(mode: str) -> dict[str, Any]:
    return {"classes": [{"name": "high", "mode": mode}, {"name": "normal"}]}


def test_pools_guarantee_unless_they_say_otherwise(tmp_path: Path) -> None:
    for mode in ("elastic", "shared"):
        pools = loaded(tmp_path, content(mode, None)).fleets[0].pools
        assert [pool.mode for pool in pools] == [mode, "guaranteed"]
    assert [class_.mode for class_ in loaded(tmp_path, content(None, None)).classes] == [None] * 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (content("x", None), "fleets[0].pools[0].mode: has to be one of guaranteed, elastic, shared"),
        (content(None, None, **promised("shared")), "classes[0].mode: has to be one of guaranteed, elastic"),
        (
            content("elastic", None, **promised("guaranteed")),
            "classes[0].mode: is guaranteed, but every pool of lane short of fleet demo is elastic",
        ),
        (
            content(None, "elastic", lanes={"long": ["long"]}, **promised("guaranteed")),
            "classes[0].mode: is guaranteed, but every pool of lane long of fleet demo is elastic",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, settings: Any, named: str) -> None:
    assert problem(tmp_path, settings).startswith(named)


def test_a_promise_that_some_pool_of_each_lane_keeps_is_good(tmp_path: Path) -> None:
    lanes = {"short": ["short", "long"]}
    assert loaded(tmp_path, content("elastic", None, lanes=lanes, **promised("guaranteed"))).classes[0].mode
    assert loaded(tmp_path, content("elastic", "elastic", **promised("elastic")))
    assert loaded(tmp_path, content("shared", "shared", **promised("guaranteed")))


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"mode": "shared"}, "keys[0].mode: has to be one of guaranteed, elastic, got 'shared'"),
        ({"mode": 1}, "keys[0].mode: expected text or nothing, got 1"),
        ({"mode": "guaranteed"}, "keys[0].mode: is guaranteed, but every pool of lane short of fleet demo"),
        ({"mode": "guaranteed", "models": ["demo"]}, "keys[0].mode: is guaranteed"),
        ({"mode": "guaranteed", "models": ["other"]}, ""),
        ({"mode": "elastic"}, ""),
        ({}, ""),
    ],
)
def test_keys(tmp_path: Path, entry: dict[str, Any], named: str) -> None:
    fleets = loaded(tmp_path, content("elastic", None)).fleets
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump([{"name": "a", "sha256": SHA, **entry}]))
    if not named:
        return check_promises(load_keys(path, None), fleets)
    with pytest.raises(ConfigError) as caught:
        check_promises(load_keys(path, None), fleets)
    assert str(caught.value).startswith(named)


def test_classes_inherit_when_a_first_token_is_wanted(tmp_path: Path) -> None:
    settings = content(
        None, None, queue={"ttft_seconds": 8}, classes=[{"name": "a"}, {"name": "b", "ttft_seconds": 2}]
    )
    assert [class_.ttft_seconds for class_ in loaded(tmp_path, settings).classes] == [8, 2]
    assert loaded(tmp_path, content(None, None)).classes[0].ttft_seconds is None
    assert problem(tmp_path, content(None, None, queue={"ttft_seconds": 0})).startswith("queue.ttft_seconds")
