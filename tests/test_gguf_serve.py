"""The server over a GGUF file: chats get the answers that they get from the Hugging Face folder."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from headwater.cli import run
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics
from headwater.models.embedded import embedded
from headwater.models.families import read_folder
from headwater.server.app import create_app
from tests.gguf.convert import convert
from tests.server.routes.test_serving import Server

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


@pytest.mark.parametrize("form", ["F32", "BF16"])
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
