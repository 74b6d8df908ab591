"""Scenario files: what is sent, when, and how the clients behave.

`load` returns frozen values in which every limit holds, or raises `ScenarioError` with one line that names the field.
"""

import json
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta
from msgspec.structs import replace

TRACE_LINES_MAX = 2_000_000

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]


class ScenarioError(ValueError):
    """A scenario or trace cannot be used.  Its text is one line."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unknown key is an error, so that a misspelt setting is never a missing one."""


class Distribution(_Strict, frozen=True, kw_only=True):
    """Whole numbers: exactly one of the four."""

    fixed: Count | None = None
    uniform: tuple[Count, Count] | None = None
    log_uniform: tuple[Count, Count] | None = None
    """Each doubling is as likely as the next, as lengths of real prompts are."""
    choice: Annotated[tuple[Count, ...], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("exactly one of fixed, uniform, log_uniform, choice is needed")
        for low, high in filter(None, (self.uniform, self.log_uniform)):
            if low > high:
                raise ValueError(f"{given[0]}: {low} is above {high}")

    @property
    def most(self) -> int:
        """The largest number that can come."""
        if self.choice:
            return max(self.choice)
        return (self.uniform or self.log_uniform or (0, self.fixed or 0))[1]


Tokens = Count | Distribution
"""A bare number is a fixed one."""


class Targets(_Strict, frozen=True, kw_only=True):
    """What an answer in time is."""

    first_token_seconds: Seconds = 3
    """From the start of the attempt that answered, and once more from the call's arrival."""
    gap_seconds: Seconds = 0.2
    """The longest silence between two tokens of that attempt."""


class Client(_Strict, frozen=True, kw_only=True):
    """As the OpenAI SDK's `timeout` and `max_retries`; the defaults are the SDK's but for the shorter time-out."""

    timeout_seconds: Seconds = 60
    """Without a byte: to connect, to the headers, between two tokens.  Never of a whole answer."""
    retries: Annotated[int, Meta(ge=0, le=100)] = 2
    backoff_seconds: SecondsOrZero = 0.5
    backoff_seconds_max: SecondsOrZero = 8
    honour_retry_after: bool = True
    retry_after_seconds_max: SecondsOrZero = 120


class Key(_Strict, frozen=True, kw_only=True):
    name: Name
    weight: Weight = 1


class Phase(_Strict, frozen=True, kw_only=True):
    """A stretch of time with one rate of arrivals."""

    seconds: Seconds
    sessions: SecondsOrZero | None = None
    """That many sessions start one call each per `session.period_seconds`."""
    calls_per_second: SecondsOrZero | None = None

    def __post_init__(self) -> None:
        if (self.sessions is None) == (self.calls_per_second is None):
            raise ValueError("exactly one of sessions, calls_per_second is needed")


class Session(_Strict, frozen=True, kw_only=True):
    period_seconds: Seconds = 10
    arrivals: Literal["poisson", "even"] = "poisson"


class Leave(_Strict, frozen=True, kw_only=True):
    """Clients that close their connection in the middle of an answer."""

    fraction: Share
    after_tokens: Tokens


class Slow(_Strict, frozen=True, kw_only=True):
    """Clients that read at most once in so many seconds, from a small buffer."""

    fraction: Share
    read_seconds: Seconds


class Mix(_Strict, frozen=True, kw_only=True):
    """One kind of call."""

    weight: Weight = 1
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    """The call's `max_tokens`."""
    answer_tokens: Tokens | None = None
    """How many a mock engine answers with; a real engine ignores it and runs to the limit."""
    stream: bool = True
    leave: Leave | None = None
    slow: Slow | None = None
    shared_prefix_tokens: CountOrZero = 0
    """Tokens that all calls of this kind begin with."""
    unique_every_tokens: CountOrZero = 0
    """In each so many there are some of the call's own, so that no part is known from another call; 0: at its beginning
    only."""


class Scenario(_Strict, frozen=True, kw_only=True):
    name: Name
    description: str = ""
    seed: int = 1
    model: str = "demo"
    endpoint: Literal["chat", "completions"] = "chat"
    """Chat sends text; completions send token ids, whose count is exact on every engine."""
    targets: Targets = Targets()
    client: Client = Client()
    keys: Annotated[tuple[Name | Key, ...], Meta(min_length=1)] = ("default",)
    phases: tuple[Phase, ...] = ()
    session: Session = Session()
    calls: Annotated[tuple[Mix, ...], Meta(min_length=1)] = (Mix(),)
    drain_seconds: SecondsOrZero = 60
    """How long what runs may go on after the last arrival."""
    expected_gap_ms: Annotated[float, Meta(gt=0, le=60_000)] | None = None
    """Between two tokens of an idle engine, for the correction of gaps; by default the median of the run itself."""
    trace: str | None = None
    """A file of arrivals instead of phases, relative to the scenario file."""

    def __post_init__(self) -> None:
        if bool(self.phases) == bool(self.trace):
            raise ValueError("exactly one of phases, trace is needed")
        if self.trace and len(self.calls) > 1:
            raise ValueError("calls: a trace goes with one kind of call")
        for number, mix in enumerate(self.calls):
            if mix.unique_every_tokens and mix.shared_prefix_tokens:
                raise ValueError(
                    f"calls[{number}]: shared_prefix_tokens and unique_every_tokens exclude each other"
                )
            if not self.trace and (mix.prompt_tokens is None or mix.output_tokens is None):
                raise ValueError(f"calls[{number}]: prompt_tokens and output_tokens are needed")
        names = [key.name for key in self.weighted_keys]
        if len(set(names)) < len(names):
            raise ValueError("keys: two have the same name")

    @property
    def weighted_keys(self) -> tuple[Key, ...]:
        return tuple(key if isinstance(key, Key) else Key(name=key) for key in self.keys)


class TraceLine(_Strict, frozen=True, kw_only=True):
    """One recorded call."""

    arrival: SecondsOrZero
    """Seconds from the beginning of the trace."""
    prompt_tokens: Count
    output_tokens: Count
    key: Name | None = None


_Value = TypeVar("_Value", bound=_Strict)


def load(name_or_file: str, seconds_scale: float = 1.0) -> tuple[Scenario, tuple[TraceLine, ...]]:
    """A scenario by the name it has in this package or by its file, and its trace in order of arrival.

    `seconds_scale` shortens or stretches the phases at the same rates; of a trace it takes that share.
    """
    place = _find(name_or_file)
    scenario = parse(place.read_text(encoding="utf-8"), place.name)
    if scenario.trace is None:
        return scaled(scenario, seconds_scale), ()
    if not isinstance(place, Path):
        raise ScenarioError(f"{place.name}: a trace needs a scenario file of its own")
    lines = parse_trace((place.parent / scenario.trace).read_text(encoding="utf-8"), scenario.trace)
    unknown = {line.key for line in lines if line.key} - {key.name for key in scenario.weighted_keys}
    if unknown:
        raise ScenarioError(f"{scenario.trace}: key {min(unknown)!r}: not one of the scenario's keys")
    end = lines[-1].arrival * seconds_scale
    return scenario, tuple(line for line in lines if line.arrival <= end)


def scaled(scenario: Scenario, seconds_scale: float) -> Scenario:
    phases = tuple(replace(phase, seconds=phase.seconds * seconds_scale) for phase in scenario.phases)
    return replace(scenario, phases=phases)


def parse(text: str, where: str = "scenario") -> Scenario:
    try:
        document = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{where}: {' '.join(str(error).split())}") from None
    return _convert(document, Scenario, where)


def parse_trace(text: str, where: str = "trace") -> tuple[TraceLine, ...]:
    """One JSON object per line, sorted by arrival."""
    rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 0 < len(rows) <= TRACE_LINES_MAX:
        raise ScenarioError(f"{where}: {len(rows)} lines; 1 to {TRACE_LINES_MAX} are allowed")
    lines = [_convert(_json(line, f"{where}:{n}"), TraceLine, f"{where}:{n}") for n, line in rows]
    return tuple(sorted(lines, key=lambda line: line.arrival))


def names() -> list[str]:
    """Scenarios that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in _packaged().iterdir() if ".yaml" in file.name)


def to_json(scenario: Scenario) -> dict[str, Any]:
    """As a document that `parse` reads again."""
    document: dict[str, Any] = msgspec.to_builtins(scenario)
    return document


def _packaged() -> Traversable:
    return resources.files("gateway.loadtest") / "scenarios"


def _find(name_or_file: str) -> Traversable | Path:
    file = Path(name_or_file)
    if file.suffix or file.is_file():
        return file
    packaged = _packaged() / f"{name_or_file}.yaml"
    if not packaged.is_file():
        raise ScenarioError(f"no scenario {name_or_file!r}: a file, or one of {', '.join(names())}")
    return packaged


def _json(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ScenarioError(f"{where}: {error}") from None


def _convert(document: object, kind: type[_Value], where: str) -> _Value:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{where}: {_path_first(str(error))}") from None


def _path_first(text: str) -> str:
    """`client.retries: Expected ...` for msgspec's `Expected ... - at `$.client.retries``."""
    problem, _, place = text.partition(" - at `")
    path = place.removesuffix("`").removeprefix("$").removeprefix(".")
    named = re.search(r"(unknown|required) field `(.*)`$", problem)
    if named:
        path = f"{path}.{named[2]}".removeprefix(".")
        problem = "missing" if named[1] == "required" else "unknown field"
    return f"{path}: {problem.replace('`', '')}" if path else problem


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)
