"""Named prefixes on real processes: kept in an engine's cache while others push everything else out of it."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from tests.processes import GatewayProcess, Mock, World, sum_of, wait_until, world

BLOCKS = 513
SYSTEM = {"role": "system", "content": "You are a careful clerk of the harbour. " * 100}
PREFIX = {"name": "clerk", "messages": [SYSTEM]}
STRANGER_TOKENS = 600
"""Of each call that has nothing in common with another one: ten of them push out whatever was there."""
CALLS, TOKENS, SAVED = (f"kvgate_pin_{name}_total" for name in ("calls", "tokens", "saved_tokens"))


@pytest.fixture
def here() -> Iterator[World]:
    with world() as made:
        yield made


def begin(here: World, *options: str, **fleet: Any) -> tuple[Mock, GatewayProcess]:
    mock = here.mock("--num-gpu-blocks-override", str(BLOCKS), "--step-base-ms", "1", *options)
    fleet = {"pinned_prefixes": [PREFIX]} | fleet
    config, (key,) = here.config([{"name": "all", "replicas": [mock.url]}], fleet=fleet)
    return mock, here.gateway(config, key)


def ask(gateway: GatewayProcess, **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {gateway.key}"}
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    body = {"model": "demo", "max_tokens": 4, **body}
    answer = gateway.client.post(path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def use(gateway: GatewayProcess, number: int) -> int:
    """A call behind the system prompt; the tokens that its engine had of it."""
    found = ask(gateway, messages=[SYSTEM, {"role": "user", "content": f"ship {number}"}])
    details = found["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def crowd(gateway: GatewayProcess, number: int) -> None:
    ask(gateway, prompt=[10 + (number * 7919 + place) % 3000 for place in range(STRANGER_TOKENS)])


def endings(gateway: GatewayProcess, prefix: str = "clerk") -> dict[str, float]:
    """Of kvgate's own calls."""
    lines = [line for line in gateway.metrics().splitlines() if line.startswith(f"{CALLS}{{")]
    return {
        name: sum(float(line.split()[-1]) for line in lines if f'"{name}"' in line and f'"{prefix}"' in line)
        for name in ("warm", "cold", "untold", "refused", "failed")
    }


def thrash_until(gateway: GatewayProcess, done: Callable[[], object], what: str) -> list[int]:
    """Strangers come one after the other, and now and then a call behind the system prompt, until that is so; what each
    of these found of its prompt."""
    found: list[int] = []
    numbers = count()

    def once() -> object:
        number = next(numbers)
        crowd(gateway, number)
        if number % 4 == 0:
            found.append(use(gateway, number))
        return done()

    wait_until(once, what, 90)
    return found


def test_a_prefix_is_asked_for_before_it_is_forgotten(here: World) -> None:
    unused = {"name": "unused", "prompt": "Once upon a time"}
    mock, gateway = begin(here, "--enable-prompt-tokens-details", pinned_prefixes=[PREFIX, unused])
    found = thrash_until(gateway, lambda: endings(gateway)["warm"], "a call has kept it")
    thrash_until(gateway, lambda: sum_of(SAVED, gateway.metrics()), "a call has found what was kept")
    ended = endings(gateway)
    print(f"{found} tokens found; {ended}; {sum_of(TOKENS, gateway.metrics()):.0f} tokens of kvgate's own")
    assert (found[0], ended["failed"]) == (0, 0)
    assert not any(endings(gateway, "unused").values())
    wait_until(gateway.is_quiet, "nothing is held")
    ours = [
        call
        for call in mock.log()["requests"]
        if call["prompt_tokens"] > 400 and call["body"]["max_tokens"] == 1
    ]
    assert ours
    assert all(call["body"]["messages"] == [SYSTEM] for call in ours)


def test_an_engine_that_says_nothing_of_its_cache_is_asked_all_the_same(here: World) -> None:
    _, gateway = begin(here)
    thrash_until(gateway, lambda: endings(gateway)["untold"] >= 1, "a call has kept it")
    assert sum_of(SAVED, gateway.metrics()) == 0
