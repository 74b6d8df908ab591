"""Chat templates: what a model's own Jinja template makes of a chat, rendered as transformers does.

Source: `transformers.utils.chat_template_utils` 5.19, and vLLM 0.32 for what is read off a template.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any

import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.core.conversation import Chat, Fields, Inexpressible, Style

_GOES_ON = "CONTINUE_FINAL_MESSAGE_TAG "
_CLOCK = "strftime_now"
_DATES = frozenset("AaBbCDdeFGgjmntUuVWwxYy%")
"""Directives of strftime that are the same all day."""
_DIRECTIVE = re.compile(r"%[-_0^#]?(.?)")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 the type that Jinja declares

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_as_it_is")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One template, compiled.  Rendering keeps nothing, so that threads may share it."""

    def __init__(self, source: str) -> None:
        """Raises jinja2's TemplateError."""
        environment = _environment()
        self._source = source
        self._template = environment.from_string(source)
        root = environment.parse(source)
        self.shows_time = _CLOCK in source
        """It may show the time, of this moment, which is not that when its engine shows it."""
        self.shows_clock = _shows_clock(root)
        """And more of it than the date."""
        self.style = Style(
            shows_parts=_loops_over_parts(root),
            knows_developer='"developer"' in source or "'developer'" in source,
        )

    def render(self, chat: Chat, special_tokens: Mapping[str, Any]) -> str:
        """The prompt.  Raises Inexpressible where the template refuses the chat: so will the engine."""
        messages = _marked(chat.messages, self._source) if chat.continue_final_message else chat.messages
        try:
            prompt = self._template.render(
                {
                    **special_tokens,
                    "documents": None,
                    **chat.variables,
                    "messages": messages,
                    "tools": chat.tools,
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except Exception as error:  # whatever a template raises is its own: it may add a text to None
            raise Inexpressible("the template refuses it") from error
        return _cut_at_mark(prompt) if chat.continue_final_message else prompt


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[_CLOCK] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


# Does it show the time of day? -----------------------------------------------------------------------------


def _shows_clock(root: jinja2.nodes.Template) -> bool:
    """Also where that cannot be told: a format that is made up as it is rendered, or the clock by another name."""
    calls = [call for call in root.find_all(jinja2.nodes.Call) if _reads(call.node, _CLOCK)]
    asked = [test for test in root.find_all(jinja2.nodes.Test) if _reads(test.node, _CLOCK)]
    named = sum(name.name == _CLOCK for name in root.find_all(jinja2.nodes.Name))
    return named > len(calls) + len(asked) or not all(map(_is_of_date, calls))


def _is_of_date(call: jinja2.nodes.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.kwargs)]
    if len(given) != 1 or not isinstance(given[0], jinja2.nodes.Const) or not isinstance(given[0].value, str):
        return False
    return _DATES.issuperset(_DIRECTIVE.findall(given[0].value))


# A message that goes on -------------------------------------------------------------------------------------


def _marked(messages: list[Fields], source: str) -> list[Fields]:
    """With a mark at the end of the last message's text, where the prompt is cut."""
    last = deepcopy(messages[-1])
    if "content" not in source:
        raise Inexpressible("the template shows no content")
    content = last["content"]
    if isinstance(content, str):
        last["content"] = content + _GOES_ON
    elif content:
        content[-1]["text"] += _GOES_ON
    else:
        raise Inexpressible("no text that could go on")
    return [*messages[:-1], last]


def _cut_at_mark(prompt: str) -> str:
    at = prompt.rfind(_GOES_ON.strip())
    if at < 0:
        raise Inexpressible("the template does not show the last message")
    kept = prompt[:at]
    return kept if prompt.startswith(_GOES_ON, at) else kept.rstrip()


# Does it loop over parts? -----------------------------------------------------------------------------------
# As vLLM's `_detect_content_format` finds out whether a template takes OpenAI's list of parts.


def _loops_over_parts(root: jinja2.nodes.Template) -> bool:
    messages = set(_aliases(root, "messages"))
    names = {
        loop.target.name
        for loop in root.find_all(jinja2.nodes.For)
        if isinstance(loop.target, jinja2.nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }
    in_macros: dict[int, set[str]] = {}
    for macro in root.find_all(jinja2.nodes.Macro):
        given = _given_content(root, macro, names)
        for loop in macro.find_all(jinja2.nodes.For):
            in_macros[id(loop)] = given or in_macros.get(id(loop), set())
    return any(_is_over_parts(loop, names, in_macros) for loop in root.find_all(jinja2.nodes.For))


def _is_over_parts(loop: jinja2.nodes.For, names: set[str], in_macros: Mapping[int, set[str]]) -> bool:
    if any(_reads(loop.iter, name, "content") for name in names):
        return True
    if not isinstance(loop.iter, jinja2.nodes.Name):
        return False
    if id(loop) in in_macros:
        return loop.iter.name in in_macros[id(loop)]
    return loop.iter.name == "content"


def _aliases(root: jinja2.nodes.Template, name: str) -> Iterator[str]:
    """The name, and those that are set to it or to a part of it."""
    waiting, seen = [name], set()
    while waiting:
        known = waiting.pop(0)
        if known in seen:
            continue
        seen.add(known)
        yield known
        for assign in root.find_all(jinja2.nodes.Assign):
            if isinstance(assign.target, jinja2.nodes.Name) and _reads(assign.node, known):
                waiting.append(assign.target.name)


def _given_content(root: jinja2.nodes.Template, macro: jinja2.nodes.Macro, names: set[str]) -> set[str]:
    """Parameters of a macro that some call gives a message's content."""
    parameters = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in root.find_all(jinja2.nodes.Call):
        if not (isinstance(call.node, jinja2.nodes.Name) and call.node.name == macro.name):
            continue
        arguments = [*zip(parameters, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
        given |= {
            parameter
            for parameter, value in arguments
            if parameter in parameters and any(_reads(value, name, "content") for name in names)
        }
    return given


def _reads(node: jinja2.nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its member `key`, or those filtered or sliced."""
    if isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
        return _reads(node.node, variable, key)
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
        return _reads(node.node, variable, key)
    if key is None:
        return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, jinja2.nodes.Getitem):
        is_key = isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == key
        return is_key and _reads(node.node, variable)
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == key and _reads(node.node, variable)
