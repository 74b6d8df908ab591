"""Settings: what a file, the environment and the defaults give together, and the one line that a mistake gets."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import (
    POOLS_MAX,
    ConfigError,
    KeyEntry,
    ReplicasFrom,
    Settings,
    Tokenizer,
    found_replicas,
    load,
    load_keys,
    load_replicas,
    load_secrets,
    without_password,
)

CLASSES = ("high", "normal", "low")


def small() -> dict[str, Any]:
    return {"fleets": [{"model": "demo", "pools": [{"name": "all", "replicas": ["http://engine:8000"]}]}]}


def two_pools() -> dict[str, Any]:
    pools = [
        {"name": "short", "max_prompt_tokens": 4096, "replicas": ["http://s0:8000", "http://s1:8000"]},
        {"name": "long", "replicas": [{"url": "http://l0:8000", "max_num_seqs": 128}]},
    ]
    return {"fleets": [{"model": "demo", "pools": pools}]}


def loaded(tmp_path: Path, content: Any, **environ: str) -> Settings:
    path = tmp_path / "kvgate.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return load(path, environ)


def problem(tmp_path: Path, content: Any, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, content, **environ)
    text = str(caught.value)
    assert "\n" not in text
    return text


def with_(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`content` with the value at a path such as `fleets.0.name`."""
    *parts, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    here: Any = content
    for part in parts:
        here = here[part] if isinstance(part, int) else here.setdefault(part, {})
    here[last] = value
    return content


def test_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    settings = loaded(tmp_path, small())
    assert (settings.store.url, settings.store.lease_seconds, settings.store.heartbeat_seconds) == (
        "embedded",
        6,
        1,
    )
    assert (settings.store.hold_calls_max, settings.store.hold_bytes_max) == (256, 67_108_864)
    assert (settings.server.body_bytes_max, settings.server.n_max) == (8_388_608, 16)
    assert settings.auth.keys_file == str(tmp_path / "keys.yaml")
    assert settings.log.calls is None
    classes = [(c.name, c.share, c.depth_max, c.seconds_max) for c in settings.classes]
    assert classes == [("high", 0, 1_000, 30), ("normal", 0.2, 1_000, 30), ("low", 0.1, 1_000, 300)]
    fleet = settings.fleets[0]
    assert (fleet.name, fleet.default_output_tokens, fleet.safe_fraction) == ("demo", 1_024, 0.95)
    assert fleet.lanes == {"all": ("all",)}


def test_classes_take_the_bounds_of_the_queue(tmp_path: Path) -> None:
    content = small() | {"queue": {"depth_max": 7, "seconds_max": 5}}
    classes = loaded(tmp_path, content).classes
    assert [(c.depth_max, c.seconds_max) for c in classes] == [(7, 5), (7, 5), (7, 300)]


def test_a_queue_switched_off_by_a_variable_is_off_in_every_class(tmp_path: Path) -> None:
    settings = loaded(tmp_path, small(), KVGATE_QUEUE__DEPTH_MAX="0")
    assert [c.depth_max for c in settings.classes] == [0, 0, 0]


def test_the_default_class_is_normal_or_the_lowest(tmp_path: Path) -> None:
    assert loaded(tmp_path, small()).default_class == "normal"
    assert loaded(tmp_path, small() | {"classes": [{"name": "gold"}, {"name": "tin"}]}).default_class == "tin"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-3-70b-instruct"),
        ("/models/Qwen_2/", "qwen-2"),
        ("m" * 60, "m" * 40),
    ],
)
def test_a_fleet_is_named_from_its_model(tmp_path: Path, model: str, name: str) -> None:
    assert loaded(tmp_path, with_(small(), "fleets.0.model", model)).fleets[0].name == name


