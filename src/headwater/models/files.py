"""Files of a model: those of a folder in Hugging Face's format, by their names, or a GGUF file. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from headwater.config_keys import read_json
from headwater.errors import CheckpointError
from headwater.models.gguf.config import gguf_config
from headwater.models.mlx.config import is_mlx, mlx_config
from headwater.unreadable import is_gguf

CONFIG = "config.json"
QUANTISATION = "hf_quant_config.json"  # of ModelOpt, whose older versions write nothing about it to config.json
EMBEDDED_FOLDER = Path(__file__).parent.parent / "assets" / "headwater-tiny"
TOKENIZER, TIKTOKEN = TOKENIZERS = "tokenizer.json", "tiktoken.model"  # the first precedes
TOKENIZER_CONFIG = "tokenizer_config.json"
WITHOUT_TOKENIZER = "transformers saves it (AutoTokenizer), from a tiktoken.model by its convert_tiktoken_to_fast"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    CONFIG,
    QUANTISATION,
    *TOKENIZERS,
    TOKENIZER_CONFIG,
    "generation_config.json",
    "chat_template.jinja",
    INDEX,
)


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index of sharded weights. Raises CheckpointError."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index}: key 'weight_map' is missing")
    return {tensor: str(file) for tensor, file in names.items()}


def weight_files(folder: Path, files: Collection[str] = ()) -> list[str]:
    """Return the names of the files with weights: those of the index if there is one, otherwise a single file.

    An index is stale, and the single file has the weights, if that is there and not every file that the index names:
    in the folder, or among `files`, which a hub lists.
    """
    index = folder / INDEX
    if not index.exists():
        return [SINGLE]
    named = sorted(set(weight_map(index).values()))

    def there(name: str) -> bool:
        return name in files if files else (folder / name).exists()

    return [SINGLE] if there(SINGLE) and not all(map(there, named)) else named


def is_whole(folder: Path) -> bool:
    """Return whether a folder has every file without which its model cannot be loaded."""
    found = {name for name in (CONFIG, *TOKENIZERS, *weight_files(folder)) if (folder / name).exists()}
    return not found.isdisjoint(TOKENIZERS) and found.issuperset((CONFIG, *weight_files(folder)))


def model_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration: a folder's config.json, or a GGUF file's metadata by the same keys.

    Raises CheckpointError that names the file.
    """
    if is_gguf(path):
        return gguf_config(path)
    config, quantisation = read_json(path / CONFIG), path / QUANTISATION
    if quantisation.exists():
        described = {"quant_method": "modelopt"} | read_json(quantisation).get("quantization", {})
        config["quantization_config"] = described | (config.get("quantization_config") or {})
    return mlx_config(config) if is_mlx_folder(path) else config


def is_mlx_folder(folder: Path) -> bool:
    """Return whether the folder's first file of weights names MLX as its format."""
    return is_mlx(folder / next(iter(weight_files(folder)), SINGLE))


def config_file(path: Path) -> Path:
    """Return the file that a model's configuration is read from."""
    return path if is_gguf(path) else path / CONFIG


def embedded() -> Path:
    """Return the folder of the model that is served by default. Raises CheckpointError if it is missing."""
    file = EMBEDDED_FOLDER / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: the embedded model was not installed; name another")
    return EMBEDDED_FOLDER
