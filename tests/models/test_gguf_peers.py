"""llama.cpp reads the GGUF files that tests write, and answers as Headwater does; so it does with its own quantiser's.

`make test-peers` runs this, with the extra `peers` or an environment that has it: VENV_LLAMA=FOLDER.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from headwater.models.gguf.file import read_header
from headwater.models.gguf.tokenizer import SPLITTINGS, tokenizer_of
from headwater.models.load import load_model
from tests.checkpoints import write
from tests.checkpoints.mtp import add_head
from tests.checkpoints.state_spaces import NEMOTRON_H
from tests.gguf_files.blocks import ALL_FORMATS
from tests.gguf_files.convert import convert
from tests.gguf_files.values import contents
from tests.gguf_files.writer import pack
from tests.models.test_gguf_models import EXACT
from tests.support import Bench

pytestmark = pytest.mark.peers
PROGRAM = Path(__file__).parents[1] / "gguf_files" / "llama.py"
PROMPT = list(range(300, 340))
N_TOKENS, N_CHOICES = 32, 4000
MIN_MARGIN = 1e-3  # between the logits of two tokens: below it roundings choose
MAX_DIVERGENCE = 0.01  # nats, mean over tokens: rows are rounded in other groups
OWN = {"nemotron_h_moe": "M*E", "nemotron_h_dense": "M*-"}  # llama.cpp has no model with both
HEADS = {"qwen3_5_mtp": "qwen3_5", "qwen3_5_moe_mtp": "qwen3_5_moe"}  # with a head of multi-token prediction
OTHERWISE = ("nemotron_h", "gpt_oss")  # llama.cpp rounds the bounds of gpt-oss's YaRN, which the model does not
FAMILIES = (*(name for name in EXACT if name not in OTHERWISE), *HEADS, *OWN)


def by_llama(*arguments: str) -> Any:
    folder = os.environ.get("VENV_LLAMA")
    if not folder and not find_spec("xllamacpp"):
        pytest.skip("no llama.cpp: install the extra peers, or name an environment that has it: VENV_LLAMA=FOLDER")
    python = f"{folder}/bin/python" if folder else sys.executable
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run([python, str(PROGRAM), *arguments], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout) if run.stdout else None


def logits_after(file: Path, tokens: list[int]) -> Tensor:
    """Our logits for each of their tokens."""
    bench = Bench(load_model(file, "float32").model)
    sequence = bench.sequence(len(PROMPT) + len(tokens))
    rows = [bench.prefill(sequence, PROMPT)]
    rows += [bench.step([], [(sequence, token)]) for token in tokens[:-1]]
    return torch.stack([row.view(-1, row.shape[-1])[-1].float() for row in rows])


def compared(file: Path) -> tuple[list[int], list[int], float, float]:
    """Their tokens and ours, the smallest margin of our first two choices, and the mean divergence of ours."""
    found = by_llama("complete", str(file), json.dumps(PROMPT), str(N_TOKENS), str(N_CHOICES))
    logits_NV = logits_after(file, found["tokens"])
    top_N2 = logits_NV.topk(2, -1).values
    ours_NV, divergence = logits_NV.log_softmax(-1), 0.0
    for n, likely in enumerate(found["likely"]):
        at = torch.tensor([int(token) for token in likely])
        theirs = torch.tensor(list(likely.values()))
        divergence += float((theirs.exp() * (theirs - ours_NV[n, at])).sum()) / N_TOKENS
    margin = float((top_N2[:, 0] - top_N2[:, 1]).min())
    return found["tokens"], logits_NV.argmax(-1).tolist(), margin, divergence


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_chooses_the_same_tokens(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    if name in OWN:
        folder = tmp_path / name
        write(folder, NEMOTRON_H.recipe(hybrid_override_pattern=OWN[name]))
    elif name in HEADS:
        folder = Path(shutil.copytree(checkpoint(HEADS[name]), tmp_path / name))
        add_head(folder)
    else:
        folder = checkpoint(name)
    theirs, ours, margin, divergence = compared(convert(folder, tmp_path / f"{name}.gguf"))
    print(f"{name}: margin {margin:.4f}, divergence {divergence:.2e}")
    assert margin > MIN_MARGIN
    assert theirs == ours
    assert abs(divergence) < 1e-4


@pytest.mark.parametrize("kind", ALL_FORMATS)
def test_file_of_llama_cpps_quantiser_has_its_next_tokens(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, file = convert(checkpoint("qwen3_5_blocks"), tmp_path / "plain.gguf"), tmp_path / f"{kind}.gguf"
    by_llama("quantise", str(plain), kind, str(file))
    _, _, margin, divergence = compared(file)
    print(f"{kind}: margin {margin:.4f}, divergence {divergence:.2e}")
    assert abs(divergence) < MAX_DIVERGENCE


TEXTS = (
    "Hello World's 12345 //\n\n  x", "HelloWorld don't  DON'T a1b22c333 4444", "日本語のテキスト 漢字カナ mixed, naïve",
    "  leading\tTabs \r\n new  ", "<<=>>~~`` $5+3^2 | a.b,c!?", "ÀÉÎ ñandú ЖЗ ß", "'s 's're\n",
    "1 22 333 55555", "a", "",
)  # fmt: skip


def byte_pairs(n_tokens: int) -> dict[str, Any]:
    """Tokens of bytes and of every pair of neighbours in the texts, so that each place where a text is split shows."""
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    joined = ["".join(part for part, _ in parts.pre_tokenize_str(text)) for text in TEXTS]
    pairs = sorted({line[i : i + 2] for line in joined for i in range(len(line) - 1)})
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs]
    return {"model": "gpt2", "merges": [f"{pair[0]} {pair[1]}" for pair in pairs]} | filled(tokens, n_tokens, [3])


def pieces(n_tokens: int) -> dict[str, Any]:
    """A tokenizer of SentencePiece with the words of the texts, and their beginnings; the shorter, the likelier."""
    words = {word for text in TEXTS for word in text.replace(" ", " ▁").split(" ") if word}
    found = {word[:end] for word in words for end in range(1, len(word) + 1)} | set("".join(words))
    ordered = sorted(found, key=lambda word: (len(word), word))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *ordered]
    scores = [-float(i) for i in range(n_tokens)]
    return {"model": "llama", "scores": scores} | filled(tokens, n_tokens, [2, 3, 3, *[6] * 256])


def filled(tokens: list[str], n: int, types: list[int]) -> dict[str, Any]:
    types = types + [1] * (len(tokens) - len(types)) + [5] * (n - len(tokens))
    return {"tokens": tokens + [f"[PAD{i}]" for i in range(n - len(tokens))], "token_type": types}


@pytest.mark.parametrize("pre", ["sentencepiece", *filter(None, SPLITTINGS)])
def test_text_has_the_tokens_of_llama_cpp(pre: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    plain = convert(checkpoint("qwen3"), tmp_path / "plain.gguf")
    metadata = read_header(plain).metadata
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    own = pieces(n_tokens) if pre == "sentencepiece" else byte_pairs(n_tokens) | {"pre": pre, "bos_token_id": 0}
    kept = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    file = tmp_path / "tokens.gguf"
    file.write_bytes(pack(kept | {f"tokenizer.ggml.{key}": value for key, value in own.items()}, contents(plain)))
    tokenizer = tokenizer_of(read_header(file))
    assert [tokenizer.encode(text).ids for text in TEXTS] == by_llama("tokenise", str(file), json.dumps(TEXTS))
