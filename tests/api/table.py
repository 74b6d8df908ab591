"""The table itself: routes, fields, parts of messages and headers, as of vLLM 0.32.

A field that counts or is changed has a `Field`, any other one is named in `plain` of its form, with a value in
`EXAMPLES`.
`tests/fixtures/vllm/request_fields.json` says which there are.
"""

from dataclasses import replace
from typing import Any

from gateway.core.outcomes import Code
from tests.api.rows import As, Counts, Field, Form, Route, Way, Written

HI = [{"role": "user", "content": "hi there"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}}


def wave(tenths: int) -> bytes:
    """A WAV file of so many tenths of a second of silence, 1,000 samples of two bytes a second."""
    size, rate = 200 * tenths, 1000
    numbers = [(16, 4), (1, 2), (1, 2), (rate, 4), (2 * rate, 4), (2, 2), (16, 2)]
    head = b"".join(number.to_bytes(width, "little") for number, width in numbers)
    chunks = b"WAVEfmt " + head + b"data" + size.to_bytes(4, "little") + bytes(size)
    return b"RIFF" + len(chunks).to_bytes(4, "little") + chunks


CONTEXT = 8192
"""Of the engines that the table is checked with."""

EXAMPLES: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "cache_salt": "salt",
    "continue_final_message": False,
    "dimensions": 8,
    "early_stopping": True,
    "echo": True,
    "embed_dtype": "float32",
    "enable_response_messages": False,
    "encoding_format": "float",
    "endianness": "little",
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include": [],
    "include_reasoning": True,
    "include_stop_str_in_output": True,
    "length_penalty": 1.0,
    "logit_bias": {"1": 0.5},
    "logprob_token_ids": [1],
    "max_tool_calls": 3,
    "media_io_kwargs": {"video": {"num_frames": 8}},
    "metadata": {"user_id": "u"},
    "min_p": 0.1,
    "mm_payload": "none",
    "mm_processor_kwargs": {"num_crops": 4},
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "prompt": None,
    "prompt_cache_key": "k",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "repetition_penalty": 1.1,
    "request_id": "mine",
    "response_format": "json",
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_token_strs": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 0,
    "seed": 7,
    "service_tier": "auto",
    "session_id": "s",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["\n"],
    "stop_sequences": ["\n"],
    "stop_token_ids": [2],
    "stream_interval": 2,
    "structured_outputs": {"json": WEATHER},
    "suffix": "after",
    "task": "embed",
    "guided_decoding_backend": "auto",
    "language": "en",
    "timestamp_granularities[]": "segment",
    "to_language": "de",
    "temperature": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "thinking_token_budget": 100,
    "tool_choice": "auto",
    "top_k": 5,
    "top_n": 1,
    "top_p": 0.9,
    "truncation_side": "left",
    "use_activation": True,
    "user": "u",
    "vllm_xargs": {"key": "value"},
    "watermarking": False,
    "an_unknown_field": {"of": ["any", "kind"]},
}
"""A value of each field that counts nothing."""


def names(text: str) -> tuple[str, ...]:
    return tuple(sorted(text.split()))


SAMPLING = """allowed_token_ids bad_words cache_salt echo frequency_penalty ignore_eos include_stop_str_in_output
    length_penalty logit_bias logprob_token_ids min_p mm_payload presence_penalty prompt_logprobs repetition_detection
    repetition_penalty request_id return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids
    stream_interval structured_outputs temperature thinking_token_budget top_k top_p truncation_side user vllm_xargs
    watermarking add_special_tokens an_unknown_field"""

