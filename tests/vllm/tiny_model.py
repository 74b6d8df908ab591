"""Make a Llama of two layers with random weights and a tokenizer trained on this Python's own library.

    python tiny_model.py FOLDER        # in an environment with torch, tokenizers and safetensors

Nothing is downloaded.  4,096 tokens of vocabulary, positions up to 32,768.
"""

import json
import sys
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, HEAD, LAYERS, VOCABULARY, POSITIONS = 128, 64, 2, 4096, 32768
SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<|pad|>"}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 6}
TRAINING_FILES = 80
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER = NAMES | {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": POSITIONS,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
CONFIG = IDS | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": HIDDEN // HEAD,
    "head_dim": HEAD,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))[:TRAINING_FILES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train(files, trainer)
    return tokenizer


def random_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 0.02).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{at}self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{at}mlp.gate_proj.weight"] = matrix(2 * HIDDEN, HIDDEN)
        weights[f"{at}mlp.up_proj.weight"] = matrix(2 * HIDDEN, HIDDEN)
        weights[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)
        weights[f"{at}input_layernorm.weight"] = ones.clone()
        weights[f"{at}post_attention_layernorm.weight"] = ones.clone()
    return weights


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {
        "tokenizer_config.json": TOKENIZER,
        "special_tokens_map.json": NAMES,
        "config.json": CONFIG,
        "generation_config.json": IDS,
    }.items():
        (folder / name).write_text(json.dumps(value, indent=1))
    save_file(random_weights(), str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
