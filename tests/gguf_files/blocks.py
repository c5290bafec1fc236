"""Blocks of ggml's formats in numpy: encoders, and the reference that decodes a block value by value.

The formulas are those of ggml-quants.c; the encoders round to the nearest code of a group's range. They encode all
blocks at once, [blocks, inputs]: a file of the embedded model has 150,000. Formats without an encoder have blocks of
random codes; the package `gguf` decodes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headwater.models.gguf.blocks import TYPES, Blocks

Floats = np.ndarray
Bytes = np.ndarray
f16, f32 = np.float16, np.float32


@dataclass(frozen=True)
class Format:
    """A format's number in a file, and the inputs and bytes of a block."""

    number: int
    inputs: int
    bytes: int
    encode: Callable[[Floats], Bytes] | None  # of blocks
    decode: Callable[[Bytes], Floats] | None  # of one block
    scales: tuple[int, ...]  # bytes at which float16 numbers stand


def half(block: Bytes, at: int) -> np.float32:
    return f32(block[at : at + 2].copy().view(f16)[0])


def of_half(*values: Floats) -> Bytes:
    return np.concatenate([value.astype(f16) for value in values], -1).view(np.uint8)


def codes(x: Floats, scale: Floats, shift: float, top: int) -> np.ndarray:
    quotient = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
    return np.clip(np.rint(quotient + f32(shift)), 0, top).astype(np.uint8)


def nibbles(code: np.ndarray) -> Bytes:
    low, high = np.split(code & 15, 2, -1)
    return low | high << 4


def fifth(code: np.ndarray) -> Bytes:
    return np.packbits(code >> 4 & 1, -1, "little")


def largest(x: Floats) -> Floats:
    """The number of the largest magnitude of each block, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)


def encode_q8_0(x: Floats) -> Bytes:
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.concatenate([of_half(scale), codes(x, scale, 128, 255) ^ 128], -1)


def decode_q8_0(block: Bytes) -> Floats:
    return np.array([f32(q) * half(block, 0) for q in block[2:].view(np.int8)], f32)


def encode_q4_0(x: Floats) -> Bytes:
    scale = largest(x) / -8
    return np.concatenate([of_half(scale), nibbles(codes(x, scale, 8, 15))], -1)


def decode_q4_0(block: Bytes) -> Floats:
    low, high = block[2:] & 15, block[2:] >> 4
    return np.array([f32(int(q) - 8) * half(block, 0) for q in (*low, *high)], f32)


def encode_q4_1(x: Floats) -> Bytes:
    least = x.min(-1, keepdims=True)
    scale = (x.max(-1, keepdims=True) - least) / 15
    return np.concatenate([of_half(scale, least), nibbles(codes(x - least, scale, 0, 15))], -1)


def decode_q4_1(block: Bytes) -> Floats:
    low, high = block[4:] & 15, block[4:] >> 4
    return np.array([f32(q) * half(block, 0) + half(block, 2) for q in (*low, *high)], f32)


def encode_q5_0(x: Floats) -> Bytes:
    scale = largest(x) / -16
    code = codes(x, scale, 16, 31)
    return np.concatenate([of_half(scale), fifth(code), nibbles(code)], -1)


def decode_q5_0(block: Bytes) -> Floats:
    bits = int.from_bytes(block[2:6].tobytes(), "little")
    four = (*(block[6:] & 15), *(block[6:] >> 4))
    return np.array([f32((int(q) | (bits >> i & 1) << 4) - 16) * half(block, 0) for i, q in enumerate(four)], f32)


def encode_q5_1(x: Floats) -> Bytes:
    least = x.min(-1, keepdims=True)
    scale = (x.max(-1, keepdims=True) - least) / 31
    code = codes(x - least, scale, 0, 31)
    return np.concatenate([of_half(scale, least), fifth(code), nibbles(code)], -1)


def decode_q5_1(block: Bytes) -> Floats:
    bits = int.from_bytes(block[4:8].tobytes(), "little")
    four = (*(block[8:] & 15), *(block[8:] >> 4))
    code = [f32(int(q) | (bits >> i & 1) << 4) for i, q in enumerate(four)]
    return np.array([q * half(block, 0) + half(block, 2) for q in code], f32)


def encode_groups(x: Floats, top: int) -> tuple[Bytes, np.ndarray]:
    """d, m and 6-bit scales and minimums of 8 groups of 32, and the codes [blocks, 8, 32]."""
    groups = x.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - least) / top
    d, m = ((values.max(-1, keepdims=True) / 63).astype(f16) for values in (scale, -least))
    sc, mn = (np.rint(v / of_unit(of)).clip(0, 63).astype(np.uint8) for v, of in ((scale, d), (-least, m)))
    first, second = sc[:, :4] | (sc[:, 4:] >> 4) << 6, mn[:, :4] | (mn[:, 4:] >> 4) << 6
    third = (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4
    exact, below = d.astype(f32) * sc, m.astype(f32) * mn
    code = codes(groups + below[..., None], exact[..., None], 0, top)
    return np.concatenate([of_half(d, m), first, second, third], -1), code


def of_unit(half: Floats) -> Floats:
    """A divisor: the unit of scales, or a number close to 0 instead of 0."""
    return np.maximum(half.astype(f32), f32(1e-12))


def six_bits(q: Bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of group j, from 12 bytes."""
    if j < 4:
        return int(q[j] & 63), int(q[j + 4] & 63)
    return int(q[j + 4] & 15 | q[j - 4] >> 6 << 4), int(q[j + 4] >> 4 | q[j] >> 6 << 4)


