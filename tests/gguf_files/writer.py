"""Writer of GGUF files: metadata and tensors, each in a format of its own."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gguf_files.blocks import ALL_FORMATS, encode

ALIGNMENT = 32
PLAIN = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(of: Any) -> bytes:
    """A value of the metadata, after the number of its type."""
    if isinstance(of, bool):
        return struct.pack("<I?", 7, of)
    if isinstance(of, int):
        return struct.pack("<II", 4, of)
    if isinstance(of, float):
        return struct.pack("<If", 6, of)
    if isinstance(of, str):
        return struct.pack("<I", 8) + text(of)
    kind, code = (8, "") if isinstance(of[0], str) else (6, "f") if isinstance(of[0], float) else (5, "i")
    items = b"".join(map(text, of)) if kind == 8 else struct.pack(f"<{len(of)}{code}", *of)
    return struct.pack("<IIQ", 9, kind, len(of)) + items


def raw(tensor: torch.Tensor, form: str) -> tuple[int, bytes]:
    """The number of a format, and a tensor's bytes in it."""
    if form in PLAIN:
        number, dtype = PLAIN[form]
        return number, tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    rows = tensor.float().reshape(-1, tensor.shape[-1]).numpy()
    return ALL_FORMATS[form].number, encode(form, rows).tobytes()


def pack(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]], version: int = 3
) -> bytes:
    """A whole file; of each tensor its shape, outputs first, its format's number and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(of) for key, of in metadata.items())
    data = b""
    for name, (shape, number, content) in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, len(data))
        data += content
    return head + bytes(-len(head) % ALIGNMENT) + data


def write(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[torch.Tensor, str]]) -> Path:
    """Write tensors, each with the name of its format."""
    packed = {name: (tuple(tensor.shape), *raw(tensor, form)) for name, (tensor, form) in tensors.items()}
    file.write_bytes(pack(metadata, packed))
    return file


def blocks(array: np.ndarray, form: str, n_in: int) -> tuple[tuple[int, ...], int, bytes]:
    """A tensor of `pack` from blocks [N, bytes of a row]."""
    return (len(array), n_in), ALL_FORMATS[form].number, array.tobytes()


FACTS = {"general.architecture": "qwen3", "qwen3.block_count": 1}
SIZES = FACTS | {
    "qwen3.embedding_length": 32, "qwen3.context_length": 100, "qwen3.feed_forward_length": 32,
    "qwen3.attention.head_count": 2, "qwen3.attention.head_count_kv": 1, "qwen3.attention.key_length": 16,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
