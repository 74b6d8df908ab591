"""Settings: a strict YAML file, environment variables over it, all of it checked before anything starts.

`load` and `load_keys` either return frozen values in which every limit holds, or raise `ConfigError` with one
line that names the setting, its value and the limit.  Secrets are never settings: `admin.token_env` and
`api_key_env` name variables, which `load_secrets` reads.  The environment is an argument.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from ipaddress import ip_network
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

import msgspec
import yaml
from msgspec import Meta
from msgspec.structs import replace

from gateway.core.headers import FOR_ENGINES, PROMPT_TOKENS
from gateway.core.media import AUDIO_BYTES_PER_SECOND, AUDIO_SECONDS_MAX, CLIP_SECONDS, MEDIA_TOKENS, host_of
from gateway.core.modes import PROMISES, Mode, can_keep
from gateway.core.outcomes import OperatorError, Refusal
from gateway.core.pins import Pin, pin_of
from gateway.core.request import UNRESERVED, Endpoint

INT_MAX = 2**31 - 1
NAME_LENGTH_MAX = 40
EMBEDDED = "embedded"
"""A `store.url`: a Valkey that the gateway starts and ends itself."""
SERVERS_MAX = 16
"""Sentinels, or nodes of a cluster, that `store.url` may name."""

NAME = rf"\A[a-z0-9-]{{1,{NAME_LENGTH_MAX}}}\Z"
Name = Annotated[str, Meta(pattern=NAME)]
NameOrDefault = Annotated[str, Meta(pattern=rf"\A[a-z0-9-]{{0,{NAME_LENGTH_MAX}}}\Z")]
KEY_NAME = r"\A[A-Za-z0-9._-]{1,64}\Z"
KeyName = Annotated[str, Meta(pattern=KEY_NAME)]
ModelName = Annotated[str, Meta(pattern=r"\A[^\s\x00-\x1f\x7f]{1,256}\Z")]
VariableName = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z")]
Count = Annotated[int, Meta(ge=1, le=INT_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=INT_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=0.5)]
QueueDepth = Annotated[int, Meta(ge=0, le=100_000)]
KeyShare = Annotated[float, Meta(gt=0, le=1)]
RetryShare = Annotated[float, Meta(ge=0, le=10)]


_PATH = re.compile(r"/[A-Za-z0-9._~/-]{1,255}").fullmatch
_OWN_PATHS = frozenset(
    {*Endpoint, *UNRESERVED, "/v1/models", "/health", "/ping", "/version", "/metrics", "/admin"}
)
_OWN_FOLDERS = ("/health/", "/admin/", "/v1/responses/")

VALUES_MAX = 5_000_000
"""Of one file, each as often as it is named: a hundred thousand keys with all their settings are fewer."""


class ConfigError(OperatorError, ValueError):
    """A setting is wrong.  Its text is one line without secrets."""

    def __init__(self, path: str, problem: str, where: str = "") -> None:
        super().__init__(f"{path}: {problem}{where}" if path else f"{problem}{where}")
        self.path = path
        self.problem = problem


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unknown key is an error, so that a misspelt limit is never a missing one."""


class Store(_Strict, frozen=True, kw_only=True):
    url: str = EMBEDDED
    """Once loaded it carries `ca_file`, so that whoever has the URL can connect."""
    ca_file: Annotated[str, Meta(min_length=1)] | None = None
    """Absolute once loaded."""
    on_outage: str = "hold"
    hold_seconds: Annotated[float, Meta(ge=0, le=60)] = 2
    hold_calls_max: Annotated[int, Meta(ge=0, le=65_536)] = 256
    hold_bytes_max: Annotated[int, Meta(ge=0, le=2**34)] = 64 * 2**20
    share_seconds: Annotated[float, Meta(ge=0, le=3_600)] = 30
    on_lease_lost: str = "cut"
    lease_seconds: Annotated[float, Meta(ge=0.1, le=600)] = 6
    heartbeat_seconds: Annotated[float, Meta(ge=0.01, le=60)] = 1


class Admin(_Strict, frozen=True, kw_only=True):
    token_env: VariableName = "KVGATE_ADMIN_TOKEN"


class Log(_Strict, frozen=True, kw_only=True):
    level: str = "info"
    format: str = "json"
    calls: Annotated[str, Meta(min_length=1)] | None = None
    """Absolute once loaded."""


KEEPALIVE_SECONDS_MIN, KEEPALIVE_SECONDS_MAX = 0.1, 3600.0


class Answers(_Strict, frozen=True, kw_only=True):
    overload_status: int = 429
    show_replica: bool = True
    keepalive_seconds: float = 0


class TrustedHeader(_Strict, frozen=True, kw_only=True):
    """A header in which a proxy names the key of a call."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9-]{0,63}\Z")]
    """Lower case once loaded."""
    from_: Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)] = msgspec.field(name="from")
    """Addresses, or networks, of the proxy."""


class Jwt(_Strict, frozen=True, kw_only=True):
    """Signed tokens of which a claim names the key of a call."""

    issuer: Annotated[str, Meta(min_length=1, max_length=512)]
    audience: Annotated[str, Meta(min_length=1, max_length=512)]
    claim: Annotated[str, Meta(min_length=1, max_length=128)] = "sub"
    algorithms: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = ("RS256",)
    jwks_file: Annotated[str, Meta(min_length=1)] | None = None
    """Absolute once loaded, as is the other."""
    public_key_file: Annotated[str, Meta(min_length=1)] | None = None


class Auth(_Strict, frozen=True, kw_only=True):
    required: bool = True
    keys_file: Annotated[str, Meta(min_length=1)] | None = None
    """Absolute once loaded; `keys.yaml` beside the configuration where keys are required, and neither a file is named
    nor are there any in the store."""
    keys_in_store: bool = False
    trusted_header: TrustedHeader | None = None
    jwt: Jwt | None = None

    @property
    def names_from_outside(self) -> bool:
        """Somebody else than a secret may say whose call it is."""
        return self.trusted_header is not None or self.jwt is not None


class Server(_Strict, frozen=True, kw_only=True):
    body_bytes_max: Annotated[int, Meta(ge=1_024, le=2**30)] = 8 * 2**20
    audio_bytes_max: Annotated[int, Meta(ge=1_024, le=2**30)] = 26 * 2**20
    """Of a form with a sound: vLLM takes files of 25 MiB."""
    body_seconds: Annotated[float, Meta(gt=0, le=3_600)] = 30
    bodies_bytes_max: Annotated[int, Meta(ge=2**20, le=2**40)] = 512 * 2**20
    grace_seconds: Annotated[float, Meta(ge=0, le=3_600)] = 30
    n_max: Annotated[int, Meta(ge=1, le=128)] = 16


class Routes(_Strict, frozen=True, kw_only=True):
    """What reaches an engine without a reservation."""

    pass_through: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Paths beside those that are known."""
    unreserved_max: Annotated[int, Meta(ge=1, le=100_000)] = 64
    """Such calls of one process under way at once."""


class Queue(_Strict, frozen=True, kw_only=True):
    depth_max: QueueDepth = 1_000
    seconds_max: Seconds = 30
    key_share: KeyShare = 0.5
    """The part of `depth_max` that one key may fill."""
    ttft_seconds: Seconds | None = None
    """When the first token is wanted; None = whenever."""
    retry_share: RetryShare = 0.2
    """Retries of a key that are queued for each of its first attempts."""


