"""The example for Istio, as far as it can be judged without a mesh: who goes where, and that nothing is sent twice."""

import re
from typing import Any

import pytest
import yaml

from gateway.config import Upstream
from gateway.core.headers import PROMPT_TOKENS
from tests.repo.files import text_of

DOCUMENTS: dict[str, dict[str, Any]] = {
    document["kind"]: document for document in yaml.safe_load_all(text_of("deploy/istio.yaml"))
}
SERVICE, RULE = DOCUMENTS["VirtualService"]["spec"], DOCUMENTS["DestinationRule"]["spec"]


def route_of(tokens: int) -> str:
    """The name of the route that a call with such an estimate takes."""
    for route in SERVICE["http"]:
        matches = route.get("match", [{"headers": {}}])
        if any(_matches(match["headers"], tokens) for match in matches):
            return str(route["name"])
    raise AssertionError(f"no route takes {tokens}")


def _matches(headers: dict[str, dict[str, str]], tokens: int) -> bool:
    """RE2 matches the whole value, as Envoy asks it to."""
    return all(
        name.encode() == PROMPT_TOKENS and re.fullmatch(match["regex"], str(tokens))
        for name, match in headers.items()
    )


def test_the_two_are_what_istio_calls_them() -> None:
    assert list(DOCUMENTS) == ["VirtualService", "DestinationRule"]
    assert {document["apiVersion"] for document in DOCUMENTS.values()} == {"networking.istio.io/v1"}
    assert all(set(document) == {"apiVersion", "kind", "metadata", "spec"} for document in DOCUMENTS.values())


@pytest.mark.parametrize("tokens", [0, 1, 9, 99, 3_276, 9_999, 10_000, 32_699, 32_766, 32_767])
def test_shorter_prompts_go_with_the_other_calls(tokens: int) -> None:
    assert route_of(tokens) == "other-calls"


@pytest.mark.parametrize(
    "tokens",
    [32_768, 32_769, 32_770, 32_799, 32_800, 33_000, 40_000, 99_999, 100_000, 131_072, 2_147_483_647],
)
def test_long_prompts_have_a_route_of_their_own(tokens: int) -> None:
    assert route_of(tokens) == "long-prompts"


def test_every_route_leads_to_the_engine_that_was_asked_for() -> None:
    """Its blocks are reserved there and nowhere else."""
    (host,) = SERVICE["hosts"]
    subsets = {subset["name"] for subset in RULE["subsets"]}
    destinations = [place["destination"] for route in SERVICE["http"] for place in route["route"]]
    assert {place["host"] for place in destinations} == {host, RULE["host"]}
    assert {place["subset"] for place in destinations} == subsets
    assert len({str(subset["labels"]) for subset in RULE["subsets"]}) == 1


def test_the_mesh_sends_nothing_twice_and_cuts_nothing_short() -> None:
    longest = Upstream().headers_seconds
    for route in SERVICE["http"]:
        assert route["retries"] == {"attempts": 0}
        assert int(route["timeout"].removesuffix("s")) > longest
    for subset in RULE["subsets"]:
        assert subset["trafficPolicy"]["connectionPool"]["http"]["maxRetries"] == 0
