"""The embedded model: it comes whole with the package, and is what transformers reads of its files."""

import random
import subprocess
import sys
import threading
import tomllib
from glob import glob
from pathlib import Path

import jinja2
import pytest
import torch

from benchmarks.mtp import questions
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.errors import CheckpointError
from headwater.events import TokenEvent
from headwater.models import files as module
from headwater.models.files import embedded
from headwater.models.load import LoadedModel, load_model
from headwater.request import Generation, SamplingParams
from headwater.schedule.speculation import Speculator
from tests import checkpoints
from tests.exactness.rig import verify_every_draft
from tests.support import Bench
from training import template
from training.bpe import MARKUP
from training.tasks.recall import SEGMENT
from training.tokenizer import SPECIAL

ROOT = Path(__file__).parents[2]
MOST_BYTES = 24 * 10**6
FILES = (
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded(), "float32")


def render(loaded: LoadedModel, messages: list[dict[str, object]], **options: object) -> str:
    assert loaded.chat_template is not None
    source = jinja2.Environment().from_string(loaded.chat_template)
    return source.render(messages=messages, add_generation_prompt=True, **options)


def test_all_of_its_files_are_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "src" / "headwater"
    packed = {
        package / name
        for pattern in project["tool"]["setuptools"]["package-data"]["headwater"]
        for name in glob(pattern, root_dir=package, recursive=True)
    }
    assert sorted(path.name for path in embedded().iterdir()) == list(FILES)
    assert set(embedded().iterdir()) <= packed


def test_embedded_model_is_small_enough_for_the_package() -> None:
    assert sum((embedded() / name).stat().st_size for name in ("model.safetensors", "tokenizer.json")) <= MOST_BYTES


def test_embedded_model_is_found_without_torch() -> None:
    program = "import sys; from headwater.models.files import embedded; embedded(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_package_without_the_embedded_model_raises_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "EMBEDDED_FOLDER", tmp_path / "headwater-tiny")
    with pytest.raises(CheckpointError, match=r"headwater-tiny/config\.json is missing.*not installed"):
        embedded()


def test_embedded_chat_template_equals_that_of_training(loaded: LoadedModel) -> None:
    assert loaded.chat_template == template.FILE.read_text("utf-8")


def test_transformers_reads_it_and_computes_the_same(loaded: LoadedModel) -> None:
    tokens = random.Random(1).choices(range(loaded.spec.vocab_size), k=200)
    bench = Bench(loaded.model)
    ours = bench.prefill(bench.sequence(200), tokens)
    with torch.no_grad():
        theirs = checkpoints.oracle(embedded())(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


def test_an_answer_ends_with_a_turn_or_a_text(loaded: LoadedModel) -> None:
    ids = {loaded.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert set(loaded.eos_token_ids) == ids


def test_special_tokens_are_one_token_each(loaded: LoadedModel) -> None:
    assert loaded.tokenizer.get_vocab_size() == loaded.spec.vocab_size
    for token in SPECIAL + MARKUP:
        assert len(loaded.tokenizer.encode(token).ids) == 1
    special = {token.content for token in loaded.tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == set(SPECIAL)
    assert SEGMENT == "<|segment|>"
    assert SEGMENT in special
    text = "Zürich 東京 🌊 naïve\n\tend"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text).ids) == text


SYSTEM = {"role": "system", "content": "Be short."}
ASK = {"role": "user", "content": "One?"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."}


def test_a_turn_is_framed(loaded: LoadedModel) -> None:
    assert render(loaded, [SYSTEM, ASK]) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(loaded, [ASK], enable_thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert render(loaded, [ASK], enable_thinking=False).endswith("<|im_start|>assistant\n")


def test_an_answer_begins_with_a_space_once(loaded: LoadedModel) -> None:
    spaced = {"role": "assistant", "content": " Two."}
    assert render(loaded, [ASK, spaced]) == render(loaded, [ASK, {"role": "assistant", "content": "Two."}])


def test_reasoning_is_stripped_before_the_last_query_only(loaded: LoadedModel) -> None:
    stripped = render(loaded, [ASK, THOUGHT, ASK])
    assert "hm" not in stripped
    assert "<|im_start|>assistant\n Two.<|im_end|>" in stripped
    assert "<think>\nhm\n</think>\n\n Two." in render(loaded, [ASK, THOUGHT])
    apart = {"role": "assistant", "content": "Two.", "reasoning_content": "hm"}
    assert render(loaded, [ASK, apart]) == render(loaded, [ASK, THOUGHT])


def test_tools_calls_and_results_are_framed(loaded: LoadedModel) -> None:
    tool = {"type": "function", "function": {"name": "depth", "parameters": {}}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "depth", "arguments": {"at": 3}}}]}
    thinking = call | {"content": "<think>\nhm\n</think>\n\nLet me see."}
    result = {"role": "tool", "content": "7"}
    text = render(loaded, [SYSTEM, ASK, thinking, result, result], tools=[tool])
    assert '"name": "depth"' in text.split("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "depth", "arguments": {"at": 3}}\n</tool_call><|im_end|>' in text
    response = "\n<tool_response>\n7\n</tool_response>"
    assert f"<|im_start|>user{response}{response}<|im_end|>\n" in text
    assert "hm" in text, "a tool's result is not a query"
    assert render(loaded, [ASK, call, result]).count("<|im_start|>user") == 2


def test_embedded_head_drafts_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafts of tool calls are right."""
    with_head = load_model(embedded(), "float32", mtp=True)
    config = ServeConfig(memory=64 << 20, speculation="mtp")
    engine = Engine.over(with_head, SelfCheck(True, None, "compiled"), config)
    verify_every_draft(engine.scheduler.speculation)
    monkeypatch.setattr(Speculator, "wants_head", lambda self, least, cheap: self.uses_head)
    engine.start()
    ended, prompts = threading.Semaphore(0), questions(with_head, "tool", 3)
    for prompt in prompts:
        generation = Generation(tuple(prompt), SamplingParams(max_tokens=64, temperature=0))
        engine.submit(generation, lambda event: isinstance(event, TokenEvent) or ended.release())
    assert all(ended.acquire(timeout=60) for _ in prompts)
    engine.stop()
    stats = engine.stats()
    assert stats.accepted_drafts > 3 * stats.rejected_drafts
    assert stats.accepted_drafts > 30