class PriorityClass(_Strict, frozen=True, kw_only=True):
    name: Name
    share: Share = 0
    depth_max: QueueDepth = 1_000
    seconds_max: Seconds = 30
    key_share: KeyShare = 0.5
    ttft_seconds: Seconds | None = None
    mode: str | None = None
    """None = as the pool does."""


class Access(_Strict, frozen=True, kw_only=True):
    """What lets a gateway in to engines.  Files are absolute once loaded."""

    api_key_env: VariableName | None = None
    ca_file: Annotated[str, Meta(min_length=1)] | None = None
    client_cert_file: Annotated[str, Meta(min_length=1)] | None = None
    client_key_file: Annotated[str, Meta(min_length=1)] | None = None
    """None: the key is in the file of the certificate."""


class Upstream(Access, frozen=True, kw_only=True):
    connect_seconds: Seconds = 2
    headers_seconds: Seconds = 120
    first_event_seconds: Seconds = 120
    idle_seconds: Seconds = 60
    background_seconds: Seconds = 3_600
    """How long a response may go on after its answer."""


class Replica(_Strict, frozen=True, kw_only=True):
    """One engine.  Each number overrides what the engine says of itself."""

    url: str
    """Scheme, host and port only."""
    name: NameOrDefault = ""
    """Never empty once loaded: host and port where the file gives none, and the rank where there is one."""
    data_parallel_rank: Annotated[int, Meta(ge=0, le=4_095)] | None = None
    """Of the engines behind one URL."""
    num_gpu_blocks: Annotated[int, Meta(ge=2, le=INT_MAX)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    prefill_tokens: Count | None = None


class EndpointSlices(_Strict, frozen=True, kw_only=True):
    """The pods of a Kubernetes service, as its API lists them."""

    service: Annotated[str, Meta(pattern=r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
    namespace: Annotated[str, Meta(pattern=r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
    port: Annotated[str, Meta(max_length=63)] | Annotated[int, Meta(ge=1, le=65_535)] = ""
    """Name or number; "" = the only one."""
    scheme: Literal["http", "https"] = "http"
    api: str = "https://kubernetes.default.svc"
    token_file: Annotated[str, Meta(min_length=1)] = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca_file: Annotated[str, Meta(min_length=1)] = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"


class ReplicasFrom(_Strict, frozen=True, kw_only=True):
    """Where a pool's replicas are looked for while the gateway runs: one of the three."""

    dns: str | None = None
    """Scheme, host and port: each address of the host is a replica."""
    file: Annotated[str, Meta(min_length=1)] | None = None
    endpoint_slices: EndpointSlices | None = None
    seconds: Annotated[float, Meta(ge=0.1, le=3_600)] = 5
    """Between two looks, but for a file."""
    num_gpu_blocks: Annotated[int, Meta(ge=2, le=INT_MAX)] | None = None
    """This and the following: of each replica that is found."""
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    prefill_tokens: Count | None = None


POOLS_MAX = 32
"""Of one fleet.  Each is a lane, which the store looks at whenever it looks for who is next."""
REPLICAS_MAX = 256
"""Of one pool."""


class Pool(_Strict, frozen=True, kw_only=True):
    name: Name
    max_prompt_tokens: Count | None = None
    mode: str = Mode.GUARANTEED.value
    upstream: Access = Access()
    """Once loaded with what `upstream` of the file says where it says nothing."""
    replicas: Annotated[tuple[Replica, ...], Meta(max_length=REPLICAS_MAX)] = ()
    replicas_from: ReplicasFrom | None = None
    """Beside those of the list."""


ENGINE = "engine"
"""In the place of a tokenizer's files: the engines themselves are asked."""


AUTO, OFF = "auto", "off"


class Tokenizer(_Strict, frozen=True, kw_only=True):
    """Files of the served model, as its engines read them."""

    file: str
    """`tokenizer.json`, or the folder that holds it; absolute once loaded, and the file itself."""
    chat_template: str | None = None
    """What the engines were given as `--chat-template`; absolute once loaded."""
    chat_template_kwargs: dict[str, Any] = {}
    """Their `--default-chat-template-kwargs`."""


class Media(_Strict, frozen=True, kw_only=True):
    """What images, sounds and videos in a request count, and whence they may come."""

    image_tokens: CountOrZero = MEDIA_TOKENS
    audio_tokens: CountOrZero = MEDIA_TOKENS
    video_tokens: CountOrZero = MEDIA_TOKENS
    hosts: Annotated[tuple[str, ...], Meta(max_length=256)] | None = None
    """Lower case once loaded; None = any."""
    inline: bool = True
    """The data itself may stand in a request."""
    clip_seconds: Annotated[int, Meta(ge=0, le=3_600)] = CLIP_SECONDS
    """An engine cuts a longer sound into clips of this length; 0 = it does not."""
    audio_seconds_max: Annotated[int, Meta(ge=1, le=7_200)] = AUDIO_SECONDS_MAX
    audio_bytes_per_second: Annotated[int, Meta(ge=100, le=1_000_000)] = AUDIO_BYTES_PER_SECOND
    tensor_tokens: Count | None = None
    """None = tensors in place of a text or of media are refused."""


class PinnedPrefix(_Strict, frozen=True, kw_only=True):
    """How prompts begin that engines are to keep."""

    name: Name
    model: ModelName | None = None
    """One of the fleet's names; None = its first."""
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    """Of completions; chats have `messages`."""
    messages: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=64)] | None = None
    tools: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=256)] | None = None

    def pin(self, model: str) -> Pin | Refusal:
        """`model`: of its fleet."""
        return pin_of(self.name, self.model or model, self.prompt, self.messages, self.tools)


class Fleet(_Strict, frozen=True, kw_only=True):
    model: ModelName
    name: NameOrDefault = ""
    """Never empty once loaded: made from `model` where the file gives none."""
    aliases: Annotated[tuple[ModelName, ...], Meta(max_length=64)] = ()
    default_output_tokens: Count = 1_024
    max_output_tokens: Count | None = None
    safe_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.95
    share_prompt_of_n: bool = False
    share_prefixes: str | bool = AUTO
    """AUTO or OFF once loaded: YAML reads a bare `off` as false."""
    soft_hold: str | bool = AUTO
    """As `share_prefixes`."""
    speculative_tokens: Annotated[int, Meta(ge=0, le=1_024)] = 0
    encoder_tokens: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """What an encoder-decoder model keeps for a sequence beside its context; Whisper: 1,500."""
    engine_tools: bool = False
    """The engines have vLLM's `--tool-server`."""
    token_factor: Annotated[float, Meta(ge=0.5, le=4)] | None = None
    """None = 1.0, and what is learned from the engines' reports."""
    tokenizer: Tokenizer | str | None = None
    """ENGINE, or the folder that holds the files, which is no text once loaded; None = prompts are always estimated."""
    exact_above: Annotated[float, Meta(ge=0, le=1)] = 0.7
    media: Media = Media()
    overtake_blocks: CountOrZero | None = None
    pinned_prefixes: Annotated[tuple[PinnedPrefix, ...], Meta(max_length=16)] = ()
    slow_start_seconds: Annotated[float, Meta(ge=0, le=3_600)] = 30
    """Until a replica that has just been started beside others has all its blocks; 0 = at once."""
    lanes: dict[str, tuple[str, ...]] = {}
    """One a pool once loaded, named as the pool, with the pools that its calls may use in order."""
    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=POOLS_MAX)]

    @property
    def models(self) -> tuple[str, ...]:
        """Every name under which clients may ask for this fleet."""
        return self.model, *self.aliases

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Of settings that were checked."""
        made = (prefix.pin(self.model) for prefix in self.pinned_prefixes)
        return tuple(pin for pin in made if isinstance(pin, Pin))


class Settings(_Strict, frozen=True, kw_only=True):
    store: Store = Store()
    admin: Admin = Admin()
    log: Log = Log()
    answers: Answers = Answers()
    auth: Auth = Auth()
    server: Server = Server()
    routes: Routes = Routes()
    queue: Queue = Queue()
    classes: Annotated[tuple[PriorityClass, ...], Meta(min_length=1, max_length=8)]
    upstream: Upstream = Upstream()
    fleets: Annotated[tuple[Fleet, ...], Meta(min_length=1, max_length=64)]

    @property
    def default_class(self) -> str:
        """The class of callers that name none: `normal` where it is configured, else the lowest."""
        names = [class_.name for class_ in self.classes]
        return "normal" if "normal" in names else names[-1]


class _Rates(_Strict, frozen=True, kw_only=True):
    """None = no limit."""

    requests_max: CountOrZero | None = None
    requests_per_minute: Count | None = None
    requests_per_day: Count | None = None
    prompt_tokens_per_minute: Count | None = None
    prompt_tokens_per_day: Count | None = None
    output_tokens_per_minute: Count | None = None
    output_tokens_per_day: Count | None = None
    minute_burst: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The part of a minute's quota that may be used at once."""