def test_a_tokenizer_is_a_folder_or_files_or_the_engine(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    asked: list[Any] = ["model", {"file": "model"}, {"file": "/m/tokenizer.json", "chat_template": "c.jinja"}]
    found = [
        loaded(tmp_path, with_(small(), "fleets.0.tokenizer", each)).fleets[0].tokenizer for each in asked
    ]
    folder = Tokenizer(file=str(tmp_path / "model/tokenizer.json"))
    files = Tokenizer(file="/m/tokenizer.json", chat_template=str(tmp_path / "c.jinja"))
    assert found == [folder, folder, files]
    for none in ({}, {"tokenizer": "engine"}):
        content = small()
        content["fleets"][0].update(none)
        assert loaded(tmp_path, content).fleets[0].tokenizer == none.get("tokenizer")


@pytest.mark.parametrize("name", ["share_prefixes", "soft_hold"])
def test_prefixes_are_shared_and_histories_held_unless_it_is_off(tmp_path: Path, name: str) -> None:
    """YAML takes a bare `off` for false."""
    assert getattr(loaded(tmp_path, small()).fleets[0], name) == "auto"
    for given, found in (("auto", "auto"), ("off", "off"), (False, "off")):
        content = with_(small(), f"fleets.0.{name}", given)
        assert getattr(loaded(tmp_path, content).fleets[0], name) == found
    for wrong in (True, "always"):
        told = problem(tmp_path, with_(small(), f"fleets.0.{name}", wrong))
        assert told.startswith(
            f"fleets[0].{name}: has to be one of auto, off, got {wrong!r} (kvgate.yaml line"
        )


@pytest.mark.parametrize(
    ("url", "stored", "name"),
    [
        ("http://vllm-0:8000", "http://vllm-0:8000", "vllm-0-8000"),
        ("https://Engine.Example/", "https://engine.example", "engine-example-443"),
        ("http://[::1]:9", "http://[::1]:9", "1-9"),
        (f"http://{'a' * 60}:8000", f"http://{'a' * 60}:8000", f"{'a' * 35}-8000"),
    ],
)
def test_a_replica_is_named_from_host_and_port(tmp_path: Path, url: str, stored: str, name: str) -> None:
    content = with_(small(), "fleets.0.pools.0.replicas.0", url)
    replica = loaded(tmp_path, content).fleets[0].pools[0].replicas[0]
    assert (replica.url, replica.name) == (stored, name)


def test_hosts_of_media_are_compared_in_lower_case(tmp_path: Path) -> None:
    content = with_(two_pools(), "fleets.0.media", {"hosts": ["Pics.Example", "[::1]"]})
    assert loaded(tmp_path, content).fleets[0].media.hosts == ("pics.example", "[::1]")
    assert loaded(tmp_path, two_pools()).fleets[0].media.hosts is None


def test_every_pool_has_a_lane(tmp_path: Path) -> None:
    content = with_(two_pools(), "fleets.0.lanes", {"short": ["short", "long"]})
    assert loaded(tmp_path, content).fleets[0].lanes == {"short": ("short", "long"), "long": ("long",)}


def test_a_fleet_has_as_many_pools_as_the_store_can_look_at(tmp_path: Path) -> None:
    pools = [
        {"name": f"p{i}", "max_prompt_tokens": i + 1, "replicas": [f"http://h{i}:8000"]}
        for i in range(POOLS_MAX + 1)
    ]
    found = loaded(tmp_path, with_(two_pools(), "fleets.0.pools", pools[:-1]))
    assert len(found.fleets[0].lanes) == POOLS_MAX
    with pytest.raises(ConfigError, match=rf"fleets\[0\].pools: .*{POOLS_MAX}"):
        loaded(tmp_path, with_(two_pools(), "fleets.0.pools", pools))


BOMB = "\n".join(["a: &l0 [x]"] + [f"b{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)])
"""Ten lines for a billion values."""


def test_anchors_are_copies(tmp_path: Path) -> None:
    text = """
    fleets:
      - model: a
        pools: [{name: x, max_prompt_tokens: 5, replicas: &r [{url: http://a:1}]}]
      - {model: b, pools: [{name: x, replicas: *r}]}
    """
    settings = loaded(tmp_path, text, KVGATE_FLEETS__1__POOLS__0__REPLICAS__0__URL="http://b:1")
    assert [fleet.pools[0].replicas[0].url for fleet in settings.fleets] == ["http://a:1", "http://b:1"]


def header(name: str, networks: list[str] | None = None) -> dict[str, Any]:
    return {"name": name, "from": ["10.0.0.0/8"] if networks is None else networks}


def jwt(**changes: Any) -> dict[str, Any]:
    return {"issuer": "i", "audience": "a", "jwks_file": "jwks.json", **changes}


def test_keys_named_from_outside(tmp_path: Path) -> None:
    content = with_(
        with_(small(), "auth.trusted_header", header("X-Who", ["::1", "10.0.0.0/8"])), "auth.jwt", jwt()
    )
    auth = loaded(tmp_path, content).auth
    assert auth.trusted_header
    assert (auth.trusted_header.name, auth.trusted_header.from_) == ("x-who", ("::1", "10.0.0.0/8"))
    assert auth.jwt
    assert (auth.jwt.jwks_file, auth.jwt.claim) == (str(tmp_path / "jwks.json"), "sub")
    assert auth.jwt.algorithms == ("RS256",)
    assert not loaded(tmp_path, small()).auth.names_from_outside


def test_with_keys_in_the_store_no_file_is_needed(tmp_path: Path) -> None:
    content = with_(with_(small(), "auth", {"keys_in_store": True}), "store", {"url": "unix:///s"})
    assert loaded(tmp_path, content).auth.keys_file is None
    content = with_(content, "auth.keys_file", "k.yaml")
    assert loaded(tmp_path, content).auth.keys_file == str(tmp_path / "k.yaml")


# Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "starts"),
    [
        ("stoer", {}, "stoer: unknown setting"),
        ("server.body_bytes", 1, "server.body_bytes: unknown setting"),
        ("server.n_max", 0, "server.n_max: expected whole number >= 1, got 0"),
        ("server.n_max", 129, "server.n_max: expected whole number <= 128, got 129"),
        ("server.n_max", True, "server.n_max: expected whole number, got True"),
        ("server.n_max", 2**70, "server.n_max: expected whole number <= 128"),
        ("server.body_seconds", "30s", "server.body_seconds: expected number, got '30s'"),
        ("queue.depth_max", -1, "queue.depth_max: expected whole number >= 0, got -1"),
        ("queue.seconds_max", 0, "queue.seconds_max: expected number > 0"),
        ("store.heartbeat_seconds", 3, "store.heartbeat_seconds: 3 has to be under half of store.lease_seconds (6)"),
        ("store.on_outage", "panic", "store.on_outage: has to be one of hold, refuse, share, got 'panic'"),
        ("store.on_lease_lost", "x", "store.on_lease_lost: has to be one of cut, keep"),
        ("store.url", "redis+sentinel://h1:26379,h2:26379", "store.url: has to be redis+sentinel://host:port,host"),
        ("store.url", "redis+sentinel://h1/my name/0", "store.url: has to be redis+sentinel://host:port,host:port/NA"),
        ("store.url", "redis+sentinel://h1/m/zero", "store.url: has to be redis+sentinel://host:port,host:port/NAME/"),
        ("store.url", "redis+sentinel://h1,,h2/m/0", "store.url: has to be redis+sentinel://host:port,host:port/NAME"),
        ("store.url", "redis+sentinel://h1,h2:0/m", "store.url: is not a URL with a port of 1 to 65535"),
        ("store.url", "redis+cluster://h1:6379/1", "store.url: has to be redis+cluster://host:port,host:port, got"),
        ("store.url", "redis+cluster://", "store.url: has to be redis+cluster://host:port,host:port, got"),
        ("store.url", "redis+cluster://" + ",".join("abcdefghijklmnopq"), "store.url: names 17 servers, at most 16"),
        ("store.url", "redis+cluster://h1:99999", "store.url: is not a URL with a port of 1 to 65535"),
        ("store.ca_file", "ca.pem", "store.ca_file: goes with a store.url that starts with rediss://"),
        ("store", {"url": "rediss://h", "ca_file": "none.pem"}, "store.ca_file: no such file"),
        ("auth.keys_in_store", True, "auth.keys_in_store: an embedded store forgets them when it ends"),
        ("routes.pass_through", ["classify"], "routes.pass_through[0]: has to be a whole path, such as /classify"),
        ("routes.pass_through", ["/a", "/b?c=1"], "routes.pass_through[1]: has to be a whole path"),
        ("routes.pass_through", ["/a/../b"], "routes.pass_through[0]: has to be a whole path"),
        ("routes.pass_through", ["/a/"], "routes.pass_through[0]: has to be a whole path"),
        ("routes.pass_through", ["//a"], "routes.pass_through[0]: has to be a whole path"),
        ("routes.pass_through", ["/a", "/a"], "routes.pass_through[1]: /a is there twice"),
        ("routes.pass_through", ["/v1/completions"], "routes.pass_through[0]: /v1/completions is answered by kvgate"),
        ("routes.pass_through", ["/tokenize"], "routes.pass_through[0]: /tokenize is answered by kvgate"),
        ("routes.pass_through", ["/metrics"], "routes.pass_through[0]: /metrics is answered by kvgate"),
        ("routes.pass_through", ["/admin/v1/state"], "routes.pass_through[0]: /admin/v1/state is answered by kvgate"),
        ("routes.unreserved_max", 0, "routes.unreserved_max: expected whole number >= 1"),
        ("auth.trusted_header", {"name": "x-who"}, "auth.trusted_header.from: missing"),
        ("auth.trusted_header", header("x-who", []), "auth.trusted_header.from: expected list of length >= 1"),
        ("auth.trusted_header", header("x-who", ["10.0.0.1/8"]), "auth.trusted_header.from[0]: has to be an address"),
        ("auth.trusted_header", header("x-who", ["::1", "h"]), "auth.trusted_header.from[1]: has to be an address"),
        ("auth.trusted_header", header("x-who", ["0.0.0.0/0"]), "auth.trusted_header.from[0]: 0.0.0.0/0 is everybody"),
        ("auth.trusted_header", header("x-who", ["::/0"]), "auth.trusted_header.from[0]: ::/0 is everybody"),
        ("auth.trusted_header", header("x who"), "auth.trusted_header.name: expected text matching"),
        ("auth.trusted_header", header("Authorization"), "auth.trusted_header.name: authorization has another meaning"),
        ("auth.trusted_header", header("user-agent"), "auth.trusted_header.name: user-agent has another meaning"),
        ("auth.trusted_header", header("X-Prompt-Tokens"), "auth.trusted_header.name: x-prompt-tokens has another"),
        ("auth.trusted_header", header("x-kvgate-key"), "auth.trusted_header.name: x-kvgate-key has another meaning"),
        ("auth.jwt", jwt(issuer=None), "auth.jwt.issuer: expected text"),
        ("auth.jwt", {"issuer": "i"}, "auth.jwt.audience: missing"),
        ("auth.jwt", jwt(audience=""), "auth.jwt.audience: expected"),
        ("auth.jwt", jwt(public_key_file="k.pem"), "auth.jwt: needs one of jwks_file and public_key_file"),
        ("auth.jwt", jwt(jwks_file=None), "auth.jwt: needs one of jwks_file and public_key_file"),
        ("auth.jwt", jwt(algorithms=[]), "auth.jwt.algorithms: expected list of length >= 1"),
        ("auth.jwt", jwt(algorithms=["RS256", "HS256"]), "auth.jwt.algorithms[1]: has to be one of RS256"),
        ("auth.jwt", jwt(algorithms=["none"]), "auth.jwt.algorithms[0]: has to be one of RS256"),
        ("auth.jwt", jwt(leeway=60), "auth.jwt.leeway: unknown setting"),
        ("store.url", "http://h", "store.url: has to be embedded or start with"),
        ("store.url", "unix://", "store.url: names no socket"),
        ("store.url", "redis://h:99999", "store.url: is not a URL with a port"),
        ("store.url", "redis://h/zero", "store.url: has to be redis://host:port/number"),
        ("store.url", "redis://h?ssl=1", "store.url: may have no parameter but db"),
        ("answers.overload_status", 500, "answers.overload_status: has to be one of 429, 503, 529, got 500"),
        ("answers.keepalive_seconds", 0.05, "answers.keepalive_seconds: has to be 0 (off) or 0.1 to 3600, got 0.05"),
        ("log.level", "loud", "log.level: has to be one of debug, info, warning, error, got 'loud'"),
        ("upstream.ca_file", "none.pem", "upstream.ca_file: no such file"),
        ("upstream.client_cert_file", "none.pem", "upstream.client_cert_file: no such file"),
        ("fleets.0.pools.0.upstream", {"ca_file": "x"}, "fleets[0].pools[0].upstream.ca_file: no such file"),
        ("fleets.0.pools.0.upstream", {"connect_seconds": 1}, "fleets[0].pools[0].upstream.connect_seconds: unknown"),
        ("classes", [], "classes: expected list of length >= 1, got a list of 0"),
        ("classes", [{"name": "a", "share": 0.1}], "classes[0].share: 0.1, but the highest class"),
        ("classes", [{"name": "a"}, {"name": "a"}], "classes[1].name: class 'a' is already classes[0].name"),
        ("classes", [{"name": str(i), "share": 0.5 * (i > 0)} for i in range(3)], "classes: their shares sum to 1"),
        ("classes", [{"name": str(i)} for i in range(9)], "classes: expected list of length <= 8"),
        ("fleets", [], "fleets: expected list of length >= 1"),
        ("fleets.0.name", "No_Caps", "fleets[0].name: expected text matching '[a-z0-9-]{0,40}', got 'No_Caps'"),
        ("fleets.0.model", "///", "fleets[0].name: missing"),
        ("fleets.0.safe_fraction", 0, "fleets[0].safe_fraction: expected number > 0"),
        ("fleets.0.safe_fraction", 1.1, "fleets[0].safe_fraction: expected number <= 1.0, got 1.1"),
        ("fleets.0.tokenizer", {"chat_template": "a"}, "fleets[0].tokenizer.file: missing"),
        ("fleets.0.tokenizer", {"file": "a", "x": 1}, "fleets[0].tokenizer.x: unknown setting"),
        ("fleets.0.tokenizer", 7, "fleets[0].tokenizer: expected text or mapping or nothing, got 7"),
        ("fleets.0.media", {"image": 1}, "fleets[0].media.image: unknown setting"),
        ("fleets.0.media", {"image_tokens": -1}, "fleets[0].media.image_tokens: expected whole number >= 0"),
        ("fleets.0.media", {"hosts": ["a", "b:80"]}, "fleets[0].media.hosts[1]: has to be a host alone"),
        ("fleets.0.media", {"hosts": ["https://a"]}, "fleets[0].media.hosts[0]: has to be a host alone"),
        ("fleets.0.media", {"hosts": ["a", "A"]}, "fleets[0].media.hosts[1]: host 'a' is already"),
        ("fleets.0.token_factor", 0.4, "fleets[0].token_factor: expected number >= 0.5"),
        ("fleets.0.max_output_tokens", 9, "fleets[0].default_output_tokens: 1024 is over max_output_tokens (9)"),
        ("fleets.0.aliases", ["x", "x"], "fleets[0].aliases[1]: alias 'x' is already"),
        ("fleets.0.aliases", ["demo"], "fleets[0].aliases: 'demo' is the model itself"),
        ("fleets.0.pinned_prefixes", [{"name": "a"}], "fleets[0].pinned_prefixes[0]: needs one of prompt and messages"),
        (
            "fleets.0.pinned_prefixes",
            [{"name": "a", "prompt": "x", "tools": [{}]}],
            "fleets[0].pinned_prefixes[0].tools: goes with messages",
        ),
        (
            "fleets.0.pinned_prefixes",
            [{"name": "a", "prompt": "x", "model": "other"}],
            "fleets[0].pinned_prefixes[0].model: 'other' is no name of this fleet",
        ),
        (
            "fleets.0.pinned_prefixes",
            [{"name": "a", "prompt": "x"}, {"name": "a", "prompt": "y"}],
            "fleets[0].pinned_prefixes[1].name: prefix 'a' is already",
        ),
        (
            "fleets.0.pinned_prefixes",
            [{"name": "a", "messages": [{"role": "user", "content": 7}]}],
            "fleets[0].pinned_prefixes[0].messages: `content` must be a string or a list of parts.",
        ),
        ("fleets.0.lanes", {"short": ["shrt"]}, "fleets[0].lanes.short: unknown pool 'shrt', known are short, long"),
        ("fleets.0.lanes", {"x": ["short"]}, "fleets[0].lanes.x: a lane is named as the pool"),
        ("fleets.0.lanes", {"short": []}, "fleets[0].lanes.short: names no pool"),
        ("fleets.0.lanes", {"short": ["long"] * 2}, "fleets[0].lanes.short[1]: pool 'long' is already"),
        ("fleets.0.pools.0.max_prompt_tokens", None, "fleets[0].pools[0].max_prompt_tokens: missing; only the last"),
        ("fleets.0.pools.1.max_prompt_tokens", 4096, "fleets[0].pools[1].max_prompt_tokens: 4096 has to be over"),
        ("fleets.0.pools.1.name", "short", "fleets[0].pools[1].name: pool 'short' is already"),
        ("fleets.0.pools.0.replicas", [], "fleets[0].pools[0].replicas: lists none, and no replicas_from says where"),
        ("fleets.0.pools.0.replicas_from", {}, "fleets[0].pools[0].replicas_from: has to name one of dns, file,"),
        ("fleets.0.pools.0.replicas_from", {"dns": "http://h:1", "file": "f"}, "fleets[0].pools[0].replicas_from: has"),
        ("fleets.0.pools.0.replicas_from", {"dns": "h:1"}, "fleets[0].pools[0].replicas_from.dns: has to start with"),
        ("fleets.0.pools.0.replicas_from", {"dns": "http://h", "seconds": 0}, "fleets[0].pools[0].replicas_from.sec"),
        ("fleets.0.pools.0.replicas_from", {"endpoint_slices": {"service": "vllm"}}, "fleets[0].pools[0].replicas_fr"),
        (
            "fleets.0.pools.0.replicas_from",
            {"endpoint_slices": {"service": "v/../x", "namespace": "m"}},
            "fleets[0].pools[0].replicas_from.endpoint_slices.service",
        ),
        (
            "fleets.0.pools.0.replicas_from",
            {"endpoint_slices": {"service": "v", "namespace": "m", "api": "https://k/x"}},
            "fleets[0].pools[0].replicas_from.endpoint_slices.api: has to be scheme, host",
        ),
        ("fleets.0.pools.0.replicas.1", "ftp://h:1", "fleets[0].pools[0].replicas[1].url: has to start with http"),
        ("fleets.0.pools.0.replicas.1", "http://h:1/v1", "fleets[0].pools[0].replicas[1].url: has to be scheme, host"),
        ("fleets.0.pools.0.replicas.1", "http://u:p@h", "fleets[0].pools[0].replicas[1].url: has to be scheme, host"),
        ("fleets.0.pools.0.replicas.1", "http://:1", "fleets[0].pools[0].replicas[1].url: names no host"),
        ("fleets.0.pools.0.replicas.1", "http://h h", "fleets[0].pools[0].replicas[1].url: is empty, or holds"),
        ("fleets.0.pools.1.replicas.0", "http://S0:8000/", "fleets[0].pools[1].replicas[0].url: http://s0:8000 is"),
        ("fleets.0.pools.1.replicas.0.name", "s0-8000", "fleets[0].pools[1].replicas[0].name: replica 's0-8000'"),
        ("fleets.0.pools.1.replicas.0.num_gpu_blocks", 1, "fleets[0].pools[1].replicas[0].num_gpu_blocks: expected"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tmp_path: Path, path: str, value: Any, starts: str) -> None:
    text = problem(tmp_path, with_(two_pools(), path, value))
    assert text.startswith(starts)


def test_a_mistake_is_located(tmp_path: Path) -> None:
    text = "fleets:\n- model: demo\n  pools:\n  - name: all\n    replicas: [{url: 'http://a', nmae: b}]\n"
    assert problem(tmp_path, text).endswith("replicas[0].nmae: unknown setting (kvgate.yaml line 5)")
    missing = problem(tmp_path, "fleets:\n- name: x\n")
    assert missing == "fleets[0].model: missing (kvgate.yaml line 2)"


@pytest.mark.parametrize("name", ["first", "Demo"])
def test_a_name_leads_to_one_fleet(tmp_path: Path, name: str) -> None:
    other = {"model": "other", "aliases": [name], "pools": [{"name": "p", "replicas": ["http://o:1"]}]}
    content = with_(small(), "fleets.0.name", "first")
    content["fleets"][0]["model"] = "Demo"
    content["fleets"].append(other)
    assert problem(tmp_path, content).startswith(f"fleets[1]: the name '{name}' already belongs to fleets[0]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fleets: [", "kvgate.yaml line 2: not YAML"),
        ("log: {level: info}\nadmin: {}\nlog: {}\n", "kvgate.yaml line 3: key 'log' is already on line 1"),
        ("queue: {depth_max: 1, depth_max: 2}", "key 'depth_max' is already on line 1"),
        ("queue: &a {depth_max: *a}", "an anchor that contains itself"),
        (BOMB, "its anchors stand for more than 5000000 values"),
        ("queue: {seconds_max: .inf}", ".inf is not a finite number"),
        ("queue: {seconds_max: .NaN}", ".NaN is not a finite number"),
        ("queue: {seconds_max: 1.0e+400}", "1.0e+400 is not a finite number"),
        ("on: 1", "a key that is not text"),
        ("? [a]\n: 1", "a key that is not text"),
        ("- a", "the file does not hold settings by name"),
        ("x: !!python/object:os.system {}", "not YAML"),
        ("[" * 5_000, "kvgate.yaml"),
        ("x: \x01", "kvgate.yaml"),
        ("", "fleets: missing"),
        ("store:\nfleets:\n", "fleets: expected list, got nothing"),
    ],
)
def test_what_yaml_allows_and_settings_do_not(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problem(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml", {})


# Environment ------------------------------------------------------------------------------------------------------


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        two_pools() | {"store": {"url": "embedded"}},
        KVGATE_STORE__URL="redis://:p%23s@h:6379/1",
        KVGATE_AUTH__REQUIRED="false",
        KVGATE_CLASSES__1__SHARE="0.3",
        KVGATE_FLEETS__0__MODEL="other",
        KVGATE_FLEETS__0__ALIASES__0="nick",
        KVGATE_FLEETS__0__POOLS__0__REPLICAS__1__NUM_GPU_BLOCKS="512",
        PATH="/bin",
    )
    assert settings.store.url == "redis://:p%23s@h:6379/1"
    assert settings.auth.required is False
    assert settings.classes[1].share == 0.3
    assert settings.fleets[0].models == ("other", "nick")
    assert settings.fleets[0].pools[0].replicas[1].num_gpu_blocks == 512
    assert settings.fleets[0].pools[0].replicas[1].url == "http://s1:8000"


def test_variables_alone_are_enough(tmp_path: Path) -> None:
    environ = {f"KVGATE_FLEETS__0__POOLS__0__REPLICAS__{i}": f"http://e{i}:1" for i in range(12)}
    settings = loaded(
        tmp_path, "", KVGATE_FLEETS__0__MODEL="m", KVGATE_FLEETS__0__POOLS__0__NAME="p", **environ
    )
    urls = [replica.url for replica in settings.fleets[0].pools[0].replicas]
    assert urls == [f"http://e{i}:1" for i in range(12)]


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("KVGATE_FOO", "1", "foo: unknown setting (from KVGATE_FOO)"),
        ("KVGATE_STORE__URLS", "1", "store.urls: unknown setting (from KVGATE_STORE__URLS)"),
        ("KVGATE_QUEUE__DEPTH_MAX", "many", "got 'many' (from KVGATE_QUEUE__DEPTH_MAX)"),
        ("KVGATE_QUEUE__DEPTH_MAX", "[1]", "KVGATE_QUEUE__DEPTH_MAX: holds a list"),
        ("KVGATE_QUEUE__DEPTH_MAX", "@", "KVGATE_QUEUE__DEPTH_MAX: is not a plain YAML value"),
        ("KVGATE_FLEETS__7__MODEL", "m", "KVGATE_FLEETS__7__MODEL: names no setting: fleets has 1 entries"),
        ("KVGATE_FLEETS__X__MODEL", "m", "KVGATE_FLEETS__X__MODEL: names no setting"),
        (
            "KVGATE_FLEETS__0__MODEL__X",
            "m",
            "KVGATE_FLEETS__0__MODEL__X: names no setting: fleets[0].model is",
        ),
        ("KVGATE_STORE____URL", "m", "KVGATE_STORE____URL: names no setting"),
        ("KVGATE_", "m", "KVGATE_: names no setting"),
    ],
)
def test_a_variable_that_sets_nothing_is_named(
    tmp_path: Path, variable: str, value: str, expected: str
) -> None:
    assert expected in problem(tmp_path, small(), **{variable: value})


def test_variables_that_are_no_settings_are_left_alone(tmp_path: Path) -> None:
    environ = {
        "KVGATE_ADMIN_URL": "http://x",
        "KVGATE_ADMIN_TOKEN": "t",
        "KVGATE_UPSTREAM_KEY": "sk",
        "KVGATE_UPSTREAM__API_KEY_ENV": "KVGATE_UPSTREAM_KEY",
        # what Kubernetes adds beside Services named kvgate and kvgate-valkey
        "KVGATE_SERVICE_HOST": "10.0.0.1",
        "KVGATE_SERVICE_PORT_HTTP": "80",
        "KVGATE_PORT": "tcp://10.0.0.1:80",
        "KVGATE_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVGATE_VALKEY_PORT_6379_TCP": "tcp://10.0.0.2:6379",
    }
    settings = loaded(tmp_path, small(), **environ)
    secrets = load_secrets(settings, environ)
    assert (secrets.admin_token, secrets.engine_keys) == ("t", {"KVGATE_UPSTREAM_KEY": "sk"})
    assert "sk" not in repr(secrets)


def test_a_secret_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    settings = loaded(tmp_path, small() | {"upstream": {"api_key_env": "UPSTREAM_KEY"}})
    with pytest.raises(ConfigError, match=r"^upstream\.api_key_env: the variable that it names is not set$"):
        load_secrets(settings, {})
    with pytest.raises(ConfigError, match="no HTTP header can carry") as caught:
        load_secrets(settings, {"UPSTREAM_KEY": "two words"})
    assert "words" not in str(caught.value)


def test_a_pool_has_its_own_key_and_certificates_or_those_of_all(tmp_path: Path) -> None:
    """A certificate comes with its key: that of another one does not fit."""
    for name in ("ca.pem", "all.pem", "all.key", "own.pem"):
        (tmp_path / name).write_text("")
    common = {
        "api_key_env": "ALL",
        "ca_file": "ca.pem",
        "client_cert_file": "all.pem",
        "client_key_file": "all.key",
    }
    own = {"api_key_env": "KVGATE_OWN", "client_cert_file": "own.pem"}
    pools = [
        {"name": "short", "max_prompt_tokens": 100, "replicas": ["http://a:1"]},
        {"name": "long", "replicas": ["https://b:1"], "upstream": own},
    ]
    environ = {"ALL": "sk-all", "KVGATE_OWN": "sk-own", "UNUSED": "x"}
    settings = loaded(tmp_path, {"upstream": common, "fleets": [{"model": "m", "pools": pools}]}, **environ)
    short, long = (pool.upstream for pool in settings.fleets[0].pools)
    paths = (short.ca_file, short.client_cert_file, short.client_key_file)
    assert paths == tuple(f"{tmp_path}/{name}" for name in ("ca.pem", "all.pem", "all.key"))
    paths = (long.ca_file, long.client_cert_file, long.client_key_file)
    assert paths == (f"{tmp_path}/ca.pem", f"{tmp_path}/own.pem", None)
    assert (short.api_key_env, long.api_key_env) == ("ALL", "KVGATE_OWN")
    assert load_secrets(settings, environ).engine_keys == {"ALL": "sk-all", "KVGATE_OWN": "sk-own"}
    with pytest.raises(ConfigError, match=r"^fleets\[0\]\.pools\[1\]\.upstream\.api_key_env: the variable"):
        load_secrets(settings, {"ALL": "sk-all"})


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.key").write_text("")
    said = problem(tmp_path, with_(small(), "upstream", {"client_key_file": "own.key"}))
    assert said.startswith("upstream.client_key_file: goes with client_cert_file")


def test_an_unset_admin_token_is_none(tmp_path: Path) -> None:
    assert load_secrets(loaded(tmp_path, small()), {"KVGATE_ADMIN_TOKEN": ""}).admin_token is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("store.url", "redis://:hunter2@h/x"),
        ("store.url", "redis+sentinel://me:hunter2@h1,h2"),
        ("store.url", "redis+cluster://me:hunter2@h1,h2/9"),
        ("store.url", "redis+cluster://me:hunter2/@h1"),
        ("store.url", ["redis://:hunter2@h"]),
        ("upstream.api_key_env", "sk-hunter2"),
        ("upstream.api_key", "hunter2"),
        ("fleets.0.pools.0.replicas.0", "http://u:hunter2@h:1"),
    ],
)
def test_secrets_in_the_wrong_place_are_not_repeated(tmp_path: Path, path: str, value: Any) -> None:
    assert "hunter2" not in problem(tmp_path, with_(small(), path, value))


