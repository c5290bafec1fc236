"""Tokenizer of a GGUF file: byte-level BPE from tokens and merges, or SentencePiece's BPE from tokens and scores.

Patterns of splitting and defaults: llama-vocab.cpp of github.com/ggml-org/llama.cpp, and the published tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headwater.errors import CheckpointError
from headwater.models.gguf.file import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # types of tokens; 1 is a normal one, 6 a byte
PREFIX = "tokenizer.ggml."
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
SENTENCEPIECE = "llama"  # kind of a tokenizer
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # unless the file has others
SPACE = "▁"

SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = rf"{SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
LLAMA3 = rf"{SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FALCON = r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"
DEFAULT = r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"
SINGLE_DIGITS = r"\p{N}", GPT2
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def _by_case(ending: str, digits: str, after: str, without: str = "") -> str:
    """Return a pattern that splits words where a lower-case letter precedes an upper-case one."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
    )
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*"))
    return "|".join([*words, digits, rf" ?[^\s\p{{L}}\p{{N}}]+{after}", SPACES])


TEKKEN = _by_case("", r"\p{N}", r"[\r\n/]*")
GPT4O = _by_case(f"{SHORT_FORMS}?", r"\p{N}{1,3}", r"[\r\n/]*")
KIMI = r"\p{Han}+|" + _by_case(f"{SHORT_FORMS}?", r"\p{N}{1,3}", r"[\r\n]*", r"&&[^\p{Han}]")


@dataclass(frozen=True)
class Splitting:
    """Patterns by which a text is split before merges, one after the other, and what else their name stands for."""

    patterns: tuple[str, ...]
    nfc: bool = False  # texts are brought to Unicode's form NFC
    whole: bool = False  # a part that is a token as a whole is taken without merges
    adds_bos: bool = False  # unless the file says otherwise


SPLITTINGS = {
    **dict.fromkeys(("default", ""), Splitting(DEFAULT)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Splitting((BAILING,))),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "glm4", "smaug-bpe"), Splitting((LLAMA3,))),
    **dict.fromkeys(("exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "mpt", "olmo", "phi-2", "trillion"),
                    Splitting((GPT2,))),
    **dict.fromkeys(("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"),
                    Splitting(SINGLE_DIGITS)),
    "falcon": Splitting(FALCON),
    **dict.fromkeys(("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral"),
                    Splitting((LLAMA3,), whole=True, adds_bos=True)),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "minimax-m2"), Splitting((GPT4O,))),
    "kimi-k2": Splitting((KIMI,)),
    "deepseek-r1-qwen": Splitting((QWEN2,)),
    "qwen2": Splitting((QWEN2,), nfc=True),
    "qwen35": Splitting((QWEN35,), nfc=True),
    "tekken": Splitting((TEKKEN,), whole=True, adds_bos=True),
}  # fmt: skip


def tokenizer_of(header: GgufHeader) -> Tokenizer:
    """Build the tokenizer. Raises CheckpointError for another kind than these two, or an unknown splitting."""
    kind, tokens = header.need(f"{PREFIX}model"), header.need(f"{PREFIX}tokens")
    types = header.metadata.get(f"{PREFIX}token_type", [1] * len(tokens))
    if kind not in ("gpt2", SENTENCEPIECE):
        raise CheckpointError(
            f"{header.path}: the tokenizer is of kind {kind!r}, only byte-level BPE ('gpt2') and SentencePiece's BPE "
            f"({SENTENCEPIECE!r}) are read"
        )
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind != UNUSED}
    try:
        tokenizer, adds_bos = _of_scores(header, vocab) if kind == SENTENCEPIECE else _of_merges(header, vocab)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception for merges of tokens that are missing
        raise CheckpointError(f"{header.path}: tokens and merges do not fit: {error}") from error
    for token, kind in zip(tokens, types, strict=False):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False)])
    _frame(tokenizer, header, tokens, adds_bos)
    return tokenizer


def _of_merges(header: GgufHeader, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Build byte-level BPE; return whether it begins texts with BOS, too."""
    name = header.metadata.get(f"{PREFIX}pre", "default")
    if name not in SPLITTINGS:
        known = ", ".join(name for name in SPLITTINGS if name)
        raise CheckpointError(f"{header.path}: key '{PREFIX}pre' is {name!r}, must be one of {known}")
    splitting = SPLITTINGS[name]
    merges = [_pair(merge) for merge in header.need(f"{PREFIX}merges")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.whole))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _of_scores(header: GgufHeader, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Build SentencePiece's BPE: of two neighbours, those whose whole has the highest score are merged first."""
    scores = header.need(f"{PREFIX}scores")
    merges = chain.from_iterable(
        ((scores[i], -len(token[:at]), token[:at], token[at:]) for at in range(1, len(token)))
        for token, i in vocab.items()
    )
    known = [merge for merge in merges if merge[2] in vocab and merge[3] in vocab]
    known.sort(key=lambda merge: merge[:2], reverse=True)
    unknown = header.need(f"{PREFIX}tokens")[_id(header, "unknown")]
    pairs = [(first, second) for _, _, first, second in known]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = header.metadata.get(f"{PREFIX}add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return tokenizer, True


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Return the named tokens that there are: `bos_token`, `eos_token`, ..."""
    tokens = header.need(f"{PREFIX}tokens")
    ids = {ours: _id(header, theirs) for theirs, ours in NAMED.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _id(header: GgufHeader, name: str) -> Any:
    """Return the number of a named token; None if there is none."""
    default = SENTENCEPIECE_IDS.get(name) if header.metadata.get(f"{PREFIX}model") == SENTENCEPIECE else None
    return header.metadata.get(f"{PREFIX}{name}_token_id", default)


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _frame(tokenizer: Tokenizer, header: GgufHeader, tokens: list[str], adds_bos: bool) -> None:
    """Put the tokens that begin and end each text around it, if the file, or the kind of its tokenizer, asks for it."""
    asked = {"bos": adds_bos, "eos": False}
    found = {name: _id(header, name) for name in asked if header.metadata.get(f"{PREFIX}add_{name}_token", asked[name])}
    used = {name: i for name, i in found.items() if i is not None}
    if not used:
        return
    parts = [tokens[used["bos"]]] if "bos" in used else []
    parts += ["$A", *([tokens[used["eos"]]] if "eos" in used else [])]
    special = [(tokens[i], i) for i in used.values()]
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
