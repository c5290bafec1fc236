"""GGUF files: headers, formats of tensors to the bit, tokenizers, and defects of a file."""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.errors import CheckpointError
from headwater.layers.attention import Rotary
from headwater.layers.rotary_scaling import Divided, Linear, Yarn
from headwater.mixers.quantised import Quantised
from headwater.models.gguf import names as changes
from headwater.models.gguf.blocks import TYPES, Plain
from headwater.models.gguf.file import GgufHeader, read_header
from headwater.models.gguf.held import HELD
from headwater.models.gguf.tokenizer import SPLITTINGS, special_tokens, tokenizer_of
from headwater.models.load import load_model, read_spec
from tests.gguf_files.blocks import ALL_FORMATS, FORMATS, decode, encode, random_blocks
from tests.gguf_files.convert import convert
from tests.gguf_files.writer import FACTS, SIZES, pack


def read_blocks(name: str, byte_NY: np.ndarray) -> Quantised:
    kind, form = TYPES[ALL_FORMATS[name].number], ALL_FORMATS[name]
    assert not isinstance(kind, Plain)
    assert (kind.name, kind.inputs, kind.bytes) == (name, form.inputs, form.bytes)
    return kind.read(torch.from_numpy(byte_NY).view(len(byte_NY), -1, kind.bytes))


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_any_block_has_the_values_of_its_format_to_the_bit(name: str) -> None:
    byte_NY = random_blocks(name, n_out=5, blocks=3)
    assert torch.equal(read_blocks(name, byte_NY).values(), torch.from_numpy(decode(name, byte_NY)))


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_bytes_of_an_element_are_those_that_panels_take(name: str) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    weight = read_blocks(name, random_blocks(name, n_out=64, blocks=32))
    arrays = panels.held(weight, torch.float32).arrays
    held = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert HELD[ALL_FORMATS[name].number] == (name, pytest.approx(held / weight.code_NK.numel(), rel=0.01))


@pytest.mark.parametrize("name", FORMATS)
def test_encoded_numbers_come_back_as_near_as_their_bits_allow(name: str) -> None:
    x_NK = np.random.default_rng(1).normal(0, 1, (4, 512)).astype(np.float32)
    found = read_blocks(name, encode(name, x_NK))
    steps = 2.0**-found.bits * 8
    assert np.abs(found.values().numpy() - x_NK).max() < steps