def test_the_url_of_the_store_carries_its_certificates(tmp_path: Path) -> None:
    (tmp_path / "our ca.pem").write_text("")
    for url, joint in (("rediss://h:1/0", "?"), ("rediss://h:1?db=3", "&")):
        store = loaded(tmp_path, small() | {"store": {"url": url, "ca_file": "our ca.pem"}}).store
        assert store.ca_file == f"{tmp_path}/our ca.pem"
        assert store.url == f"{url}{joint}ssl_ca_certs={tmp_path}/our%20ca.pem"


def test_the_call_log_is_beside_the_configuration(tmp_path: Path) -> None:
    for name, stored in (("calls.jsonl", f"{tmp_path}/calls.jsonl"), ("/var/log/calls", "/var/log/calls")):
        assert loaded(tmp_path, small() | {"log": {"calls": name}}).log.calls == stored


def test_a_password_is_taken_out_of_a_url() -> None:
    assert without_password("redis+sentinel://me:secret@h1,h2/m/0") == "redis+sentinel://***@h1,h2/m/0"
    assert without_password("redis://me:secret@h:1/0") == "redis://***@h:1/0"
    assert without_password("redis://h:1/0") == "redis://h:1/0"


# Keys -------------------------------------------------------------------------------------------------------------


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def keys_of(tmp_path: Path, content: Any) -> tuple[KeyEntry, ...]:
    path = tmp_path / "keys.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return load_keys(path, CLASSES)


