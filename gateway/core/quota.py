"""Rate quotas of a key: what a call takes of each, and what a client is told of them.

One method everywhere.  A quota is a bucket that refills evenly at its limit per window and holds what it gives in that
time, or less where bursts are bounded (the generic cell rate algorithm, ITU-T I.371).  The ledger keeps the instant at
which a bucket is full again, so amounts go there as microseconds of refilling: what a call was charged stays right when
the limit changes meanwhile.
"""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.core.outcomes import Code, Refusal

MINUTE_US = 60_000_000
DAY_US = 24 * 60 * MINUTE_US

PATIENCE_MS = 120_000
"""OpenAI's clients give up by themselves on what is further away; Anthropic's would sleep through the day."""
DEBT_WINDOWS_MAX = 10
"""How far beyond its charge one call can put a bucket into debt.  What an engine reports is not to be trusted so far
that it locks a key out for years, or that a number grows beyond what the ledger can hold.
"""

REQUESTS = "requests"
TOKENS = "tokens"

LIMITS = "limits"
"""The section of a key's settings whose limits hold for each fleet by itself."""
ALL_FLEETS = "all_fleets"
"""The section inside it whose limits hold over all fleets together, and the name of the books that keep them: no fleet
can be called that, for their names have no `_`."""
ALL_FLEETS_LIMITS = f"{LIMITS}.{ALL_FLEETS}"


