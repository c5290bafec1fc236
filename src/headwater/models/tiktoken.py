"""Tokenizer of a `tiktoken.model`: byte-level BPE from the bytes of tokens and their ranks, one token a line.

tiktoken (github.com/openai/tiktoken, src/lib.rs) merges the two neighbours whose whole has the lowest rank, whatever
they are; so each way to cut a token into two others is a merge, in the order of ranks. The file has neither the pattern
that splits texts nor the special tokens: the class of the tokenizer stands for the first, and its configuration names
the second, which follow the ranks.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from headwater.errors import CheckpointError
from headwater.models.files import TIKTOKEN
from headwater.models.gguf.tokenizer import KIMI

PATTERNS = {"TikTokenTokenizer": KIMI}  # by the class, whose code is published with the model: tokenization_kimi.py
SPECIAL_TOKENS = 256  # of that class, named or not
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level BPE spells as themselves


def tiktoken_tokenizer(file: Path, config: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer; `config` is tokenizer_config.json. Raises CheckpointError."""
    check_class(config, file.parent)
    rank_of = _ranks(file)
    letter = _letters()
    spelt = {token: "".join(letter[byte] for byte in token) for token in rank_of}
    cuts = (
        (token[:at], token[at:]) for token in sorted(rank_of, key=rank_of.__getitem__) for at in range(1, len(token))
    )
    merges = [(spelt[first], spelt[second]) for first, second in cuts if first in spelt and second in spelt]
    tokenizer = Tokenizer(models.BPE({spelt[token]: i for token, i in rank_of.items()}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERNS[config["tokenizer_class"]]), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    named = config.get("added_tokens_decoder") or {}
    for i in range(len(rank_of), len(rank_of) + SPECIAL_TOKENS):
        token = named.get(str(i), {})
        content = token.get("content", f"<|reserved_token_{i}|>")
        tokenizer.add_tokens([AddedToken(content, special=token.get("special", True), normalized=False)])
    return tokenizer


def check_class(config: dict[str, Any], where: object) -> None:
    """Raise CheckpointError, which begins with `where`, for a class whose pattern is not known."""
    name = config.get("tokenizer_class")
    if name not in PATTERNS:
        what = f"{where}: {TIKTOKEN} of class {name!r}, not {' or '.join(PATTERNS)}"
        raise CheckpointError(f"{what}: save tokenizer.json by transformers' convert_tiktoken_to_fast")


def _ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each token, by its bytes: 0, 1, 2, ..., and among them all single bytes."""
    try:
        lines = (line.split() for line in file.read_bytes().splitlines() if line)
        rank_of = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{file}: not lines of a token in base64 and its rank: {error}") from error
    if sorted(rank_of.values()) != list(range(len(rank_of))):
        raise CheckpointError(f"{file}: the ranks of its {len(rank_of):,} tokens are not 0, 1, 2, ...")
    missing = [byte for byte in range(256) if bytes([byte]) not in rank_of]
    if missing:
        raise CheckpointError(f"{file}: {len(missing)} of 256 bytes are not tokens, the first is {missing[0]}")
    return rank_of


def _letters() -> list[str]:
    """Return the letter by which byte-level BPE spells each byte (GPT-2): 256 and on for those that cannot be seen."""
    hidden = [byte for byte in range(256) if byte not in PRINTABLE]
    return [chr(byte if byte in PRINTABLE else 256 + hidden.index(byte)) for byte in range(256)]