def keys_problem(tmp_path: Path, *entries: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path, list(entries))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", ["", "# none yet\n", "keys:\n", "[]", "keys: []"])
def test_an_empty_file_has_no_keys(tmp_path: Path, content: str) -> None:
    assert keys_of(tmp_path, content) == ()


def test_line_ends_and_mark_of_another_system(tmp_path: Path) -> None:
    (key,) = keys_of(tmp_path, f"\ufeff# ours\r\n- name: a\r\n  sha256: {digest('a')}\r\n")
    assert (key.name, key.sha256) == ("a", digest("a"))


def test_any_well_formed_class_is_good_where_classes_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: a, sha256: {digest('a')}, class: gold}}\n")
    assert [key.class_ for key in load_keys(path, None)] == ["gold"]
    path.write_text(f"- {{name: a, sha256: {digest('a')}, class: Gold}}\n")
    with pytest.raises(ConfigError, match=r"keys\[0\].class: 1 to 40 of the characters"):
        load_keys(path, None)


@pytest.mark.parametrize("wrap", [lambda keys: keys, lambda keys: {"keys": keys}])
def test_keys_are_read(tmp_path: Path, wrap: Any) -> None:
    entry = {"name": "team.a", "sha256": digest("a"), "class": "low", "weight": 5, "models": ["demo"]}
    limits = {"limits": {"requests_max": 0, "blocks_max": 9}}
    first, second = keys_of(tmp_path, wrap([entry | limits, {"name": "b", "sha256": digest("b")}]))
    assert (first.class_, first.weight, first.models) == ("low", 5, ("demo",))
    assert (first.limits.requests_max, first.limits.blocks_max, first.limits.max_output_tokens) == (
        0,
        9,
        None,
    )
    assert (second.class_, second.weight, second.models, second.expires_ms) == ("normal", 1, None, None)


