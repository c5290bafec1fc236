"""Loading of a Hugging Face model folder, or a GGUF file: config, weights, tokenizer, chat template, end tokens."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headwater.config_keys import MAX_SIZE, checked, read_json, text_config
from headwater.errors import CheckpointError
from headwater.hub_name import HubName, name_of
from headwater.mixers.weight_memory import of_a_model
from headwater.models.build import build_model, build_mtp
from headwater.models.dtype import choose_dtype
from headwater.models.families import read_folder
from headwater.models.files import (
    TIKTOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WITHOUT_TOKENIZER,
    is_mlx_folder,
    model_config,
    weight_files,
)
from headwater.models.gguf.file import parts_of, read_header
from headwater.models.gguf.tensors import GgufTensors
from headwater.models.gguf.tokenizer import special_tokens, tokenizer_of
from headwater.models.hybrid import HybridModel
from headwater.models.kept_weights import open_kept_weights
from headwater.models.mlx.tensors import MlxTensors
from headwater.models.mtp import MtpModule
from headwater.models.quantisation import method_of
from headwater.models.quantiser import converted
from headwater.models.tensors import CheckpointTensors, ModelTensors
from headwater.models.tiktoken import tiktoken_tokenizer
from headwater.setting import SettingError
from headwater.spec import ModelSpec
from headwater.unreadable import is_gguf

log = logging.getLogger("headwater.models")


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer, chat template and generation settings."""

    name: str
    path: Path
    model: HybridModel
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: str | None  # jinja2 source
    special_tokens: dict[str, str]  # "bos_token", "eos_token", ... as the template may use them
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json
    eos_token_ids: tuple[int, ...] = ()
    mtp: MtpModule | None = None  # the head of multi-token prediction, if it was asked for
    device: str = "cpu"  # where the model computes


def read_spec(
    path: Path | str,
    dtype: str = "auto",
    device: str = "cpu",
    page_size: int = 64,
    weights: str = "auto",
    rope_scaling: str | None = None,
) -> ModelSpec:
    """Read the spec of the model in this folder; `auto` chooses the dtype.

    Raises CheckpointError, and SettingError for a device that torch cannot use.
    """
    check_device(device)
    folder = Path(path)
    return read_folder(folder, choose_dtype(model_config(folder), dtype, device).name, page_size, weights, rope_scaling)


