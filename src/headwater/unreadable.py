"""Paths and files that are not a readable checkpoint: the reason, and advice. They are read, never executed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headwater.hub_name import HubName

PICKLE = "a pickled file of PyTorch, which could run any code"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HEAD = 4096  # bytes that tell what a file is
LONGEST_HEADER = 100 * 2**20  # bytes, of a safetensors file
ARCHITECTURE = b"general.architecture"  # the first key of a GGUF file


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return path.suffix == ".gguf" and path.is_file()


def download(name: str = "ORG/NAME") -> str:
    return f"download it with `hf download {name} --local-dir {name.rpartition('/')[2]}`"


def why_no_model(path: Path) -> str:
    """Explain why a path without a config.json below it is not the folder of a model."""
    if path.is_file():
        return f"{why_unreadable(path)}; a model is a folder in Hugging Face format: {download()}"
    if path.is_dir():
        return _why_no_weights(path) or f"the folder holds no model, or a part of one; {download()}"
    if HubName.parse(str(path)):
        return f"if it is the name of a model on Hugging Face, {download(str(path))} and serve that folder"
    return "there is nothing at this path"


def why_missing(path: Path) -> str:
    """Say why a folder does not have this file of weights, if other files in it tell."""
    return f"no such file; {_why_no_weights(path.parent) or f'if the download was cut off, {download()}'}"


def why_unreadable(path: Path) -> str:
    """Say what a file is that cannot be read as safetensors; empty if its bytes do not tell."""
    return _other_format(path) or _why_truncated(path)


def why_no_gguf(path: Path) -> str:
    """Say what a file is that does not begin as GGUF files do."""
    with path.open("rb") as file:
        start = file.read(4)
    return _other_format(path) or f"it begins with {start!r}, not with b'GGUF'"


def _other_format(path: Path) -> str:
    """Name the format of a file that is not one of safetensors; empty if its first bytes do not tell."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, without the weights: run `git lfs pull` in its folder"
    if head.startswith(b"GGUF"):
        return f"it is a GGUF file{_architecture(head)}, a format that is read by the name of a file, *.gguf"
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return f"it is {PICKLE}: only safetensors are read"
    return ""


def _why_no_weights(folder: Path) -> str:
    """Name the weights of another format in a folder, and say what helps; empty if there are none."""
    for file in sorted(folder.glob("*.gguf")):
        return f"{file.name} is a GGUF file: name that file, not its folder"
    for file in sorted(file for pattern in PICKLES for file in folder.glob(pattern)):
        return f"{file.name} is {PICKLE}: only safetensors are read; {download()}"
    return ""


def _architecture(head: bytes) -> str:
    at = head.find(ARCHITECTURE) + len(ARCHITECTURE) + 4  # after the type of the value
    length = int.from_bytes(head[at : at + 8], "little")
    name = head[at + 8 : at + 8 + length].decode("ascii", "replace")
    return f" of architecture {name!r}" if ARCHITECTURE in head and re.fullmatch(r"[\w.-]{1,60}", name) else ""


def _why_truncated(path: Path) -> str:
    """Compare a safetensors file's size with the one that its header describes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        try:
            tensors = json.loads(file.read(header) if header <= LONGEST_HEADER else b"")
            ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return f"its {size:,} bytes are not a whole safetensors file: {download()}"
    described = 8 + header + max(ends, default=0)
    if size < described:
        return f"it is truncated, with {size:,} of {described:,} bytes: {download()} again"
    return ""