@pytest.mark.parametrize(
    ("written", "expected_ms"),
    [
        ("2027-01-31", 1_801_353_600_000),
        ("2027-01-31T01:00:00+01:00", 1_801_353_600_000),
        ("'2027-01-31T00:00:00.250Z'", 1_801_353_600_250),
    ],
)
def test_expiry_is_kept_as_epoch_milliseconds(tmp_path: Path, written: str, expected_ms: int) -> None:
    keys = keys_of(tmp_path, f"- {{name: a, sha256: {digest('a')}, expires: {written}}}\n")
    assert keys[0].expires_ms == expected_ms


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"name": "a:b"}, "keys[0].name: expected text matching"),
        ({"name": "a" * 65}, "keys[0].name: expected text matching"),
        (
            {"sha256": None},
            "keys[0].sha256: missing; only a key that auth.trusted_header or auth.jwt can name",
        ),
        ({"sha256": "secret"}, "keys[0].sha256: expected text matching '[0-9a-f]{64}' (keys.yaml line"),
        ({"class": "gold"}, "keys[0].class: unknown class, known are high, normal, low"),
        ({"weight": 0}, "keys[0].weight: expected whole number >= 1, got 0"),
        ({"weight": 1.5}, "keys[0].weight: expected whole number, got 1.5"),
        ({"limits": {"blocks_max": 0}}, "keys[0].limits.blocks_max: expected whole number >= 1, got 0"),
        ({"limits": {"requests_max": -1}}, "keys[0].limits.requests_max: expected whole number >= 0, got -1"),
        ({"expires": "2027-01-31T00:00:00"}, "keys[0].expires: has to be a date"),
        ({"expires": "soon"}, "keys[0].expires: has to be a date"),
        ({"expires": 1801353600000}, "keys[0].expires: has to be a date"),
        ({"secret": "kvg_x"}, "keys[0].secret: unknown setting"),
    ],
)
def test_a_mistake_in_a_key_is_named(tmp_path: Path, changes: dict[str, Any], starts: str) -> None:
    assert keys_problem(tmp_path, {"name": "a", "sha256": digest("a")} | changes).startswith(starts)


