"""A rolling change of the configuration: gateways with different settings on one store."""

import concurrent.futures
import json
import time

from tests.processes import QUICK_STORE, GatewayProcess, World, wait_until


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


def test_a_process_that_reads_a_rename_late_holds_nobody_up(new_world: World) -> None:
    """The store has replicas only that this one does not know yet: its calls wait for it to read them, or say so."""
    mocks = [new_world.mock("--blocks", "1001") for _ in range(2)]
    pools = [{"name": "only", "replicas": [{"name": f"old-{n}", "url": m.url} for n, m in enumerate(mocks)]}]
    config, (key,) = new_world.config(pools, store=QUICK_STORE, queue={"seconds_max": 120})
    old = new_world.gateway(config, key)
    document = json.loads(config.read_text())
    for replica in document["fleets"][0]["pools"][0]["replicas"]:
        replica["name"] = replica["name"].replace("old", "new")
    newer = new_world.folder / "newer.yaml"
    newer.write_text(json.dumps(document))
    new = new_world.gateway(newer, key)
    wait_until(lambda: set(replicas_of(new)) == {"new-0", "new-1"}, "the store has the new names only")

    body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(old.client.post, "/v1/completions", json=body) for _ in range(3)]
        time.sleep(0.3)
        config.write_text(newer.read_text())
        answers = [call.result() for call in waiting]
        assert new.client.post("/v1/completions", json=body).status_code == 200
    assert {answer.status_code for answer in answers} == {200}
    wait_until(lambda: old.is_quiet() and new.is_quiet(), "all was given back")


def replicas_of(gateway: GatewayProcess) -> dict[str, object]:
    found: dict[str, object] = gateway.state()["fleets"]["demo"]["pools"]["only"]["replicas"]
    return found