class AllFleetsLimits(_Rates, frozen=True, kw_only=True):
    """What holds over all fleets together."""


class Limits(_Rates, frozen=True, kw_only=True):
    """What one key, or all keys of one group together, may have of each fleet."""

    blocks_max: Count | None = None
    pool_share: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    """The part of each pool's limit that may be held at once."""
    context_tokens_max: Count | None = None
    max_output_tokens: Count | None = None
    all_fleets: AllFleetsLimits | None = None


class KeyEntry(_Strict, frozen=True, kw_only=True):
    name: KeyName
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] | None = None
    """None: only `auth.trusted_header` and `auth.jwt` can name the key."""
    class_: str = msgspec.field(name="class", default="normal")
    mode: str | None = None
    """None = as its class."""
    weight: Annotated[int, Meta(ge=1, le=1_000)] = 1
    group: KeyName | None = None
    models: Annotated[tuple[ModelName, ...], Meta(max_length=256)] | None = None
    """None = all."""
    limits: Limits = Limits()
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Calls of keys with the same one share the prefixes that engines keep, and with nobody else."""
    expires_ms: int | None = msgspec.field(name="expires", default=None)
    """Epoch milliseconds; the file has an ISO date (its first moment in UTC) or a date and time with zone."""


class _KeysFile(_Strict, frozen=True, kw_only=True):
    keys: Annotated[tuple[KeyEntry, ...], Meta(max_length=100_000)] = ()


@dataclass(frozen=True, slots=True)
class Secrets:
    """What the named variables held; kept out of `repr`, so that no log line can show it."""

    admin_token: str | None = field(repr=False)
    """None switches the admin API off."""
    engine_keys: Mapping[str, str] = field(repr=False)
    """By the variable that held it."""


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """Read and check the configuration; raises ConfigError."""
    document = _Document.of(text_of(path), path.name)
    try:
        raw = _section(document.value)
        _normalise(raw)
        document.variables = _override(raw, environ)
        _normalise(raw)
        _inherit_queue(raw)
        settings = _completed(_convert(raw, Settings), path.parent)
        _check(settings)
    except ConfigError as error:
        raise ConfigError(error.path, error.problem, document.where(error.path)) from None
    return replace(settings, store=_with_ca_file(settings.store))


def load_keys(path: Path, classes: Collection[str] | None, secretless: bool = False) -> tuple[KeyEntry, ...]:
    """Read and check the keys file; `classes` are the configured names, None = not known.  Raises ConfigError.

    The file is a list of keys or `{keys: [...]}`.  An empty file means that no key is valid.
    `secretless`: an entry may do without a `sha256`.
    """
    text = text_of(path, f"`kvgate keys create NAME --file {path}` makes one")
    return parse_keys(text, path.name, classes, secretless)


def parse_keys(
    text: str, name: str, classes: Collection[str] | None, secretless: bool = False
) -> tuple[KeyEntry, ...]:
    """As `load_keys`, of the text of a file; `name` is what messages call it."""
    document = _Document.of(text, name)
    try:
        raw = {"keys": document.value} if isinstance(document.value, list) else _section(document.value)
        raw["keys"] = [] if raw.get("keys") is None else raw["keys"]
        _parse_expiries(raw["keys"])
        keys = _convert(raw, _KeysFile, show_text=False).keys
        _check_keys(keys, classes)
        if not secretless:
            _check_secrets(keys)
        return _with_group_limits(keys)
    except ConfigError as error:
        raise ConfigError(error.path, error.problem, document.where(error.path)) from None


def parse_key(fields: Mapping[str, Any]) -> KeyEntry:
    """One entry as a keys file may have it, checked alone; raises ConfigError, whose path begins in the entry."""
    raw = dict(fields)
    if raw.get("expires") is not None:
        raw["expires"] = _epoch_ms(raw["expires"], "expires")
    entry = _convert(raw, KeyEntry)
    _check_class_name(entry.class_, "class")
    _check_promise(entry.mode, "mode")
    return entry


class _ReplicasFile(_Strict, frozen=True, kw_only=True):
    replicas: Annotated[tuple[Replica, ...], Meta(max_length=REPLICAS_MAX)]


def load_replicas(source: ReplicasFrom) -> tuple[Replica, ...]:
    """What the file of a source lists, as the configuration does: replicas, or `{replicas: [...]}`.

    Raises ConfigError.
    """
    path = Path(source.file or "")
    document = _Document.of(text_of(path), path.name)
    try:
        raw = {"replicas": document.value} if isinstance(document.value, list) else _section(document.value)
        _normalise_replicas(raw)
        replicas = _convert(raw, _ReplicasFile).replicas
        found = tuple(
            _completed_replica(_with_numbers(replica, source), f"replicas[{i}]")
            for i, replica in enumerate(replicas)
        )
        _unique("replicas[{}].name", (replica.name for replica in found), "replica")
        return found
    except ConfigError as error:
        raise ConfigError(error.path, error.problem, document.where(error.path)) from None


def found_replicas(source: ReplicasFrom, urls: Iterable[str]) -> tuple[Replica, ...]:
    """Those that a source found, in order.  Raises ConfigError."""
    unique = sorted(set(urls))
    if len(unique) > REPLICAS_MAX:
        raise ConfigError("replicas_from", f"finds {len(unique)} replicas, a pool has {REPLICAS_MAX} at most")
    return tuple(
        _completed_replica(_with_numbers(Replica(url=url), source), "replicas_from") for url in unique
    )


def _with_numbers(replica: Replica, source: ReplicasFrom) -> Replica:
    """A replica's own numbers go first."""
    names = ("num_gpu_blocks", "block_size", "max_model_len", "max_num_seqs", "prefill_tokens")
    return replace(replica, **{name: getattr(replica, name) or getattr(source, name) for name in names})