def test_keys_are_unique(tmp_path: Path) -> None:
    a = {"name": "a", "sha256": digest("a")}
    assert keys_problem(tmp_path, a, a | {"sha256": digest("b")}).startswith(
        "keys[1].name: key 'a' is already"
    )
    text = keys_problem(tmp_path, a, a | {"name": "b"})
    assert text.startswith("keys[1].sha256: is also that of keys[0] (keys.yaml line 4)")


def test_a_secret_pasted_into_the_file_is_not_repeated(tmp_path: Path) -> None:
    assert "kvg_hunter2" not in keys_problem(tmp_path, "kvg_hunter2")
    assert "kvg_hunter2" not in keys_problem(tmp_path, {"name": "a", "sha256": "kvg_hunter2"})
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path, "kvg_hunter2")
    assert "kvg_hunter2" not in str(caught.value)


def test_keys_of_a_group_share_its_limits(tmp_path: Path) -> None:
    a = {"name": "a", "sha256": digest("a"), "group": "team", "limits": {"blocks_max": 5}}
    b = {"name": "b", "sha256": digest("b"), "group": "team"}
    assert [key.limits.blocks_max for key in keys_of(tmp_path, [b, a])] == [5, 5]
    differing = b | {"limits": {"blocks_max": 6}}
    assert keys_problem(tmp_path, a, differing).startswith("keys[1].limits: differ from those of keys[0]")
    outside = {"name": "team", "sha256": digest("c")}
    assert keys_problem(tmp_path, a, outside).startswith("keys[0].group: 'team' is the name of a key outside")


