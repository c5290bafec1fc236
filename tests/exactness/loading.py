"""Fixtures of models, each loaded once in a process, and of answers of servers without a cache."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.engine.proof.selfcheck import SelfCheck
from headwater.engine.proof.verdict import verdict
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import LoadedModel, load_model, read_spec
from tests.exactness.formats import stored
from tests.exactness.rig import Answer, Make

Load = Callable[..., tuple[LoadedModel, SelfCheck]]
Compare = Callable[[LoadedModel, list[Answer]], list[bool]]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """(recipe, dtype, threads, format of weights) -> the model and what the self-check said of this machine."""
    yield from loading(tmp_path_factory.mktemp("exactness"))


@pytest.fixture
def load_apart(tmp_path: Path) -> Iterator[Load]:
    """The same for models that no other test uses."""
    yield from loading(tmp_path)


def loading(root: Path, device: str = "cpu") -> Iterator[Load]:
    loaded: dict[tuple[str, str, int, str], tuple[LoadedModel, SelfCheck]] = {}

    def get(recipe: str, dtype: str, threads: int, form: str = "auto") -> tuple[LoadedModel, SelfCheck]:
        prepare_process(threads)
        key = (recipe, dtype, threads, form)
        if key not in loaded:
            path, weights = stored(root, recipe, form)
            check = verdict(read_spec(path, dtype, device, weights=weights), device)  # once in a run
            numerics.use(Numerics(check.mode))
            loaded[key] = load_model(path, dtype, device, weights=weights), check
        return loaded[key]

    before = torch.get_num_threads()
    mode = numerics.current()
    yield get
    prepare_process(before)
    numerics.use(mode)


@pytest.fixture(scope="session")
def same_bits_as_without_a_cache() -> Callable[[Make, list[Answer]], list[bool]]:
    """For each answer: whether a server without a cache and other requests gives the same logits."""
    references: dict[tuple, Answer] = {}

    def compare(make: Make, answers: list[Answer]) -> list[bool]:
        key = (id(make.loaded), torch.get_num_threads())
        with replace(make, settings={})(600 + make.checkpoint_pages, cache=False) as reference:
            for answer in answers:
                asked = (*key, tuple(answer.prompt), answer.max_tokens)
                if asked not in references:
                    references[asked] = reference.ask(answer.prompt, answer.max_tokens)
            return [a.same_bits(references[(*key, tuple(a.prompt), a.max_tokens)]) for a in answers]

    return compare


@pytest.fixture
def make(load: Load) -> Make:
    """Maker of rigs over the smallest model, in float32."""
    return Make(*load("qwen3_5", "float32", 2))


@pytest.fixture
def loaded(make: Make) -> LoadedModel:
    return make.loaded
