"""Tests against a real vLLM run only with KVGATE_TEST_VLLM set, as in `make test-vllm`: they take minutes and 2 GB."""

import os
from collections.abc import Iterator

import pytest

from tests.processes import Mock, World, world
from tests.vllm.engine import MOCK_OPTIONS, POOLING_OPTIONS, Vllm
from tests.vllm.environment import ready_place

if not os.environ.get("KVGATE_TEST_VLLM"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """One real engine for all tests: its start takes 20 to 45 seconds."""
    yield from _engine(tmp_path_factory)


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A real engine that embeds."""
    yield from _engine(tmp_path_factory, *POOLING_OPTIONS)


def _engine(folders: pytest.TempPathFactory, *options: str) -> Iterator[Vllm]:
    engine = Vllm(ready_place(os.environ), folders.mktemp("vllm") / "vllm.log", *options)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def mock() -> Iterator[Mock]:
    """A mock engine with the settings of the real one."""
    engine = Mock(*MOCK_OPTIONS)
    yield engine
    engine.stop()


@pytest.fixture
def new_world() -> Iterator[World]:
    with world() as here:
        yield here
