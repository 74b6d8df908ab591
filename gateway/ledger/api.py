"""The shared books of one fleet as the request path sees them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.core.forecast import Course, unseen
from gateway.core.identity import Identity
from gateway.core.outcomes import Refusal
from gateway.core.quota import LIMITS, Charge, Left, Units
from gateway.core.segments import Segment


class Admission(msgspec.Struct, frozen=True):
    """One call's demand and policy, in the units of the ledger (blocks, tokens, milliseconds)."""

    key: str
    class_: str
    lane: str
    blocks: int
    sequences: int
    prefill: int
    """Prompt tokens charged against a replica's prefill budget until the first token; 0 for short prompts."""
    cost: int
    """Expected block-seconds, the currency of fairness."""
    wait_ms: int
    """How long the caller is willing to queue."""
    weight: int
    blocks_max: int
    """The key's cap on blocks held at once; -1 for none."""
    requests_max: int
    """The key's cap on calls running at once; -1 for none."""
    queue_max: int
    """Tickets that its lane and class may hold; 0 switches the queue off."""
    queue_key_max: int
    """Tickets of these that may be its key's."""
    identity: Identity
    """Of the request.  The ledger takes its fingerprint when the call leaves the queue, or may have left it before."""
    once: str = ""
    """Hash of its key and `Idempotency-Key`, whose fingerprint is known then; '' = none."""
    standing: int = 0
    """PLACE_ONLY, ASKED_BACK, or 0 (`core/order.py`)."""
    pool_share: int = -1
    """The part of each pool's limit that the key may hold at once, in millionths; -1 for none."""
    exclude: tuple[str, ...] = ()
    """Replicas of its lane that cannot take it."""
    charges: tuple[Charge, ...] = ()
    """What it takes of its key's rate quotas."""
    body_bytes: int = 0
    """Memory that the call keeps while the store is away."""
    waited_ms: int = 0
    """What it has waited already of `wait_ms`, in other books."""
    section: str = LIMITS
    """Where the key's settings have its caps, for those who are told of one."""
    tokens_max: int = 0
    """That it may generate; 0 where its end cannot be foreseen."""
    course: Callable[[], Course | None] = unseen
    """How far its answer is; None while that cannot be seen."""
    held: int = -1
    """Blocks that it holds at first where it is charged by its path; -1 for all of them."""
    base: int = 0
    """The size of replica that its path is made for (`core/elastic.py`)."""
    path: bytes = b""
    """What it may hold later, as `elastic.pack` has it; empty: it is charged in full everywhere."""
    promised: bool = False
    """The guarantee was promised: it is charged in full, and runs on no replica whose mode is `elastic`."""
    segments: tuple[Segment, ...] = ()
    """How its prompt begins, from its start on: what of it a replica holds for others already is not charged again.
    Together fewer blocks than `blocks`."""
    block_size: int = 0
    """Tokens of a block: with segments, and where a call whose prompt is not known yet may come to have some."""
    prefer: tuple[str, ...] = ()
    """Replicas that are likely to have its prompt's beginning in their cache."""
    past: str = ""
    """Name of the conversation with which it goes on (`core/talk.py`); '' = none."""


class Grant(msgspec.Struct, frozen=True):
    replica: str
    queue_ms: int
    """Milliseconds between asking and being granted."""
    queued: bool
    """True when the call held a ticket."""
    position: int = 0
    """Tickets of its lane and class when it got its own, that one included; 0 where it needed none."""
    predicted_ms: int | None = None
    """The wait that was expected then; None where nothing was known of how fast blocks come back."""
    left: tuple[Left, ...] = ()
    """Of its key's rate quotas, when it was admitted or got its ticket."""
    limited_ms: int = 0
    """Milliseconds before that, for its key's limits over all fleets."""
    shared: int = 0
    """Blocks of its prompt that others hold there, so that it was charged only for the rest."""
    cache: int = 0
    """Number of the engine's cache that has them, for `distrust`; 0 where it asked for no sharing, or there is none."""
    warm: bool = False
    """What its conversation holds was kept for it: others had to wait for that."""


