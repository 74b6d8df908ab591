"""A rolling change of the configuration: gateways with different settings on one store."""

import json

from tests.processes import World, wait_until


def test_a_replica_that_only_the_new_configuration_has(new_world: World) -> None:
    """The old gateway goes on serving, on the replicas that it knows."""
    mocks = [new_world.mock("--blocks", "101"), new_world.mock("--blocks", "1001")]
    config, (key,) = new_world.config([{"name": "only", "replicas": [mocks[0].url]}])
    old = new_world.gateway(config, key)
    document = json.loads(config.read_text())
    document["fleets"][0]["pools"][0]["replicas"] = [mock.url for mock in mocks]
    newer = new_world.folder / "newer.yaml"
    newer.write_text(json.dumps(document))
    new = new_world.gateway(newer, key)
    body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
    for gateway, expected in ((new, mocks[1]), (old, mocks[0])):
        for _ in range(3):
            answer = gateway.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvgate-replica"] == expected.url.removeprefix("http://").replace(
                ".", "-"
            ).replace(":", "-")
    wait_until(
        lambda: [mock.log()["finished"] for mock in mocks] == [3, 3], "each served its own gateway's calls", 5
    )
    assert "has changed the settings" in old.log.read_text()
