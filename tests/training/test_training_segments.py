"""Segments that see only themselves while a model learns: as a server that composes them has computed them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.models.families import read_config
from training.batches import draw
from training.model import Norm, TrainedHybrid
from training.recipe import RECIPES, Stage
from training.segments import Apart, Marks, first_seen
from training.source import Source
from training.tokenizer import train

MARKS = Marks(separator=9, ends=frozenset({8}))
SEAM = 2


@pytest.fixture(scope="module")
def model() -> TrainedHybrid:
    made = TrainedHybrid.random(read_config(RECIPES["smoke"].config, "float32"), 3, torch.float32)
    with torch.no_grad():
        made.embed.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(4))
    return made


def ids(*lengths: int) -> list[int]:
    """A leading part, segments of these lengths with their separators, the last part."""
    rng = random.Random(sum(lengths))
    first, *segments = lengths
    text = [rng.randint(10, 4000) for _ in range(first)]
    for length in segments:
        text += [9, *(rng.randint(10, 4000) for _ in range(length - 1))]
    return text


def test_segment_sees_from_its_separator_to_its_seam() -> None:
    seen = first_seen(ids(3, 6, 7, 4), MARKS, SEAM).tolist()
    assert seen == [0] * 3 + [3] * 4 + [0] * 2 + [9] * 5 + [0] * 2 + [0] * 4


def test_short_segments_see_all() -> None:
    assert not first_seen(ids(3, 4, 7)[:-1], MARKS, SEAM).any()


def test_no_segment_reaches_across_turns() -> None:
    assert not first_seen([*ids(3, 6), 8, *ids(2, 5)], MARKS, SEAM).any()


def test_segment_is_computed_as_a_prompt_of_its_own(model: TrainedHybrid) -> None:
    tokens = ids(20, 90, 70, 30)
    seen = torch.from_numpy(first_seen(tokens, MARKS, SEAM))[None]
    with torch.no_grad():
        apart = model.hidden(torch.tensor([tokens]), Apart(seen))[0]
        whole = model.hidden(torch.tensor([tokens]))[0]
        first, second = (model.hidden(torch.tensor([tokens[begin:end]]))[0] for begin, end in ((20, 110), (110, 180)))
    torch.testing.assert_close(apart[:20], whole[:20], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(apart[20:108], first[:-SEAM], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(apart[110:178], second[:-SEAM], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(apart[110:178], whole[110:178], atol=1e-2)


def test_text_after_segments_depends_on_each_of_them(model: TrainedHybrid) -> None:
    tokens = ids(20, 40, 50, 30)
    seen = torch.from_numpy(first_seen(tokens, MARKS, SEAM))[None]
    with torch.no_grad():
        before = model.hidden(torch.tensor([tokens]), Apart(seen))[0]
        for changed in (5, 30, 80):  # of the leading part, of the first segment, of the second
            other = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
            after = model.hidden(torch.tensor([other]), Apart(seen))[0]
            assert not torch.allclose(before[110:], after[110:], atol=1e-4)


def test_text_after_segments_starts_from_their_composed_state() -> None:
    """In the first layer all inputs are the same, so it is the state of tokens that saw each other.

    Its convolution takes one token here; otherwise a segment's first tokens write something else.
    """
    model = TrainedHybrid.random(read_config(RECIPES["smoke"].config, "float32"), 3, torch.float32)
    tokens = ids(20, 80, 70, 30)
    seen = torch.from_numpy(first_seen(tokens, MARKS, SEAM))[None]
    norm = Norm(model.norms[0], 1.0, 1e-6)
    with torch.no_grad():
        model.embed.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(4))
        model.parts[0]["conv1d.weight"][..., :-1] = 0.0  # type: ignore[index]
        x_1TC = model.embed[torch.tensor([tokens])]
        whole, apart = (model.parts[0](x_1TC, norm, segments)[0] for segments in (None, Apart(seen)))
    together = seen[0] == 0
    torch.testing.assert_close(apart[together], whole[together], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(apart[100:168], whole[100:168], atol=1e-3)


def test_every_weight_learns_from_segments_apart(model: TrainedHybrid) -> None:
    tokens = ids(10, 40, 50, 30)
    apart = Apart(torch.from_numpy(first_seen(tokens, MARKS, SEAM))[None])
    logits = model.logits(model.hidden(torch.tensor([tokens]), apart))
    torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(tokens[1:])).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert 0 < weight.grad.abs().max() < torch.inf, name


def test_share_of_the_steps_has_segments_apart(tmp_path: Path) -> None:
    train(examples=30).save(str(tmp_path / "tokenizer.json"))
    source = Source.load(tmp_path / "tokenizer.json", None)
    recipe = replace(RECIPES["smoke"], stages=(Stage(384, 2, 40, {"single": 1.0}),), apart=0.5)
    steps = [draw(recipe, source, step) for step in range(40)]
    with_apart = [batch for batch in steps if batch.seen_BT is not None]
    assert 8 <= len(with_apart) <= 26  # half of them, less those whose sequences have no separators
    none = replace(recipe, apart=0.0)
    assert all(draw(none, source, step).seen_BT is None for step in range(10))
