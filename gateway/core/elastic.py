"""How many blocks the calls on a replica will hold in some steps' time, so that more may run than fit at their limits.

A call whose output limit is far above what such calls write would hold blocks for nothing if its whole demand were
reserved.  It holds what it may need until its next growth instead, and adds its path to its replica's: for each of
some horizons, counted in tokens because all sequences of a replica advance one token a step, the effective bandwidth
of what it may hold then.  By Chernoff's bound

    P[ sum of X_i > N ] <= min over theta of exp(theta x (sum of e_i(theta) - N)),   e_i = ln E[exp(theta X_i)] / theta

so a replica of N blocks takes a call if for every horizon and one theta at least

    sum of e_i + e + ln(1 / EPS) / theta <= N

which holds the chance that its blocks run out then below EPS, or FAR_EPS where the horizon is far: until it comes fewer
calls can still be taken.  The sums are integers, in SCALE-ths of a block, and additive: who adds a path can take the
same one away.
"""

import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence

GUARANTEED, ELASTIC, SHARED = "guaranteed", "elastic", "shared"
"""Modes of a replica: every call there is charged in full; none there was promised that; or both, side by side."""
HORIZONS = (32, 128, 256, 512, 768, 1024, 2048, 3072, 4096, 8192, 12288)
"""Tokens from now.  At 0 stands the sum of the blocks held, which is exact and needs no theta."""
ALONE = 3
"""So many of them, the first, stand for themselves.  Each of the others, which few calls reach and which lie far apart,
stands for all the time until the next one, with the larger figure of both its ends: a call that comes to hold much
between two of them would be at neither."""
NEAR = 5
"""So many of them, the first, are near."""
TILTS = (12, 50, 240)
"""The thetas, times the blocks of a replica: one alone costs a tenth to a third of the throughput, two up to 7 %.  A
small one is for few calls that may hold much, far from now, a large one for many that hold little more soon."""
EPS = 1e-3
FAR_EPS = 0.012
"""At horizons that are not near.  With EPS there, small replicas under heavy tails lose a fifth of their throughput and
are preempted hardly more rarely."""
SCALE = 64
"""Of what a path counts in, for one block."""
POINTS = len(HORIZONS) * len(TILTS)
GROWTH_TOKENS_MIN = 64
GROWTH_PART = 8
"""A call grows by this part of what it has written, at least by GROWTH_TOKENS_MIN: few messages, little held early."""
CERTAIN = 0.9
"""The part of calls that go to their limit from which on each is charged as if it did."""
EXPONENT_MAX = 30
"""From there on `1 - share` is nothing beside `share x e^exponent`, and leaving it out errs on the safe side."""
NARROWED_MAX = 2**20
"""Blocks of the largest call whose path is narrowed: the store computes in doubles, and exactly so far."""
SUM_MAX = 2**32 - 1
"""Of a point, as it is packed."""
_PACKED = struct.Struct(f">{POINTS}I")
_NOTHING = (0,) * POINTS

Path = tuple[int, ...]
"""Of each horizon the figures of all tilts: POINTS integers, in SCALE-ths of a block."""
Survival = Callable[[int], float]
"""The part of such calls that write more than so many tokens: 1 at 0, never rising."""


def base_of(blocks: int) -> int:
    """The size of replica that thetas are made for: a power of two, so that replicas of about one size agree on it.

    Any theta gives a bound that holds; one that is off by half a power of two gives nearly the best.
    """
    return 1 << max(round(math.log2(max(blocks, 1))), 0)


