"""A `tiktoken.model` has the tokens of tiktoken: of ranks that were trained, and of any others, on any text."""

import base64
import json
import random
import shutil
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headwater.errors import CheckpointError
from headwater.models.files import is_whole
from headwater.models.gguf.tokenizer import KIMI, tokenizer_of
from headwater.models.load import read_texts
from headwater.models.tiktoken import tiktoken_tokenizer
from tests.checkpoints.tokenizer import train
from tests.models.test_gguf import of_tokens
from tests.support import FULL

NAMED = {0: "[BOS]", 1: "[EOS]", 3: "<|im_end|>", 4: "<think>", 250: "[PAD]"}  # by their places after the ranks
LETTERS = (
    "abcdefgh tion the AND'S don't I'LL", "ÀÉîñß ЖЗи ΑβΓ ﬁ ǅ", "日本語のテキスト漢字カナ한국어", "0123456789٣४²Ⅷ",
    " \t\r\n\u00a0\u3000\u2028", "!?.,;:'\"()[]{}<>|/\\@#$%^&*-_=+~`", "😀👩👧\u200de\u0301",
    "\x00\x7f\ufffd\U0010ffff",
)  # fmt: skip

BREAKS = (  # contractions in any case and after any word, words by case, numbers by three, slashes and line ends
    ["'s", "'S", "'T", "'re", "'vE", "'LL", "'d", "'\u017f", "\u2019s", "I", "we", "\u00c9", "\u00df", " ", "'"],
    ["iPhone", "HTTPServer", "McDonald", "\u01c5ungla", "\u02b0", "\u00aa", "e\u0301", "\u0301", " ", "_", "3D"],
    ["1", "22", "4444", "\u0663", "\u00b2", "\u00bd", ",", ".", " ", "a", "\n"],
    ["\n", "\r\n", "\r", " ", "  ", "\t", "/", "//", "\u3000", "\u0085", "\u200b", "x", "!"],
)


def trained() -> dict[bytes, int]:
    """The ranks of the tests' byte-level BPE, without its special tokens."""
    tokenizer = train()
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    by_id = sorted((i, token) for token, i in tokenizer.get_vocab().items() if token not in special)
    tokens = [bytes(byte_of[letter] for letter in token) for _, token in by_id]
    missing = [bytes([byte]) for byte in range(256) if bytes([byte]) not in tokens]
    return {token: rank for rank, token in enumerate([*missing, *tokens])}


def drawn(seed: int) -> dict[bytes, int]:
    """Ranks without order: of some tokens, parts have higher ranks, or are none."""
    dice = random.Random(seed)
    tokens = {bytes([byte]) for byte in range(256)}
    while len(tokens) < 1500:
        raw = "".join(dice.choices(dice.choice(LETTERS), k=6)).encode()
        tokens.add(raw[: dice.randint(2, 6)])
    order = sorted(tokens)
    dice.shuffle(order)
    return {token: rank for rank, token in enumerate(order)}


RANKS: dict[str, Callable[[], dict[bytes, int]]] = {"trained": trained, "drawn": lambda: drawn(1)}