class Reservation(Protocol):
    """The guard of one call.  Its id exists before the first store call.

    Whoever called `open` owns it and calls `settle` exactly in one `finally`.  `settle` is synchronous: it hands the
    id to the channel, which delivers it however often the connection breaks, so a cancelled task cannot lose it.
    """

    id: str

    async def granted(self) -> Grant | Refusal:
        """Ask, and wait in the queue if need be.  Cancelling it is safe at any point."""
        ...

    async def moved(self, exclude: str) -> Grant | Refusal:
        """Give the place on a replica up for one elsewhere, in the old place of the queue, without paying again."""
        ...

    def first_token(self) -> None:
        """The prompt has been computed: its share of the prefill budget is given back, and its segments may be shared.

        Also of calls whose `prefill` is 0.  A second call does nothing.
        """
        ...

    def grow(self, held: int, base: int, path: bytes, net: int = 0) -> None:
        """It holds so many blocks from now on, or fewer, and may hold what its path says later; empty: it is charged in
        full.  `held` is with what it shares, the path without `net` blocks of that.

        Never refused: where the replica has less than that left, the store writes it down all the same, admits nothing
        there until enough is given back, and an `Overdraft` is observed.  One that was not sent yet is replaced.
        """
        ...

    def settle(
        self, used_blocks: int | None, cost: int | None, used: Units | None = None, name: str = ""
    ) -> None:
        """Give everything back.  A second call does nothing.

        `cost`: block-seconds really held, None = unknown; `used`: what quotas count of it, None = as it was charged.
        `name`: of its conversation, where that is likely to go on soon: `used_blocks` are held softly for it.
        """
        ...


class Lost(Protocol):
    def __call__(self) -> None:
        """The reservation's place was given to somebody else: its stream has to end."""
        ...


class Ahead(NamedTuple):
    """Calls of this process that are being counted and will wait before another one in its line."""

    in_line: int
    of_key: int
    """Those of them that are its key's."""


class Ledger(Protocol):
    @property
    def ready(self) -> bool:
        """The store answers and its gate is open, or this process admits within a share of its own."""
        ...

    @property
    def fill(self) -> float | None:
        """How much of the fleet is reserved (`core/fill.py`), as the store said a heartbeat ago; None = not known."""
        ...

    @property
    def refused_lately(self) -> bool:
        """Whether `known_refusal` may know any."""
        ...

    def known_refusal(self, lanes: Sequence[str], class_: str, key: str) -> Refusal | None:
        """A refusal that the store gave the key a moment ago, for every one of these lanes or by a rate quota."""
        ...

    async def would_refuse(self, admission: Admission, blocks_min: int, ahead: Ahead) -> Refusal | None:
        """The refusal that the store has for a call of `blocks_min` or more, how many is not known yet.

        The admission says how many are likely, and what a call of `blocks_min` would hold (`held`, `base`, `path`);
        `ahead` comes from `counted`.  Nothing is taken but an appointment.
        None also where the store has no answer soon.
        """
        ...

    async def closed(self) -> Refusal | None:
        """What a call hears that needs no reservation, where an operator has closed the fleet, up to a second ago.

        None also where the store has no answer soon and had none before.
        """
        ...

    def counted(self, admission: Admission) -> AbstractContextManager[Ahead]:
        """While a call is asked about and counted: it will wait before those that come to be counted meanwhile."""
        ...

    def open(self, admission: Admission, lost: Lost) -> Reservation: ...

    async def state(self) -> dict[str, Any]:
        """What the store holds, for operators: replicas, calls, queue and the holdings of each key."""
        ...

    async def observe(self, replica: str, up: bool) -> None:
        """Tell the fleet that a replica stopped or resumed answering."""
        ...

    async def distrust(self, replica: str, cache: int) -> None:
        """Nothing more is shared there as long as the engine has that cache (`Grant.cache`): it holds less than it
        should.  Who shares goes on as charged.  Without effect while the store is away."""
        ...

    async def shut(self, on: bool) -> Refusal | None:
        """The operator's word, as with `drain`: the fleet takes no new calls; who waits or runs goes on."""
        ...

    async def drain(self, replica: str, on: bool) -> Refusal | None:
        """The operator's word, which holds for all gateways at once and until the opposite one: the replica gets no
        new calls, what runs there finishes.  Returns why that cannot be done."""
        ...


class Edit(msgspec.Struct, frozen=True):
    """A change of one of the keys that all gateways share."""

    name: str
    entry: bytes | None
    """JSON; None takes it out."""
    cut: bool = False
    """The calls of that name end."""


class Cut(msgspec.Struct, frozen=True):
    """Whose calls are to end."""

    name: str
    """Of a key."""
    before: float
    """Seconds of the monotonic clock: calls that arrived later go on."""


class SharedKeys(Protocol):
    """The keys in the store, and the word to all gateways to end a key's calls."""

    async def change(self, decide: Callable[[Mapping[str, bytes]], Edit | Refusal]) -> int | Refusal:
        """Make the edit that `decide` finds for the entries as they are now, with nobody else's edit in between.

        `decide` may be asked several times; what it raises is passed on, and nothing was done.
        Returns how many calls of this process were ended.
        """
        ...

    async def cut(self, name: str) -> int | Refusal:
        """End the calls of a key, in every process; returns how many of this one were ended."""
        ...


def printable(name: str) -> str:
    """A name out of the store, for logs: what is no text in it is escaped."""
    return name.encode(errors="backslashreplace").decode()
