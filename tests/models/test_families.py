"""What every family promises: it says what it does not take, and how it is tested."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.models.families import FAMILIES, Family, Refusal, read_config
from headwater.models.families.table import ALL_REFUSE
from headwater.models.profiles import PROFILES
from tests.checkpoints import SMALLEST

REFUSALS = [
    pytest.param(family, refusal, id=f"{family.name}: {refusal.part}, {', '.join(refusal.keys)}")
    for family in FAMILIES
    for refusal in (*family.refuses, *ALL_REFUSE)
]


def changed(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The config with these keys, in its rotation's part too if they are of it."""
    rope = config.get("rope_parameters") or {}
    inner = {key: value for key, value in keys.items() if key in rope}
    return config | keys | ({"rope_parameters": rope | inner} if inner else {})


def test_every_family_has_a_checkpoint_to_be_tested_with() -> None:
    assert set(SMALLEST) == {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_says_what_it_is_held_to_and_what_it_refuses(family: Family) -> None:
    assert family.oracle
    assert family.profile in PROFILES
    assert family.refuses


@pytest.mark.parametrize(("family", "refusal"), REFUSALS)
def test_a_part_that_there_is_no_code_for_is_refused_by_its_name(
    family: Family, refusal: Refusal, checkpoint: Callable[[str], Path]
) -> None:
    config = json.loads((checkpoint(SMALLEST[family.name]) / "config.json").read_text())
    read_config(config, "float32")  # as it is, it is taken
    with pytest.raises(CheckpointError) as refused:
        read_config(changed(config, refusal.keys), "float32")
    assert refusal.error in str(refused.value)
