"""Writes the embedded default checkpoint in the files and names of a Hugging Face one."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from headwater.models.families import read_config
from headwater.models.tiny import tokenizer as tiny_tokenizer
from headwater.spec import ModelSpec

NAME = "headwater-tiny-3"  # a new number whenever what is written changes
SEED = 20
VOCAB = 2048
MEMORY_TOKENS = (20.0, 5000.0)  # of the recurrent states' heads, spread evenly in the logarithm
LOGIT_SCALE = 0.3  # a random word's logits spread over several units, so one word stands out

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}


def ensure_default(cache_dir: Path | str) -> Path:
    """The folder of the default checkpoint, written if it is not there. It appears whole or not at all."""
    root = Path(cache_dir).expanduser()
    target = root / NAME
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{NAME}-") as name:
        made = Path(name) / NAME
        made.mkdir()
        _write(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first: its folder is as good
                raise
    return target


def _write(folder: Path) -> None:
    tokenizer = tiny_tokenizer.train(VOCAB, SEED)
    end, pad = tokenizer.token_to_id(tiny_tokenizer.TURN_END), tokenizer.token_to_id(tiny_tokenizer.END_OF_TEXT)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = resources.files("headwater.models.tiny") / "chat_template.jinja"
    with resources.as_file(template) as file:
        shutil.copyfile(file, folder / "chat_template.jinja")
    ids = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "tokenizer_config.json", tiny_tokenizer.config())
    _write_json(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    )
    _write_json(folder / "config.json", CONFIG | ids)
    weights = folder / "model.safetensors"
    save_file(_weights(tokenizer), str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # it is written readable by its owner only


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _weights(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Every tensor of the model in bfloat16, from the seed."""
    spec = read_config(CONFIG, "bfloat16")
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {}
    for name, shape in tensor_shapes(spec):
        if name.endswith("A_log"):
            low, high = map(math.log, MEMORY_TOKENS)
            tokens = torch.exp(low + (high - low) * torch.rand(*shape, generator=generator))
            tensors[name] = -torch.log(math.log1p(math.e) * tokens)  # dt_bias is 1: softplus(1) = log(1 + e)
        elif name.endswith("dt_bias"):
            tensors[name] = torch.ones(shape)
        elif name.endswith("linear_attn.norm.weight"):
            tensors[name] = 1.0 + normal(*shape, scale=0.05)
        elif name.endswith("norm.weight"):
            tensors[name] = normal(*shape, scale=0.05)
        elif name == "lm_head.weight":
            words = tiny_tokenizer.sayable(tokenizer)
            tensors[name] = torch.zeros(shape)
            tensors[name][words] = normal(len(words), shape[1], scale=LOGIT_SCALE)
        elif name == "model.embed_tokens.weight":
            tensors[name] = normal(*shape, scale=1.0)
        else:
            tensors[name] = normal(*shape, scale=0.5 if "conv1d" in name else shape[-1] ** -0.5)
    return {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a dense Qwen3.5 text model's tensors."""
    yield f"model.{spec.embedding}", (spec.vocab_size, spec.hidden_size)
    for block in spec.blocks:
        yield f"model.{block.norm}", (spec.hidden_size,)
        for part in block.parts:
            yield from ((f"model.{part.at}.{name}", shape) for name, shape in part.layer.tensors().items())
    yield f"model.{spec.final_norm}", (spec.hidden_size,)
    yield spec.head, (spec.vocab_size, spec.hidden_size)
