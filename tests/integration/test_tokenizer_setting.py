"""`fleets[].tokenizer`, with real processes."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.tokens.exact import TokenizerCounter
from gateway.tokens.files import TokenizerFiles
from gateway.tokens.threads import CountingThreads
from tests.processes import GatewayProcess, World, wait_until

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


def serving(world: World, **fleet: Any) -> GatewayProcess:
    pools = [{"name": "only", "replicas": [world.mock().url]}]
    config, (key,) = world.config(pools, fleet={"exact_above": 0, **fleet})
    return world.gateway(config, key)


def asked(gateway: GatewayProcess) -> tuple[int, int]:
    """Blocks that a call of BODY reserves, and those that its prompt has by what the engine says."""
    answer = gateway.client.post(Endpoint.CHAT, content=BODY, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["usage"]["prompt_tokens"]
    return int(answer.headers["x-kvgate-reserved-blocks"]), -(-tokens // 16)


async def test_a_folder_counts_by_its_files(new_world: World, model: Path) -> None:
    """Where the machine stands still for longer than a count may take, the next call is counted."""
    threads = CountingThreads(lambda: 0.0)
    request = parse(Endpoint.CHAT, BODY, 1)
    assert isinstance(request, GenerationRequest)
    counts = await TokenizerCounter(TokenizerFiles(model / "tokenizer.json"), threads).count(request)
    threads.close()
    assert counts is not None
    blocks = -(-counts[0].tokens // 16)
    gateway = serving(new_world, tokenizer=str(model))
    wait_until(lambda: asked(gateway)[0] == blocks, "a call reserves what its tokenizer counts")
    assert asked(serving(new_world))[0] != blocks


def test_engine_asks_the_engine(new_world: World) -> None:
    gateway = serving(new_world, tokenizer="engine")
    wait_until(lambda: len(set(asked(gateway))) == 1, "a call reserves what its engine counts")
    assert len(set(asked(serving(new_world)))) == 2


def test_files_that_are_wrong_end_the_start_in_one_line(new_world: World, tmp_path: Path) -> None:
    pools = [{"name": "only", "replicas": ["http://127.0.0.1:9"]}]
    config, (key,) = new_world.config(pools, fleet={"tokenizer": str(tmp_path / "absent.json")})
    gateway = new_world.gateway(config, key, wait=False)
    assert gateway.process.wait(timeout=60) != 0
    lines = [line for line in gateway.log.read_text().splitlines() if "absent.json" in line]
    assert len(lines) == 1
    assert "cannot read" in lines[0]
    assert "Traceback" not in gateway.log.read_text()