def test_replicas_may_be_looked_for(tmp_path: Path) -> None:
    content = with_(small(), "fleets.0.pools.0.replicas", [])
    content = with_(content, "fleets.0.pools.0.replicas_from", {"file": "r.yaml", "max_num_seqs": 7})
    source = loaded(tmp_path, content).fleets[0].pools[0].replicas_from
    assert source is not None
    assert source.file == str(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text("- http://A:1\n- {url: http://b:2, max_num_seqs: 9, name: bee}\n")
    found = load_replicas(source)
    assert [(r.name, r.url, r.max_num_seqs) for r in found] == [
        ("a-1", "http://a:1", 7),
        ("bee", "http://b:2", 9),
    ]


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("- ftp://a", "replicas[0].url: has to start with http"),
        ("- {url: 'http://a:1', nmae: b}", "replicas[0].nmae: unknown setting"),
        ("- http://a:1\n- http://a:1", "replicas[1].name: replica 'a-1' is already"),
        ("replica: []", "replica: unknown setting"),
    ],
)
def test_a_mistake_in_a_file_of_replicas_is_named(tmp_path: Path, text: str, starts: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"line \d+") as caught:
        load_replicas(ReplicasFrom(file=str(tmp_path / "r.yaml")))
    assert str(caught.value).startswith(starts)