def check_device(device: str) -> None:
    """Raise SettingError if torch cannot compute on the device."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        why = "is a build without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise SettingError("device", repr(device), f"but torch {torch.__version__} {why}: use --device cpu")


def load_model(
    path: Path | str,
    dtype: str = "auto",
    device: str = "cpu",
    page_size: int = 64,
    weights: str = "auto",
    mtp: bool = False,
    texts: Texts | None = None,
    rope_scaling: str | None = None,
    keep: bool = False,
) -> LoadedModel:
    """Read a folder or a GGUF file; `weights` is how weights are held, `mtp` reads the MTP head as well.

    `texts`: what `read_texts` read already; `rope_scaling`: a change of the rotation; `keep`: converted weights, in
    the cache folder.

    Raises CheckpointError that names the file, and the tensor or key, that is wrong.
    """
    folder = Path(path)
    spec = read_spec(folder, dtype, device, page_size, weights, rope_scaling)
    config = model_config(folder)
    if is_gguf(folder):  # whose heads are reordered as soon as it is opened
        _check_size(folder, spec)
    with checked(folder):
        tensors = open_weights(folder, spec.dtype_name, device)
    _check_size(folder, spec)
    kept = open_kept_weights(folder, spec.weights) if keep and spec.weights != "auto" else None
    with of_a_model():
        model = build_model(spec, tensors, kept or converted)
        head = build_mtp(spec, tensors, model, kept or converted) if mtp else None
    if kept is not None:
        kept.report()
    if kept is None or not kept.n_read:  # else the tensors of kept weights are unread, too
        _tell_of_skipped(folder, [name for name in tensors.unread() if spec.mtp is None or not spec.mtp.has(name)])
    texts = texts or read_texts(folder)
    _check_ends(texts.generation, text_config(config))
    named_end = texts.tokenizer.token_to_id(texts.special_tokens.get("eos_token", ""))
    return LoadedModel(
        name=name_of(folder),
        path=folder,
        model=model,
        spec=spec,
        tokenizer=texts.tokenizer,
        chat_template=texts.chat_template,
        special_tokens=texts.special_tokens,
        generation=texts.generation,
        eos_token_ids=_end_tokens(text_config(config), texts.generation, named_end),
        mtp=head,
        device=device,
    )


def _check_size(folder: Path, spec: ModelSpec) -> None:
    """Raise CheckpointError for a configuration of more weights than bits in the files, before memory is taken."""
    files = parts_of(folder) if is_gguf(folder) else [folder / name for name in weight_files(folder)]
    held, described = sum(file.stat().st_size for file in files if file.exists()), spec.parameters_by_kind()
    if held and sum(described.values()) > 8 * held:
        raise CheckpointError(
            f"{folder}: the configuration describes {sum(described.values()):,} weights, the files of {held:,} bytes "
            "have fewer"
        )


def _check_ends(*configs: dict[str, Any]) -> None:
    """Raise CheckpointError for an end token that is not a number, or several."""
    for config in configs:
        value = config.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and 0 <= one <= MAX_SIZE for one in values):
            raise CheckpointError(f"key 'eos_token_id' is {value!r}, must be the ids of tokens"[:200])


def open_weights(folder: Path, dtype: str, device: str = "cpu") -> ModelTensors:
    """Open the files that hold a model's weights, without reading weights.

    Raises CheckpointError for a file that is missing, cut off, or of another format.
    """
    config, to = model_config(folder), (getattr(torch, dtype), torch.device(device))
    if is_gguf(folder):
        return GgufTensors(folder, config, *to)
    return (
        MlxTensors(folder, config, *to) if is_mlx_folder(folder) else CheckpointTensors(folder, *to, method_of(config))
    )


@dataclass(frozen=True)
class Texts:
    """Parts of a model for texts; fields as in `LoadedModel`."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    generation: dict[str, Any]


def read_texts(folder: Path) -> Texts:
    """Read what a folder or GGUF file has for texts. Raises CheckpointError."""
    with checked(folder):
        return _gguf_texts(folder) if is_gguf(folder) else _folder_texts(folder)


def _folder_texts(folder: Path) -> Texts:
    config = _optional_json(folder / TOKENIZER_CONFIG)
    generation = _optional_json(folder / "generation_config.json")
    tokenizer = _tokenizer(folder, config)
    return Texts(tokenizer, _chat_template(folder, config), _special_tokens(config), generation)


def _gguf_texts(file: Path) -> Texts:
    header = read_header(file)
    template = header.metadata.get("tokenizer.chat_template")
    return Texts(tokenizer_of(header), template, special_tokens(header), {})


def _tell_of_skipped(folder: Path, names: list[str]) -> None:
    """Log one line if a checkpoint has more than the text model: a vision tower, layers that predict further tokens."""
    if names:
        parts = Counter(".".join(name.split(".")[:2]) for name in names)
        listed = ", ".join(f"{part} ({n})" for part, n in parts.items())
        model = HubName.of_folder(folder) or folder
        log.info("%s: skipped %d tensors that the text model does not compute with: %s", model, len(names), listed)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    path, ranks = folder / TOKENIZER, folder / TIKTOKEN
    if not path.exists() and ranks.exists():
        return tiktoken_tokenizer(ranks, config)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; {WITHOUT_TOKENIZER}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Read chat_template.jinja, or the tokenizer config's template (of several, the one named "default")."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        return by_name.get("default")
    return template


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the named tokens; each is stored as a string or as an object with its content."""
    tokens = {}
    for key, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _end_tokens(config: dict[str, Any], generation: dict[str, Any], tokenizer_end: int | None) -> tuple[int, ...]:
    """Return all ids that end an answer, from generation config, model config and tokenizer."""
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer_end):
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(ids))
