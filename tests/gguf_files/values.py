"""GGUF files from others: with the values of one's tensors, in float32, and the parts of one."""

from pathlib import Path

import torch

from headwater.models.gguf.blocks import TYPES, Plain, bytes_of
from headwater.models.gguf.file import read_header
from tests.gguf_files.writer import PLAIN, pack

DTYPES = dict(PLAIN.values())


def contents(file: Path) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """The tensors of a file as `pack` takes them."""
    content = file.read_bytes()
    return {
        name: (place.shape, place.type, content[place.start :][: bytes_of(place)])
        for name, place in read_header(file).tensors.items()
    }


def in_parts(file: Path, n: int) -> list[Path]:
    """Write a file's tensors to `n` parts, as llama-gguf-split does: the first has the metadata."""
    tensors, metadata, parts = list(contents(file).items()), read_header(file).metadata, []
    for i in range(n):
        split = {"split.no": i, "split.count": n, "split.tensors.count": len(tensors)}
        parts.append(file.with_name(f"{file.stem}-{i + 1:05}-of-{n:05}.gguf"))
        parts[-1].write_bytes(pack({**(metadata if i == 0 else {}), **split}, dict(tensors[i::n])))
    return parts


def as_float32(file: Path, out: Path) -> Path:
    header = read_header(file)
    tensors = {}
    for name, (_, _, content) in contents(file).items():
        place, raw = header.tensors[name], bytearray(content)
        kind = TYPES[place.type]
        n = torch.Size(place.shape).numel()
        if isinstance(kind, Plain):
            values = torch.frombuffer(raw, dtype=kind.dtype, count=n).float()
        else:
            byte = torch.frombuffer(raw, dtype=torch.uint8, count=n // kind.inputs * kind.bytes)
            values = kind.read(byte.view(n // place.shape[-1], -1, kind.bytes)).values()
        tensors[name] = (place.shape, 0, values.numpy().tobytes())
    out.write_bytes(pack(header.metadata, tensors))
    return out
