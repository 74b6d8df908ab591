"""What calls on one replica hold together: each node is a segment whose blocks the books count once.

An engine puts a full block into its prefix cache as soon as it is scheduled, gives it to whoever looks it up, and
evicts none that is held.  So all calls that begin alike hold the same blocks, as long as one of them runs.  A node is
there while anybody is in it: *holders*, whose prompts are computed, and *newcomers*, which were charged only for the
rest because of it, and are not computed yet.  Only holders make it worth sharing: what is not computed is in no cache.

A node stays for as long as one of its calls, so it counts at every horizon.  That of a single call that is charged by
its path would count for longer than the call may be there: it is the call's *own*, in the call's charge, until another
one has computed it too.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from gateway.core.estimate import PREFILL_TOKENS_MIN
from gateway.core.segments import Segment


class Prefix(msgspec.Struct, array_like=True):
    """How a call's prompt begins, and what of it is in nodes.  In the store an array, empty where it has no segments.

    Of a call that only asks, and whose prompt is not known, the block size alone.
    """

    block_size: int = 0
    """Tokens."""
    segments: tuple[Segment, ...] = ()
    cache: int = 0
    """Number of its replica's cache when it came there; 0 = that had none to share."""
    joined: int = 0
    """So many of the segments, the first, are in nodes."""
    computed: int = 0
    """1 = it is past its first token: a holder of those nodes, else a newcomer."""
    net: int = 0
    """So many of its blocks are not in the path by which it is charged: what it shared as that was made."""
    alone: int = 0
    """Blocks of those nodes that are its own."""

    @property
    def shared(self) -> int:
        """Blocks that are not in its own charge."""
        return self.blocks_of(self.joined) - self.alone

    def blocks_of(self, count: int) -> int:
        """Of the first segments."""
        return sum(segment.blocks for segment in self.segments[:count])

    def prefill(self, tokens: int, shared: int) -> int:
        """What counts of a demand on the prefill budget where so many blocks are computed already."""
        left = tokens - shared * self.block_size
        return left if not shared or left >= PREFILL_TOKENS_MIN else 0

    def leave(self) -> None:
        self.cache = self.joined = self.computed = self.alone = 0


NodeName = tuple[str, str, int, int]
"""Id of the segment, replica, number of its cache, and blocks."""


@dataclass(slots=True)
class Node:
    holders: int = 0
    newcomers: int = 0
    own: str = ""
    """Id of the only call in it, in whose charge it is; '' = it counts by itself."""


class Joined(NamedTuple):
    """What comes of a call that joins nodes."""

    counted: int
    """Blocks that count by themselves from now on."""
    alone: int
    """Blocks of nodes that are its own."""
    freed: list[tuple[str, int]]
    """Calls whose own nodes are so no more, and their blocks."""


@dataclass(slots=True)
class Nodes:
    """Of all replicas of a fleet.  An engine's new process has a new cache: whoever is in a node of the old one goes on
    as charged, and nobody else joins."""

    nodes: dict[NodeName, Node] = field(default_factory=dict)

    def run(self, prefix: Prefix, replica: str, cache: int) -> int:
        """So many of the first segments are computed there, and nobody's own."""
        count = 0
        for segment in prefix.segments if cache else ():
            node = self.nodes.get((segment.id, replica, cache, segment.blocks))
            if node is None or not node.holders or node.own:
                break
            count += 1
        return count

    def known(self, prefix: Prefix, replica: str) -> int:
        """Blocks of those of a call's nodes that count there without it."""
        names = ((s.id, replica, prefix.cache, s.blocks) for s in prefix.segments[: prefix.joined])
        return sum(name[-1] for name in names if name in self.nodes and not self.nodes[name].own)

    def join(self, prefix: Prefix, first: int, last: int, replica: str, own: str) -> Joined:
        """Be in the nodes of these segments, up to `last` without that one.  `own`: the call, where nodes that were not
        there are its own; else ''."""
        counted, alone, freed = 0, 0, list[tuple[str, int]]()
        for segment in prefix.segments[first:last]:
            name = (segment.id, replica, prefix.cache, segment.blocks)
            node = self.nodes.get(name)
            if node is None:
                node = self.nodes[name] = Node(own=own)
                alone += segment.blocks if own else 0
                counted += 0 if own else segment.blocks
            elif node.own:
                freed.append((node.own, segment.blocks))
                node.own = ""
                counted += segment.blocks
            node.holders += prefix.computed
            node.newcomers += 1 - prefix.computed
        return Joined(counted, alone, freed)

    def leave(self, prefix: Prefix, replica: str) -> int:
        """Be in none any more; blocks that counted by themselves and are gone with it."""
        gone = 0
        for segment in prefix.segments[: prefix.joined]:
            name = (segment.id, replica, prefix.cache, segment.blocks)
            node = self.nodes[name]
            node.holders -= prefix.computed
            node.newcomers -= 1 - prefix.computed
            if not node.holders and not node.newcomers:
                del self.nodes[name]
                gone += 0 if node.own else segment.blocks
        prefix.leave()
        return gone

    def compute(self, prefix: Prefix, replica: str) -> None:
        """A newcomer becomes a holder."""
        prefix.computed = 1
        for segment in prefix.segments[: prefix.joined]:
            node = self.nodes[segment.id, replica, prefix.cache, segment.blocks]
            node.newcomers -= 1
            node.holders += 1
