"""Tokenizer of a GGUF file: byte-level BPE from its tokens and merges, and its named tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headwater.errors import CheckpointError
from headwater.models.gguf.file import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # types of tokens; 1 is a normal one
PREFIX = "tokenizer.ggml."
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
LLAMA3 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Splitting:
    """Pattern by which a text is split before merges, and what comes before it."""

    pattern: str
    nfc: bool = False  # texts are brought to Unicode's form NFC
    whole: bool = False  # a part that is a token as a whole is taken without merges


SPLITTINGS = {
    "dbrx": Splitting(LLAMA3),
    "falcon-h1": Splitting(LLAMA3, whole=True),
    "gpt-2": Splitting(GPT2),
    "llama-bpe": Splitting(LLAMA3, whole=True),
    "llama3": Splitting(LLAMA3, whole=True),
    "mpt": Splitting(GPT2),
    "olmo": Splitting(GPT2),
    "pixtral": Splitting(LLAMA3, whole=True),
    "qwen2": Splitting(QWEN2, nfc=True),
    "qwen35": Splitting(QWEN35, nfc=True),
}


def tokenizer_of(header: GgufHeader) -> Tokenizer:
    """Build the tokenizer. Raises CheckpointError for another kind than byte-level BPE, or an unknown splitting."""
    kind = header.need(f"{PREFIX}model")
    if kind != "gpt2":
        raise CheckpointError(f"{header.path}: the tokenizer is of kind {kind!r}, only byte-level BPE ('gpt2') is read")
    name = header.metadata.get(f"{PREFIX}pre", "default")
    if name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise CheckpointError(f"{header.path}: key '{PREFIX}pre' is {name!r}, must be one of {known}")
    splitting, tokens = SPLITTINGS[name], header.need(f"{PREFIX}tokens")
    types = header.metadata.get(f"{PREFIX}token_type", [1] * len(tokens))
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind != UNUSED}
    merges = [_pair(merge) for merge in header.need(f"{PREFIX}merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.whole))
    except Exception as error:  # the library raises bare Exception for merges of tokens that are missing
        raise CheckpointError(f"{header.path}: tokens and merges do not fit: {error}") from error
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(splitting.pattern), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=False):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False)])
    _frame(tokenizer, header.metadata, tokens)
    return tokenizer


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Return the named tokens that there are: `bos_token`, `eos_token`, ..."""
    tokens = header.need(f"{PREFIX}tokens")
    ids = {ours: header.metadata.get(f"{PREFIX}{theirs}_token_id") for theirs, ours in NAMED.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Put the tokens that begin and end each text around it, if the file asks for them."""
    found = {name: metadata.get(f"{PREFIX}{name}_token_id") for name in ("bos", "eos")}
    used = {name: i for name, i in found.items() if i is not None and metadata.get(f"{PREFIX}add_{name}_token")}
    if not used:
        return
    parts = [tokens[used["bos"]]] if "bos" in used else []
    parts += ["$A", *([tokens[used["eos"]]] if "eos" in used else [])]
    special = [(tokens[i], i) for i in used.values()]
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
