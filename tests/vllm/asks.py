"""What both engines are asked: every kind of request and every refusal that was recorded of a real vLLM, and more."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.engine import CONTEXT_TOKENS, MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "def foo(x):"}]
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
EVERY_USAGE: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
LONG_TEXT = "def foo " * 4000


@dataclass(frozen=True)
class Ask:
    name: str
    path: str
    body: Any = None
    """Sent as JSON; bytes as they are; None is a request without body."""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    def request(self) -> bytes:
        raw = self.body if isinstance(self.body, bytes) else b"" if self.body is None else _dump(self.body)
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: engine", "connection: close"]
        if self.method == "POST":
            kind = self.headers.get("content-type", "application/json")
            lines += [f"content-type: {kind}", f"content-length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items() if name != "content-type"]
        return "\r\n".join([*lines, "", ""]).encode() + raw

    @property
    def exact(self) -> bool:
        """The prompt is given as token ids, so its count does not depend on a tokenizer."""
        prompt = self.body.get("prompt", self.body.get("input")) if isinstance(self.body, dict) else None
        while isinstance(prompt, list) and prompt:
            prompt = prompt[0]
        return isinstance(prompt, int)


def _dump(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def chat(name: str, max_tokens: Any = 3, headers: dict[str, str] | None = None, **more: Any) -> Ask:
    """A chat that runs to its limit; `max_tokens=None` leaves the field out."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True} | more
    if max_tokens is None:
        del body["max_tokens"]
    return Ask(name, CHAT, body, headers=headers or {})


def text(name: str, max_tokens: Any = 3, prompt: Any = "def foo", **more: Any) -> Ask:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | more
    if max_tokens is None:
        del body["max_tokens"]
    return Ask(name, TEXT, body)