class Units(msgspec.Struct, frozen=True):
    """What quotas count of a call."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Quota(msgspec.Struct, frozen=True):
    bucket: int
    """Its number in the ledger."""
    limit: int
    """Units a window."""
    capacity: int
    """Units in a full bucket; at most the limit."""
    section: str = LIMITS
    """Of the key's settings."""

    @property
    def name(self) -> str:
        """Of the setting in its section."""
        unit, window, _ = BUCKETS[self.bucket]
        return f"{unit}_per_{window}"

    @property
    def setting(self) -> str:
        """As messages name it."""
        return f"{self.section}.{self.name}"

    @property
    def counts(self) -> str:
        """The field of `Units`."""
        return BUCKETS[self.bucket][0]

    @property
    def family(self) -> str:
        """`requests` or `tokens`, as the headers have it."""
        return REQUESTS if self.counts == REQUESTS else TOKENS

    def microseconds(self, units: int) -> int:
        """In which so many units come back, rounded up."""
        return -(-units * BUCKETS[self.bucket][2] // self.limit)

    def units_in(self, microseconds: int) -> int:
        """What comes back meanwhile, rounded down."""
        return max(microseconds, 0) * self.limit // BUCKETS[self.bucket][2]


BUCKETS = (
    ("requests", "minute", MINUTE_US),
    ("requests", "day", DAY_US),
    ("prompt_tokens", "minute", MINUTE_US),
    ("prompt_tokens", "day", DAY_US),
    ("output_tokens", "minute", MINUTE_US),
    ("output_tokens", "day", DAY_US),
)
"""Unit, name and microseconds of the window of each bucket, by its number in the ledger."""


class Charge(msgspec.Struct, frozen=True):
    """What one call takes of one quota when it is admitted."""

    quota: Quota
    units: int

    @property
    def microseconds(self) -> int:
        """Rounded down: as many calls as a full bucket holds fit into it together, and less than a microsecond of the
        window is given away with each."""
        return self.units * BUCKETS[self.quota.bucket][2] // self.quota.limit


class AllFleets(msgspec.Struct, frozen=True):
    """What a key may have of all fleets together."""

    requests_max: int | None = None
    """Calls at once; None = no limit."""
    quotas: tuple[Quota, ...] = ()


class Left(msgspec.Struct, frozen=True):
    """A quota as a client is told of it."""

    quota: Quota
    remaining: int
    reset_us: int
    """Until it is full."""


def of_limits(
    limits: Mapping[str, int | None], minute_burst: float, section: str = LIMITS
) -> tuple[Quota, ...]:
    """The quotas among a key's limits; `minute_burst` is the part of a minute's that may be used at once."""
    found = []
    for bucket, (_, window, _) in enumerate(BUCKETS):
        limit = limits.get(Quota(bucket, 1, 1).name)
        if limit is not None:
            burst = minute_burst if window == "minute" else 1.0
            found.append(Quota(bucket, limit, max(int(limit * burst), 1), section))
    return tuple(found)


def charges(quotas: Sequence[Quota], units: Units) -> tuple[Charge, ...]:
    """A call that counts nothing of a quota takes nothing of it, but has to wait for what others took too much."""
    return tuple(Charge(quota, getattr(units, quota.counts)) for quota in quotas)


def never_fits(taken: Sequence[Charge]) -> Refusal | None:
    """More than a full bucket holds is refused for good."""
    for charge in taken:
        quota = charge.quota
        if charge.units > quota.capacity:
            message = (
                f"the request may take {charge.units} {quota.counts.replace('_', ' ')}, the key's {quota.setting} "
                f"gives at most {quota.capacity} at once"
            )
            return Refusal(Code.KEY_CAP_EXCEEDED, message, should_retry=False)
    return None


def arguments(taken: Sequence[Charge]) -> list[int]:
    """For the ledger: bucket, microseconds, microseconds of a full one..."""
    flat = []
    for charge in taken:
        flat += [charge.quota.bucket, charge.microseconds, charge.quota.microseconds(charge.quota.capacity)]
    return flat


def corrections(taken: Sequence[Charge], really: Units) -> list[int]:
    """For the ledger: bucket, microseconds that were charged too little (negative: too much)..."""
    flat = []
    for charge in taken:
        difference = (
            Charge(charge.quota, getattr(really, charge.quota.counts)).microseconds - charge.microseconds
        )
        if difference:
            debt_max = DEBT_WINDOWS_MAX * BUCKETS[charge.quota.bucket][2]
            flat += [charge.quota.bucket, min(difference, debt_max)]
    return flat


def refusal(taken: Sequence[Charge], bucket: int, left_us: int, retry_ms: int) -> Refusal:
    """In words; the time is the true one.  `left_us` is negative where more was used than the bucket holds."""
    charge = next(charge for charge in taken if charge.quota.bucket == bucket)
    quota = charge.quota
    message = (
        f"the request may take {charge.units} of the key's {quota.setting}, which is {quota.limit}; "
        f"{quota.units_in(left_us)} left now"
    )
    left = Left(quota, quota.units_in(left_us), quota.microseconds(quota.capacity) - left_us)
    return Refusal(
        Code.QUOTA_EXCEEDED,
        message,
        retry_ms=max(retry_ms, 1),
        should_retry=None if retry_ms <= PATIENCE_MS else False,
        headers=tuple(headers([left])),
    )


def lefts(taken: Sequence[Charge], missing_us: Sequence[int]) -> tuple[Left, ...]:
    """After admission; `missing_us`: until each is full, in the order of `taken`."""
    found = []
    for charge, missing in zip(taken, missing_us, strict=False):
        quota = charge.quota
        found.append(Left(quota, quota.units_in(quota.microseconds(quota.capacity) - missing), missing))
    return tuple(found)


def headers(left: Sequence[Left]) -> list[tuple[bytes, bytes]]:
    """`x-ratelimit-*` as OpenAI's: of requests and of tokens the quota of which the smallest part remains."""
    found = []
    for family in (REQUESTS, TOKENS):
        of_family = [one for one in left if one.quota.family == family]
        if of_family:
            told = min(of_family, key=lambda one: one.remaining / one.quota.limit)
            name = family.encode()
            found += [
                (b"x-ratelimit-limit-" + name, b"%d" % told.quota.limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % told.remaining),
                (b"x-ratelimit-reset-" + name, _span(told.reset_us)),
            ]
    return found


def _span(microseconds: int) -> bytes:
    """A Go duration as OpenAI writes them: `12ms`, `6m0s`, `8h30m1.5s`."""
    milliseconds = -(-microseconds // 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest_ms = divmod(milliseconds, 60_000)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if hours or minutes else "", f"{seconds}s"]
    return "".join(parts).encode()
