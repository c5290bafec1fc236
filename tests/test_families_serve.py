"""Checkpoints of other families, and files of GGUF, in a server of their own."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from headwater.cli import run
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics
from headwater.models.families import read_folder
from headwater.models.files import embedded
from headwater.server.app import create_app
from tests.checkpoints import SMALLEST
from tests.gguf_files.convert import convert
from tests.server.routes.test_serving import Server

PROMPT = "the quiet river flows under the old stone bridge and " * 30
QUICK = ("qwen3_5", "kimi_linear")
SERVED = [pytest.param(one, marks=[pytest.mark.full] * (one not in QUICK)) for one in SMALLEST.values()]


@pytest.fixture(params=SMALLEST.values(), ids=SMALLEST)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture
def client(folder: Path) -> Iterator[openai.OpenAI]:
    config = ServeConfig(model=folder, dtype="float32", memory=64 * 2**20)
    engine = Engine.load(config)
    engine.start()
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, config), sock):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
    engine.stop()
    numerics.use(Numerics())


@pytest.mark.parametrize("folder", SERVED, indirect=True)
def test_family_is_served_and_a_cached_answer_is_the_cold_one(client: openai.OpenAI) -> None:
    cold, cached = (
        client.completions.create(model="any", prompt=PROMPT, max_tokens=24, temperature=0, logprobs=1) for _ in "12"
    )
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cached.usage.prompt_tokens_details.cached_tokens == cold.usage.prompt_tokens
    assert cached.choices[0].text == cold.choices[0].text != ""
    assert cached.choices[0].logprobs.token_logprobs == cold.choices[0].logprobs.token_logprobs
    assert client.get("/../health", cast_to=object)["deterministic"] == "yes"


def test_inspect_prints_the_cache_costs_of_a_family(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = read_folder(folder)
    assert run(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    for cost in (spec.weight_bytes, spec.kv_bytes_per_token, spec.page_bytes, spec.checkpoint_bytes):
        assert f" {cost:,} " in shown
    for kind, n in spec.layers_by_kind.items():
        assert f"{n} {kind}" in " ".join(shown.split())


QUESTION = [{"role": "user", "content": "Which river flows under the old bridge?"}]


def answer(model: Path) -> tuple[str, list[float], str]:
    """The text of an answer, the log probabilities of its tokens, and the model's name in the API of Ollama."""
    config = ServeConfig(model=model, dtype="float32", memory=64 * 2**20, model_name="same")
    engine = Engine.load(config)
    engine.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, config), sock):
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                reply = client.chat.completions.create(
                    model="same", messages=QUESTION, max_tokens=24, temperature=0, logprobs=True
                )
                listed = client.get("/../api/tags", cast_to=object)["models"][0]["name"]
    finally:
        engine.stop()
        numerics.use(Numerics())
    choice = reply.choices[0]
    return choice.message.content, [token.logprob for token in choice.logprobs.content], listed


@pytest.mark.parametrize("form", [pytest.param("F32", marks=pytest.mark.full), "BF16"])
def test_gguf_chat_answers_like_the_folder_it_came_from(form: str, tmp_path: Path) -> None:
    file = convert(embedded(), tmp_path / "tiny.gguf", form)
    expected, found = answer(embedded()), answer(file)
    assert expected[0] == found[0] != ""
    assert found[1] == pytest.approx(expected[1], abs=1e-3)
    assert found[2] == expected[2]


def test_inspect_takes_a_file(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = convert(checkpoint("qwen3_5"), tmp_path / "model.gguf")
    assert run(["inspect", str(file)]) == 0
    assert f" {read_folder(file).page_bytes:,} " in capsys.readouterr().out