CHATS = [
    chat("chat", 5, temperature=0),
    chat("chat stream", 5, stream=True),
    chat("chat stream usage", 5, **USAGE),
    chat("chat stream every usage", 5, **EVERY_USAGE),
    chat("chat stream no usage", 5, stream=True, stream_options={"include_usage": False}),
    chat("chat continuous usage alone", stream=True, stream_options={"continuous_usage_stats": True}),
    chat("chat stream null", stream=None, stream_options=None),
    chat("chat n=3", n=3),
    chat("chat n=3 stream", n=3, **USAGE),
    chat("chat n=2 every usage", n=2, **EVERY_USAGE),
    chat("chat n=2 stream without usage", n=2, stream=True),
    chat("chat stream as a word", stream="yes"),
    chat("chat no stream as a word", stream="false"),
    chat("chat empty stream_options", stream=True, stream_options={}),
    chat("chat max_completion_tokens", None, max_completion_tokens=4),
    chat("chat both limits", 7, max_completion_tokens=4),
    chat("chat logprobs", 2, logprobs=True, top_logprobs=2),
    chat("chat logprobs stream", 2, logprobs=True, top_logprobs=2, stream=True),
    chat("chat logprobs alone", 2, logprobs=True),
    chat("chat return_token_ids", return_token_ids=True, stream=True),
    chat("chat return_token_ids whole", return_token_ids=True),
    chat("chat parts", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    chat("chat system", messages=[{"role": "system", "content": "Be brief."}, *MESSAGES]),
    chat("chat beams", use_beam_search=True, n=2),
    chat("chat beams stream", use_beam_search=True, n=2, stream=True),
    chat("chat priority", priority=5),
    chat("chat cache_salt", cache_salt="abc"),
    chat("chat request_id", request_id="bodyid7"),
    chat("chat X-Request-Id", headers={"x-request-id": "my-req-42"}),
    chat("chat rank 0", headers={"x-data-parallel-rank": "0"}),
    chat("chat rank x", headers={"x-data-parallel-rank": "x"}),
    chat("chat unknown field", frobnicate=1),
    chat("chat string as integer", "12"),
    chat("chat float as integer", 3.0),
    chat("chat boolean as integer", True),
    chat("refused text/plain", headers={"content-type": "text/plain"}),
    chat("chat stop", 8, stop=["never to be seen"]),
    chat("chat min_tokens", 5, min_tokens=5),
    chat("chat seed", seed=7, temperature=0.5, top_p=0.9),
    chat("chat json mode off", response_format={"type": "text"}),
    chat("chat null fields", n=None, temperature=None, stop=None, seed=None, logprobs=None, user=None),
    Ask("chat without model", CHAT, {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True}),
]
TEXTS = [
    text("text", 5, temperature=0),
    text("text stream", 5, stream=True),
    text("text stream usage", 5, **USAGE),
    text("text stream every usage", 5, **EVERY_USAGE),
    text("text n=3", n=3),
    text("text n=2 stream", n=2, **USAGE),
    text("text default limit", None),
    Ask("text null limit", TEXT, {"model": MODEL, "prompt": "def foo", "max_tokens": None}),
    text("text max_completion_tokens", None, max_completion_tokens=4),
    text("text list", prompt=["def foo", "class Bar"]),
    text("text list stream", 2, prompt=["def foo", "class Bar"], **USAGE),
    text("ids", prompt=[10, 11, 12, 13]),
    text("ids stream", prompt=[10, 11, 12, 13], **EVERY_USAGE),
    text("ids lists", prompt=[[10, 11, 12, 13], [20, 21]]),
    text("ids lists n=2", prompt=[[10, 11, 12, 13], [20, 21]], n=2),
    text("ids lists n=2 stream", prompt=[[10, 11, 12, 13], [20, 21]], n=2, **USAGE),
    text("text echo", echo=True),
    text("text echo stream", echo=True, stream=True),
    text("text echo usage", echo=True, **USAGE),
    text("ids echo", prompt=[40, 41, 42], echo=True),
    text("text echo without output", 0, echo=True),
    text("text logprobs", 2, logprobs=2),
    text("text logprobs stream", 2, logprobs=2, stream=True),
    text("text logprobs 0", 2, logprobs=0),
    text("ids logprobs echo", 2, prompt=[40, 41, 42], logprobs=1, echo=True),
    text("ids logprobs echo stream", 2, prompt=[40, 41, 42], logprobs=1, echo=True, stream=True),
    text("text return_token_ids", 2, return_token_ids=True),
    text("ids return_token_ids stream", 2, prompt=[40, 41, 42], return_token_ids=True, stream=True),
    text("text best_of", best_of=4, n=2),
    text("text beams", use_beam_search=True, n=2),
    text("ids to the end of the context", 16, prompt=[10] * (CONTEXT_TOKENS - 16)),
    text("ids clamped", 17, prompt=[11] * (CONTEXT_TOKENS - 16)),
    text("ids room for one", None, prompt=[12] * (CONTEXT_TOKENS - 1)),
    text("ids truncated", prompt=[13] * 5000, truncate_prompt_tokens=100),
    text("ids truncated to all", prompt=[14] * 200, truncate_prompt_tokens=-1),
]
REFUSALS = [
    text("refused ids too long", prompt=[10] * 5000),
    text("refused ids too long stream", prompt=[10] * 5000, stream=True),
    text("refused text too long", prompt=LONG_TEXT),
    chat("refused chat too long", messages=[{"role": "user", "content": LONG_TEXT}]),
    chat("refused chat too long stream", messages=[{"role": "user", "content": LONG_TEXT}], stream=True),
    text("refused ids fill the context", 1, prompt=[10] * CONTEXT_TOKENS),
    text("refused id out of vocabulary", prompt=[10, 1 << 60]),
    text("refused negative id", prompt=[10, -1]),
    text("refused mixed prompt", prompt=["a", [1, 2]]),
    text("refused empty prompt", prompt=""),
    text("refused empty list", prompt=[]),
    text("refused list of an empty list", prompt=[[]]),
    text("refused null prompt", prompt=None),
    text("refused number as prompt", prompt=7),
    text("refused object as prompt", prompt={"text": "x"}),
    Ask("refused no prompt", TEXT, {"model": MODEL, "max_tokens": 3}),
    text("refused limit above the context", CONTEXT_TOKENS + 1),
    text("refused huge limit", 999999999999),
    text("refused overflowing limit", 99999999999999999999999),
    text("refused negative limit", -1),
    text("refused no output", 0),
    text("refused suffix", suffix="x"),
    text("refused tensor", prompt_embeds="AAAA"),
    text("refused tensors alone", prompt=None, prompt_embeds=["AAAA", "AAAA"]),
    text("refused tensor with an empty prompt", prompt="", prompt_embeds="AAAA"),
    text("no tensors", prompt_embeds=[]),
    text("refused beams in a stream", use_beam_search=True, n=2, stream=True),
    text("refused logprobs", logprobs=-2),
    text("refused too many logprobs", logprobs=1000),
    chat("refused limit above the context chat", CONTEXT_TOKENS + 1),
    chat("refused negative limit chat", -1),
    chat("refused no output chat", 0),
    chat("refused fraction", 3.5),
    chat("refused words as integer", "many"),
    chat("refused list as integer", [3]),
    chat("refused object as integer", {"x": 3}),
    chat("refused n=0", n=0),
    chat("refused n<0", n=-2),
    chat("refused huge n", 1, n=100000),
    chat("refused n as words", n="many"),
    chat("refused temperature", temperature=-1),
    chat("refused temperature stream", temperature=-1, stream=True),
    chat("refused temperature as words", temperature="hot"),
    chat("refused top_p", top_p=1.5),
    chat("refused temperature above 2", temperature=3),
    chat("refused presence_penalty", presence_penalty=3),
    chat("refused frequency_penalty", frequency_penalty=-3),
    chat("refused repetition_penalty", repetition_penalty=0),
    chat("refused top_k", top_k=-5),
    chat("refused min_p", min_p=2),
    chat("refused stream as number", stream=2),
    chat("refused stream as list", stream=[1]),
    chat("refused seed", seed=1.5),
    chat("refused user", user=5),
    chat("refused model as number", model=5),
    chat("refused truncation", truncate_prompt_tokens=-2),
    chat("refused include_usage as words", stream=True, stream_options={"include_usage": "perhaps"}),
    chat("refused several fields", temperature="hot", n="many", max_tokens="many"),
    chat("refused top_logprobs", logprobs=True, top_logprobs=-2),
    chat("refused all logprobs", logprobs=True, top_logprobs=30),
    chat("refused top_logprobs alone", top_logprobs=2),
    chat("refused min_tokens above the limit", 3, min_tokens=5),
    chat("refused negative min_tokens", 3, min_tokens=-1),
    chat("refused stream_options without stream", stream_options={"include_usage": True}),
    chat("refused stream_options as list", stream=True, stream_options=[1]),
    chat("refused stream as words", stream="perhaps"),
    chat("refused empty cache_salt", cache_salt=""),
    chat("refused rank", headers={"x-data-parallel-rank": "3"}),
    chat("refused with an id", -2, headers={"x-request-id": "my-req-43"}),
    chat("refused model", model="nope"),
    chat("refused model stream", model="nope", stream=True),
    chat("refused empty conversation", messages=[]),
    chat("refused messages as text", messages="hi"),
    chat("refused message as text", messages=["hi"]),
    chat("refused role", messages=[{"role": 5, "content": "x"}]),
    chat("refused no role", messages=[{"content": "x"}]),
    Ask("refused no messages", CHAT, {"model": MODEL, "max_tokens": 3}),
    Ask("refused text for a chat", CHAT, {"model": MODEL, "prompt": "x"}),
    Ask("refused broken JSON", CHAT, b'{"model":"tiny","messages":['),
    Ask("refused no JSON", CHAT, b"hello"),
    Ask("refused two objects", CHAT, b"{} {}"),
    Ask("refused list", CHAT, [1, 2]),
    Ask("refused text", CHAT, "hello"),
    Ask("refused null", CHAT, b"null"),
    Ask("refused empty body", CHAT, b""),
    Ask("refused empty object", CHAT, {}),
    Ask("refused empty object text", TEXT, {}),
    Ask("refused invalid UTF-8", CHAT, b'{"model":"\xff"}'),
]
_ANTHROPIC = {"model": MODEL, "messages": MESSAGES}
OTHERS = [
    Ask("responses", "/v1/responses", {"model": MODEL, "input": "def foo", "max_output_tokens": 4}),
    Ask(
        "responses stream",
        "/v1/responses",
        {"model": MODEL, "input": "x", "max_output_tokens": 3, "stream": True},
    ),
    Ask(
        "responses of a name",
        "/v1/responses",
        {"model": MODEL, "input": "x", "max_output_tokens": 2, "request_id": "resp_0123456789abcdef"},
    ),
    Ask("responses again", "/v1/responses/resp_0123456789abcdef", method="GET"),
    Ask("responses not cancelled", "/v1/responses/resp_0123456789abcdef/cancel"),
    Ask(
        "responses of an X-Request-Id",
        "/v1/responses",
        {"model": MODEL, "input": "x", "max_output_tokens": 2},
        headers={"x-request-id": "my-req-42"},
    ),
    Ask(
        "responses after nothing",
        "/v1/responses",
        {"model": MODEL, "input": "x", "previous_response_id": "resp_n"},
    ),
    Ask("responses of a template", "/v1/responses", {"model": MODEL, "prompt": {"id": "p"}}),
    Ask(
        "responses cut",
        "/v1/responses",
        {"model": MODEL, "input": LONG_TEXT, "truncation": "auto", "max_output_tokens": 2},
    ),
    Ask("responses too long", "/v1/responses", {"model": MODEL, "input": LONG_TEXT, "max_output_tokens": 2}),
    Ask("responses without input", "/v1/responses", {"model": MODEL}),
    Ask("responses unknown model", "/v1/responses", {"model": "nope", "input": "x"}),
    Ask("responses unknown id", "/v1/responses/resp_nope", method="GET"),
    Ask("messages", "/v1/messages", {**_ANTHROPIC, "max_tokens": 4}),
    Ask("messages stream", "/v1/messages", {**_ANTHROPIC, "max_tokens": 3, "stream": True}),
    Ask("messages without limit", "/v1/messages", _ANTHROPIC),
    Ask("messages limit above the context", "/v1/messages", {**_ANTHROPIC, "max_tokens": 99999}),
    Ask("messages unknown model", "/v1/messages", {**_ANTHROPIC, "model": "nope", "max_tokens": 3}),
    Ask("messages count", "/v1/messages/count_tokens", _ANTHROPIC),
    Ask("chat batch", f"{CHAT}/batch", {"model": MODEL, "messages": [MESSAGES, MESSAGES], "max_tokens": 3}),
    Ask("chat render", f"{CHAT}/render", {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}),
    Ask("text render", f"{TEXT}/render", {"model": MODEL, "prompt": "def foo", "max_tokens": 5}),
    Ask("generate", "/inference/v1/generate", {"token_ids": [10, 11], "sampling_params": {"max_tokens": 3}}),
    Ask("abort requests", "/inference/v1/abort_requests", {"request_ids": ["nope"]}),
    Ask("invocations", "/invocations", {"model": MODEL, "messages": MESSAGES, "max_tokens": 3}),
    Ask("tokenize", "/tokenize", {"model": MODEL, "prompt": "def foo(x):"}),
    Ask("tokenize without model", "/tokenize", {"prompt": "def foo(x):"}),
    Ask(
        "tokenize strings",
        "/tokenize",
        {"model": MODEL, "prompt": "def foo", "return_token_strs": True, "add_special_tokens": False},
    ),
    Ask("tokenize chat", "/tokenize", {"model": MODEL, "messages": MESSAGES}),
    Ask("tokenize nothing", "/tokenize", {"model": MODEL}),
    Ask("tokenize unknown model", "/tokenize", {"model": "nope", "prompt": "x"}),
    Ask("tokenize empty body", "/tokenize", b""),
    Ask("detokenize", "/detokenize", {"model": MODEL, "tokens": [10, 11, 12]}),
    Ask("detokenize nothing", "/detokenize", {"model": MODEL}),
    Ask("detokenize negative ids", "/detokenize", {"model": MODEL, "tokens": [-1]}),
    Ask("detokenize text", "/detokenize", {"model": MODEL, "tokens": "x"}),
    Ask("responses cancel", "/v1/responses/resp_nope/cancel"),
    Ask("responses delete", "/v1/responses/resp_nope", method="DELETE"),
    Ask("messages text/plain", "/v1/messages", {}, headers={"content-type": "text/plain"}),
    Ask("detokenize words", "/detokenize", {"model": MODEL, "tokens": ["x"]}),
    Ask("embeddings", "/v1/embeddings", {"model": MODEL, "input": "x"}),
    Ask("unknown path", "/v1/nope", {}),
    Ask("GET chat", CHAT, method="GET"),
    Ask("HEAD health", "/health", method="HEAD"),
    Ask("POST models", "/v1/models", {}),
    Ask("DELETE models", "/v1/models", method="DELETE"),
    *(
        Ask(f"GET {path}", path, method="GET")
        for path in ("/v1/models", "/health", "/ping", "/version", "/load")
    ),
    *(
        Ask(f"GET {path}", path, method="GET")
        for path in ("/tokenizer_info", "/kv_event_sources", "/nope", "/")
    ),
    Ask("POST ping", "/ping", {}),
    Ask(
        "options",
        CHAT,
        method="OPTIONS",
        headers={"origin": "http://x", "access-control-request-method": "POST"},
    ),
    Ask("origin", "/v1/models", method="GET", headers={"origin": "http://x"}),
]
ASKS = [*CHATS, *TEXTS, *REFUSALS, *OTHERS]

EMBED, SCORE, RERANK = "/v1/embeddings", "/score", "/rerank"


def embed(name: str, value: Any, **more: Any) -> Ask:
    return Ask(f"embed {name}", EMBED, {"model": MODEL, "input": value} | more)


def score(name: str, **fields: Any) -> Ask:
    return Ask(f"score {name}", SCORE, {"model": MODEL} | fields)


def rerank(name: str, path: str = RERANK, **fields: Any) -> Ask:
    return Ask(f"rerank {name}", path, {"model": MODEL, "query": "def foo"} | fields)


_DOCUMENTS = ["class Bar", "import os"]
POOLED = [
    embed("text", "def foo"),
    embed("texts", ["def foo", "class Bar"]),
    embed("ids", [10, 11, 12]),
    embed("lists of ids", [[10, 11, 12], [13]]),
    embed("base64", [[10, 11]], encoding_format="base64"),
    embed("cut", [[10, 11, 12, 13]], truncate_prompt_tokens=2),
    embed("whole context", [[10] * CONTEXT_TOKENS]),
    embed("too long", [[10] * (CONTEXT_TOKENS + 1)]),
    embed("too long text", LONG_TEXT),
    embed("cut to the context", [[10] * (CONTEXT_TOKENS + 1)], truncate_prompt_tokens=-1),
    embed("cut beyond the context", "x", truncate_prompt_tokens=CONTEXT_TOKENS + 1),
    embed("nothing", ""),
    embed("no text", []),
    embed("nothing among texts", ["", "x"]),
    embed("messages as input", MESSAGES),
    embed("conversations as input", [MESSAGES, MESSAGES]),
    embed("streamed", "x", stream=True),
    embed("of an unknown model", "x", model="nope"),
    Ask("embed messages", EMBED, {"model": MODEL, "messages": MESSAGES}),
    Ask("embed without input", EMBED, {"model": MODEL}),
    Ask("embed without body", EMBED, b""),
    Ask("pooling", "/pooling", {"model": MODEL, "input": [[10, 11]]}),
    score("one", text_1="def foo", text_2="class Bar"),
    score("many", text_1="def foo", text_2=_DOCUMENTS),
    score("pairs", text_1=_DOCUMENTS, text_2=_DOCUMENTS),
    score("queries", queries="def foo", documents=_DOCUMENTS),
    score("cut", text_1="def foo bar", text_2=_DOCUMENTS, max_tokens_per_query=1, max_tokens_per_doc=2),
    score("uneven", text_1=_DOCUMENTS, text_2="x"),
    score("nothing", text_1="x", text_2=[]),
    score("without texts"),
    rerank("the best", documents=["class Bar"], top_n=1),
    rerank("one", documents="class Bar"),
    rerank("nothing"),
    *(rerank(path, path, documents="class Bar") for path in ("/v1/rerank", "/v2/rerank")),
    Ask("pooled chat", CHAT, {"model": MODEL, "messages": MESSAGES}),
    Ask("pooled response", "/v1/responses", {"model": MODEL, "input": "x"}),
    Ask("pooled tokens", "/tokenize", {"model": MODEL, "prompt": "def foo"}),
    Ask("pooled models", "/v1/models", method="GET"),
]
"""Of a model that embeds."""