def next_growth(written: int, output_tokens: int) -> int:
    """Up to which output token a call that has written so many holds blocks."""
    return min(output_tokens, written + max(GROWTH_TOKENS_MIN, written // GROWTH_PART))


def blocks_at(prompt_tokens: int, written: int, block_size: int, ahead: int) -> int:
    """Blocks of a sequence that has so many tokens; the last one's KV is not stored.  `ahead`: speculative tokens."""
    return max(1, -(-(prompt_tokens + written - 1 + ahead) // block_size))


def path_of(
    prompt_tokens: int,
    output_tokens: int,
    written: int,
    survival: Survival,
    block_size: int,
    base: int,
    ahead: int = 0,
) -> Path:
    """Of a call that has written so many of at most `output_tokens`.  At most what its whole demand adds.

    Where calls of such a limit nearly all go there, as they are taken to while nothing is learned, it is flat, as if it
    were guaranteed: horizons are too far apart to tell when each of them will be over.  Else nothing stands at horizons
    beyond its limit, and the last one before it has the token before the limit, too.

    A path stands until the call grows, so its blocks are those that it holds by then, and its age is the one that it
    has half-way.
    """
    last = output_tokens - 1
    if survival(last) >= CERTAIN:
        return flat(blocks_at(prompt_tokens, output_tokens, block_size, ahead))
    grown, reached = next_growth(written, output_tokens), bisect_right(HORIZONS, last - written)
    if not reached:
        return _NOTHING
    age = (written + grown) // 2
    alive, thetas = max(survival(age), 1e-300), [tilt / base for tilt in TILTS]
    rows: list[list[int]] = []
    for horizon in (*HORIZONS[:reached], last - written):
        blocks = blocks_at(prompt_tokens, min(grown + horizon, output_tokens), block_size, ahead)
        share = min(survival(min(age + horizon, last)) / alive, 1.0)
        rows.append([_point(blocks, share, theta) for theta in thetas])
    points: list[int] = []
    for number in range(reached):
        alone = number < ALONE and number < reached - 1
        points += rows[number] if alone else map(max, rows[number], rows[number + 1])
    return (*points, *_NOTHING[len(points) :])


def _point(blocks: int, share: float, theta: float) -> int:
    """The effective bandwidth of a call that holds `blocks` with the chance `share`, else none; rounded up."""
    if share <= 0:
        return 0
    if share >= 1:
        return blocks * SCALE
    exponent = theta * blocks
    if exponent > EXPONENT_MAX:
        beyond = exponent + math.log(share)
        bandwidth = (max(beyond, 0.0) + math.log1p(math.exp(-abs(beyond)))) / theta
    else:
        bandwidth = math.log1p(share * math.expm1(exponent)) / theta
    return min(math.ceil(bandwidth * SCALE), blocks * SCALE)


def narrowed(path: Path, net: int, shared: int, held: int, blocks: int, block_size: int) -> Path:
    """The path of a call of which `shared` blocks are counted elsewhere, once for all who share them.

    `net`: so many of its blocks are not in `path`.  `held`: what it holds until it grows next; `blocks`: its whole
    demand; both with what it shares.

    What is left of X, all blocks or none, is at most X (1 - more / most), where `more` of it is shared, and X never
    above `most`.  By Lyapunov's inequality ln E[exp(theta c X)] <= c ln E[exp(theta X)] for c <= 1, so as much is left
    of each point at most; exactly that where the call certainly runs on, and of bandwidths far below 1 / theta.
    To take the shared blocks off a point would be wrong: who has left would count as less than nothing.  Where less is
    shared than the path is without, the rest counts as though the call certainly ran on.
    """
    more = shared - net
    if not more:
        return path
    points: list[int] = []
    for number in range(len(HORIZONS)):
        row = path[number * len(TILTS) : (number + 1) * len(TILTS)]
        if more < 0:
            points += (point - more * SCALE if point else 0 for point in row)
            continue
        reach = min(blocks, _reach(path, number, held, block_size) or blocks) - net
        most = max(reach, -(-max(row) // SCALE), 1)
        left = max(most - more, 0)
        points += row if most > NARROWED_MAX else (-(-point * left // most) for point in row)
    return tuple(points)


def _reach(path: Path, number: int, held: int, block_size: int) -> int | None:
    """Most blocks that the call has at that horizon, or at the next one where it stands for that too; None = all."""
    following = number + 1
    if following == len(HORIZONS):
        return None
    alone = number < ALONE and path[following * len(TILTS)] > 0
    return held - (-HORIZONS[number if alone else following] // block_size)


def flat(blocks: int) -> Path:
    """Of a call that holds so many until it ends, whenever that is."""
    return (blocks * SCALE,) * POINTS


def margins(base: int, eps: float = EPS) -> tuple[int, ...]:
    """`ln(1 / eps) / theta` of each tilt, in SCALE-ths of a block, rounded up."""
    return tuple(math.ceil(SCALE * -math.log(eps) * base / tilt) for tilt in TILTS)


def bound_holds(sums: Sequence[int], path: Sequence[int], assured: int, limit: int, base: int) -> bool:
    """Whether a replica takes a call of that path.  `sums`: the paths that are there; `assured`: blocks of the calls
    there that hold all of their demand from the beginning."""
    room, near, far = (limit - assured) * SCALE, margins(base), margins(base, FAR_EPS)
    tilts = len(TILTS)
    return all(
        any(
            sums[at + k] + path[at + k] + (near if at < NEAR * tilts else far)[k] <= room
            for k in range(tilts)
        )
        for at in range(0, POINTS, tilts)
    )


def pack(path: Path) -> bytes:
    """As the store has it: 4 bytes each, the highest first."""
    return _PACKED.pack(*path)


def unpack(packed: bytes) -> Path:
    """Raises struct.error for another length."""
    return _PACKED.unpack(packed)
