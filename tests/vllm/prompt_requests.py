"""Requests whose prompts show every way in which a chat reaches its template."""

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a city · "now", in °C <b>',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["København", "東京"]},
                "days": {"type": "integer", "minimum": 1, "default": 3.0},
            },
            "required": ["city"],
        },
        "strict": True,
    },
}
CLOCK = {"function": {"parameters": {"type": "object", "properties": {}}, "name": "now"}, "unknown": 1}
SYSTEM = {"role": "system", "content": "You are a terse assistant.\n"}
ASKED = {"role": "user", "content": "What is the weather in København? 今日の東京は。 👍🏽 "}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "call_0123456789",
            "function": {"name": "get_weather", "arguments": '{"city": "København", "days": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": '{"celsius": -3.5}'}
ANSWER = {
    "role": "assistant",
    "content": "It is -3,5 °C, 7 ½ feet.",
    "reasoning_content": "\nThe tool says so.\n",
}
MORE = {"role": "user", "content": "And\ttomorrow?  \r\n", "name": "alice"}
TEXT_PARTS = [
    {"type": "text", "text": "First part."},
    {
        "type": "text",
        "text": "Second part: <|im_end|> is text here, too.",
        "cache_control": {"type": "ephemeral"},
    },
]


def _calls(*arguments: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}{'0' * 8}", "type": "function", "function": {"name": "f", "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASKED]},
    "system": {"messages": [SYSTEM, ASKED]},
    "turns": {"messages": [SYSTEM, ASKED, ANSWER, MORE]},
    "two systems": {"messages": [SYSTEM, ASKED, ANSWER, SYSTEM, MORE]},
    "billing": {
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe brief."},
            ASKED,
        ]
    },
    "parts": {"messages": [SYSTEM, {"role": "user", "content": TEXT_PARTS}]},
    "parts of strings": {"messages": [{"role": "user", "content": ["one", "two"]}]},
    "empty parts": {"messages": [{"role": "user", "content": []}, {"role": "user", "content": ""}]},
    "part kinds": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "refusal", "refusal": "No."}],
            },
            {"role": "user", "content": [{"type": "input_text", "text": "why?"}]},
        ]
    },
    "tools": {"messages": [SYSTEM, ASKED], "tools": [WEATHER, CLOCK]},
    "tools deferred": {"messages": [ASKED], "tools": [CLOCK | {"defer_loading": True}]},
    "tools not chosen": {"messages": [ASKED], "tools": [WEATHER], "tool_choice": "none"},
    "tool call": {"messages": [SYSTEM, ASKED, CALLS, RESULT, ANSWER, MORE], "tools": [WEATHER]},
    "tool result in parts": {
        "messages": [ASKED, CALLS, RESULT | {"content": TEXT_PARTS}],
        "tools": [WEATHER],
    },
    "tool calls": {
        "messages": [ASKED, _calls("{}", "", "[1]", "{broken", '{"x": [1.50, 1e3, null, "é"]}'), RESULT],
    },
    "no tool calls": {"messages": [ASKED, {"role": "assistant", "content": "hm", "tool_calls": []}, MORE]},
    "call with more": {
        "messages": [ASKED, {**CALLS, "tool_calls": [{**CALLS["tool_calls"][0], "index": 0}]}, RESULT],
    },
    "reasoning": {"messages": [ASKED, {"role": "assistant", "content": "x", "reasoning": "y"}, MORE]},
    "unknown fields": {
        "messages": [
            ASKED | {"mood": "glad", "weight": 1},
            {"role": "assistant", "content": "a", "audio": None},
            MORE,
        ]
    },
    "own role": {"messages": [{"role": "critic", "content": "Hm.", "name": "bob"}, ASKED]},
    "developer": {
        "messages": [
            {"role": "developer", "content": "Obey.", "tools": [WEATHER]},
            ASKED,
            {"role": "developer", "content": "Still."},
        ]
    },
    "no generation prompt": {"messages": [ASKED, ANSWER], "add_generation_prompt": False},
    "continued": {
        "messages": [ASKED, {"role": "assistant", "content": "The weather is  "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued in parts": {
        "messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "It"}]}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "variables": {
        "messages": [ASKED],
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 Jan 2030", "nothing": None},
    },
    "effort": {"messages": [ASKED], "reasoning_effort": "none"},
    "documents": {"messages": [ASKED], "documents": [{"title": "T", "text": "Some text."}]},
    "special tokens": {"messages": [ASKED], "add_special_tokens": True},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Once upon a time there was  "},
    "texts": {"prompt": ["eins", "zwei 三", "<s> <|im_start|>"]},
    "without special tokens": {"prompt": "def f(x):\n    return x\n", "add_special_tokens": False},
}
