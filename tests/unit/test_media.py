"""Images, sounds and videos: which kind a part is, what it counts, and which hosts it may name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import config
from gateway.app import _plan as plan_of
from gateway.core.media import INLINE, MEDIA_TOKENS, NO_HOST, USUAL, Media, MediaRule, host_of
from gateway.core.outcomes import Code, Refusal
from gateway.core.prompt import PromptText
from gateway.core.request import Dialect, Endpoint, GenerationRequest, parse, read_passed

DATA = "data:image/png;base64," + "A" * 200_000
RULE = MediaRule(image_tokens=1000, audio_tokens=300, video_tokens=7000)
IMAGE, AUDIO, VIDEO, OTHER = Media(images=1), Media(audios=1), Media(videos=1), Media(others=1)
ANTHROPICS = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 200_000}}
BY_URL = {"type": "image", "source": {"type": "url", "url": "https://pics.example/a.png"}}


def body_of(endpoint: Endpoint, part: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
    if endpoint is Endpoint.CHAT_BATCH:
        return {"messages": [messages]}
    if endpoint is Endpoint.RESPONSES:
        return {"input": messages}
    if endpoint in (Endpoint.SCORE, Endpoint.SCORE_V1):
        return {"text_1": "look", "text_2": {"content": [part]}}
    if endpoint in (Endpoint.RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2):
        return {"query": {"content": [part]}, "documents": ["look"]}
    return {"messages": messages, "max_tokens": 4}


def read(endpoint: Endpoint, part: Any) -> GenerationRequest | Refusal:
    return parse(endpoint, json.dumps(body_of(endpoint, part)).encode(), 16)


def media_prompt(request: GenerationRequest | Refusal) -> PromptText:
    """The one of its prompts that has media."""
    assert isinstance(request, GenerationRequest), request
    (found,) = [p for p in request.prompts if isinstance(p, PromptText) and p.media.count]
    return found


def tokens(request: GenerationRequest) -> int:
    return sum(prompt.fixed_tokens for prompt in request.prompts if isinstance(prompt, PromptText))


WITH_PARTS = [e for e in Endpoint if e is not Endpoint.COMPLETIONS and not e.takes_form]


@pytest.mark.parametrize("endpoint", WITH_PARTS)
@pytest.mark.parametrize(
    ("part", "media", "each"),
    [
        ({"type": "image_url", "image_url": {"url": DATA}}, IMAGE, 1000),
        ({"type": "image_url", "image_url": DATA}, IMAGE, 1000),
        ({"image_url": DATA}, IMAGE, 1000),
        ({"type": "input_image", "image_url": DATA}, IMAGE, 1000),
        ({"type": "input_image", "file_id": "f"}, IMAGE, 1000),
        (ANTHROPICS, IMAGE, 1000),
        (BY_URL, IMAGE, 1000),
        ({"type": "input_audio", "input_audio": {"data": "A" * 300_000, "format": "wav"}}, AUDIO, 300),
        ({"type": "audio_url", "audio_url": {"url": "https://h/a.wav"}}, AUDIO, 300),
        ({"type": "video_url", "video_url": {"url": DATA}}, VIDEO, 7000),
        ({"type": "hologram", "data": "A" * 300_000}, OTHER, 7000),
        ({"type": ["image_url"]}, OTHER, 7000),
        ({}, OTHER, 7000),
        ({"uuid": "u", "video_url": None, "audio_url": None}, AUDIO, 300),
        ({"type": "image_url", "uuid": "u", "video_url": "https://h/v"}, VIDEO, 7000),
    ],
)
def test_each_counts_by_the_fleets_rule_and_never_as_text(
    endpoint: Endpoint, part: dict[str, Any], media: Media, each: int
) -> None:
    request = read(endpoint, part)
    prompt = media_prompt(request)
    assert prompt.media == media
    assert "A" * 100 not in "".join(map(str, prompt.texts))
    assert isinstance(request, GenerationRequest)
    assert tokens(request.by_rule(RULE)) == tokens(request) - MEDIA_TOKENS + each
    assert media_prompt(request.by_rule(RULE)).media_tokens == each


def test_a_text_with_a_uuid_is_read_as_the_media_that_it_has() -> None:
    """As vLLM does: the type of such a part counts for nothing."""
    part = {"type": "text", "text": "hi", "uuid": "u", "image_url": "https://evil.example/"}
    prompt = media_prompt(read(Endpoint.CHAT, part))
    assert (prompt.media, prompt.sources) == (IMAGE, (("image_url", "evil.example"),))
    assert prompt.texts[-1] == "hi"


@pytest.mark.parametrize("endpoint", WITH_PARTS)
@pytest.mark.parametrize("name", ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"])
def test_tensors_are_taken_where_the_fleet_says_what_one_counts(endpoint: Endpoint, name: str) -> None:
    for part in (
        {"type": name, "data": "AAAA"},
        {"type": name, name: "AAAA"},
        {name: "AAAA"},
        {"type": "image_url", "uuid": "u", name: None},
    ):
        request = read(endpoint, part)
        prompt = media_prompt(request)
        assert prompt.media == Media(tensors=1), part
        assert isinstance(request, GenerationRequest)
        refusal = request.not_taken(USUAL)
        assert refusal is not None
        assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, name)
        rule = MediaRule(tensor_tokens=500)
        assert request.not_taken(rule) is None
        assert tokens(request.by_rule(rule)) == tokens(request) + 500


def test_a_tensor_passes_where_no_blocks_are_held() -> None:
    """A fleet that names hosts takes it there, too: it comes from none of them."""
    body = json.dumps(body_of(Endpoint.CHAT, {"prompt_embeds": "AAAA"})).encode()
    request = read_passed("/tokenize", Dialect.OPENAI, body)
    assert not isinstance(request, Refusal)
    assert request.not_taken(MediaRule(hosts=frozenset())) is None


def test_a_tool_that_gave_a_screenshot_gave_an_image() -> None:
    items = [
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": DATA},
        }
    ]
    prompt = media_prompt(parse(Endpoint.RESPONSES, json.dumps({"input": items}).encode(), 16))
    assert (prompt.media, prompt.utf8_bytes < 100) == (IMAGE, True)


def test_the_rule_is_that_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "kvgate.yaml"
    media = (
        "{image_tokens: 1, audio_tokens: 2, video_tokens: 3, hosts: [Pics.example], inline: false,"
        " tensor_tokens: 9}"
    )
    pools = "[{name: short, replicas: ['http://h:1']}]"
    file.write_text(f"auth: {{required: false}}\nfleets: [{{model: demo, pools: {pools}, media: {media}}}]\n")
    settings = config.load(file, {})
    rule = plan_of(settings, settings.fleets[0]).media
    assert rule == MediaRule(1, 2, 3, frozenset({"pics.example"}), inline=False, tensor_tokens=9)


@given(
    st.builds(Media, *[st.integers(0, 50)] * 5),
    st.builds(MediaRule, *[st.integers(0, 10_000)] * 3, tensor_tokens=st.none() | st.integers(1, 10_000)),
)
def test_a_rule_counts_each_kind_and_the_unknown_as_the_dearest(media: Media, rule: MediaRule) -> None:
    costs = (rule.image_tokens, rule.audio_tokens, rule.video_tokens)
    kinds = (media.images, media.audios, media.videos)
    expected = sum(count * cost for count, cost in zip(kinds, costs, strict=True)) + media.others * max(costs)
    expected += media.tensors * (rule.tensor_tokens or 0)
    assert rule.tokens(media) == expected
    prompt = PromptText((), 7 + USUAL.tokens(media), 0, media=media, media_tokens=USUAL.tokens(media))
    counted = prompt.by_rule(rule)
    assert (counted.fixed_tokens, counted.media_tokens) == (7 + expected, expected)


def test_media_that_cost_nothing_are_still_no_text() -> None:
    """Nothing is learned from such a prompt, and no engine is asked to count it: it would fetch the media."""
    prompt = media_prompt(read(Endpoint.CHAT, {"type": "image_url", "image_url": "https://h/"}))
    assert not prompt.by_rule(MediaRule(0, 0, 0)).is_text_alone


# -- hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://pics.example/a.png", "pics.example"),
        ("HTTPS://Pics.Example:8443/a?b#c", "pics.example"),
        ("http://10.0.0.1", "10.0.0.1"),
        ("http://[::1]:80/x", "[::1]"),
        ("data:image/png;base64,AAAA", INLINE),
        ("DATA:,", INLINE),
        ("", NO_HOST),
        ("file:///etc/passwd", NO_HOST),
        ("ftp://pics.example/a", NO_HOST),
        ("//pics.example/a", NO_HOST),
        ("pics.example/a", NO_HOST),
        ("https://pics.example@evil.example/", NO_HOST),
        ("https://pics.example\\@evil.example/", NO_HOST),
        ("https://evil.example\\.pics.example/", NO_HOST),
        ("https://evil.example#@pics.example/", "evil.example"),
        ("https://evil.example/\\pics.example", NO_HOST),
        (" https://pics.example/", NO_HOST),
        ("https://pics.example/ x", NO_HOST),
        ("https://pics.example\n", NO_HOST),
        ("https://pics.example\t.evil.example/", NO_HOST),
        ("https://pícs.example/", NO_HOST),
        ("https://pics%2eexample/", NO_HOST),
        ("https:///pics.example/", NO_HOST),
        ("https:pics.example/", NO_HOST),
        ("https://" + "a" * 254, NO_HOST),
        ("https://" + "a" * 253, "a" * 253),
        ("https://pics.example/" + "a" * 9000, NO_HOST),
    ],
)
def test_a_host_is_told_where_no_reader_could_see_another(url: str, host: str) -> None:
    assert host_of(url) == host


ALLOWING = MediaRule(hosts=frozenset({"pics.example"}))


@pytest.mark.parametrize("endpoint", WITH_PARTS)
@pytest.mark.parametrize(
    ("part", "names"),
    [
        ({"type": "image_url", "image_url": {"url": "https://pics.example/a"}}, None),
        ({"type": "image_url", "image_url": {"url": DATA}}, None),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, None),
        (ANTHROPICS, None),
        (BY_URL, None),
        (
            {"type": "image_url", "image_url": {"url": "https://evil.example/a"}},
            ("image_url", "evil.example"),
        ),
        ({"type": "input_image", "image_url": "http://169.254.169.254/"}, ("image_url", "169.254.169.254")),
        (
            {"type": "audio_url", "audio_url": {"url": "https://a.pics.example"}},
            ("audio_url", "a.pics.example"),
        ),
        ({"video_url": "https://pics.example.evil/"}, ("video_url", "pics.example.evil")),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, ("image_url", "plain")),
        (
            {"type": "image", "source": {"type": "url", "url": "https://evil.example"}},
            ("source", "evil.example"),
        ),
        ({"type": "image", "source": {"type": "url"}}, ("source", "plain")),
    ],
)
def test_only_the_allowed_hosts_may_be_named(
    endpoint: Endpoint, part: dict[str, Any], names: tuple[str, str] | None
) -> None:
    request = read(endpoint, part)
    assert isinstance(request, GenerationRequest)
    assert request.not_taken(USUAL) is None
    refusal = request.not_taken(ALLOWING)
    if names is None:
        assert refusal is None
        return
    assert refusal is not None
    assert (refusal.code, refusal.param) == (Code.INVALID_VALUE, request.prompt_field)
    assert all(name in refusal.message for name in names)
    assert refusal.message.endswith("in `media.hosts` of the model, which names 1 host.")


def test_data_itself_may_be_refused_alone() -> None:
    for part in (
        {"type": "image_url", "image_url": DATA},
        ANTHROPICS,
        {"type": "input_audio", "input_audio": {}},
    ):
        request = read(Endpoint.CHAT, part)
        assert isinstance(request, GenerationRequest)
        refusal = request.not_taken(MediaRule(inline=False))
        assert refusal is not None
        assert "media.inline" in refusal.message


def test_one_wrong_host_among_many_is_found() -> None:
    parts = [{"type": "image_url", "image_url": f"https://pics.example/{i}"} for i in range(500)]
    parts.append({"type": "image_url", "image_url": "https://evil.example/"})
    request = parse(
        Endpoint.CHAT, json.dumps({"messages": [{"role": "tool", "content": parts}]}).encode(), 16
    )
    assert isinstance(request, GenerationRequest)
    assert len(media_prompt(request).sources) == 2
    assert request.not_taken(ALLOWING) is not None


@pytest.mark.parametrize(
    ("path", "dialect", "part"),
    [
        ("/tokenize", Dialect.OPENAI, {"type": "image_url", "image_url": "https://evil.example/"}),
        (
            "/v1/messages/count_tokens",
            Dialect.ANTHROPIC,
            {**BY_URL, "source": {"type": "url", "url": "http://e"}},
        ),
    ],
)
def test_what_only_counts_names_no_other_host_either(path: str, dialect: Dialect, part: Any) -> None:
    """The engine fetches the media there, too."""
    for messages in ([{"role": "user", "content": [part]}], [{"role": "user", "content": 7}], "no messages"):
        request = read_passed(path, dialect, json.dumps({"messages": messages}).encode())
        assert not isinstance(request, Refusal), "what is wrong with it is for the engine to say"
        assert request.not_taken(USUAL) is None
        refusal = request.not_taken(ALLOWING)
        assert refusal is not None
        assert refusal.param == "messages"
    plain = read_passed(path, dialect, json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode())
    assert not isinstance(plain, Refusal)
    assert plain.not_taken(ALLOWING) is None