def load_secrets(settings: Settings, environ: Mapping[str, str]) -> Secrets:
    """Read the variables that the settings name; raises ConfigError where one is unusable."""
    admin_token = _secret("admin.token_env", settings.admin.token_env, environ)
    engine_keys: dict[str, str] = {}
    for path, access in _accesses(settings):
        variable = access.api_key_env
        if variable is None or variable in engine_keys:
            continue
        key = _secret(f"{path}.api_key_env", variable, environ)
        if key is None:
            raise ConfigError(f"{path}.api_key_env", "the variable that it names is not set")
        engine_keys[variable] = key
    return Secrets(admin_token, engine_keys)


def _accesses(settings: Settings) -> Iterator[tuple[str, Access]]:
    """With their paths; the one that all pools have first."""
    yield "upstream", settings.upstream
    for f, fleet in enumerate(settings.fleets):
        for p, pool in enumerate(fleet.pools):
            yield f"fleets[{f}].pools[{p}].upstream", pool.upstream


def without_password(url: str) -> str:
    """A URL fit for logs; a password may hold what should have been escaped."""
    return re.sub(r"//.*@", "//***@", url, flags=re.DOTALL)


# Reading ----------------------------------------------------------------------------------------------------


def text_of(path: Path, if_missing: str = "") -> str:
    """What a file holds, its line ends and its byte order mark included.

    Raises ConfigError, which says `if_missing` (what to do) of a file that is not there.
    """
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        advice = if_missing and f"; {if_missing}"
        raise ConfigError(str(path), f"cannot be read: {error.strerror}{advice}") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not UTF-8 at byte {error.start}") from None


class _Document:
    """One YAML file with the places of its values."""

    def __init__(self, name: str, value: Any, node: yaml.Node | None) -> None:
        self.value = value
        self.variables: dict[str, str] = {}
        """Path of a setting -> the environment variable that gave it."""
        self._name = name
        self._node = node

    @classmethod
    def of(cls, text: str, name: str) -> "_Document":
        value, node = parse_yaml(text, name)
        return cls(name, value, node)

    def where(self, path: str) -> str:
        """Where the value at fault came from, as the end of a message."""
        for set_path, variable in self.variables.items():
            if set_path == path or set_path.startswith((f"{path}.", f"{path}[")):
                return f" (from {variable})"
        line = self._line_of(re.findall(r"[^.\[\]]+", path))
        return f" ({self._name} line {line})" if line else ""

    def _line_of(self, parts: list[str]) -> int | None:
        """The line of the innermost part of a path that the file has."""
        node, line = self._node, None
        if isinstance(node, yaml.SequenceNode):
            parts = parts[1:]
        for part in parts:
            node = _child(node, part)
            if node is None:
                break
            line = node.start_mark.line + 1
        return line