def test_what_a_source_finds_is_bounded(tmp_path: Path) -> None:
    source = ReplicasFrom(dns="http://h:1", prefill_tokens=5)
    (found,) = found_replicas(source, ["http://10.0.0.1:8000"] * 2)
    assert (found.name, found.prefill_tokens) == ("10-0-0-1-8000", 5)
    with pytest.raises(ConfigError, match="finds 257 replicas, a pool has 256 at most"):
        found_replicas(source, [f"http://h:{port}" for port in range(1, 258)])


def test_ranks_behind_one_url_are_replicas(tmp_path: Path) -> None:
    ranks = [{"url": "http://dp:8000", "data_parallel_rank": rank} for rank in (0, 1)]
    settings = loaded(tmp_path, with_(small(), "fleets.0.pools.0.replicas", ranks))
    found = settings.fleets[0].pools[0].replicas
    assert [(r.name, r.data_parallel_rank) for r in found] == [("dp-8000-r0", 0), ("dp-8000-r1", 1)]


@pytest.mark.parametrize("ranks", [(0, 0), (0, None), (None, 1), (None, None)])
def test_one_engine_has_one_place(tmp_path: Path, ranks: tuple[int | None, int | None]) -> None:
    replicas = [
        {"url": "http://dp:8000", "name": f"r{i}"} | ({} if rank is None else {"data_parallel_rank": rank})
        for i, rank in enumerate(ranks)
    ]
    text = problem(tmp_path, with_(small(), "fleets.0.pools.0.replicas", replicas))
    assert "replicas[1].url: http://dp:8000 is already fleets[0].pools[0].replicas[0].url" in text
