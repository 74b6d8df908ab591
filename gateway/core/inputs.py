"""What a call is made of that embeds or scores: many inputs, and no output.

Source: the protocol of vLLM 0.32's pooling models, and answers recorded from it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.core.body import Members, Refused, is_given, read_integer, read_value
from gateway.core.outcomes import Code
from gateway.core.prompt import Prompt, check_inputs, read_content, read_inputs, read_template

PAIR_TOKENS = 4
"""Around a query and its document, and between them, as RoBERTa and its descendants have it."""
TOKENS_MAX = 2**31 - 1
_SCORED = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The names that vLLM has for the two sides of a score."""
_NOT_PADDED = ("do_not_pad",)


class Layout(msgspec.Struct, frozen=True):
    """How the texts that are counted become the engine's prompts.

    The first one is in every prompt.  Then come queries, then what every prompt has one of; the only query goes with
    each of those, or each query with its own.  So a text that many prompts have is counted once.
    """

    queries: int = 0
    query_tokens_max: int = 0
    document_tokens_max: int = 0
    """Longer ones are cut by the engine; 0: they are not."""

    def prompts(self, counts: Sequence[int]) -> list[int]:
        """Tokens of each prompt, from those of each text."""
        everywhere, *texts = counts
        queries = [_cut(tokens, self.query_tokens_max) for tokens in texts[: self.queries]] or [0]
        documents = [_cut(tokens, self.document_tokens_max) for tokens in texts[self.queries :]]
        if len(queries) == 1:
            queries *= len(documents)
        return [everywhere + q + d for q, d in zip(queries, documents, strict=True)]

    def count(self, texts: int) -> int:
        """How many prompts so many texts make."""
        return texts - 1 - self.queries


class Inputs(msgspec.Struct, frozen=True):
    field: str
    """The one that holds what there may be too much of."""
    texts: tuple[Prompt, ...]
    layout: Layout


def read_embedded(members: Members, *names: str) -> Inputs:
    """The inputs under the only one of these names that is given.  Raises Refused."""
    _check_padding(members)
    if is_given(members, "data"):
        message = "`data` is not accepted: what a plugin of the engine makes of it cannot be counted."
        raise Refused(Code.INVALID_VALUE, message, "data")
    given = [name for name in names if is_given(members, name)]
    if not given:
        raise _missing(" or ".join(f"`{name}`" for name in names), names[0])
    if len(given) > 1:
        raise _ambiguous([(name,) for name in given])
    (name,) = given
    texts = read_inputs(members, name)
    return Inputs(name, (read_template(members, 0), *texts), Layout())


def read_scored(members: Members) -> Inputs:
    """Two lists of texts, or a text and a list.  Raises Refused."""
    given = [pair for pair in _SCORED if all(is_given(members, name) for name in pair)]
    if not given:
        raise _missing("`queries` and `documents` (or `text_1` and `text_2`)", "queries")
    if len(given) > 1:
        raise _ambiguous(given)
    return _read_pairs(members, *given[0])


def read_reranked(members: Members) -> Inputs:
    """A query and its documents.  Raises Refused."""
    for name in ("query", "documents"):
        if not is_given(members, name):
            raise _missing(f"`{name}`", name)
    if isinstance(read_value(members, "query"), list):
        message = "`query` must be a string or an object with a list as its `content`."
        raise Refused(Code.INVALID_VALUE, message, "query")
    return _read_pairs(members, "query", "documents")


def _read_pairs(members: Members, of_queries: str, of_documents: str) -> Inputs:
    _check_padding(members)
    queries, documents = _read_side(members, of_queries), _read_side(members, of_documents)
    if len(queries) not in (1, len(documents)):
        counts = f"`{of_queries}` has {len(queries)}, `{of_documents}` {len(documents)}"
        message = f"{counts}; it must be one and any number, or as many of both."
        raise Refused(Code.INVALID_VALUE, message, of_queries)
    layout = Layout(
        len(queries),
        read_integer(members, "max_tokens_per_query", 0, TOKENS_MAX) or 0,
        read_integer(members, "max_tokens_per_doc", 0, TOKENS_MAX) or 0,
    )
    everywhere = read_template(members, PAIR_TOKENS, "instruction")
    return Inputs(of_documents, (everywhere, *queries, *documents), layout)


def _read_side(members: Members, name: str) -> list[Prompt]:
    value: Any = read_value(members, name)
    sides = value if isinstance(value, list) else [value]
    if not sides:
        raise Refused(Code.INVALID_VALUE, f"`{name}` is an empty list.", name)
    check_inputs(len(sides), name)
    return [read_content(side, name) for side in sides]


def _check_padding(members: Members) -> None:
    padding = read_value(members, "padding")
    if padding is not None and padding not in _NOT_PADDED:
        message = "`padding` must be do_not_pad: by how much an engine pads its inputs is not known here."
        raise Refused(Code.INVALID_VALUE, message, "padding")


def _missing(what: str, param: str) -> Refused:
    return Refused(Code.MISSING_FIELD, f"{what} must be given.", param)


def _ambiguous(given: Sequence[Sequence[str]]) -> Refused:
    """Which of them an engine reads is its own affair."""
    names = ", ".join(" and ".join(f"`{name}`" for name in pair) for pair in given)
    return Refused(Code.INVALID_VALUE, f"Only one of {names} may be given.", given[0][0])


def _cut(tokens: int, most: int) -> int:
    return min(tokens, most) if most else tokens