def write(folder: Path, rank_of: dict[bytes, int]) -> dict[str, Any]:
    """Write the file and tokenizer_config.json, as they are published; return the latter."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in rank_of.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    named = {str(len(rank_of) + at): {"content": name, "special": name != "<think>"} for at, name in NAMED.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": named, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return config


def both(folder: Path, ranks: str) -> tuple[Tokenizer, tiktoken.Encoding]:
    rank_of = RANKS[ranks]()
    n = len(rank_of)
    special = {NAMED.get(at, f"<|reserved_token_{n + at}|>"): n + at for at in range(256)}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=rank_of, special_tokens=special)
    config = write(folder, rank_of)
    return tiktoken_tokenizer(folder / "tiktoken.model", config), theirs


def texts(n: int) -> list[str]:
    dice = random.Random(7)
    names = [*NAMED.values(), "<|im_end", "[BOS"]
    parts = [lambda: "".join(dice.choices(dice.choice(LETTERS), k=dice.randint(1, 12))), lambda: dice.choice(names)]
    return ["".join(dice.choices(parts, (20, 1))[0]() for _ in range(dice.randint(0, 12))) for _ in range(n)]


@pytest.mark.parametrize("ranks", RANKS)
def test_random_texts_have_the_tokens_of_tiktoken(ranks: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, ranks)
    for text in texts(3000):
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text).ids == ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.get_vocab_size() == theirs.n_vocab


def test_texts_split_by_gpt_4o_have_the_tokens_of_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published pattern of o200k, with a token for each pair of bytes, so that each place of a split shows."""
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    pattern = openai_public.o200k_base()["pat_str"]
    pairs = [bytes(pair) for pair in product(range(256), repeat=2)]
    random.Random(3).shuffle(pairs)
    rank_of = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *pairs])}
    theirs = tiktoken.Encoding("o200k", pat_str=pattern, mergeable_ranks=rank_of, special_tokens={})
    letter = bytes_to_unicode()
    merges = [f"{letter[first]} {letter[second]}" for first, second in pairs]
    tokens = ["".join(letter[byte] for byte in token) for token in rank_of]
    ours = tokenizer_of(of_tokens(tokens, [1] * len(tokens), model="gpt2", pre="gpt-4o", merges=merges))
    points = range(0, 0xD800, 1 if FULL else 41), range(0xE000, 0x110000, 1 if FULL else 2003)
    around = (f"aB{c}bA{c}{c}1{c}2 {c} \t{c}\n'{c}x '{c} !{c}/" for c in map(chr, chain(*points)))
    for text in chain(around, texts(3000), words_and_breaks(3000)):
        assert ours.encode(text).ids == theirs.encode(text), repr(text)


def words_and_breaks(n: int) -> list[str]:
    dice = random.Random(8)
    return ["".join(dice.choices(dice.choice(BREAKS), k=dice.randint(1, 12))) for _ in range(n)]


def test_special_tokens_are_those_that_the_configuration_names(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, "drawn")
    added = {token.content: (i, token.special) for i, token in ours.get_added_tokens_decoder().items()}
    assert added["[EOS]"] == (1501, True)
    assert added["<think>"] == (1504, False)
    assert added["<|reserved_token_1502|>"] == (1502, True)


def test_folder_with_ranks_needs_no_tokenizer_json(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("kimi_linear"), tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    assert not is_whole(folder)
    write(folder, drawn(1))
    assert is_whole(folder)
    found = read_texts(folder)
    assert found.special_tokens == {"eos_token": "<|im_end|>"}
    assert found.tokenizer.encode("<|im_end|>").ids == [1503]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda raw: raw.replace(b" 7\n", b" 9000\n"), r"the ranks of its 1,500 tokens are not 0, 1, 2"),
        (lambda raw: raw.replace(base64.b64encode(b"a") + b" ", b"YWFhYQ== "), "1 of 256 bytes are not tokens, .* 97"),
        (lambda raw: b"{}\n" + raw, "not lines of a token in base64 and its rank"),
    ],
)
def test_broken_ranks_are_refused(change: Callable[[bytes], bytes], error: str, tmp_path: Path) -> None:
    config = write(tmp_path, drawn(1))
    file = tmp_path / "tiktoken.model"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=error):
        tiktoken_tokenizer(file, config)


def test_class_without_a_known_pattern_is_refused(tmp_path: Path) -> None:
    write(tmp_path, drawn(1))
    with pytest.raises(CheckpointError, match=r"of class 'Other', not TikTokenTokenizer: .*convert_tiktoken"):
        tiktoken_tokenizer(tmp_path / "tiktoken.model", {"tokenizer_class": "Other"})