MODEL = Field(
    "model",
    "demo",
    words="the fleet, whose engines know aliases and LoRA adapters by this name; only where there is a single fleet "
    "it may be missing",
)
PRIORITY = Field(
    "priority",
    5,
    (Counts.CLASS,),
    "above 0 it lowers the call by a class; nothing raises it; in a `shared` pool more is added for calls that grow",
)
TRANSFERS = tuple(
    Field(
        name,
        {"do_remote_decode": True},
        refused=Code.INVALID_VALUE,
        words="an engine would keep blocks for another one",
    )
    for name in ("kv_transfer_params", "ec_transfer_params")
)
EXTRAS = Field(
    "vllm_xargs",
    {"kv_transfer_params": "any"},
    refused=Code.INVALID_VALUE,
    words="an engine would read it as the field of that name",
)
USAGE = {"stream_options": {"include_usage": True}}
STREAMED = (
    Field("stream", True, words="`stream_options` is written beside it, so that usage is told", writes=USAGE),
    Field(
        "stream_options",
        {"include_usage": True},
        words="the client sees the frame of usage",
        beside={"stream": True},
    ),
    Field(
        "stream_options",
        {"include_usage": False},
        words="the client does not see it",
        beside={"stream": True},
        writes=USAGE,
    ),
    Field("stream_options", None, words="as absent", beside={"stream": True}, writes=USAGE),
    Field(
        "stream_options",
        {"other": 1},
        words="the rest of it stays",
        beside={"stream": True},
        writes={"stream_options": {"other": 1, "include_usage": True}},
    ),
    Field(
        "stream_options",
        {"continuous_usage_stats": True},
        words="alone it means nothing",
        beside={"stream": True},
        writes=USAGE,
    ),
    Field("stream_options", {"include_usage": True, "continuous_usage_stats": True}, beside={"stream": True}),
)
NUMBERS = (
    Field(
        "n", 3, (Counts.SEQUENCES,), "each choice is charged in full; with `use_beam_search` the beam's width"
    ),
    Field("n", 10_000, refused=Code.TOO_MANY_SEQUENCES, words="above `server.n_max`"),
    Field("best_of", 3, (Counts.SEQUENCES,), "the larger of it and `n`; engines of today ignore it"),
    Field("use_beam_search", True, words="`n` is the width"),
    Field("min_tokens", 4),
    Field("min_tokens", 9, refused=Code.INVALID_VALUE, words="above the output limit"),
    Field("seed", 7),
    Field(
        "truncate_prompt_tokens",
        5,
        (Counts.CUT,),
        "the engine cuts longer prompts to this; -1: to what its context leaves",
    ),
    Field("top_logprobs", 2, beside={"logprobs": True}),
    PRIORITY,
)
SHOWN = (
    Field("chat_template", "{{ messages[0].content }} and more", (Counts.PROMPT,), "as text"),
    Field(
        "chat_template_kwargs",
        {"enable_thinking": False},
        (Counts.PROMPT,),
        "as text: templates show such fields",
    ),
)
TOOLS = Field("tools", [TOOL], (Counts.PROMPT,), "compact JSON as text, and 16 tokens each")

