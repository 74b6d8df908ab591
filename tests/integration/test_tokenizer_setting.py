"""`fleets[].tokenizer`, with real processes."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.tokens.exact import TokenizerCounter
from gateway.tokens.files import TokenizerFiles
from gateway.tokens.threads import CountingThreads
from tests.processes import World

FIXTURES = Path(__file__).parents[1] / "fixtures"
BODY = (
    b'{"model":"demo","messages":[{"role":"user","content":"'
    + "é1234567 ".encode() * 200
    + b'"}],"max_tokens":1}'
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as Hugging Face lays it out."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "tokenizers/bytes", folder)
    shutil.copy(FIXTURES / "templates/chatml.jinja", folder / "chat_template.jinja")
    return folder


def blocks_of(world: World, **fleet: Any) -> tuple[int, int]:
    """What a call of BODY reserves, and the tokens that the engine says its prompt has."""
    pools = [{"name": "only", "replicas": [world.mock().url]}]
    config, (key,) = world.config(pools, fleet={"exact_above": 0, **fleet})
    gateway = world.gateway(config, key)
    answer = gateway.client.post(Endpoint.CHAT, content=BODY, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-kvgate-reserved-blocks"]), answer.json()["usage"]["prompt_tokens"]


async def test_a_folder_counts_by_its_files(new_world: World, model: Path) -> None:
    threads = CountingThreads()
    request = parse(Endpoint.CHAT, BODY, 1)
    assert isinstance(request, GenerationRequest)
    counts = await TokenizerCounter(TokenizerFiles(model / "tokenizer.json"), threads).count(request)
    threads.close()
    assert counts is not None
    reserved, _ = blocks_of(new_world, tokenizer=str(model))
    assert reserved == -(-counts[0] // 16)
    estimated, _ = blocks_of(new_world)
    assert estimated != reserved


def test_engine_asks_the_engine(new_world: World) -> None:
    reserved, told = blocks_of(new_world, tokenizer="engine")
    assert reserved == -(-told // 16)
    estimated, _ = blocks_of(new_world)
    assert estimated != reserved


def test_files_that_are_wrong_end_the_start_in_one_line(new_world: World, tmp_path: Path) -> None:
    pools = [{"name": "only", "replicas": ["http://127.0.0.1:9"]}]
    config, (key,) = new_world.config(pools, fleet={"tokenizer": str(tmp_path / "absent.json")})
    gateway = new_world.gateway(config, key, wait=False)
    assert gateway.process.wait(timeout=60) != 0
    lines = [line for line in gateway.log.read_text().splitlines() if "absent.json" in line]
    assert len(lines) == 1
    assert "cannot read" in lines[0]
    assert "Traceback" not in gateway.log.read_text()
