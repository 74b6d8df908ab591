"""The gate of a store that was just begun: calls wait, and the gateways ask now and then whether it is open."""

from tests.processes import World

ASKED_MAX = 60
"""Two heartbeats of 1 s with a question every 250 ms, and what a start and one call need; a gateway that asked back to
back made thousands."""


def test_a_closed_gate_is_not_asked_without_a_pause(new_world: World) -> None:
    mock = new_world.mock()
    config, (key,) = new_world.config([{"name": "only", "replicas": [mock.url]}], store={})
    gateway = new_world.gateway(config, key)
    answer = gateway.client.post("/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 1})
    assert answer.status_code == 200  # so the gate is open now
    assert gateway.metric("kvgate_store_seconds_count") < ASKED_MAX
