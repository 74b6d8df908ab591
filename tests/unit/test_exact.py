"""Counts by a model's own tokenizer and template, beside those that a real vLLM made of the same requests."""

import asyncio
import copy
import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import _model_counter
from gateway.config import Tokenizer
from gateway.core.prefixes import GRID, PromptCount, points
from gateway.core.request import Endpoint, GenerationRequest, parse
from gateway.steps import Begun
from gateway.tokens.exact import BODY_BYTES_MAX, PROMPT_CHARS_MAX, TokenizerCounter
from gateway.tokens.files import TokenizerError, TokenizerFiles
from gateway.tokens.template import ChatTemplate
from gateway.tokens.threads import CountingThreads
from tests.vllm.prompt_requests import CHATS, COMPLETIONS

FIXTURES = Path(__file__).parents[1] / "fixtures"
TOKENIZERS, TEMPLATES = FIXTURES / "tokenizers", FIXTURES / "templates"
COUNTS = json.loads((FIXTURES / "prompts.json").read_text())["counts"]
USER = {"role": "user", "content": "hi"}
SHORT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def threads() -> Iterator[CountingThreads]:
    """Nothing is ever late."""
    threads = CountingThreads(lambda: 0.0)
    yield threads
    threads.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, without a template."""
    shutil.copytree(TOKENIZERS / "bytes", tmp_path / "model")
    return tmp_path / "model"


def folder_of(tokenizer: str) -> Path:
    """A fixture, or the files of a package."""
    if (TOKENIZERS / tokenizer).is_dir():
        return TOKENIZERS / tokenizer
    found = importlib.util.find_spec(tokenizer)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def request_of(endpoint: Endpoint, **fields: Any) -> GenerationRequest:
    request = parse(endpoint, json.dumps({"model": "m", **fields}).encode(), 16)
    assert isinstance(request, GenerationRequest), request
    return request


def chat(*messages: dict[str, Any], **fields: Any) -> GenerationRequest:
    return request_of(Endpoint.CHAT, **{"messages": messages or [USER], **fields})


def with_template(folder: Path, threads: CountingThreads, source: str, **changes: Any) -> TokenizerCounter:
    (folder / "own.jinja").write_text(source)
    return TokenizerCounter(
        TokenizerFiles(folder / "tokenizer.json", folder / "own.jinja", **changes), threads
    )


def counted(found: list[PromptCount] | None) -> list[int] | None:
    return found if found is None else [tokens for tokens, _ in found]


@functools.cache
def loaded(tokenizer: str) -> TokenizerCounter:
    """Half a second for one of 128,000 tokens, whichever template is beside it."""
    return TokenizerCounter(TokenizerFiles(folder_of(tokenizer) / "tokenizer.json"), CountingThreads())


@pytest.mark.parametrize(("tokenizer", "template", "case", "counts"), COUNTS)
def test_it_counts_as_vllm_does(tokenizer: str, template: str, case: str, counts: list[int] | None) -> None:
    """What vLLM refuses may be counted in any way."""
    counter = copy.copy(loaded(tokenizer))
    if template:
        counter._templates = {"": ChatTemplate((TEMPLATES / f"{template}.jinja").read_text())}
    request = chat(**CHATS[case]) if template else request_of(Endpoint.COMPLETIONS, **COMPLETIONS[case])
    for block_size in (0, 1):
        found = counter._count(request, block_size, lambda: False)
        assert counts is None or counted(found) == counts


async def test_each_conversation_of_a_batch_is_counted_as_a_chat(
    folder: Path, threads: CountingThreads
) -> None:
    """vLLM shows no tools there; what all have in common is in each already."""
    counter = with_template(folder, threads, "{% if tools %}{{ tools }}{% endif %}" + SHORT)
    other = {"role": "user", "content": "hello there"}
    batch = request_of(Endpoint.CHAT_BATCH, messages=[[USER], [USER, other]], tools=[{"type": "function"}])
    alone = [await counter.count(chat(*messages)) for messages in ((USER,), (USER, other))]
    found = await counter.count(batch)
    assert found is not None
    every = [count for counts in alone for count in counted(counts) or ()]
    assert [batch.prompt_tokens(counted(found) or ())] == [every]


# What cannot be told --------------------------------------------------------------------------------------------


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    "request_",
    [
        chat({"role": "user", "content": [IMAGE]}),
        chat({"role": "user", "content": [{"type": "text", "text": "a", "uuid": "1"}]}),
        chat({"role": "user", "content": [{"type": "unheard of", "text": "a"}]}),
        chat(chat_template="{{ messages }}"),
        chat(chat_template_kwargs={"messages": []}),
        chat(chat_template_kwargs=[]),
        chat(continue_final_message=True),
        chat(add_generation_prompt="yes"),
        chat({"content": "nobody says this"}),
        chat({"role": "assistant", "content": "a", "tool_calls": [{"type": "custom"}]}),
        chat(tools=[{"type": "function"}]),
        request_of(Endpoint.MESSAGES, messages=[USER], max_tokens=1),
    ],
)
async def test_what_only_the_engine_can_tell_is_not_counted(
    folder: Path, threads: CountingThreads, request_: GenerationRequest
) -> None:
    counter = with_template(folder, threads, SHORT)
    assert await counter.count(chat()) is not None
    assert await counter.count(request_) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ undefined.attribute }}",
    ],
    ids=["refuses", "fails", "looks behind its sandbox", "changes what it was given", "asks for nothing"],
)
async def test_a_template_that_fails_counts_nothing(
    folder: Path, threads: CountingThreads, source: str
) -> None:
    assert await with_template(folder, threads, source).count(chat()) is None


async def test_a_template_may_ask_for_the_date(folder: Path, threads: CountingThreads) -> None:
    dated = with_template(folder, threads, "{{ strftime_now('%Y-%m-%d') | length }}")
    fixed = with_template(folder, threads, "10")
    assert await dated.count(chat()) == await fixed.count(chat())


async def test_the_servers_own_variables_are_defaults(folder: Path, threads: CountingThreads) -> None:
    source = "{{ 'a' * (length | int) }}"
    counter = with_template(folder, threads, source, template_kwargs={"length": 40})
    assert await counter.count(chat()) == await with_template(folder, threads, "a" * 40).count(chat())
    asked = chat(chat_template_kwargs={"length": 7})
    assert await counter.count(asked) == await with_template(folder, threads, "a" * 7).count(chat())


# Bounds ---------------------------------------------------------------------------------------------------------


async def test_long_prompts_keep_to_the_estimate(folder: Path, threads: CountingThreads) -> None:
    counter = with_template(folder, threads, SHORT + "{{ 'x' * (more or 0) }}")
    assert await counter.count(chat({"role": "user", "content": "a " * (BODY_BYTES_MAX // 2)})) is None
    assert await counter.count(chat(chat_template_kwargs={"more": PROMPT_CHARS_MAX})) is None


async def test_late_counts_are_not_begun(folder: Path) -> None:
    now = 0.0
    threads = CountingThreads(lambda: now)
    counter = with_template(folder, threads, SHORT)
    held = threading.Event()
    waiting = [asyncio.create_task(threads.run(lambda _: held.wait(30))) for _ in range(2)]
    counting = asyncio.create_task(counter.count(chat()))
    for _ in range(3):
        await asyncio.sleep(0)
    now = 1000.0
    held.set()
    assert await counting is None
    await asyncio.gather(*waiting)
    threads.close()


async def test_nothing_is_done_before_it_suspends(
    folder: Path, threads: CountingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = with_template(folder, threads, SHORT)
    asked = []
    monkeypatch.setattr(counter, "_count", lambda *_: asked.append(threading.current_thread().name))
    begun = Begun(counter.count(chat()))
    assert begun.suspended
    begun.close()
    assert not asked
    await counter.count(chat())
    (thread,) = asked
    assert thread.startswith("kvgate-tokens")


async def test_other_threads_go_on_while_a_prompt_is_counted(folder: Path, threads: CountingThreads) -> None:
    """The plain way to encode keeps the interpreter for all of it: nearly all that the process computes would then be
    done between two turns of the loop."""
    counter = with_template(folder, threads, SHORT)
    request = chat({"role": "user", "content": " ".join(map(str, range(60_000)))})
    begun = last = time.process_time()
    longest = 0.0
    counting = asyncio.create_task(counter.count(request))
    while not counting.done():
        await asyncio.sleep(0)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    assert counting.result() is not None
    assert longest < (last - begun) / 3


async def test_a_prompt_is_counted_once(
    folder: Path, threads: CountingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = with_template(folder, threads, SHORT)
    first = await counter.count(chat())
    monkeypatch.setattr(counter, "_tokenizer", None)
    assert await counter.count(chat()) == first
    with pytest.raises(AttributeError):
        await counter.count(chat({"role": "user", "content": "else"}))


# Beginnings -------------------------------------------------------------------------------------------------


def said(text: str) -> GenerationRequest:
    return chat({"role": "user", "content": text})


async def beginnings(counter: TokenizerCounter, *requests: GenerationRequest) -> list[bytes]:
    found = [await counter.count(request, 1) for request in requests]
    return [each[0].points for each in found if each is not None]


async def test_prompts_begin_alike_as_far_as_their_tokens_are_the_same(
    folder: Path, threads: CountingThreads
) -> None:
    counter = with_template(folder, threads, SHORT)
    common = "a very long story begins " * 20
    one, other, short = await beginnings(counter, said(common + "so"), said(common + "otherwise"), said("a"))
    tokens = len(counter._tokenizer.encode(common.strip(), add_special_tokens=False).ids)
    same = sum(one[at : at + 16] == other[at : at + 16] for at in range(0, len(one), 16))
    assert same == sum(cut <= tokens for cut in GRID) > 10
    assert short == b""


async def test_tokens_that_a_tokenizer_adds_move_all_others(folder: Path, threads: CountingThreads) -> None:
    counter = TokenizerCounter(TokenizerFiles(folder / "tokenizer.json"), threads)
    plain, added = (
        request_of(Endpoint.COMPLETIONS, prompt="word " * 40, add_special_tokens=adds)
        for adds in (False, True)
    )
    ids = counter._tokenizer.encode("word " * 40, add_special_tokens=True).ids
    assert len(ids) > len(counter._tokenizer.encode("word " * 40, add_special_tokens=False).ids)
    for _ in range(2):
        one, other = await beginnings(counter, plain, added)
        assert not one.startswith(other[:16])
        assert other == points(ids, 1)


async def test_a_prompt_that_may_show_the_time_has_nothing_in_common_with_one_of_another_day(
    folder: Path, threads: CountingThreads
) -> None:
    hours = iter((0.0, 899.0, 900.0))
    source = "{% if messages|length > 5 %}{{ strftime_now('%d') }}{% endif %}" + SHORT
    (folder / "dated.jinja").write_text(source)
    counter = TokenizerCounter(
        TokenizerFiles(folder / "tokenizer.json", folder / "dated.jinja"), threads, lambda: next(hours)
    )
    first, same, later = await beginnings(counter, *[said("hello " * 30)] * 3)
    assert first == same
    assert first[:16] != later[:16]


@pytest.mark.parametrize(
    ("shown", "shares"),
    [
        ("strftime_now('%d %b %Y')", True),
        ("strftime_now('%A, %-d. %B') if strftime_now is defined else ''", True),
        ("strftime_now('100 %%')", True),
        ("strftime_now('%Y-%m-%d %H:%M')", False),
        ("strftime_now('%c')", False),
        ("strftime_now('%-I')", False),
        ("strftime_now('%Y' ~ (format or ''))", False),
        ("[strftime_now][0]('%H')", False),
    ],
)
async def test_a_prompt_that_may_show_the_time_of_day_has_nothing_in_common_with_any(
    folder: Path, threads: CountingThreads, shown: str, shares: bool
) -> None:
    """The engine shows it later, and so maybe another one.  Counted it is all the same."""
    counter = with_template(folder, threads, "{{ " + shown + " }}" + SHORT)
    counts = await counter.count(said("hello " * 30), 1)
    assert counts is not None
    assert (counts[0].tokens > 30, counts[0].points != b"") == (True, shares)


async def test_a_beginning_is_found_out_once_for_each_size(
    folder: Path, threads: CountingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = with_template(folder, threads, SHORT)
    request = said("hello " * 30)
    first = await counter.count(request, 1)
    monkeypatch.setattr(counter, "_tokenizer", None)
    assert await counter.count(request, 1) == first
    with pytest.raises(AttributeError):
        await counter.count(request, 2)


# Files ----------------------------------------------------------------------------------------------------------


async def tokens(folder: Path, threads: CountingThreads, request: GenerationRequest) -> int | None:
    counts = await TokenizerCounter(TokenizerFiles(folder / "tokenizer.json"), threads).count(request)
    return counts and counts[0].tokens


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


async def test_a_model_without_a_template_has_its_completions_counted(
    folder: Path, threads: CountingThreads
) -> None:
    assert await tokens(folder, threads, chat()) is None
    assert await tokens(folder, threads, request_of(Endpoint.COMPLETIONS, prompt="hi")) == 3


async def test_templates_are_found_where_hugging_face_has_them(
    folder: Path, threads: CountingThreads
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    plain, with_tools = chat(), chat(tools=[tool])
    configure(folder, chat_template="a" * 31)
    assert await tokens(folder, threads, plain) == await tokens(folder, threads, with_tools)
    named = [{"name": "default", "template": "1"}, {"name": "tool_use", "template": "1 2 3"}]
    configure(folder, chat_template=named)
    assert await tokens(folder, threads, plain) == 1
    assert await tokens(folder, threads, with_tools) > 2
    (folder / "chat_template.jinja").write_text("1 2")
    both = await tokens(folder, threads, plain)
    assert both > 1
    assert await tokens(folder, threads, with_tools) == both
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("1")
    assert await tokens(folder, threads, with_tools) == 1


async def test_a_template_gets_the_special_tokens_by_name(folder: Path, threads: CountingThreads) -> None:
    configure(
        folder,
        eos_token={"content": "<the end>", "lstrip": False},
        pad_token=None,
        additional_special_tokens=["<more>"],
        chat_template="{{ bos_token }}{{ eos_token }}{{ additional_special_tokens[0] }}{{ pad_token }}",
    )
    assert await tokens(folder, threads, chat()) == 3, (
        "each is one token, also those that the file does not have"
    )


async def test_special_tokens_may_be_text(folder: Path, threads: CountingThreads) -> None:
    request = request_of(Endpoint.COMPLETIONS, prompt="<|im_start|>", add_special_tokens=False)
    assert await tokens(folder, threads, request) == 1
    configure(folder, split_special_tokens=True)
    shutil.copy(folder / "tokenizer.json", folder / "other.json")
    counts = await TokenizerCounter(TokenizerFiles(folder / "other.json"), threads).count(request)
    assert counts is not None
    assert counts[0].tokens > 3


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "cannot read .*tokenizer.json: No such file"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", b"\xff", "tokenizer.json: it is not UTF-8"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json does not hold a JSON object"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja is not a chat template"),
        ("tokenizer_config.json", '{"chat_template": "{{"}', "tokenizer_config.json is not a chat template"),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    folder: Path, threads: CountingThreads, name: str, content: str | bytes | None, problem: str
) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=problem) as raised:
        TokenizerCounter(TokenizerFiles(folder / "tokenizer.json"), threads)
    assert "\n" not in str(raised.value)


def test_a_missing_template_is_one_clear_line(folder: Path, threads: CountingThreads) -> None:
    with pytest.raises(TokenizerError, match=r"cannot read .*absent.jinja: No such file"):
        TokenizerCounter(TokenizerFiles(folder / "tokenizer.json", folder / "absent.jinja"), threads)


def test_what_is_an_extra_is_only_loaded_where_it_is_wanted() -> None:
    code = "import sys, gateway.app; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "gateway.tokens.files" in ran.stdout.split()
    assert not {"gateway.tokens.exact", "tokenizers", "jinja2"} & set(ran.stdout.split())


def test_without_the_extra_it_says_what_to_install(
    folder: Path, threads: CountingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gateway.tokens.exact", None)
    with pytest.raises(TokenizerError, match=r"pip install 'kvgate\[exact\]'"):
        _model_counter(Tokenizer(file=str(folder / "tokenizer.json")), threads)
