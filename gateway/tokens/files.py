"""The files of a model's tokenizer, as Hugging Face lays them out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.core.outcomes import OperatorError

MISSING = "a model's own tokenizer needs tokenizers and Jinja2: pip install 'kvgate[exact]'"


class TokenizerError(OperatorError):
    """They cannot be used; one line for the operator."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    tokenizer: Path
    """`tokenizer.json`; beside it `tokenizer_config.json` is read, where there is one."""
    chat_template: Path | None = None
    """What vLLM was given as `--chat-template`; None = the model's own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's `--default-chat-template-kwargs`."""