def decode_groups(block: Bytes, code: list[list[int]]) -> Floats:
    """Values of 8 groups: (d · scale) · code − m · minimum, each operation rounded to float32."""
    values = []
    for j in range(8):
        scale, minimum = six_bits(block[4:16], j)
        values += [f32(half(block, 0) * f32(scale)) * f32(q) - half(block, 2) * f32(minimum) for q in code[j]]
    return np.array(values, f32)


def encode_q4_k(x: Floats) -> Bytes:
    head, code = encode_groups(x, 15)
    return np.concatenate([head, nibbles(code.reshape(-1, 4, 64)).reshape(-1, 128)], -1)


def decode_q4_k(block: Bytes) -> Floats:
    code = []
    for pair in range(4):
        byte = block[16 + 32 * pair :][:32]
        code += [[int(b & 15) for b in byte], [int(b >> 4) for b in byte]]
    return decode_groups(block, code)


def encode_q5_k(x: Floats) -> Bytes:
    head, code = encode_groups(x, 31)
    high = np.bitwise_or.reduce((code >> 4) << np.arange(8, dtype=np.uint8)[:, None], 1)
    return np.concatenate([head, high, nibbles(code.reshape(-1, 4, 64)).reshape(-1, 128)], -1)


def decode_q5_k(block: Bytes) -> Floats:
    code = []
    for pair in range(4):
        byte, high = block[48 + 32 * pair :][:32], block[16:48]
        code.append([int(b & 15) + 16 * int(h >> 2 * pair & 1) for b, h in zip(byte, high, strict=True)])
        code.append([int(b >> 4) + 16 * int(h >> 2 * pair + 1 & 1) for b, h in zip(byte, high, strict=True)])
    return decode_groups(block, code)


def encode_q6_k(x: Floats) -> Bytes:
    groups = x.reshape(-1, 16, 16)
    scale = largest(groups)[..., 0].astype(np.float64) / -32
    d = (np.abs(scale).max(-1, keepdims=True) / 127).astype(f16)
    sc = np.rint(scale / of_unit(d)).clip(-128, 127).astype(np.int8)
    code = codes(groups, (d.astype(f32) * sc)[..., None], 32, 63)
    quarters = code.reshape(-1, 2, 4, 32) >> 4
    high = np.bitwise_or.reduce(quarters << np.arange(0, 8, 2, dtype=np.uint8)[:, None], 2)
    low = nibbles(code.reshape(-1, 2, 128))
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), sc.view(np.uint8), of_half(d)], -1)