CHAT = Form(
    ("/v1/chat/completions",),
    {"model": "demo", "messages": HI, "max_tokens": 8},
    (
        MODEL,
        Field(
            "messages",
            [*HI, *HI],
            (Counts.PROMPT,),
            "texts, 4 tokens a message, 3 for the reply; parts: see below",
        ),
        Field(
            "max_tokens",
            None,
            (Counts.OUTPUT,),
            "as absent: `default_output_tokens` of the fleet",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field("max_tokens", 20, (Counts.OUTPUT,)),
        Field(
            "max_tokens",
            CONTEXT,
            (Counts.OUTPUT,),
            "above what the prompt leaves of the context: clamped",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field("max_tokens", CONTEXT + 1, refused=Code.INVALID_VALUE, words="above the context"),
        Field(
            "max_completion_tokens",
            30,
            (Counts.OUTPUT,),
            "goes before `max_tokens`, and is written into both",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field(
            "max_completion_tokens", None, words="as absent", writes={"max_completion_tokens": Written.LIMIT}
        ),
        *NUMBERS,
        *STREAMED,
        TOOLS,
        Field("functions", [{"name": "weather"}], (Counts.PROMPT,), "as `tools`"),
        Field("response_format", SCHEMA, (Counts.PROMPT,), "a schema as text: some templates show it"),
        Field("response_format", {"type": "json_object"}),
        Field("documents", [{"text": "more to read"}], (Counts.PROMPT,), "as text"),
        *SHOWN,
        Field("logprobs", True),
        *TRANSFERS,
        EXTRAS,
    ),
    names(
        SAMPLING
        + """ add_generation_prompt continue_final_message include_reasoning media_io_kwargs
        mm_processor_kwargs parallel_tool_calls reasoning_effort return_prompt_text tool_choice"""
    ),
)

BATCH = Form(
    ("/v1/chat/completions/batch",),
    {"model": "demo", "messages": [HI, HI], "max_tokens": 8},
    (
        MODEL,
        Field(
            "messages",
            [HI, HI, HI],
            (Counts.PROMPT, Counts.SEQUENCES),
            "each conversation as a chat of its own",
        ),
        Field("max_tokens", 20, (Counts.OUTPUT,), "of each"),
        Field(
            "max_completion_tokens",
            30,
            (Counts.OUTPUT,),
            "goes before `max_tokens`, and is written into both",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field("n", 3, (Counts.SEQUENCES,), "choices of each"),
        Field("best_of", 3, (Counts.SEQUENCES,), "the larger of it and `n`"),
        Field("use_beam_search", True, words="`n` is the width"),
        Field("seed", 7),
        Field("logprobs", True),
        Field("top_logprobs", 2, beside={"logprobs": True}),
        PRIORITY,
        TOOLS,
        Field("response_format", SCHEMA, (Counts.PROMPT,), "a schema as text, in each"),
        *SHOWN,
        Field("stream", True, words="vLLM does not read it here"),
        *TRANSFERS,
    ),
    names("""add_generation_prompt cache_salt continue_final_message early_stopping echo frequency_penalty
        guided_decoding_backend include_reasoning include_stop_str_in_output length_penalty logit_bias
        logprob_token_ids media_io_kwargs min_p mm_processor_kwargs presence_penalty repetition_penalty request_id
        return_token_ids return_tokens_as_token_ids stop structured_outputs temperature tool_choice top_k top_p user
        watermarking an_unknown_field"""),
)

COMPLETIONS = Form(
    ("/v1/completions",),
    {"model": "demo", "prompt": "hi there", "max_tokens": 8},
    (
        MODEL,
        Field("prompt", "hi there and more", (Counts.PROMPT,), "text, and a token for its begin"),
        Field(
            "prompt",
            ["hi there", "and more"],
            (Counts.PROMPT, Counts.SEQUENCES),
            "each is a prompt of its own",
        ),
        Field("prompt", [7] * 30, (Counts.PROMPT,), "token ids, exactly"),
        Field("prompt", [[7] * 30, [8] * 3], (Counts.PROMPT, Counts.SEQUENCES), "lists of ids"),
        Field("prompt", "", refused=Code.INVALID_VALUE, words="empty"),
        Field(
            "prompt_embeds",
            "AAAA",
            refused=Code.INVALID_VALUE,
            words="only the engine could tell its tokens; with the fleet's `media.tensor_tokens` each counts that"
            " many, is a prompt of its own, and passes",
        ),
        Field(
            "max_tokens",
            None,
            (Counts.OUTPUT,),
            "as absent: 16, as in vLLM",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field("max_tokens", 20, (Counts.OUTPUT,)),
        Field(
            "max_tokens",
            CONTEXT,
            (Counts.OUTPUT,),
            "above what the prompt leaves of the context: clamped",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field("max_tokens", CONTEXT + 1, refused=Code.INVALID_VALUE, words="above the context"),
        Field("max_completion_tokens", 30, words="vLLM ignores it here"),
        *(field for field in NUMBERS if field.name != "top_logprobs"),
        *STREAMED,
        Field("logprobs", 2),
        Field("response_format", SCHEMA, words="no template shows it"),
        *TRANSFERS,
        EXTRAS,
    ),
    names(SAMPLING + " suffix"),
)

MESSAGES = Form(
    ("/v1/messages",),
    {"model": "demo", "messages": HI, "max_tokens": 8},
    (
        MODEL,
        Field("messages", [*HI, *HI], (Counts.PROMPT,), "as in a chat"),
        Field("system", "Be brief.", (Counts.PROMPT,), "a message more"),
        Field("max_tokens", 20, (Counts.OUTPUT,)),
        Field("max_tokens", None, refused=Code.MISSING_FIELD, words="it has to be there"),
        Field(
            "max_tokens",
            CONTEXT,
            (Counts.OUTPUT,),
            "above what the prompt leaves of the context: clamped",
            writes={"max_tokens": Written.LIMIT},
        ),
        Field("tools", [{"name": "weather", "input_schema": WEATHER}], (Counts.PROMPT,), TOOLS.words),
        Field(
            "output_config",
            {"format": {"type": "json_schema", "schema": WEATHER}},
            (Counts.PROMPT,),
            "`format` as text",
        ),
        Field("chat_template_kwargs", {"enable_thinking": False}, (Counts.PROMPT,), SHOWN[1].words),
        Field("stream", True, words="usage comes by itself"),
        Field("n", 3, words="vLLM does not read it here"),
        Field("priority", 5, words="vLLM does not read it here"),
        *TRANSFERS,
        EXTRAS,
    ),
    names("""cache_salt metadata mm_payload return_mm_kwargs stop_sequences temperature thinking tool_choice top_k top_p
        vllm_xargs watermarking an_unknown_field"""),
)

RESPONSES = Form(
    ("/v1/responses",),
    {"model": "demo", "input": "hi there", "max_output_tokens": 8, "store": False},
    (
        MODEL,
        Field("input", "hi there and more", (Counts.PROMPT,), "a text is a message"),
        Field(
            "input",
            [*HI, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
            (Counts.PROMPT,),
            "items: messages, calls of tools (16 tokens more), what tools gave, thoughts",
        ),
        Field("instructions", "Be brief.", (Counts.PROMPT,), "a message more"),
        Field("previous_input_messages", HI, (Counts.PROMPT,), "as `input`"),
        Field("max_output_tokens", 20, (Counts.OUTPUT,)),
        Field(
            "max_output_tokens",
            None,
            (Counts.OUTPUT,),
            "as absent: `default_output_tokens` of the fleet",
            writes={"max_output_tokens": Written.LIMIT},
        ),
        Field(
            "store",
            True,
            words="an id is written, so that the response is found again",
            writes={"request_id": Written.ID},
        ),
        Field(
            "request_id",
            "mine",
            words="of a response that may be stored it is ours",
            beside={"store": True},
            writes={"request_id": Written.ID},
        ),
        Field(
            "background",
            True,
            words="with `stream` as well: its blocks are held until its engine says that it is over",
            beside={"store": True},
            writes={"request_id": Written.ID},
        ),
        Field(
            "background",
            True,
            refused=Code.INVALID_VALUE,
            words="of a response that is not stored nobody could ask whether it is over",
            beside={"store": False},
        ),
        Field("background", False),
        Field(
            "tools",
            [{"type": "function", "name": "weather", "parameters": WEATHER}],
            (Counts.PROMPT,),
            f"{TOOLS.words}; with `engine_tools` of the fleet the whole context where an engine may run one itself",
        ),
        Field(
            "text",
            {"format": {"type": "json_schema", "name": "place", "schema": WEATHER}},
            (Counts.PROMPT,),
            "`format` as text",
        ),
        Field("chat_template_kwargs", {"enable_thinking": False}, (Counts.PROMPT,), SHOWN[1].words),
        Field("truncation", "auto", words="the prompt is cut to what the context leaves"),
        Field("stream", True, words="usage comes by itself"),
        PRIORITY,
        Field("seed", 7),
        Field("top_logprobs", 2),
        *TRANSFERS,
        EXTRAS,
    ),
    names("""cache_salt enable_response_messages frequency_penalty ignore_eos include include_reasoning
        include_stop_str_in_output logit_bias max_tool_calls media_io_kwargs metadata min_p mm_payload
        mm_processor_kwargs parallel_tool_calls presence_penalty prompt prompt_cache_key reasoning repetition_penalty
        return_mm_kwargs service_tier session_id skip_special_tokens stop stop_token_ids structured_outputs
        temperature tool_choice top_k top_p user vllm_xargs watermarking an_unknown_field"""),
    words="`previous_response_id` sends the call to the replica that has the conversation, and counts all of it, as "
    "that engine tells its length.",
)

_POOLED = (
    MODEL,
    Field("input", "hi there and more", (Counts.PROMPT,), "text, and a token at either end"),
    Field(
        "input",
        ["hi there", "and more"],
        (Counts.PROMPT, Counts.SEQUENCES),
        "each is a sequence, up to 2,048",
    ),
    Field("input", [7] * 30, (Counts.PROMPT,), "token ids, exactly"),
    Field("input", [[7] * 30, [8] * 3], (Counts.PROMPT, Counts.SEQUENCES), "lists of ids"),
    Field("input", [*HI, *HI], (Counts.PROMPT,), "a conversation, as in a chat"),
    Field("messages", [*HI, *HI], (Counts.PROMPT,), "the same", without=("input",)),
    *SHOWN,
    Field("truncate_prompt_tokens", 5, (Counts.CUT,), "the engine cuts longer inputs to this"),
    PRIORITY,
    Field("padding", "do_not_pad"),
    Field("padding", "longest", refused=Code.INVALID_VALUE, words="by how much an engine pads is not known"),
    *TRANSFERS,
)
_POOLED_PLAIN = """add_generation_prompt add_special_tokens cache_salt continue_final_message dimensions embed_dtype
    encoding_format endianness media_io_kwargs mm_processor_kwargs request_id truncation_side use_activation user
    an_unknown_field"""
EMBEDDINGS = Form(("/v1/embeddings",), {"model": "demo", "input": "hi there"}, _POOLED, names(_POOLED_PLAIN))
POOLING = Form(
    ("/pooling",),
    {"model": "demo", "input": "hi there"},
    (
        *_POOLED,
        Field(
            "data",
            {"any": 1},
            refused=Code.INVALID_VALUE,
            words="what a plugin makes of it cannot be counted",
        ),
    ),
    names(_POOLED_PLAIN + " task"),
)

_SCORED = (
    MODEL,
    Field("max_tokens_per_doc", 3, (Counts.CUT,), "the engine cuts longer documents to this"),
    Field("max_tokens_per_query", 3, (Counts.CUT,), "the engine cuts longer queries to this"),
    Field("truncate_prompt_tokens", 5, (Counts.CUT,), "the engine cuts longer prompts to this"),
    Field("instruction", "Compare.", (Counts.PROMPT,), "as text, in each prompt"),
    SHOWN[1],
    PRIORITY,
    Field("padding", "do_not_pad"),
    Field("padding", "longest", refused=Code.INVALID_VALUE, words="by how much an engine pads is not known"),
    *TRANSFERS,
)
_SCORED_PLAIN = (
    "cache_salt mm_processor_kwargs request_id truncation_side use_activation user an_unknown_field"
)
SCORE = Form(
    ("/score", "/v1/score"),
    {"model": "demo", "text_1": "hi there", "text_2": "hello"},
    (
        Field("text_1", "hi there and more", (Counts.PROMPT,), "a query; 4 tokens around a pair"),
        Field(
            "text_2",
            ["hello", "and more"],
            (Counts.PROMPT, Counts.SEQUENCES),
            "each with the query is a sequence",
        ),
        *(
            Field(
                two,
                ["hello", "and more"],
                (Counts.PROMPT, Counts.SEQUENCES),
                "other names of the same",
                without=("text_1", "text_2"),
                beside={one: "hi there"},
            )
            for one, two in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
        ),
        *(
            Field(
                one,
                "hi there and more",
                (Counts.PROMPT,),
                "other names of the same",
                without=("text_1", "text_2"),
                beside={two: "hello"},
            )
            for one, two in (("data_1", "data_2"), ("queries", "documents"))
        ),
        *_SCORED,
    ),
    names(_SCORED_PLAIN),
)
RERANK = Form(
    ("/rerank", "/v1/rerank", "/v2/rerank"),
    {"model": "demo", "query": "hi there", "documents": ["hello"]},
    (
        Field(
            "query",
            "hi there and more",
            (Counts.PROMPT,),
            "it counts with each document; 4 tokens around a pair",
        ),
        Field(
            "documents",
            ["hello", "and more"],
            (Counts.PROMPT, Counts.SEQUENCES),
            "each with the query is a sequence",
        ),
        *_SCORED,
    ),
    names(_SCORED_PLAIN + " top_n"),
)
SPEECH = Form(
    ("/v1/audio/transcriptions", "/v1/audio/translations"),
    {"model": "demo", "file": wave(1), "max_completion_tokens": "8"},
    (
        MODEL,
        Field(
            "file",
            wave(400),
            (Counts.PROMPT, Counts.SEQUENCES),
            "clips of `media.clip_seconds`, each a sequence",
        ),
        Field("prompt", "Names: Ada.", (Counts.PROMPT,), "as text, for each clip"),
        Field("hotwords", "Ada", (Counts.PROMPT,), "as text, for each clip"),
        Field("max_completion_tokens", "20", (Counts.OUTPUT,), "of each clip"),
        Field("n", "3", words="alone it means nothing to vLLM here"),
        Field("use_beam_search", "true", (Counts.SEQUENCES,), "`n` beams of each clip", beside={"n": "3"}),
        Field(
            "stream",
            "true",
            words="so that usage is told",
            writes={"stream_include_usage": "true"},
        ),
        Field(
            "stream_include_usage",
            "true",
            words="the client sees the frame of usage",
            beside={"stream": "true"},
        ),
        Field(
            "stream_continuous_usage_stats",
            "true",
            words="alone it means nothing",
            beside={"stream": "true"},
            writes={"stream_include_usage": "true", "stream_continuous_usage_stats": "false"},
        ),
        replace(EXTRAS, value='{"kv_transfer_params": "any"}'),
    ),
    names("""frequency_penalty include_stop_str_in_output language length_penalty min_p presence_penalty
        repetition_penalty response_format seed temperature timestamp_granularities[] to_language top_k top_p vllm_xargs
        watermarking"""),
    is_json=False,
    words="A form (multipart/form-data) of which every byte but these passes as it came.",
)
FORMS = (CHAT, BATCH, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS, POOLING, SCORE, RERANK, SPEECH)

PASSED = {
    "/tokenize": {"model": "demo", "messages": HI, "tools": [TOOL], "return_token_strs": True},
    "/detokenize": {"model": "demo", "tokens": [1, 2]},
    "/v1/messages/count_tokens": {"model": "demo", "messages": HI, "system": "Be brief."},
}
"""Bodies of which only `model` is read."""

PARTS: dict[str, tuple[dict[str, Any], As]] = {
    "`text`, `input_text`, `output_text`, `refusal`, `thinking`": (
        {"type": "text", "text": "and more"},
        As.TEXT,
    ),
    "`image_url`": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, As.MEDIA),
    "`input_image`": ({"type": "input_image", "image_url": "https://host/a.png"}, As.MEDIA),
    "`image` (Anthropic)": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        As.MEDIA,
    ),
    "`image_embeds`, `audio_embeds`, `video_embeds`, `prompt_embeds`": (
        {"type": "image_embeds", "image_embeds": "AAAA"},
        As.NOTHING,
    ),
    "`input_audio`": ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, As.MEDIA),
    "`audio_url`": ({"type": "audio_url", "audio_url": {"url": "https://host/a.wav"}}, As.MEDIA),
    "`video_url`": ({"type": "video_url", "video_url": {"url": "https://host/a.mp4"}}, As.MEDIA),
    "any unknown type": ({"type": "hologram", "data": "AAAA"}, As.MEDIA),
    "`tool_use`": ({"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}, As.TEXT),
    "`tool_result`": ({"type": "tool_result", "tool_use_id": "1", "content": "rain"}, As.TEXT),
}
"""Parts of a message's `content`, and what they count as."""

HEADERS = {
    "authorization": ("Bearer kvg_x", False, "the caller's key stays behind; the pool's own is sent"),
    "x-api-key": ("kvg_x", False, "the same"),
    "cookie": ("a=b", False, ""),
    "content-type": ("application/json", True, ""),
    "accept": ("*/*", True, ""),
    "user-agent": ("mine", True, ""),
    "traceparent": ("00-1-2-01", True, ""),
    "tracestate": ("a=b", True, ""),
    "baggage": ("a=b", True, ""),
    "x-session-id": ("s", True, ""),
    "x-claude-code-session-id": ("s", True, ""),
    "x-data-parallel-rank": ("1", True, "replaced where the replica is one rank (`data_parallel_rank`)"),
    "endpoint-load-metrics-format": ("JSON", True, ""),
    "x-prompt-tokens": ("1", False, "the engine gets the estimate"),
    "x-request-id": ("mine", False, "the engine gets an id of ours, the client its own back"),
    "idempotency-key": ("k", False, "read by kvgate"),
    "x-kvgate-priority": ("low", False, "read by kvgate"),
    "x-kvgate-deadline-ms": ("100", False, "read by kvgate"),
    "x-stainless-retry-count": ("1", False, "read by kvgate"),
    "x-anything-else": ("a", False, ""),
}
"""Headers of a request: a value, whether it passes, and why."""

ROUTES = (
    *(Route("POST", path, Way.ADMITTED, "as below") for form in FORMS for path in form.paths),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        Way.UNRESERVED,
        "at the replica that has it, for the key that asked for it; `stream=true` with `starting_after` too, where the "
        "engine has its events",
    ),
    Route("POST", "/v1/responses/{response_id}/cancel", Way.UNRESERVED, "the same"),
    *(
        Route(
            "POST", path, Way.UNRESERVED, "its tokenizer answers; `model` is read, the body passes untouched"
        )
        for path in PASSED
    ),
    Route("GET", "/v1/models", Way.OWN, "the models of the key"),
    *(Route("GET", path, Way.OWN, "as vLLM does", public=True) for path in ("/health", "/ping", "/version")),
    Route("POST", "/ping", Way.OWN, "as vLLM does", public=True),
    Route("GET", "/metrics", Way.OWN, "kvgate's own figures", public=True),
    *(
        Route(method, path, Way.CLOSED)
        for method, path in (
            ("POST", "/v1/systemone"),
            ("POST", "/generative_scoring"),
            ("POST", "/invocations"),
            ("GET", "/load"),
            ("GET", "/tokenizer_info"),
            ("GET", "/kv_event_sources"),
            ("POST", "/scale_elastic_ep"),
            ("POST", "/is_scaling_elastic_ep"),
            ("POST", "/inference/v1/generate"),
            ("POST", "/abort_requests"),
            ("POST", "/sleep"),
            ("POST", "/pause"),
        )
    ),
)
