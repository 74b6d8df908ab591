"""How much of a fleet is reserved."""

import pytest

from gateway.core.books import Replica
from gateway.core.fill import fill


def replica(pool: str, used: int, limit: int = 100, state: str = "up") -> Replica:
    return Replica(f"{pool}-{used}-{limit}-{state}", pool, limit, used=used, state=state)


@pytest.mark.parametrize(
    ("replicas", "part"),
    [
        ([], 1.0),
        ([replica("a", 0)], 0.0),
        ([replica("a", 90), replica("a", 30)], 0.3),
        ([replica("a", 90), replica("b", 30)], 0.9),
        ([replica("a", 90), replica("a", 20, state="down")], 0.9),
        ([replica("a", 20, state="down"), replica("b", 30)], 1.0),
        ([replica("a", 0, limit=0)], 1.0),
        ([replica("a", 0, limit=0), replica("a", 50)], 0.5),
        ([replica("a", 150)], 1.5),
    ],
    ids=[
        "nothing",
        "empty",
        "roomiest",
        "fullest pool",
        "down",
        "a pool down",
        "not known",
        "one not known",
        "in debt",
    ],
)
def test_the_roomiest_replica_of_the_fullest_pool(replicas: list[Replica], part: float) -> None:
    assert fill(replicas) == part
