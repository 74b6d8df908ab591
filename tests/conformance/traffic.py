"""Generated commands, biased towards what breaks books: sizes at the edges of what is free, waits to the next end of a
lease or deadline, ids that live, replicas that lanes share, and many calls at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from gateway.core.books import Books, Call, FleetConfig, Key, ReplicaConfig
from gateway.core.elastic import (
    ELASTIC,
    EPS,
    FAR_EPS,
    GUARANTEED,
    NEAR,
    POINTS,
    SCALE,
    SHARED,
    SUM_MAX,
    TILTS,
    margins,
    pack,
)
from gateway.core.order import (
    ASKED_BACK,
    DIGEST_MODULUS,
    FORECAST_ENDS,
    FORECAST_REACH_MS,
    ID_BITS,
    LOOKAHEAD,
    OPERATOR,
    PLACE_ONLY,
    POOL_SHARE_SCALE,
    WORK,
)
from tests.conformance.twin import IN_FULL

Op = list[Any]
Policy = tuple[int, int, int, int]
"""Weight, most blocks, most calls and part of a pool of a key."""

CLASSES = (("high", 0), ("normal", 200), ("low", 100))
PALETTES = (("normal",), ("high", "normal"), ("high", "low"), ("normal", "normal", "high", "low"))
BASES = (32, 32, 32, 128)
"""What paths are made for; two of them may meet on a replica."""
MODES = ((GUARANTEED,), (ELASTIC,), (SHARED,), (GUARANTEED, ELASTIC, SHARED))
"""Of the replicas of a fleet."""
LANES = (
    (("a", ("p",)), ("b", ("q",))),
    (("a", ("p", "q")), ("b", ("q",))),
    (("a", ("q", "p")), ("b", ("p", "q"))),
    (("a", ("p",)), ("b", ("p",))),
)
"""Three of four share replicas among lanes."""
SHARES = ((-1,), (-1, POOL_SHARE_SCALE // 4, POOL_SHARE_SCALE // 2))
"""Half of the examples go without: who may hold a part of a pool only waits rarely for its replicas."""
HEARTBEAT_MS = 1_000
GAP_MS = 2 * HEARTBEAT_MS
"""The clock passes so much at most in one script."""
REACH_MS = 7_000
"""Ends further away are not waited for."""
SCRAMBLE = 0x9E3779B97F
"""Ids neither rise nor repeat: an odd factor permutes the numbers below a power of two."""


@dataclass(frozen=True)
class Start:
    fleet: FleetConfig
    policies: dict[str, Policy]
    classes: tuple[str, ...]
    shares: tuple[int, ...]
    """Of pools, that keys may have."""
    caches: bool
    """Whether engines have prefix caches, and calls say how their prompts begin."""

    @property
    def elastic(self) -> bool:
        """Whether calls may be charged by their paths anywhere."""
        return any(replica.mode != GUARANTEED for replica in self.fleet.replicas)


@dataclass
class World:
    """What generators look at: the specification, and what clients and operators would know."""

    books: Books
    start: Start
    owners: dict[str, int] = field(default_factory=dict)
    """Owner -> number of its last batch."""
    owners_ever: int = 0
    now: int = 1_000_000
    ids: int = 0

    @property
    def limit(self) -> int:
        """Of every replica at the start."""
        return self.start.fleet.replicas[0].limit

    @property
    def policies(self) -> dict[str, Policy]:
        return self.start.policies

    def new_id(self) -> str:
        self.ids += 1
        return f"{self.ids * SCRAMBLE % 2**ID_BITS:010x}"

    def calls(self, owner: str | None = None, *states: str) -> list[Call]:
        """Live calls by id."""
        found = (c for c in self.books.calls.values() if owner in (None, c.owner))
        return sorted((c for c in found if not states or c.state in states), key=lambda c: c.id)


# -- fleets and policies ---------------------------------------------------------------------------------------------


@st.composite
def fleets(draw: DrawFn) -> FleetConfig:
    limit = draw(st.sampled_from((20, 100)))
    prefill = draw(st.sampled_from((30, 1000)))
    count = draw(st.sampled_from((1, 2, 2, 4)))
    modes = st.sampled_from(draw(st.sampled_from(MODES)))
    shapes = st.tuples(st.sampled_from("pq"), st.sampled_from((0, 5)), st.sampled_from((4, 50)), modes)
    replicas = tuple(
        ReplicaConfig(f"r{i}", pool, limit, limit + spare, sequences, prefill, mode)
        for i, (pool, spare, sequences, mode) in enumerate(draw(st.tuples(*[shapes] * count)))
    )
    return FleetConfig(
        lease_ms=6000,
        heartbeat_ms=HEARTBEAT_MS,
        overtake_blocks=draw(st.sampled_from((0, limit // 2, 2 * limit))),
        lanes=draw(st.sampled_from(LANES)),
        classes=CLASSES,
        replicas=replicas,
    )


@st.composite
def starts(draw: DrawFn) -> Start:
    """One, three or twelve keys (more than a dispatch looks at), and the classes that they use."""
    fleet = draw(fleets())
    shares = draw(st.sampled_from(SHARES))
    policy = policies(fleet.replicas[0].limit, shares)
    count = draw(st.sampled_from((1, 3, 12)))
    return Start(
        fleet,
        {f"k{i}": draw(policy) for i in range(count)},
        draw(st.sampled_from(PALETTES)),
        shares,
        draw(st.booleans()),
    )


def policies(limit: int, shares: tuple[int, ...]) -> st.SearchStrategy[Policy]:
    return st.tuples(
        st.sampled_from((1, 2, 4)),
        st.sampled_from((-1, -1, limit // 2)),
        st.sampled_from((-1, -1, 2)),
        st.sampled_from(shares),
    )


# -- time ------------------------------------------------------------------------------------------------------------


def ends(world: World) -> list[int]:
    """Milliseconds until the next ends of leases, deadlines and remembered places, and of the closed gate."""
    books = world.books
    deadlines, places = (c.deadline for c in world.calls(None, "queued")), (p.end for p in books.places)
    holds = (hold.due for hold in books.holds.holds.values())
    times = {*books.owners.values(), *deadlines, *places, *holds, books.opens_at}
    return sorted(t - books.clock for t in times if books.clock < t <= books.clock + REACH_MS)[:3]


@st.composite
def pauses(draw: DrawFn, world: World) -> int:
    """Most commands follow at once."""
    if draw(st.sampled_from((False, False, False, True))):
        soon = [end + off for end in ends(world) if end <= GAP_MS for off in (-1, 0, 1)]
        return draw(st.sampled_from((1, 50, 500, GAP_MS - 1, GAP_MS + 1, 5000, -100, *soon)))
    return 0


@st.composite
def moments(draw: DrawFn, world: World) -> int:
    """Milliseconds until one of the next ends, or one less, or one more; mostly a near one: a long silence of the
    others ends their leases, and all that they hold is given back."""
    far = draw(st.sampled_from((False, False, False, True)))
    found = [end for end in ends(world) if far or end <= GAP_MS]
    return draw(st.sampled_from(found)) + draw(st.sampled_from((-1, 0, 1))) if found else 0


# -- ops -------------------------------------------------------------------------------------------------------------


def sizes(world: World, key: str) -> list[int]:
    """Blocks: 1, 2, half, all, over; what is left on a replica or under the key's caps, and one more."""
    limit, books = world.limit, world.books
    rest = [r.limit - r.used for r in books.replicas.values()]
    _, cap, _, share = world.policies[key]
    held = books.keys.get(key, Key())
    if cap >= 0:
        rest.append(cap - held.blocks)
    if share >= 0:
        limits = {pool: sum(r.limit for r in books.replicas.values() if r.pool == pool) for pool in "pq"}
        rest += [limit * share // POOL_SHARE_SCALE - held.held_in(pool) for pool, limit in limits.items()]
    edges = {size for left in rest for size in (left, left + 1) if size > 0}
    return [1, 1, 2, 3, 7, limit // 4, limit // 2, limit, limit + 3, limit + 9, *sorted(edges)]


PATIENCE = tuple(
    (seconds, wait, depth)
    for seconds in (1, 5)
    for wait in (0, 1, 100, 5000, 10**6, 10**6, 10**6)
    for depth in ((0, 0), (2, 2), (100, 1), (100, 100), (100, 100), (100, 100))
)
"""Expected seconds, how long the call waits (ms), and how long its queue may be, in all and of its key."""
SHAPES = tuple((sequences, prefill) for sequences in (1, 1, 2) for prefill in (0, 0, 5, 20, 40, 600))
PLACES = tuple(
    (prefer, exclude) for prefer in ([], [], ["r1"], ["r0", "r2"]) for exclude in ([], [], [], ["r0"])
)


CHARGES: tuple[list[int], ...] = (
    [],
    [],
    [],
    [0, 1_000_000, 4_000_000],
    [0, 400_000, 1_000_000, 2, 3_000_000, 6_000_000],
    [5, 2_000_000, 2_000_000],
    [3, 1, 2, 0, 999_999, 1_000_000],
)
"""Rate quotas of a few seconds: bucket, what the call takes, what it holds."""


FINGERPRINTS = ("0123456789abcdef", "00000000000000ff")
OTHERS = "fedcba9876543210"
"""The fingerprint of calls that have left no place."""
LIKENESS: tuple[tuple[str, str], ...] = (
    *((fingerprint, "") for fingerprint in ("",) * 10 + FINGERPRINTS * 4),
    (FINGERPRINTS[0], "a" * 16),
    (FINGERPRINTS[1], "a" * 16),
)
"""Fingerprint, and hash of the `Idempotency-Key` where there is one."""
STANDINGS = (0,) * 14 + (PLACE_ONLY, ASKED_BACK, ASKED_BACK)


def edges(world: World) -> list[int]:
    """Points that the bound leaves on a replica where it is tightest, and one more or less."""
    found = set[int]()
    for replica in world.books.replicas.values():
        if replica.elastic:
            sums, tilts = replica.points(), len(TILTS)
            room = (replica.limit - replica.assured) * SCALE
            for eps, horizons in ((EPS, range(NEAR)), (FAR_EPS, range(NEAR, POINTS // tilts))):
                beside = margins(replica.base, eps)
                left = [
                    max(room - b - s for s, b in zip(sums[at * tilts :], beside, strict=False))
                    for at in horizons
                ]
                found |= {min(left) + off for off in (-1, 0, 1)}
    return sorted(point for point in found if 0 <= point <= SUM_MAX)


@st.composite
def paths(draw: DrawFn, world: World, blocks: int) -> bytes:
    """Flat, or with one horizon or one tilt that says whether there is room; mostly low, so that many calls fit."""
    kind = draw(st.sampled_from(("low",) * 5 + ("edge",) * 3 + ("whole",)))
    near = edges(world) if kind == "edge" else []
    low = draw(st.sampled_from((0, 1, SCALE // 2)))
    high = blocks * SCALE if kind == "whole" else draw(st.sampled_from(near or [0, SCALE, 2 * SCALE]))
    at, shape = draw(st.integers(0, POINTS - 1)), draw(st.sampled_from(("flat", "horizon", "tilt", "point")))
    tilts = len(TILTS)
    alike = {"flat": lambda _: True, "horizon": lambda i: i // tilts == at // tilts,
             "tilt": lambda i: i % tilts == at % tilts, "point": lambda i: i == at}  # fmt: skip
    return pack(tuple(high if alike[shape](i) else low for i in range(POINTS)))


SALTS = ("0" * 16, "f" * 16)
"""The first half of a segment's id."""


def chains(limit: int) -> list[list[list[Any]]]:
    """Segments with which prompts begin: some part after the first, or are cut elsewhere, or differ in what is before
    them alone; the last has a segment of another size under an id of the first's."""
    few, many = [2, 1, 3], [limit // 4, 1, limit // 4]
    plain = [[f"{salt}{at:016x}", blocks] for salt in SALTS for at, blocks in enumerate(few)]
    parted = [[SALTS[0] + f"{at:016x}", blocks] for at, blocks in ((8, 1), (9, limit // 2))]
    large = [[SALTS[1] + f"{at + 16:016x}", blocks] for at, blocks in enumerate(many)]
    return [
        *(plain[:3], plain[:3], plain[3:], plain[:2], plain[1:3], plain[:1] + parted, large, large[:1]),
        [[plain[0][0], 3]],
    ]


def fitting(prefix: list[Any], blocks: int) -> list[Any]:
    """As much of it as a call of so many blocks may begin with."""
    segments, left = [], blocks - 1
    for segment in prefix[1] if len(prefix) > 1 else []:
        left -= segment[1]
        if left < 0:
            break
        segments.append(segment)
    joined = (min(n, len(segments)) for n in prefix[3:5])
    net = (min(n, sum(segment[1] for segment in segments)) for n in prefix[5:])
    return [prefix[0], segments, *prefix[2:3], *joined, *net] if segments else []


@st.composite
def prefixes(draw: DrawFn, world: World, blocks: int) -> list[Any]:
    """Of an admit."""
    if not world.start.caches or draw(st.sampled_from((False, False, True))):
        return []
    chain = draw(st.sampled_from(chains(world.limit)))
    return fitting([draw(st.sampled_from((16, 40))), chain], blocks)


@st.composite
def demands(draw: DrawFn, world: World, blocks: int) -> list[Any]:
    """The last arguments of A, Q and R, for a call of so many blocks: by its path, or in full.  What it shares is that
    of an A."""
    kinds = ("path",) * 6 + ("full", "promised", "both")
    kind = draw(st.sampled_from(kinds)) if world.start.elastic else "full"
    prefix = draw(prefixes(world, blocks))
    if kind in ("full", "promised"):
        return [*IN_FULL[:3], int(kind == "promised"), prefix]
    held = draw(st.sampled_from((-1, 1, 1, 1, 2, max(blocks // 2, 1), blocks)))
    return [held, draw(st.sampled_from(BASES)), draw(paths(world, blocks)), int(kind == "both"), prefix]


@st.composite
def admits(draw: DrawFn, world: World) -> Op:
    key = draw(st.sampled_from(sorted(world.policies)))
    class_ = draw(st.sampled_from(world.start.classes))
    lane = draw(st.sampled_from("ab"))
    blocks = draw(st.sampled_from(sizes(world, key)))
    sequences, prefill = draw(st.sampled_from(SHAPES))
    prefer, exclude = draw(st.sampled_from(PLACES))
    seconds, wait, depth = draw(st.sampled_from(PATIENCE))
    return ["A", world.new_id(), key, class_, lane, blocks, sequences, prefill, blocks * seconds, wait,
            *world.policies[key], *depth, prefer, exclude, draw(st.sampled_from(CHARGES)),
            *draw(st.sampled_from(LIKENESS)), draw(st.sampled_from(STANDINGS)),
            *draw(demands(world, blocks))]  # fmt: skip


# -- batches ---------------------------------------------------------------------------------------------------------


CONVERSATIONS = tuple(f"{at:016x}" for at in range(0xC0, 0xC6))
"""Names of conversations."""


def pasts(world: World) -> st.SearchStrategy[list[str]]:
    """The last argument of an A or Q: what it goes on with, mostly nothing, which may be left out."""
    held = sorted(world.books.holds.holds)
    named = st.sampled_from((*CONVERSATIONS, *held, *held))
    goes_on = st.booleans() if world.start.caches else st.just(False)
    return goes_on.flatmap(lambda on: st.tuples(named).map(list) if on else st.sampled_from(([], [""])))


def turns(world: World) -> st.SearchStrategy[Op]:
    """Calls that may go on with a conversation."""
    return st.tuples(admits(world), pasts(world)).map(lambda parts: [*parts[0], *parts[1]])


@st.composite
def arrivals(draw: DrawFn, world: World, owner: str) -> list[Op]:
    return [draw(turns(world))]


@st.composite
def rushes(draw: DrawFn, world: World, owner: str) -> list[Op]:
    return draw(st.lists(turns(world), min_size=2, max_size=6))


@st.composite
def conversations(draw: DrawFn, world: World, owner: str) -> list[list[Op]]:
    """Answers end whose conversations are likely to go on, others come for whom too little is left, and they go on."""
    key, class_, lane = draw(admits(world))[2:5]
    held = world.calls(owner, "reserved", "unclaimed")
    names, used = st.sampled_from(CONVERSATIONS), st.sampled_from((1, 1, world.limit // 4))
    replicas = world.books.replicas  # where what ended first was large nothing is held for long
    ends = [
        ["S", c.id, draw(used) if replicas[c.replica].history else 1, -1, [], "",
         *([draw(names)] if world.start.caches else [])]
        for c in held
    ]  # fmt: skip
    where = st.sampled_from(([], [], ["r0"]))

    def call(key: str, blocks: int, past: list[str]) -> Op:
        return ["A", world.new_id(), key, class_, lane, blocks, 1, 0, blocks, 10**6, *world.policies[key], 100, 100, [],
                draw(where), [], "", "", 0, *IN_FULL, *past]  # fmt: skip

    other = draw(st.sampled_from(sorted(world.policies)))
    sizes = st.sampled_from((1, world.limit // 4, world.limit // 2, world.limit - 1, world.limit))
    first = [call(other, 1, []) for _ in range(draw(st.integers(0, 2)))]
    cold = [call(other, draw(sizes), []) for _ in range(draw(st.integers(0, 3)))]
    warm = [call(key, draw(sizes), [draw(names)]) for _ in range(draw(st.integers(1, 3)))]
    parts = draw(st.sampled_from(([ends, cold, warm], [ends, warm, cold], [ends, [*cold, *warm]])))
    return [first, *parts] if world.start.caches else [first, ends, cold]


@st.composite
def throngs(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Calls that hold little now, and could not all run if each needed its whole demand."""
    _, _, key, class_, lane, *_ = draw(admits(world))
    blocks = draw(st.sampled_from((2, world.limit // 2, world.limit)))
    base, wait = draw(st.sampled_from(BASES)), draw(st.sampled_from((0, 100, 10**6)))
    return [
        ["A", world.new_id(), key, class_, lane, blocks, 1, 0, blocks, wait, *world.policies[key], 100, 100,
         [], draw(st.sampled_from(([], [], ["r0"]))), [], "", "", 0, draw(st.sampled_from((1, 1, 2))), base,
         draw(paths(world, blocks)), 0, []]
        for _ in range(draw(st.integers(2, 6)))
    ]  # fmt: skip


@st.composite
def herds(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Calls that begin alike, after some have been computed or given back."""
    key, class_, lane = draw(admits(world))[2:5]
    chain = draw(st.sampled_from(chains(world.limit)))
    least = sum(blocks for _, blocks in chain) + 1
    size = st.sampled_from((least, least, least + 1, max(least, world.limit // 2)))
    wait = draw(st.sampled_from((0, 100, 10**6)))
    asks = [
        ["A", world.new_id(), key, class_, lane, blocks := draw(size), 1, draw(st.sampled_from((0, 600))), blocks, wait,
         *world.policies[key], 100, 100, draw(st.sampled_from(([], ["r1"]))), [], [], "", "", 0, *IN_FULL[:4],
         fitting([16, chain], blocks) if world.start.caches else []]
        for _ in range(draw(st.integers(2, 5)))
    ]  # fmt: skip
    return [*draw(st.one_of(computations(world, owner), settles(world, owner), st.just([]))), *asks]


@st.composite
def successions(draw: DrawFn, world: World, owner: str) -> list[list[Op]]:
    """Calls that begin alike come one after the other, small ones in empty books at times, by their paths where that
    can be: the first is computed, then some are computed, leave, grow, or move, and more come."""
    key, class_, lane = draw(admits(world))[2:5]
    chain = draw(st.sampled_from(chains(world.limit)[:6]))
    blocks = sum(blocks for _, blocks in chain) + 1
    terms = [1, draw(st.sampled_from((0, 600))), blocks, 0, *world.policies[key], 0, 0]
    where = draw(st.sampled_from(([], ["r0"], ["r0", "r2"])))
    prefix = fitting([16, chain], blocks) if world.start.caches else []

    def weight() -> list[Any]:
        if not world.start.elastic or draw(st.sampled_from((False,) * 3 + (True,))):
            return [*IN_FULL[:3]]
        return [draw(st.sampled_from((1, blocks // 2 + 1, blocks))), BASES[0], draw(paths(world, blocks))]

    def call() -> Op:
        id_ = world.new_id()
        return ["A", id_, key, class_, lane, blocks, *terms, [], where, [], "", "", 0, *weight(), 0, prefix]

    first, second, third = call(), call(), call()
    ends = st.sampled_from(
        ([], [["S", first[1], -1, -1, [], ""]], [["M", first[1], ["r0", "r1", "r2", "r3"]]])
    )
    computes = st.sampled_from(
        ([], [["F", second[1]]], [["F", second[1]], ["F", third[1]]], [["F", third[1]]])
    )
    clearance = draw(st.sampled_from(([], draw(clearances(world, owner)))))
    return [
        [*clearance, first],
        [["F", first[1]]] if draw(st.sampled_from((True, True, False))) else [],
        [second],
        draw(ends),
        [third],
        draw(computes),
        [
            ["Z", id_, *weight(), draw(nets(prefix))]
            for id_ in draw(st.sampled_from(([], [first[1], third[1]])))
        ],
        [["S", second[1], -1, -1, [], ""]],
    ]


@st.composite
def computations(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """First tokens of calls that say how their prompts begin, of all of them or a few."""
    held = [c for c in world.calls(owner, "reserved", "unclaimed") if c.prefix.segments]
    return [["F", c.id] for c in (held if draw(st.booleans()) else _some(draw, held))]


@st.composite
def questions(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Calls whose sizes are not known, after some have given back."""
    _, _, *call, likely, sequences, _, cost, wait, weight, blocks, requests, share, depth, own = draw(
        admits(world)
    )[:16]
    least = draw(st.sampled_from((1, likely // 2 + 1, likely, likely + 1)))
    terms = [sequences, cost, wait, weight, blocks, requests, share, depth, own]
    ahead = draw(st.integers(0, 3))
    own_ahead = draw(st.integers(0, ahead))
    standing, demand = draw(st.sampled_from(STANDINGS)), draw(demands(world, least))
    demand[-1] = demand[-1][:1]
    asked = ["Q", least, likely, *call, *terms, standing, ahead, own_ahead, *demand, *draw(pasts(world))]
    return [*draw(st.one_of(settles(world, owner), st.just([]))), asked, asked]


@st.composite
def floods(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """More equal calls than one script grants, expires or reaps; nothing but room is in their way."""
    _, _, *rest = draw(admits(world))
    _, _, prefer, exclude, _, fingerprint, _, _, *demand = rest[12:]
    rest = _with_blocks(rest[:12], 1)
    terms = [100, 100, prefer, exclude, [], fingerprint, "", 0, *demand[:-1], []]
    return [["A", world.new_id(), *rest, *terms] for _ in range(WORK + 2)]


@st.composite
def sieges(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Every key asks in one lane and class: large calls, and small ones from about where a dispatch stops to look.

    Where there are many keys come more that ask at no other time, together more than a front holds, and then the many
    ask once more: who had its turn goes behind them."""
    _, _, _, *rest = draw(admits(world))
    first_small = LOOKAHEAD + draw(st.sampled_from((-1, 0, 1)))
    keys = sorted(world.policies)
    if len(keys) > LOOKAHEAD:
        keys += [f"siege{i}" for i in range(LOOKAHEAD)] + keys
    large, small = _with_blocks(["", *rest], world.limit), _with_blocks(["", *rest], 1)
    return [
        ["A", world.new_id(), key, *(large if i < first_small else small)[1:]] for i, key in enumerate(keys)
    ]


def _with_blocks(rest: list[Any], blocks: int) -> list[Any]:
    """The arguments of an admit from its key on, for another size."""
    whole = [*rest[:3], blocks, *rest[4:]]
    return [*whole[:-1], fitting(whole[-1], blocks)] if isinstance(whole[-1], list) else whole


@st.composite
def odd_admits(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """A call that lives is asked for again, by whoever sends it; or a lane or a class that the fleet does not have."""
    op = draw(admits(world))
    if world.calls() and draw(st.sampled_from((True, True, False))):
        op[1] = draw(st.sampled_from(world.calls())).id
    else:
        op[draw(st.sampled_from((3, 4)))] = "gone"
    return [op]


@st.composite
def settles(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Calls that run are given back; one perhaps twice."""
    held = world.calls(owner, "reserved", "unclaimed")
    return [draw(settle(c)) for c in _some(draw, held)]


def clearances(world: World, owner: str) -> st.SearchStrategy[list[Op]]:
    """Everything that runs is given back at once: much is granted in one dispatch.  So is what was displaced."""
    held = world.calls(owner, "reserved", "unclaimed", "displaced")
    return st.just([["S", c.id, -1, -1, [], ""] for c in held])


@st.composite
def withdrawals(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """With their places remembered, or not; those that another key displaced before others, as owners do."""
    left = st.sampled_from(("", "", "", *FINGERPRINTS))
    waiting = world.calls(owner, "displaced") or world.calls(owner, "queued")
    return [["S", c.id, -1, -1, [], draw(left)] for c in _some(draw, waiting)]


@st.composite
def departures(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Everybody leaves the queue, and every place is remembered under one fingerprint: more than one script forgets."""
    fingerprint = draw(st.sampled_from(FINGERPRINTS))
    return [["S", c.id, -1, -1, [], fingerprint] for c in world.calls(owner, "queued", "displaced")]


@st.composite
def returns(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Calls that would take a place that was left, with room in the queue; a newcomer may be among them."""
    found = []
    for place in _some(draw, [place for place in world.books.places if place.key in world.policies]):
        op = draw(admits(world))
        blocks = draw(st.sampled_from(sizes(world, place.key)))
        op[2:6] = place.key, place.class_, place.lane, blocks
        op[-1] = fitting(op[-1], blocks)
        fingerprint = draw(st.sampled_from((place.fingerprint, place.fingerprint, "")))
        found.append(_in_place(op, draw(st.sampled_from((1, 100, 10**6, 10**6))), fingerprint))
    return found


def _in_place(op: Op, wait_ms: int, fingerprint: str) -> Op:
    """An admit that nothing but its wait keeps from a place in the queue."""
    return [*op[:9], wait_ms, *op[10:14], 100, 100, *op[16:18], [], fingerprint, "", *op[21:]]


@st.composite
def absences(draw: DrawFn, world: World, owner: str) -> list[list[Op]]:
    """Some leave the queue, others go on or stand in their flows meanwhile, and who left is there again, perhaps to
    leave those alone that came behind."""
    fingerprint, wait_ms = draw(st.sampled_from(FINGERPRINTS)), draw(st.sampled_from((1, 10**6, 10**6)))
    left = {c.id: c for c in _some(draw, world.calls(owner, "queued")) if c.key in world.policies}.values()
    whole = [_like(world, call, max(world.policies[call.key][1], 1), 10**6, OTHERS) for call in left]
    meanwhile = st.one_of(clearances(world, owner), st.just([]), st.just(whole))
    back = [_like(world, call, call.blocks, wait_ms, fingerprint) for call in left]
    behind = [_like(world, call, call.blocks, 10**6, OTHERS) for call in left]
    once_more = [["S", op[1], -1, -1, [], ""] for op in back[: draw(st.sampled_from((1, len(back))))]]
    return [
        [["S", call.id, -1, -1, [], fingerprint] for call in left],
        draw(meanwhile),
        *draw(st.sampled_from(([back], [[*back, *behind], once_more]))),
    ]


def _like(world: World, c: Call, blocks: int, wait_ms: int, fingerprint: str) -> Op:
    """A call of the same flow."""
    return ["A", world.new_id(), c.key, c.class_, c.lane, blocks, c.sequences, c.prefill, blocks, wait_ms,
            *world.policies[c.key], 100, 100, [], [], [], fingerprint, "", 0,
            c.asked, c.base, c.path, c.promised, fitting(_beginning_of(c), blocks)]  # fmt: skip


def _beginning_of(call: Call) -> list[Any]:
    """As an admit says it that comes again, of a call that has grown."""
    return [*_segments_of(call), 0, 0, 0, call.prefix.net] if call.prefix.net else _segments_of(call)


def _segments_of(call: Call) -> list[Any]:
    """As an admit says them."""
    prefix = call.prefix
    return [prefix.block_size, [[s.id, s.blocks] for s in prefix.segments]] if prefix.segments else []


@st.composite
def touches(draw: DrawFn, world: World, owner: str) -> list[Op]:
    return [draw(touch(world, c)) for c in _some(draw, world.calls(owner))]


@st.composite
def growths(draw: DrawFn, world: World, owner: str) -> list[Op]:
    return [draw(growth(world, c)) for c in _some(draw, world.calls(owner, "reserved", "unclaimed"))]


@st.composite
def relocations(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """The replica of running calls fails."""
    held = world.calls(owner, "reserved", "unclaimed")
    return [["M", c.id, [c.replica]] for c in _some(draw, held)]


@st.composite
def thefts(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Ops on calls of other owners."""
    others = [c for c in world.calls() if c.owner != owner]
    return [draw(st.one_of(settle(c), touch(world, c))) for c in _some(draw, others)]


@st.composite
def mixtures(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """What frees before what asks, as a gateway sends it, or in turns: what one op learnt of the room is old for the
    next."""
    grown = set[str]()
    touched = draw(touches(world, owner))
    once = [op for op in touched if op[0] != "Z" or not (op[1] in grown or grown.add(op[1]))]
    frees = [*draw(settles(world, owner)), *once]
    asks = draw(st.lists(turns(world), max_size=3))
    if draw(st.booleans()):
        return [*frees, *asks]
    return [op for pair in zip_longest(frees, asks) for op in pair if op]


@st.composite
def declarations(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """A call is declared that the books know, or do not; on a replica that exists, or does not."""
    known = [c.id for c in world.calls()]
    id_ = draw(st.sampled_from(known)) if known and draw(st.booleans()) else world.new_id()
    key = draw(st.sampled_from(sorted(world.policies)))
    lane, blocks = draw(st.sampled_from("abbac")), draw(st.sampled_from(sizes(world, key)))
    demand, prefill = draw(demands(world, blocks)), draw(st.sampled_from((0, 5)))
    if demand[-1]:
        parts = draw(st.sampled_from(((1, 1, 0), (1, 9, 1), (1, 9, 0), (2, 1, 1), (0, 0, 0), (0, 0, 1))))
        demand[-1] = fitting([*demand[-1], *parts, draw(nets(demand[-1]))], blocks)
        demand[-1][4] = parts[2]
        prefill = 0 if parts[2] else prefill  # who is past its first token holds nothing of that budget
    return [["R", id_, f"r{draw(st.integers(0, 4))}", key, "normal", lane, blocks, 1, prefill, 7,
             *world.policies[key], draw(st.sampled_from((0, 1))), *draw(st.sampled_from(LIKENESS)),
             *demand]]  # fmt: skip


@st.composite
def confirmations(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """Running calls are declared as they are, or as past their first tokens; another one's as after a lost store."""
    calls = _some(draw, world.calls(None, "reserved"))
    return [
        _declaration(world, c, draw(st.sampled_from((c.id, world.new_id()))), draw(st.booleans()))
        for c in calls
    ]


def _declaration(world: World, c: Call, id_: str, computed: bool) -> Op:
    prefix = c.prefix
    whole = [*_segments_of(c), prefix.cache, prefix.joined, max(prefix.computed, int(computed)), prefix.net]
    policy = world.policies.get(c.key, (1, -1, -1, -1))
    return ["R", id_, c.replica, c.key, c.class_, c.lane, c.blocks, c.sequences, c.prefilling, c.cost, *policy, 1,
            "", "", c.asked, c.base, c.path, c.promised, whole if prefix.segments else []]  # fmt: skip


@st.composite
def heartbeats(draw: DrawFn, world: World, owner: str) -> list[Op]:
    """With the right digest, or with one call too many; perhaps "all is declared"; and the ends that it foresees."""
    mine = [int(c.id, 16) for c in world.calls(owner, "reserved")]
    off, declared = draw(st.sampled_from(((0, False), (0, True), (1, False))))
    ends = draw(forecasts(world, owner))
    return [["H", len(mine) + off, sum(mine) % DIGEST_MODULUS, ends], *([["Y"]] if declared else [])]


@st.composite
def forecasts(draw: DrawFn, world: World, owner: str) -> list[Any]:
    """Of running calls when they end; of a long list only the next ends, and at times what nobody runs."""
    held = world.calls(owner, "reserved", "unclaimed")
    each = draw(st.sampled_from(((1, 100, 1500), (100, 7000), (0, 1))))
    runs = [(draw(st.sampled_from(each)) * i, c.replica, c.blocks) for i, c in enumerate(held[:6], 1)]
    more = st.sampled_from(
        ((), ((900, "r0", world.limit // 2),), ((900, "r9", 1),), ((50, "r1", 1),) * FORECAST_ENDS)
    )
    ends = sorted([*runs, *draw(more)])[:FORECAST_ENDS]
    return [item for end in ends for item in end]


_ID = "a" * 32


def _admit(blocks: int, charge: Sequence[int] = (), promised: int = 0, prefix: Any = ()) -> Op:
    demand = [blocks, 1, 0, 1, 9]
    policy = [1, -1, -1, -1, 9, 9, [], [], list(charge), "", "", 0]
    return ["A", "00000000ba", "k0", "normal", "a", *demand, *policy, *IN_FULL[:3], promised, prefix]


def _declared(prefix: Any) -> Op:
    demand, policy = [9, 1, 0, 1], [1, -1, -1, -1, 1, "", ""]
    return ["R", "00000000ba", "r0", "k0", "normal", "a", *demand, *policy, *IN_FULL[:4], prefix]


MALFORMED: tuple[Op, ...] = (
    ["X"],
    ["S", "00000000aa"],
    ["S", "short", 1, 1, [], ""],
    ["S", "00000000aa", 1, 1, [6, 1], ""],
    ["S", "00000000aa", 1, 1, [0], ""],
    ["S", "00000000aa", 1, 1, [], "0123"],
    ["S", "00000000aa", 1, 1, [], "0123456789abcde:"],
    ["S", "00000000aa", 1, 1, [], "", "0123"],
    ["S", "00000000aa", 1, 1, [], "", "", ""],
    [*_admit(1), "0123"],
    [*_admit(1), 7],
    [*_admit(1), "", ""],
    _admit(1, charge=[0, 1]),
    _admit(1, charge=[0, -1, 5]),
    ["Z", "00000000aa", 0, 0, b"", 0],
    ["Z", "00000000aa", 1.5, 32, bytes(132), 0],
    ["Z", "00000000aa", 1, 0, bytes(132), 0],
    ["Z", "00000000aa", 1, 32, bytes(131), 0],
    ["Z", "00000000aa", 1, 32, 7, 0],
    _admit(1, promised=2),
    *(
        _admit(9, prefix=prefix)
        for prefix in (
            7,
            [0, [[_ID, 1]]],
            [16],
            [16, []],
            [16, [[_ID, 1]] * 2],
            [16, [[f"{at:032x}", 1] for at in range(5)]],
            [16, [[_ID, 9]]],
            [16, [["short", 1]]],
            [16, [[_ID, 0]]],
            [16, [[_ID.upper(), 1]]],
            [16, 7],
        )
    ),
    ["Z", "00000000aa", 1, 32, bytes(132), -1],
    ["Z", "00000000aa", 1, 32, bytes(132)],
    *(
        _declared([16, [[_ID, 1]], *parts])
        for parts in ((-1, 0, 0), (1, 2, 0), (1, 1, 2), (0, 1, 0), (1,), (1, 1, 1, 2), (1, 1, 1, -1))
    ),
    ["H", 2**53, 0, []],
    ["H", 0, 0, [1, "r0"]],
    ["H", 0, 0, [-1, "r0", 1]],
    ["H", 0, 0, [FORECAST_REACH_MS + 1, "r0", 1]],
    ["H", 0, 0, [1, "r0", 1] * (FORECAST_ENDS + 1)],
    ["K", "00000000aa", "more"],
    ["M", "00000000aa", ["r:0"]],
)
"""An error each, which neither its batch nor the books notice."""


@st.composite
def settle(draw: DrawFn, call: Call) -> Op:
    used, cost = draw(
        st.sampled_from(((-1, -1), (1, 0), (1, 0), (1, 1), (1, 1), (call.blocks, call.cost * 2)))
    )

    corrections = draw(
        st.sampled_from(([], [], [0, -1_000_000], [0, 2_500_000, 5, -1], [call_bucket(call), 7]))
    )
    name = draw(st.sampled_from(([], [""], *([name] for name in CONVERSATIONS))))
    return ["S", call.id, used, cost, corrections, draw(st.sampled_from(("", FINGERPRINTS[0]))), *name]


def call_bucket(call: Call) -> int:
    return call.charge[0] if call.charge else 1


@st.composite
def touch(draw: DrawFn, world: World, call: Call) -> Op:
    """Claim, first token, resize or move."""
    kind = draw(st.sampled_from("KKFFZM"))
    if kind == "Z":
        return draw(growth(world, call))
    if kind == "M":
        return ["M", call.id, draw(st.sampled_from(([], [call.replica or "r0"])))]
    return [kind, call.id]


@st.composite
def growth(draw: DrawFn, world: World, call: Call) -> Op:
    """To what its replica has left, or beyond; it shrinks; or its path alone is another."""
    replica = world.books.replicas.get(call.replica)
    most = max(call.held + replica.limit - replica.used, 1) if replica else 1
    held = draw(st.sampled_from((-1, 1, max(call.held, 1), call.held + 1, most, most + 1, world.limit)))
    base = draw(st.sampled_from((call.base or 32, *BASES)))
    path = draw(paths(world, call.blocks)) if draw(st.sampled_from((True,) * 7 + (False,))) else b""
    return ["Z", call.id, held, base, path, draw(nets(_segments_of(call)))]


@st.composite
def nets(draw: DrawFn, prefix: list[Any]) -> int:
    """Of how many blocks a path is said to be net: of some of the first segments, or one more, or all there are."""
    blocks = [segment[1] for segment in prefix[1]] if prefix else []
    count = draw(st.integers(0, len(blocks)))
    return sum(blocks[:count]) + draw(st.sampled_from((0, 0, 0, 1)))


def _some(draw: DrawFn, calls: list[Call]) -> list[Call]:
    """One to three of these, where there are any; one call may be among them twice."""
    return draw(st.lists(st.sampled_from(calls), min_size=1, max_size=3)) if calls else []


# -- upsets ----------------------------------------------------------------------------------------------------------


UPSETS = (
    ("observe",) * 4
    + ("rest",) * 4
    + ("shut",)
    + ("configure",) * 4
    + ("seat",) * 2
    + ("learn",) * 3
    + ("distrust",)
    + ("policy",) * 2
    + ("hello", "restart")
)
SCRAPERS = ("g0", "g0", "g1")


def observations(world: World) -> list[tuple[str, bool]]:
    """A replica that is up is down, one that is down is up again; rarely one that nobody knows, or no news."""
    replicas = sorted(world.books.replicas.values(), key=lambda r: r.name)
    return [*((r.name, r.state not in ("up", "draining")) for r in replicas), ("r0", True), ("r9", True)]


@st.composite
def rests(draw: DrawFn, world: World) -> tuple[str, str, str]:
    """Somebody lets a replica rest, or not any more; rarely nobody knows him, or the replica."""
    if world.books.rests and draw(st.booleans()):
        replica, teller = draw(st.sampled_from(sorted(world.books.rests)))
        return teller, replica, draw(st.sampled_from(("", "", "asleep")))
    tellers = (OPERATOR, OPERATOR, *sorted(world.books.sessions), "nobody")
    replicas = (*sorted(world.books.replicas), "r9")
    return (
        draw(st.sampled_from(tellers)),
        draw(st.sampled_from(replicas)),
        draw(st.sampled_from(("drained", ""))),
    )


@st.composite
def upsets(draw: DrawFn, world: World) -> tuple[str, Any]:
    """The kind, and what it needs."""
    kind = draw(st.sampled_from(UPSETS))
    if kind == "observe":
        return kind, draw(st.sampled_from(observations(world)))
    if kind == "shut":
        return kind, not world.books.shut
    if kind == "rest":
        return kind, draw(rests(world))
    if kind == "configure":
        return kind, draw(changed_fleets(world))
    if kind == "seat":
        return kind, (draw(st.sampled_from(SCRAPERS)), draw(st.sampled_from(replica_names(world))))
    if kind == "learn":
        return kind, draw(lessons(world))
    if kind == "distrust":
        name = draw(st.sampled_from(replica_names(world)))
        return kind, (name, draw(caches(world, name)))
    if kind == "policy":
        key = draw(st.sampled_from(sorted(world.policies)))
        return kind, {key: draw(policies(world.limit, world.start.shares))}
    return kind, None


def replica_names(world: World) -> list[str]:
    """Rarely one that nobody knows."""
    return [*sorted(world.books.replicas), *sorted(world.books.capacities), "r9"]


@st.composite
def lessons(draw: DrawFn, world: World) -> tuple[str, str, int, list[int], str, int]:
    """Mostly the reader's next reading of a replica: budgets are lowered, raised, or as configured again."""
    name = draw(st.sampled_from(replica_names(world)))
    capacity = world.books.capacities.get(name)
    scraper = capacity.scraper if capacity and draw(st.sampled_from((True,) * 5 + (False,))) else "g1"
    number = (capacity.number if capacity else 0) + draw(st.sampled_from((1, 1, 1, 2, 0)))
    limits = (-1, 0, world.limit // 2, world.limit, world.limit + 1)
    learned = draw(
        st.tuples(st.sampled_from(limits), st.sampled_from((-1, 2, 40)), st.sampled_from((-1, 5, 900)))
    )
    return (
        scraper,
        name,
        number,
        list(learned),
        draw(st.sampled_from(("", "{}", "é"))),
        draw(caches(world, name)),
    )


CACHES = (0, 1, 2, 1, 2**53 - 1)


@st.composite
def caches(draw: DrawFn, world: World, name: str) -> int:
    """Mostly the one that the replica has."""
    replica = world.books.replicas.get(name)
    if not world.start.caches or replica is None:
        return 0
    return draw(st.sampled_from((replica.cache, replica.cache, replica.cache, 1, *CACHES)))


@st.composite
def changed_fleets(draw: DrawFn, world: World) -> FleetConfig:
    """Limits and the bound of overtaking change, engines are unknown again or in another pool, one replica goes for
    good."""
    fleet = world.start.fleet
    limits = st.sampled_from((world.limit, world.limit, world.limit // 2, -1))
    moved = st.sampled_from((False,) * 7 + (True,))
    replicas = [
        replace(
            r,
            limit=draw(limits),
            pool="pq"[r.pool == "p"] if draw(moved) else r.pool,
            mode=draw(st.sampled_from(sum(MODES, ()))) if world.start.elastic and draw(moved) else r.mode,
        )
        for r in fleet.replicas
    ]
    if len(replicas) > 1 and draw(st.sampled_from((False, False, True))):
        replicas.pop()
    overtake_blocks = draw(st.sampled_from((fleet.overtake_blocks, fleet.overtake_blocks, world.limit)))
    return replace(fleet, overtake_blocks=overtake_blocks, replicas=tuple(replicas))
