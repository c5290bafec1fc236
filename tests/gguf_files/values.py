"""A GGUF file with the values of another's tensors, in float32."""

from pathlib import Path

import torch

from headwater.models.gguf.blocks import TYPES, Plain
from headwater.models.gguf.file import read_header
from tests.gguf_files.writer import PLAIN, pack

DTYPES = dict(PLAIN.values())


def as_float32(file: Path, out: Path) -> Path:
    header, content = read_header(file), file.read_bytes()
    ends = [*sorted(place.start for place in header.tensors.values()), len(content)]
    tensors = {}
    for name, place in header.tensors.items():
        kind = TYPES[place.type]
        end = next(end for end in ends if end > place.start)
        raw = bytearray(content[place.start : end])
        n = torch.Size(place.shape).numel()
        if isinstance(kind, Plain):
            values = torch.frombuffer(raw, dtype=kind.dtype, count=n).float()
        else:
            byte = torch.frombuffer(raw, dtype=torch.uint8, count=n // kind.inputs * kind.bytes)
            values = kind.read(byte.view(n // place.shape[-1], -1, kind.bytes)).values()
        tensors[name] = (place.shape, 0, values.numpy().tobytes())
    out.write_bytes(pack(header.metadata, tensors))
    return out
