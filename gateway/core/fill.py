"""How much of a fleet is reserved."""

from collections.abc import Iterable

from gateway.core.books import Replica


def fill(replicas: Iterable[Replica]) -> float:
    """Of the pool that has least room: the part of its limit that is reserved on the replica with most room.

    1.0 and more where a call would have to wait, or no replica can take one.
    """
    of_pools: dict[str, float] = {}
    for replica in replicas:
        usable = replica.state == "up" and replica.limit > 0
        part = replica.used / replica.limit if usable else 1.0
        of_pools[replica.pool] = min(part, of_pools.get(replica.pool, part))
    return max(of_pools.values(), default=1.0)