def _child(node: yaml.Node | None, part: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        child: yaml.Node = node.value[int(part)]
        return child
    return None


LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """Plain values (dates as ISO text, nothing shared between anchors) and the node tree with its lines."""
    try:
        loader = LOADER(text)
    except (yaml.YAMLError, ValueError):  # characters that YAML has not, or none at all
        raise ConfigError("", f"{name}: not YAML that settings can be read from") from None
    try:
        node = loader.get_single_node()
        _check_node(node, name, frozenset(), {})
        return msgspec.to_builtins(None if node is None else loader.construct_document(node)), node
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError("", f"{name} line {line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("", f"{name}: not YAML that settings can be read from") from None
    except RecursionError:
        raise ConfigError("", f"{name}: nested too deeply") from None
    finally:
        loader.dispose()


def _check_node(node: yaml.Node | None, name: str, above: frozenset[int], done: dict[int, int]) -> int:
    """Refuse what YAML allows and settings must not have: repeated keys, endless anchors, infinite numbers, and few
    lines that stand for millions of values by naming each other.

    Returns how many values the node stands for; `done` has those of the nodes that were looked at.
    """
    if node is None:
        return 0
    if id(node) in done:
        return done[id(node)]
    at = f"{name} line {node.start_mark.line + 1}"
    if id(node) in above:
        raise ConfigError("", f"{at}: an anchor that contains itself")
    above |= {id(node)}
    values = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys_differ(node, name)
        values += sum(_check_node(value, name, above, done) for _, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        values += sum(_check_node(value, name, above, done) for value in node.value)
    elif node.tag == "tag:yaml.org,2002:float" and not _is_finite(node.value):
        raise ConfigError("", f"{at}: {node.value} is not a finite number")
    if values > VALUES_MAX:
        raise ConfigError("", f"{at}: its anchors stand for more than {VALUES_MAX} values")
    done[id(node)] = values
    return values


def _check_keys_differ(node: yaml.MappingNode, name: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            raise ConfigError("", f"{name} line {line}: a key that is not text; quote it")
        if key.value in lines:
            raise ConfigError(
                "", f"{name} line {line}: key '{key.value}' is already on line {lines[key.value]}"
            )
        lines[key.value] = line


def _is_finite(text: str) -> bool:
    """False for `.inf`, `.nan` and what overflows; sexagesimal numbers (`1:30.5`) are finite."""
    try:
        return math.isfinite(float(text.replace("_", "")))
    except ValueError:
        return ":" in text


def _section(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("", "the file does not hold settings by name")
    return value


def _normalise(raw: dict[str, Any]) -> None:
    """Bring the raw tree into the one form that paths of variables and of messages refer to.

    What is of a wrong shape is left for `_convert`.  Doing it twice changes nothing the second time.
    """
    if raw.get("classes") is None:
        raw["classes"] = [
            {"name": "high"},
            {"name": "normal", "share": 0.2},
            {"name": "low", "share": 0.1, "seconds_max": 300},
        ]
    for name in [name for name, value in raw.items() if value is None and name != "fleets"]:
        del raw[name]  # `store:` with nothing under it is a section of defaults
    for fleet in _dicts(raw.get("fleets")):
        for pool in _dicts(fleet.get("pools")):
            _normalise_replicas(pool)


def _normalise_replicas(raw: dict[str, Any]) -> None:
    replicas = raw.get("replicas")
    if isinstance(replicas, list):
        replicas[:] = [{"url": entry} if isinstance(entry, str) else entry for entry in replicas]


def _inherit_queue(raw: dict[str, Any]) -> None:
    """A class that states no bound of its own has that of `queue`."""
    raw["classes"] = raw.pop("classes")  # now last, so that a bad bound of `queue` is reported as that
    queue = raw.get("queue")
    for class_ in _dicts(raw["classes"]):
        for bound in ("depth_max", "seconds_max", "key_share", "ttft_seconds"):
            if isinstance(queue, dict) and bound in queue:
                class_.setdefault(bound, queue[bound])


def _dicts(value: Any) -> Iterable[dict[str, Any]]:
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else ()


# Environment ------------------------------------------------------------------------------------------------

PREFIX = "KVGATE_"
NOT_SETTINGS = frozenset({"KVGATE_ADMIN_URL", "KVGATE_ADMIN_TOKEN"})
"""Read by the command line."""

_SERVICE_LINK = re.compile(
    r"KVGATE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)"
)
"""Variables that Kubernetes gives to every pod beside a Service whose name starts with `kvgate`."""


def _override(raw: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Lay the variables over `raw`; returns which variable set which path.  `__` parts the levels."""
    secrets = _secret_variables(raw, environ)
    taken: dict[str, str] = {}
    for variable in sorted(environ, key=_by_number):
        if not variable.startswith(PREFIX) or variable in secrets:
            continue
        if "__" not in variable and _SERVICE_LINK.fullmatch(variable):
            continue
        parts = variable.removeprefix(PREFIX).lower().split("__")
        if not all(parts):
            raise ConfigError(variable, "names no setting")
        taken[_put(raw, parts, _scalar(variable, environ[variable]), variable)] = variable
    return taken


def _secret_variables(raw: Mapping[str, Any], environ: Mapping[str, str]) -> frozenset[str]:
    pools = [pool for fleet in _dicts(raw.get("fleets")) for pool in _dicts(fleet.get("pools"))]
    sections = [raw.get("admin"), raw.get("upstream"), *(pool.get("upstream") for pool in pools)]
    settings = ("token_env", "api_key_env")
    named = [section.get(name) for section in sections if isinstance(section, dict) for name in settings]
    ends = tuple(f"__{name.upper()}" for name in settings)
    named += [
        value
        for variable, value in environ.items()
        if variable.startswith(PREFIX) and variable.endswith(ends)
    ]
    return NOT_SETTINGS.union(str(name) for name in named if name)


def _by_number(variable: str) -> list[tuple[int, str]]:
    """Entry 2 of a list before entry 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in variable.split("__")]


def _scalar(variable: str, text: str) -> Any:
    try:
        value, _ = parse_yaml(text, variable)
    except ConfigError:
        raise ConfigError(variable, "is not a plain YAML value; quote it") from None
    if isinstance(value, dict | list):
        raise ConfigError(variable, "holds a list or mapping; set one value a variable")
    return value


def _put(raw: dict[str, Any], parts: list[str], value: Any, variable: str) -> str:
    """Set the value, making levels that are not there; returns its path."""
    here: Any = raw
    path = ""
    for part, following in pairwise([*parts, None]):
        assert part is not None
        slot = _slot(here, part, path, variable)
        path = f"{path}[{slot}]" if isinstance(slot, int) else f"{path}.{slot}".lstrip(".")
        if following is None:
            here[slot] = value
        elif (here.get(slot) if isinstance(here, dict) else here[slot]) is None:
            here[slot] = [] if following.isdecimal() else {}
        here = here[slot]
    return path


def _slot(here: Any, part: str, path: str, variable: str) -> str | int:
    if isinstance(here, dict):
        return part
    if not isinstance(here, list):
        raise ConfigError(variable, f"names no setting: {path} is a plain value")
    if not part.isdecimal() or int(part) > len(here):
        raise ConfigError(variable, f"names no setting: {path} has {len(here)} entries, counted from 0")
    if int(part) == len(here):
        here.append(None)
    return int(part)


def _secret(path: str, variable: str, environ: Mapping[str, str]) -> str | None:
    secret = environ.get(variable, "")
    if re.search(r"[^\x21-\x7e]", secret):
        raise ConfigError(path, "the variable that it names holds characters that no HTTP header can carry")
    return secret or None


# Checking: shapes and ranges --------------------------------------------------------------------------------

T = TypeVar("T")

SECRETLESS = "only a key that auth.trusted_header or auth.jwt can name needs no secret"
ASYMMETRIC = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that whoever can check them cannot make."""
_NOT_A_NAME = (
    frozenset({b"authorization", b"x-api-key", b"host", b"content-length", b"x-request-id", PROMPT_TOKENS})
    | FOR_ENGINES
)
"""Headers that say something else already, or that engines get."""

_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
_SERVERS_PATH = {"redis+sentinel": r"/[A-Za-z0-9._-]+(/\d*)?", "redis+cluster": "/?"}
"""What follows the hosts: the name that sentinels watch and a database; a cluster has one database."""
_SERVERS_FORM = {
    "redis+sentinel": "redis+sentinel://host:port,host:port/NAME/number",
    "redis+cluster": "redis+cluster://host:port,host:port",
}
_NEVER_SHOWN = ("url", "sha256", "api_key_env", "token_env")
"""Values that hold a secret, or would if somebody pasted it in the wrong place."""


_WORDS = {
    "array": "list",
    "object": "mapping",
    "str": "text",
    "bool": "true or false",
    "float": "number",
    "int": "whole number",
    "null": "nothing",
}
"""msgspec's names of types -> the words of somebody who reads YAML."""


def _convert(raw: Any, type_: type[T], show_text: bool = True) -> T:
    """Strictly typed values; `show_text=False` keeps text of the file out of messages."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at ")
        path = at.strip("`").removeprefix("$").removeprefix(".")
        raise _explained(problem, path, raw, show_text) from None


def _explained(problem: str, path: str, raw: Any, show_text: bool) -> ConfigError:
    """msgspec's text as a line that names setting, value and limit."""
    field_name = re.search(r"(unknown|required) field `(.*)`$", problem)
    if field_name:
        full = f"{path}.{field_name[2]}".lstrip(".")
        return ConfigError(full, "missing" if field_name[1] == "required" else "unknown setting")
    value = _value_at(raw, path)
    hidden = path.endswith(_NEVER_SHOWN) or (isinstance(value, str) and not show_text)
    expected = re.sub(r", got .*$", "", problem).replace("matching regex", "matching")
    expected = re.sub(r"`([^`]*)`", lambda types: _in_words(types[1]), expected)
    expected = expected.replace(r"\\A", "").replace(r"\\Z", "")
    return ConfigError(
        path, f"{expected[:1].lower()}{expected[1:]}" + ("" if hidden else f", got {_shown(value)}")
    )


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))


def _value_at(raw: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(raw, dict):
            raw = raw.get(part)
        elif isinstance(raw, list) and part.isdecimal():
            raw = raw[int(part)]
    return raw


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Checking: what one setting says of another -----------------------------------------------------------------


def _completed(settings: Settings, folder: Path) -> Settings:
    """Defaults that follow from other values, and absolute paths."""
    auth, common = settings.auth, _completed_access(settings.upstream, folder)
    keys_file = auth.keys_file or ("keys.yaml" if auth.required and not auth.keys_in_store else None)
    return replace(
        settings,
        store=replace(settings.store, ca_file=_absolute(settings.store.ca_file, folder)),
        log=replace(settings.log, calls=_absolute(settings.log.calls, folder)),
        auth=_completed_auth(replace(auth, keys_file=keys_file), folder),
        upstream=common,
        fleets=tuple(
            _completed_fleet(fleet, f"fleets[{i}]", folder, common) for i, fleet in enumerate(settings.fleets)
        ),
    )


_A = TypeVar("_A", bound=Access)


def _completed_access(access: _A, folder: Path) -> _A:
    return replace(
        access,
        ca_file=_absolute(access.ca_file, folder),
        client_cert_file=_absolute(access.client_cert_file, folder),
        client_key_file=_absolute(access.client_key_file, folder),
    )


def _inherited(access: Access, common: Access) -> Access:
    """A certificate and its key come together."""
    own = access if access.client_cert_file or access.client_key_file else common
    return replace(
        access,
        api_key_env=access.api_key_env or common.api_key_env,
        ca_file=access.ca_file or common.ca_file,
        client_cert_file=own.client_cert_file,
        client_key_file=own.client_key_file,
    )


def _completed_auth(auth: Auth, folder: Path) -> Auth:
    header, jwt = auth.trusted_header, auth.jwt
    return replace(
        auth,
        keys_file=_absolute(auth.keys_file, folder),
        trusted_header=header and replace(header, name=header.name.lower()),
        jwt=jwt
        and replace(
            jwt,
            jwks_file=_absolute(jwt.jwks_file, folder),
            public_key_file=_absolute(jwt.public_key_file, folder),
        ),
    )


def _absolute(name: str | None, folder: Path) -> str | None:
    return None if name is None else str((folder / name).absolute())


def _completed_fleet(fleet: Fleet, path: str, folder: Path, common: Access) -> Fleet:
    pools = tuple(
        replace(
            pool,
            upstream=_inherited(_completed_access(pool.upstream, folder), common),
            replicas=tuple(
                _completed_replica(replica, f"{path}.pools[{p}].replicas[{r}]")
                for r, replica in enumerate(pool.replicas)
            ),
            replicas_from=pool.replicas_from
            and _completed_source(pool.replicas_from, f"{path}.pools[{p}].replicas_from", folder),
        )
        for p, pool in enumerate(fleet.pools)
    )
    return replace(
        fleet,
        name=fleet.name or _name_from_model(fleet.model, path),
        lanes={pool.name: (pool.name,) for pool in pools} | fleet.lanes,
        pools=pools,
        tokenizer=_completed_tokenizer(fleet.tokenizer, folder),
        media=_completed_media(fleet.media, f"{path}.media"),
        share_prefixes=OFF if fleet.share_prefixes is False else fleet.share_prefixes,
        soft_hold=OFF if fleet.soft_hold is False else fleet.soft_hold,
    )


def _completed_media(media: Media, path: str) -> Media:
    if media.hosts is None:
        return media
    hosts = tuple(host.lower() for host in media.hosts)
    for i, host in enumerate(hosts):
        if host_of(f"https://{host}/") != host:
            raise ConfigError(f"{path}.hosts[{i}]", f"has to be a host alone, without a port, got {host!r}")
    _unique(f"{path}.hosts[{{}}]", hosts, "host")
    return replace(media, hosts=hosts)


def _completed_tokenizer(tokenizer: Tokenizer | str | None, folder: Path) -> Tokenizer | str | None:
    if tokenizer is None or tokenizer == ENGINE:
        return tokenizer
    if isinstance(tokenizer, str):
        tokenizer = Tokenizer(file=tokenizer)
    file = (folder / tokenizer.file).absolute()
    return replace(
        tokenizer,
        file=str(file / "tokenizer.json" if file.is_dir() else file),
        chat_template=_absolute(tokenizer.chat_template, folder),
    )


def _name_from_model(model: str, path: str) -> str:
    last = model.rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"[^a-z0-9-]", "-", last)[:NAME_LENGTH_MAX].strip("-")
    if not name:
        raise ConfigError(f"{path}.name", f"missing, and none can be made from model {model!r}")
    return name


def _completed_source(source: ReplicasFrom, path: str, folder: Path) -> ReplicasFrom:
    if source.dns is not None:
        source = replace(source, dns=_completed_replica(Replica(url=source.dns), path, "dns").url)
    if (slices := source.endpoint_slices) is not None:
        api = _completed_replica(Replica(url=slices.api), f"{path}.endpoint_slices", "api").url
        source = replace(source, endpoint_slices=replace(slices, api=api))
    return replace(source, file=_absolute(source.file, folder))


def _completed_replica(replica: Replica, path: str, setting: str = "url") -> Replica:
    here = f"{path}.{setting}"
    url = _split(replica.url, here)
    if url.scheme not in ("http", "https"):
        raise ConfigError(here, "has to start with http:// or https://")
    if url.path not in ("", "/") or url.query or url.fragment or url.username is not None:
        raise ConfigError(here, "has to be scheme, host and port only, such as http://host:8000")
    if not url.hostname:
        raise ConfigError(here, "names no host")
    port = str(_port(url))
    suffix = "" if replica.data_parallel_rank is None else f"-r{replica.data_parallel_rank}"
    length = NAME_LENGTH_MAX - len(port) - len(suffix) - 1
    host = re.sub(r"[^a-z0-9-]", "-", url.hostname)[:length].strip("-")
    name = f"{host}-{port}{suffix}"
    return replace(replica, url=f"{url.scheme}://{url.netloc.lower()}", name=replica.name or name)


def _split(url: str, path: str) -> SplitResult:
    if not re.fullmatch(r"[\x21-\x7e]+", url):
        raise ConfigError(path, "is empty, or holds spaces or characters that no URL can have")
    try:
        parts = urlsplit(url)
        if parts.port != 0:
            return parts
    except ValueError:
        pass
    raise ConfigError(path, "is not a URL with a port of 1 to 65535")


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _check(settings: Settings) -> None:
    _check_store(settings.store)
    if settings.auth.keys_in_store and settings.store.url == EMBEDDED:
        raise ConfigError(
            "auth.keys_in_store", "an embedded store forgets them when it ends: use auth.keys_file"
        )
    if settings.auth.trusted_header:
        _check_trusted_header(settings.auth.trusted_header)
    if settings.auth.jwt:
        _check_jwt(settings.auth.jwt)
    _one_of("log.level", settings.log.level, ("debug", "info", "warning", "error"))
    _one_of("log.format", settings.log.format, ("json", "text"))
    _one_of("answers.overload_status", settings.answers.overload_status, (429, 503, 529))
    silence = settings.answers.keepalive_seconds
    if silence and not KEEPALIVE_SECONDS_MIN <= silence <= KEEPALIVE_SECONDS_MAX:
        bounds = f"{KEEPALIVE_SECONDS_MIN:g} to {KEEPALIVE_SECONDS_MAX:g}"
        raise ConfigError("answers.keepalive_seconds", f"has to be 0 (off) or {bounds}, got {silence:g}")
    for path, access in _accesses(settings):
        _check_access(access, path)
    _check_pass_through(settings.routes.pass_through)
    _check_classes(settings.classes)
    _check_urls_across(settings.fleets)
    for i, fleet in enumerate(settings.fleets):
        _check_fleet(fleet, f"fleets[{i}]")
    _check_names_across(settings.fleets)
    for i, class_ in enumerate(settings.classes):
        _check_kept(class_.mode, settings.fleets, f"classes[{i}].mode")


def _check_promise(mode: str | None, path: str) -> None:
    if mode is not None:
        _one_of(path, mode, [promise.value for promise in PROMISES])


def _check_kept(mode: str | None, fleets: Iterable[Fleet], path: str) -> None:
    """Every call finds a pool that keeps what it was promised."""
    for fleet in fleets:
        modes = {pool.name: Mode(pool.mode) for pool in fleet.pools}
        for lane, pools in fleet.lanes.items():
            if not can_keep(Mode(mode) if mode else None, [modes[pool] for pool in pools]):
                raise ConfigError(
                    path, f"is {mode}, but every pool of lane {lane} of fleet {fleet.name} is elastic"
                )


def check_promises(keys: Iterable[KeyEntry], fleets: Iterable[Fleet]) -> None:
    """Raises ConfigError for a key whose promise cannot be kept for a model that it may use."""
    for i, key in enumerate(keys):
        allowed = [fleet for fleet in fleets if key.models is None or set(key.models) & set(fleet.models)]
        _check_kept(key.mode, allowed, f"keys[{i}].mode")


def _check_pass_through(paths: tuple[str, ...]) -> None:
    for i, path in enumerate(paths):
        setting = f"routes.pass_through[{i}]"
        if not _PATH(path) or any(part in ("", ".", "..") for part in path.split("/")[1:]):
            raise ConfigError(setting, f"has to be a whole path, such as /classify, got {path!r}")
        if path in _OWN_PATHS or path.startswith(_OWN_FOLDERS):
            raise ConfigError(setting, f"{path} is answered by kvgate already")
        if path in paths[:i]:
            raise ConfigError(setting, f"{path} is there twice")


def _check_trusted_header(header: TrustedHeader) -> None:
    path = "auth.trusted_header"
    if header.name.encode() in _NOT_A_NAME or header.name.startswith("x-kvgate-"):
        raise ConfigError(f"{path}.name", f"{header.name} has another meaning here, or goes to the engines")
    for i, text in enumerate(header.from_):
        try:
            network = ip_network(text)
        except ValueError:
            raise ConfigError(
                f"{path}.from[{i}]", f"has to be an address or a network, such as 10.0.0.0/8, got {text!r}"
            ) from None
        if network.prefixlen == 0:
            raise ConfigError(f"{path}.from[{i}]", f"{text} is everybody: anyone could name any key")


def _check_access(access: Access, path: str) -> None:
    for name in ("ca_file", "client_cert_file", "client_key_file"):
        file = getattr(access, name)
        if file and not Path(file).is_file():
            raise ConfigError(f"{path}.{name}", f"no such file: {file}")
    if access.client_key_file and not access.client_cert_file:
        raise ConfigError(
            f"{path}.client_key_file", "goes with client_cert_file, the certificate of that key"
        )


def _check_jwt(jwt: Jwt) -> None:
    if (jwt.jwks_file is None) == (jwt.public_key_file is None):
        raise ConfigError("auth.jwt", "needs one of jwks_file and public_key_file")
    for i, algorithm in enumerate(jwt.algorithms):
        _one_of(f"auth.jwt.algorithms[{i}]", algorithm, ASYMMETRIC)


def _one_of(path: str, value: str | int, choices: Sequence[str | int]) -> None:
    if value not in choices:
        raise ConfigError(path, f"has to be one of {', '.join(map(str, choices))}, got {value!r}")


def _unique(path: str, names: Iterable[str], what: str) -> None:
    """`path` has `{}` where the number of the entry goes."""
    seen: dict[str, str] = {}
    for i, name in enumerate(names):
        here = path.format(i)
        if name in seen:
            raise ConfigError(here, f"{what} {name!r} is already {seen[name]}")
        seen[name] = here


def _with_ca_file(store: Store) -> Store:
    """In a parameter that redis-py has for it."""
    if store.ca_file is None:
        return store
    joint = "&" if "?" in store.url else "?"
    return replace(store, url=f"{store.url}{joint}ssl_ca_certs={quote(store.ca_file)}")


def _check_store(store: Store) -> None:
    _check_store_url(store.url)
    if store.ca_file and not store.url.startswith("rediss://"):
        raise ConfigError("store.ca_file", "goes with a store.url that starts with rediss://")
    if store.ca_file and not Path(store.ca_file).is_file():
        raise ConfigError("store.ca_file", f"no such file: {store.ca_file}")
    _one_of("store.on_outage", store.on_outage, ("hold", "refuse", "share"))
    _one_of("store.on_lease_lost", store.on_lease_lost, ("cut", "keep"))
    if store.heartbeat_seconds >= store.lease_seconds / 2:
        raise ConfigError(
            "store.heartbeat_seconds",
            f"{store.heartbeat_seconds:g} has to be under half of store.lease_seconds ({store.lease_seconds:g})",
        )


def _check_store_url(text: str) -> None:
    path = "store.url"
    if text == EMBEDDED:
        return
    grammar = text.partition("://")[0]
    if grammar in _SERVERS_PATH:
        _check_servers(grammar, text)
        return
    url = _split(text, path)
    if url.scheme not in ("redis", "rediss", "unix"):
        known = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
        raise ConfigError(path, f"has to be embedded or start with {known}")
    if url.fragment or {name for name, _ in parse_qsl(url.query, keep_blank_values=True)} - {"db"}:
        raise ConfigError(path, "may have no parameter but db")
    if url.scheme == "unix":
        if not url.path.strip("/"):
            raise ConfigError(path, "names no socket, such as unix:///run/valkey.sock")
        return
    if not url.hostname or not re.fullmatch(r"(/\d*)?", url.path):
        raise ConfigError(path, f"has to be {url.scheme}://host:port/number, got {without_password(text)!r}")


def _check_servers(grammar: str, text: str) -> None:
    """Several servers, as `ledger/address.py` reads them."""
    path = "store.url"
    login, _, rest = text.removeprefix(f"{grammar}://").rpartition("@")
    listed, slash, tail = rest.partition("/")
    hosts = listed.split(",")
    good = (
        re.fullmatch(r"[\x21-\x2e\x30-\x3f\x41-\x7e]*", login)
        and all(re.fullmatch(_HOST, host) for host in hosts)
        and re.fullmatch(_SERVERS_PATH[grammar], slash + tail)
    )
    if not good:
        raise ConfigError(path, f"has to be {_SERVERS_FORM[grammar]}, got {without_password(text)!r}")
    if len(hosts) > SERVERS_MAX:
        raise ConfigError(path, f"names {len(hosts)} servers, at most {SERVERS_MAX} are asked")
    for host in hosts:
        _split(f"{grammar}://{host}", path)


def _check_classes(classes: tuple[PriorityClass, ...]) -> None:
    _unique("classes[{}].name", (class_.name for class_ in classes), "class")
    if classes[0].share != 0:
        raise ConfigError(
            "classes[0].share", f"{classes[0].share:g}, but the highest class goes first and needs none"
        )
    total = sum(class_.share for class_ in classes)
    if total >= 1:
        raise ConfigError("classes", f"their shares sum to {total:g}, which has to be under 1")
    for i, class_ in enumerate(classes):
        _check_promise(class_.mode, f"classes[{i}].mode")


def _check_fleet(fleet: Fleet, path: str) -> None:
    _unique(f"{path}.aliases[{{}}]", fleet.aliases, "alias")
    if fleet.model in fleet.aliases:
        raise ConfigError(f"{path}.aliases", f"{fleet.model!r} is the model itself")
    cap = fleet.max_output_tokens
    if cap is not None and fleet.default_output_tokens > cap:
        shown = fleet.default_output_tokens
        raise ConfigError(f"{path}.default_output_tokens", f"{shown} is over max_output_tokens ({cap})")
    _one_of(f"{path}.share_prefixes", fleet.share_prefixes, (AUTO, OFF))
    _one_of(f"{path}.soft_hold", fleet.soft_hold, (AUTO, OFF))
    _unique(f"{path}.pools[{{}}].name", (pool.name for pool in fleet.pools), "pool")
    _check_bounds(fleet.pools, path)
    _check_lanes(fleet, path)
    _check_pins(fleet, path)
    for p, pool in enumerate(fleet.pools):
        _check_sources(pool, f"{path}.pools[{p}]")
        _one_of(f"{path}.pools[{p}].mode", pool.mode, [mode.value for mode in Mode])
    replicas = {
        f"{path}.pools[{p}].replicas[{r}]": replica.name
        for p, pool in enumerate(fleet.pools)
        for r, replica in enumerate(pool.replicas)
    }
    seen: dict[str, str] = {}
    for here, name in replicas.items():
        if name in seen:
            raise ConfigError(
                f"{here}.name", f"replica {name!r} is already {seen[name]}; give one another name"
            )
        seen[name] = here


def _check_pins(fleet: Fleet, path: str) -> None:
    pins = fleet.pinned_prefixes
    _unique(f"{path}.pinned_prefixes[{{}}].name", (prefix.name for prefix in pins), "prefix")
    for i, prefix in enumerate(pins):
        here = f"{path}.pinned_prefixes[{i}]"
        if (prefix.prompt is None) == (prefix.messages is None):
            raise ConfigError(here, "needs one of prompt and messages")
        if prefix.tools is not None and prefix.messages is None:
            raise ConfigError(f"{here}.tools", "goes with messages")
        if prefix.model is not None and prefix.model not in fleet.models:
            raise ConfigError(f"{here}.model", f"{prefix.model!r} is no name of this fleet")
        made = prefix.pin(fleet.model)
        if isinstance(made, Refusal):
            raise ConfigError(f"{here}.{made.param or 'messages'}", made.message)


def _check_sources(pool: Pool, path: str) -> None:
    source = pool.replicas_from
    if source is None:
        if not pool.replicas:
            raise ConfigError(f"{path}.replicas", "lists none, and no replicas_from says where to look")
        return
    named = [name for name in ("dns", "file", "endpoint_slices") if getattr(source, name) is not None]
    if len(named) != 1:
        shown = " and ".join(named) or "none"
        raise ConfigError(
            f"{path}.replicas_from", f"has to name one of dns, file, endpoint_slices, names {shown}"
        )


def _check_bounds(pools: tuple[Pool, ...], path: str) -> None:
    for i, (lower, upper) in enumerate(pairwise(pools)):
        if lower.max_prompt_tokens is None:
            raise ConfigError(
                f"{path}.pools[{i}].max_prompt_tokens", "missing; only the last pool may be unbounded"
            )
        if upper.max_prompt_tokens is not None and upper.max_prompt_tokens <= lower.max_prompt_tokens:
            raise ConfigError(
                f"{path}.pools[{i + 1}].max_prompt_tokens",
                f"{upper.max_prompt_tokens} has to be over the {lower.max_prompt_tokens} of the pool before",
            )


def _check_lanes(fleet: Fleet, path: str) -> None:
    pools = [pool.name for pool in fleet.pools]
    for lane, used in fleet.lanes.items():
        here = f"{path}.lanes.{lane}"
        if lane not in pools:
            raise ConfigError(
                here, f"a lane is named as the pool whose calls it takes, one of {', '.join(pools)}"
            )
        if not used:
            raise ConfigError(here, "names no pool")
        for name in used:
            if name not in pools:
                raise ConfigError(here, f"unknown pool {name!r}, known are {', '.join(pools)}")
        _unique(f"{here}[{{}}]", used, "pool")


def _check_names_across(fleets: tuple[Fleet, ...]) -> None:
    """A name leads to one fleet, whether a client, an operator or a metric uses it."""
    owners: dict[str, str] = {}
    for i, fleet in enumerate(fleets):
        for name in dict.fromkeys((fleet.name, *fleet.models)):
            if name in owners:
                raise ConfigError(f"fleets[{i}]", f"the name {name!r} already belongs to {owners[name]}")
            owners[name] = f"fleets[{i}]"


def _check_urls_across(fleets: tuple[Fleet, ...]) -> None:
    """One engine under two replicas would be given out twice."""
    owners: dict[tuple[str | None, int], dict[int | None, str]] = {}
    for f, fleet in enumerate(fleets):
        for p, pool in enumerate(fleet.pools):
            for r, replica in enumerate(pool.replicas):
                here = f"fleets[{f}].pools[{p}].replicas[{r}].url"
                url, rank = urlsplit(replica.url), replica.data_parallel_rank
                others = owners.setdefault((url.hostname, _port(url)), {})
                # Without a rank it is all engines behind the URL.
                taken = others.get(rank) or (
                    next(iter(others.values()), "") if rank is None else others.get(None)
                )
                if taken:
                    raise ConfigError(here, f"{replica.url} is already {taken}")
                others[rank] = here


# Keys -------------------------------------------------------------------------------------------------------


def _parse_expiries(keys: Any) -> None:
    for i, entry in enumerate(keys if isinstance(keys, list) else ()):
        if isinstance(entry, dict) and entry.get("expires") is not None:
            entry["expires"] = _epoch_ms(entry["expires"], f"keys[{i}].expires")


def _epoch_ms(value: Any, path: str) -> int:
    found = moment(value) if isinstance(value, str) else None
    if found is None or found.tzinfo is None:
        raise ConfigError(
            path, "has to be a date (2027-01-31) or a date and time with zone (2027-01-31T12:00:00Z)"
        )
    return round(found.timestamp() * 1_000)


def moment(text: str) -> datetime | None:
    """An ISO date as its first moment in UTC, or a date and time, which may lack a zone; None for anything else."""
    try:
        if len(text) == len("2027-01-31"):
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _check_keys(keys: tuple[KeyEntry, ...], classes: Collection[str] | None) -> None:
    _unique("keys[{}].name", (key.name for key in keys), "key")
    hashes: dict[str, int] = {}
    for i, key in enumerate(keys):
        if key.sha256 in hashes:
            raise ConfigError(f"keys[{i}].sha256", f"is also that of keys[{hashes[key.sha256]}]")
        if key.sha256 is not None:
            hashes[key.sha256] = i
        if classes is not None and key.class_ not in classes:
            raise ConfigError(f"keys[{i}].class", f"unknown class, known are {', '.join(classes)}")
        _check_class_name(key.class_, f"keys[{i}].class")
        _check_promise(key.mode, f"keys[{i}].mode")
    names = {key.name: key.group for key in keys}
    for i, key in enumerate(keys):
        if key.group in names and names[key.group] != key.group:
            raise ConfigError(f"keys[{i}].group", f"{key.group!r} is the name of a key outside of the group")


def _check_secrets(keys: tuple[KeyEntry, ...]) -> None:
    for i, key in enumerate(keys):
        if key.sha256 is None:
            raise ConfigError(f"keys[{i}].sha256", f"missing; {SECRETLESS}")


def _check_class_name(name: str, path: str) -> None:
    if not re.match(NAME, name):
        raise ConfigError(path, f"1 to {NAME_LENGTH_MAX} of the characters a-z 0-9 - are needed")


def _with_group_limits(keys: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
    """Keys of a group share its limits: those that state some have to agree, the others take them over."""
    stated: dict[str, tuple[Limits, int]] = {}
    for i, key in enumerate(keys):
        if key.group is None or key.limits == Limits():
            continue
        limits, first = stated.setdefault(key.group, (key.limits, i))
        if limits != key.limits:
            raise ConfigError(
                f"keys[{i}].limits", f"differ from those of keys[{first}] in group {key.group!r}"
            )
    return tuple(
        replace(key, limits=stated[key.group][0]) if key.group is not None and key.group in stated else key
        for key in keys
    )