@pytest.mark.parametrize("name", ALL_FORMATS)
@pytest.mark.parametrize("run", [8, 16, 64, 128])
def test_inputs_are_reordered_with_their_scales(name: str, run: int) -> None:
    weight = read_blocks(name, random_blocks(name, 3, 1024 // ALL_FORMATS[name].inputs))
    order = torch.randperm(1024 // run, generator=torch.Generator().manual_seed(0))
    moved = changes.inputs(order, run)(weight)
    assert isinstance(moved, Quantised)
    plain = weight.values()
    assert torch.equal(moved.values(), plain.unflatten(1, (-1, run))[:, order].flatten(1))
    assert torch.equal(changes.inputs(order, run)(plain), moved.values())


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_rows_are_reordered(name: str) -> None:
    weight = read_blocks(name, random_blocks(name, 6, 2))
    order = changes.of_heads(changes.grouped(2, 4), 1, before=2)
    moved = changes.rows(order)(weight)
    assert isinstance(moved, Quantised)
    assert torch.equal(moved.values(), weight.values()[[0, 1, 2, 4, 3, 5]])


def test_gain_of_a_norm_has_the_bits_of_the_file() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 30.0):
        gain = 1 + scale * torch.randn(10_000, generator=generator)
        assert torch.equal(1 + changes.numbers(changes.less_one(gain)), gain)


def test_the_header_has_values_of_every_type_and_places_of_tensors(tmp_path: Path) -> None:
    metadata = FACTS | {"a": True, "b": 1e-6, "c": [1, -2], "d": ["x", "é"], "e": [0.5, 1.5], "f": "text"}
    content = pack(metadata, {"w": ((3, 32), 8, bytes(3 * 34)), "v": ((5,), 0, bytes(20))})
    (tmp_path / "a.gguf").write_bytes(content)
    header = read_header(tmp_path / "a.gguf")
    assert header.metadata == metadata
    assert header.architecture == "qwen3"
    assert (header.tensors["w"].shape, header.tensors["w"].type) == ((3, 32), 8)
    assert header.tensors["v"].start % 32 == 0
    assert header.tensors["v"].start + 20 == len(content)


Change = Callable[[bytes], bytes]
BROKEN: dict[str, tuple[Change, str]] = {
    "no magic": (lambda raw: b"GGML" + raw[4:], "not a GGUF file: it begins with b'GGML', not with b'GGUF'"),
    "a pointer": (lambda raw: b"version https://git-lfs", "not a GGUF file: it is a pointer of Git LFS"),
    "empty": (lambda raw: b"", "its 0 bytes are not a GGUF file"),
    "a version": (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], r"version 1 is not one of \(2, 3\)"),
    "no header's end": (lambda raw: raw[:60], "header of its 60 bytes is cut off"),
    "many tensors": (lambda raw: raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "cut off or broken"),
    "a long text": (lambda raw: raw[:24] + struct.pack("<Q", 2**62) + raw[32:], "cut off or broken"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(case: str, tmp_path: Path) -> None:
    change, error = BROKEN[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(change(pack(FACTS, {"w": ((3, 32), 8, bytes(3 * 34))})))
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{error}"):
        read_spec(file)


def of_tensor(shape: tuple[int, ...], number: int, content: bytes) -> Any:
    return {"token_embd.weight": ((8, 32), 0, bytes(8 * 32 * 4)), "blk.0.attn_q.weight": (shape, number, content)}


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        (of_tensor((32, 32), 34, b""), "'blk.0.attn_q.weight' is of type TQ1_0, .* take a file with Q2_K in its place"),
        (of_tensor((32, 32), 77, b""), "'blk.0.attn_q.weight' is of type 77, which is not one of .*IQ4_XS"),
        (of_tensor((32, 24), 8, b""), "has 24 inputs, blocks of Q8_0 have 32"),
        (of_tensor((32, 32), 8, bytes(1000)), "ends at byte .* of a file of .*: the download was cut off"),
        (of_tensor((32, 64), 8, bytes(32 * 68)), r"'blk.0.attn_q.weight' has shape \[32, 64\], .* ask for \[32, 32\]"),
        ({"token_embd.weight": ((8, 32), 0, bytes(1024))}, "tensor 'blk.0.attn_q.weight' is missing from the file"),
    ],
)
def test_error_names_the_defect_of_a_gguf_tensor(tensors: Any, error: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(pack(SIZES, tensors))
    with pytest.raises(CheckpointError, match=error):
        load_model(tmp_path / "model.gguf", "float32")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"general.architecture": "clip"}, "a vision tower .*: name the model's own file"),
        ({"general.architecture": "llama"}, "architecture 'llama' is not one of .*qwen35"),
        ({"qwen3.block_count": None}, r"key 'qwen3\.block_count' is missing from the metadata"),
        ({"split.count": 3}, "it is part 1 of 3 by its metadata: keep the names of parts .* NAME-00001-of-00003.gguf"),
        ({"qwen3.rope.scaling.type": "other", "qwen3.rope.scaling.factor": 2.0}, "key 'rope_type' is 'other'"),
    ],
)
def test_a_model_that_is_not_read_is_refused_by_its_name(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    metadata = {key: value for key, value in (SIZES | changes).items() if value is not None}
    (tmp_path / "model.gguf").write_bytes(pack(metadata, of_tensor((32, 32), 8, bytes(32 * 34))))
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{error}"):
        read_spec(tmp_path / "model.gguf")


TEXTS = (
    "Hello wörld, it's 2026!\n\n  and   spaces \t here",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a\u0301 日本語 ... ''' don'T 12345",
    "",
)


def test_the_tokenizer_is_that_of_the_folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5")
    header = read_header(convert(folder, tmp_path / "model.gguf"))
    ours, theirs = tokenizer_of(header), load_model(folder, "float32").tokenizer
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    added = {i: (token.content, token.special) for i, token in theirs.get_added_tokens_decoder().items()}
    assert {i: (token.content, token.special) for i, token in ours.get_added_tokens_decoder().items()} == added
    assert special_tokens(header) == load_model(folder, "float32").special_tokens


def test_tokens_around_a_text_follow_the_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    header = read_header(convert(checkpoint("qwen3_5"), tmp_path / "model.gguf"))
    end = header.metadata["tokenizer.ggml.eos_token_id"]
    asked = {
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    changed = type(header)(header.path, {**header.metadata, **asked}, header.tensors)
    plain, framed = tokenizer_of(header), tokenizer_of(changed)
    assert framed.encode("hello").ids == [5, *plain.encode("hello").ids, end]


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("model", "bert", "of kind 'bert', only byte-level BPE"),
        ("model", "llama", "key 'tokenizer.ggml.scores' is missing"),
        ("pre", "viking", "key 'tokenizer.ggml.pre' is 'viking', must be one of .*qwen35"),
        ("merges", ["q zzz"], "tokens and merges do not fit"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused(
    key: str, value: Any, error: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    header = read_header(convert(checkpoint("qwen3_5"), tmp_path / "model.gguf"))
    changed = type(header)(header.path, {**header.metadata, f"tokenizer.ggml.{key}": value}, header.tensors)
    with pytest.raises(CheckpointError, match=error):
        tokenizer_of(changed)


SMALL = ["<s>", "</s>", *map(chr, range(33, 127)), "Ġ"]


def of_tokens(tokens: list[str], types: list[int], **metadata: Any) -> GgufHeader:
    metadata |= {"tokens": tokens, "token_type": types}
    return GgufHeader(Path("model.gguf"), {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, {})


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_bos_begins_texts_if_the_file_or_its_splitting_asks_for_it(pre: str) -> None:
    asked = pre in ("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken")
    for given, expected in (({}, asked), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)):
        ids = {"bos_token_id": 0, "eos_token_id": 1}
        header = of_tokens(SMALL, [3, 3, *[1] * 95], model="gpt2", pre=pre, merges=[], **ids, **given)
        assert tokenizer_of(header).encode("hi").tokens == [*(["<s>"] if expected else []), "h", "i"]


SPLIT = {
    "gpt-4o": ["Hello", "World's", "\u0120", "123", "45", "//\u010a"],
    "tekken": ["Hello", "World", "'s", "\u0120", "1", "2", "3", "4", "5", "//\u010a"],
    "kimi-k2": ["Hello", "World's", "\u0120", "123", "45", "//\u010a"],
    "falcon": ["HelloWorld", "'", "s", "\u0120", "123", "45", "//", "\u010a"],
    "smollm": ["HelloWorld", "'s", "\u0120", "1", "2", "3", "4", "5", "//", "\u010a"],
    "bailingmoe": ["HelloWorld", "'s", "\u0120", "1", "2", "3", "4", "5", "//\u010a"],
    "lfm2": ["HelloWorld", "'s", "\u0120", "123", "45", "//\u010a"],
}


@pytest.mark.parametrize("pre", SPLIT)
def test_text_is_split_by_the_named_splitting(pre: str) -> None:
    header = of_tokens(SMALL, [3, 3, *[1] * 95], model="gpt2", pre=pre, merges=[])
    split = tokenizer_of(header).pre_tokenizer.pre_tokenize_str("HelloWorld's 12345//\n")
    assert [part for part, _ in split] == SPLIT[pre]


PIECES = ["▁", *"helowrd", "▁h", "he", "ll", "llo", "▁he", "▁hello", "▁w", "or", "▁wor", "ld", "▁world"]


def of_pieces(**metadata: Any) -> GgufHeader:
    """A tokenizer of SentencePiece, with a token for each byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    scores = [0.0] * 259 + [-1000.0] * 8 + [-float(i) for i in range(len(PIECES) - 8)]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    return of_tokens(tokens, types, model="llama", scores=scores, **metadata)


def test_sentencepiece_merges_by_scores_and_falls_back_to_bytes() -> None:
    header = of_pieces()
    tokenizer = tokenizer_of(header)
    assert special_tokens(header) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("wör</s>o").tokens == ["<s>", "▁w", "<0xC3>", "<0xB6>", "r", "</s>", "▁", "o"]
    for text in ("hello  wörld\n", " x", "日本"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    plain = tokenizer_of(of_pieces(add_space_prefix=False, add_bos_token=False))
    assert plain.encode("hello world").tokens == ["he", "llo", "▁world"]
    assert plain.decode(plain.encode(" hello").ids) == " hello"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, Rotary(16)),
        ({"type": "none", "factor": 4.0}, Rotary(16)),
        ({"type": "linear", "factor": 4.0}, Rotary(16, scaling=Linear(4.0))),
        ({"factor": 4.0}, Rotary(16, scaling=Linear(4.0))),  # as llama.cpp has it
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 50, "yarn_beta_fast": 16.0, "attn_factor": 0.5},
            Rotary(16, scaling=Yarn(4.0, 50, 16.0), amplitude=0.5 * (0.1 * math.log(4.0) + 1)),
        ),
    ],
)
def test_rotation_is_scaled_as_the_metadata_describe(metadata: Any, expected: Rotary, tmp_path: Path) -> None:
    named = {f"qwen3.rope.scaling.{key}": value for key, value in metadata.items()}
    (tmp_path / "model.gguf").write_bytes(pack(SIZES | named, of_tensor((32, 32), 8, bytes(32 * 34))))
    assert read_spec(tmp_path / "model.gguf").layers[0].rotary == expected


@pytest.mark.parametrize("names", [["freqs"], ["factors_short", "factors_long"]])
def test_rotation_has_the_divisors_of_tensors(names: list[str], tmp_path: Path) -> None:
    """The configured length is 100 tokens: for a training of 50 these are the factors of long sequences."""
    divisors = {name: np.arange(1, 9, dtype=np.float32) * (i + 1) for i, name in enumerate(names)}
    tensors = {f"rope_{name}.weight": ((8,), 0, x.tobytes()) for name, x in divisors.items()}
    metadata = SIZES | {"qwen3.rope.scaling.original_context_length": 50, "qwen3.rope.scaling.attn_factor": 1.25}
    (tmp_path / "model.gguf").write_bytes(pack(metadata, of_tensor((32, 32), 8, bytes(32 * 34)) | tensors))
    found = read_spec(tmp_path / "model.gguf").layers[0].rotary
    assert found == Rotary(16, scaling=Divided(tuple(divisors[names[-1]].tolist())), amplitude=1.25)
