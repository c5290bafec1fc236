"""A loaded model that the lab is held to."""

from pathlib import Path

import pytest

from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import LoadedModel, load_model
from tests.checkpoints import checkpoint


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[LoadedModel, Path]:
    """Serve the recipe that a test names, or a model with recurrent layers."""
    prepare_process(2)
    numerics.use(Numerics())
    path: Path = checkpoint(tmp_path_factory.mktemp("lab"), getattr(request, "param", "qwen3_5"))
    return load_model(path, "float32"), path