def decode_q6_k(block: Bytes) -> Floats:
    d, scale = half(block, 208), block[192:208].view(np.int8)
    values = []
    for i in range(256):
        part, at = divmod(i, 128)
        quarter, place = divmod(at, 32)
        byte = block[64 * part + (at if at < 64 else at - 64)]
        four = byte & 15 if at < 64 else byte >> 4
        two = block[128 + 32 * part + place] >> 2 * quarter & 3
        values.append(f32(d * f32(scale[i // 16])) * f32((int(four) | int(two) << 4) - 32))
    return np.array(values, f32)


FORMATS = {
    "Q4_0": Format(2, 32, 18, encode_q4_0, decode_q4_0, (0,)),
    "Q4_1": Format(3, 32, 20, encode_q4_1, decode_q4_1, (0, 2)),
    "Q5_0": Format(6, 32, 22, encode_q5_0, decode_q5_0, (0,)),
    "Q5_1": Format(7, 32, 24, encode_q5_1, decode_q5_1, (0, 2)),
    "Q8_0": Format(8, 32, 34, encode_q8_0, decode_q8_0, (0,)),
    "Q4_K": Format(12, 256, 144, encode_q4_k, decode_q4_k, (0, 2)),
    "Q5_K": Format(13, 256, 176, encode_q5_k, decode_q5_k, (0, 2)),
    "Q6_K": Format(14, 256, 210, encode_q6_k, decode_q6_k, (208,)),
}
RANDOM_FORMATS = {
    "Q2_K": Format(10, 256, 84, None, None, (80, 82)),
    "Q3_K": Format(11, 256, 110, None, None, (108,)),
    "IQ2_XXS": Format(16, 256, 66, None, None, (0,)),
    "IQ2_XS": Format(17, 256, 74, None, None, (0,)),
    "IQ3_XXS": Format(18, 256, 98, None, None, (0,)),
    "IQ4_NL": Format(20, 32, 18, None, None, (0,)),
    "IQ3_S": Format(21, 256, 110, None, None, (0,)),
    "IQ2_S": Format(22, 256, 82, None, None, (0,)),
    "IQ4_XS": Format(23, 256, 136, None, None, (0,)),
    "MXFP4": Format(39, 32, 17, None, None, ()),
}
ALL_FORMATS = FORMATS | RANDOM_FORMATS


def encode(name: str, x_NK: Floats) -> Bytes:
    """Blocks of a weight, [N, bytes of a row]; random ones of the same magnitude, if the format has no encoder."""
    form = ALL_FORMATS[name]
    if form.encode is None:
        return random_blocks(name, len(x_NK), x_NK.shape[1] // form.inputs, magnitude=float(x_NK.std()))
    return form.encode(x_NK.astype(f32).reshape(-1, form.inputs)).reshape(len(x_NK), -1)


def decode(name: str, byte_NY: Bytes) -> Floats:
    form = ALL_FORMATS[name]
    if form.decode is None:
        quants = pytest.importorskip("gguf.quants", reason="gguf, of the extra test, is not installed")
        return quants.dequantize(byte_NY, form.number)
    return np.stack([form.decode(block) for block in byte_NY.reshape(-1, form.bytes)]).reshape(len(byte_NY), -1)


def random_blocks(name: str, n_out: int, blocks: int, seed: int = 0, magnitude: float | None = None) -> Bytes:
    """Blocks of any bytes, whose float16 numbers are finite; or whose values have a magnitude."""
    form, rng = ALL_FORMATS[name], np.random.default_rng(seed)
    byte = rng.integers(0, 256, (n_out, blocks, form.bytes), dtype=np.uint8)
    for at in form.scales:
        byte[:, :, at : at + 2] = rng.normal(0, 0.1, (n_out, blocks, 1)).astype(f16).view(np.uint8)
    if magnitude is not None:
        kind = TYPES[form.number]
        assert isinstance(kind, Blocks)
        if not form.scales:  # a power of two
            byte[:, :, 0] = 128
        times = magnitude / float(kind.read(torch.from_numpy(byte)).values().std())
        for at in form.scales:
            field = byte[:, :, at : at + 2]
            field[:] = (field.copy().view(f16).astype(f32) * times).astype(f16).view(np.uint8)
        if not form.scales:
            byte[:, :, 0] = 128 + round(np.log2(times))
    return byte.reshape(n_out, -1)
