"""The model against transformers, and against itself in other slices and other company."""

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from headwater.engine.proof.selfcheck import self_check
from headwater.mixers import numerics
from headwater.mixers.batch import StepBatch
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from headwater.mixers.recurrent import LayerState
from headwater.mixers.slices import Slice
from headwater.models.load import LoadedModel, load_model, read_spec
from tests import checkpoints
from tests.checkpoints.tokenizer import sayable
from tests.support import FULL, Bench

LENGTHS = (1, 63, 64, 65, 300)
LENGTHS_OF_SHAPES = LENGTHS if FULL else (65, 300)  # the lengths around a page are those of the families
GREEDY = 24 if FULL else 10
LONGER_BY = 97 if FULL else 41  # tokens of a prompt than of the one before
FAMILIES = [
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_window", "granite_moe", "bamba", "mamba2", "minimax",
    "ring", "jamba_moe", "kimi_linear", "ling", "ling_limits", "ling_2_5", "falcon_h1", "nemotron_h", "lfm2",
    "lfm2_moe", "gpt_oss", "olmo_hybrid", "lara_mini",
]  # fmt: skip
# Their mixers are another family's: in bfloat16, their slices and company are behind the mark.
ALIKE = (
    "qwen3_5_moe", "qwen3_next", "bamba", "minimax", "ling", "ling_limits", "ling_2_5", "falcon_h1", "nemotron_h",
    "lfm2_moe", "lara_mini",
)  # fmt: skip
SHAPES = [
    "qwen3_5_tied", "qwen3_5_odd_heads", "qwen3_next_odd_heads", "qwen3_5_sharded", "qwen3_5_moe_sharded",
    "qwen3_window_odd_heads", "qwen3_windows_only", "qwen3_moe", "qwen3_moe_window", "granite", "granite_rope",
    "granite_attention", "granite_moe_odd_heads", "bamba_odd_heads", "mamba2_odd_heads", "minimax_tied_sharded",
    "minimax_odd_heads", "ring_biases", "ring_odd_heads_tied", "jamba", "jamba_tied_biases", "jamba_odd",
    "kimi_linear_groups", "kimi_linear_odd_heads", "ling_odd_heads", "falcon_h1_biases", "falcon_h1_odd_heads",
    "ling_2_5_biases", "ling_2_5_odd_heads",
    "qwen3_5_yarn", "qwen3_longrope", "qwen3_window_llama3", "ling_yarn",
    "nemotron_h_latent", "nemotron_h_odd_heads", "mamba", "falcon_mamba", "lfm2_odd_heads", "lfm2_moe_odd",
    "gpt_oss_odd", "olmo_hybrid_odd", "lara_mini_odd",
]  # fmt: skip


def in_both_dtypes(names: list[str]) -> list[ParameterSet]:
    """(name, dtype) of each."""
    return [
        pytest.param(name, dtype, marks=[pytest.mark.full] if name in ALIKE and dtype == "bfloat16" else [])
        for name in names
        for dtype in ("float32", "bfloat16")
    ]


def prompt(loaded: LoadedModel, length: int, seed: int = 3) -> list[int]:
    return random.Random(seed).choices(sayable(loaded.tokenizer), k=length)


@pytest.fixture(scope="module")
def loaded(checkpoint: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """Models by recipe and dtype, each loaded once; wide ones with the products that a server would choose here."""
    known: dict[tuple[str, str], LoadedModel] = {}

    def load(name: str, dtype: str = "float32") -> LoadedModel:
        if (name, dtype) not in known:
            if name == "qwen3_5_wide":
                numerics.use(Numerics(self_check(read_spec(checkpoint(name), dtype)).mode))
            known[name, dtype] = load_model(checkpoint(name), dtype)
            numerics.use(Numerics())
        return known[name, dtype]

    return load


@pytest.mark.parametrize("name", [*FAMILIES, *SHAPES, "qwen3_5_wide"])
def test_logits_and_greedy_text_are_those_of_transformers(
    name: str, loaded: Callable[..., LoadedModel], checkpoint: Callable[[str], Path]
) -> None:
    ours, theirs = loaded(name), checkpoints.oracle(checkpoint(name))
    for length in LENGTHS_OF_SHAPES if name in SHAPES else LENGTHS:
        tokens = prompt(ours, length)
        bench = Bench(ours.model, n_pages=16, poison=True)
        seq = bench.sequence(length + GREEDY)
        logits = bench.prefill(seq, tokens, cuts=(64, 192))
        text = bench.greedy(seq, logits[-1], GREEDY)
        with torch.no_grad():  # in one pass over all: several of transformers' models continue wrongly from a state
            expected = theirs(torch.tensor([[*tokens, *text[:-1]]])).logits[0]
        assert (logits - expected[:length]).abs().max() < 1e-4, length
        assert text == expected[length - 1 :].argmax(dim=-1).tolist(), length
        assert len(text) == GREEDY


def test_limits_of_experts_change_logits(loaded: Callable[..., LoadedModel], checkpoint: Callable[[str], Path]) -> None:
    """The control of the oracle for limits: transformers, which lacks them, gives other logits."""
    ours = loaded("ling_limits")
    tokens, bench = prompt(ours, 65), Bench(ours.model)
    with torch.no_grad():
        unlimited = checkpoints.recipe.oracle(checkpoint("ling_limits"))(torch.tensor([tokens])).logits[0]
    assert (bench.prefill(bench.sequence(65), tokens) - unlimited).abs().max() > 0.1


def test_distant_tokens_change_logits(loaded: Callable[..., LoadedModel]) -> None:
    """Else a lost state would go unnoticed: the tests' checkpoints must have a memory."""
    for name in FAMILIES:
        ours = loaded(name)
        tokens = prompt(ours, 1000)
        bench = Bench(ours.model)
        last = bench.step([(bench.sequence(1000), tokens)])
        other = bench.step([(bench.sequence(1000), [tokens[0] - 1, *tokens[1:]])])
        assert (last - other).abs().max() > 1e-3, name


@pytest.mark.parametrize(("name", "dtype"), in_both_dtypes([*FAMILIES, "qwen3_5_odd_heads", "qwen3_5_wide"]))
def test_slices_change_no_bit(name: str, dtype: str, loaded: Callable[..., LoadedModel]) -> None:
    ours = loaded(name, dtype)
    tokens = prompt(ours, 700)
    bench = Bench(ours.model, poison=True)
    whole = bench.prefill(bench.sequence(700), tokens)
    assert not whole.isnan().any()
    for cuts in [(64,), (640,), (64, 128, 192, 512), tuple(range(64, 700, 64))]:
        bench = Bench(ours.model, poison=True)
        assert torch.equal(bench.prefill(bench.sequence(700), tokens, cuts), whole), cuts


@pytest.mark.parametrize(("name", "dtype"), in_both_dtypes(FAMILIES))
def test_company_changes_no_bit(name: str, dtype: str, loaded: Callable[..., LoadedModel]) -> None:
    """A prompt among other slices, and a decoding sequence among up to seven others and a prefill."""
    ours = loaded(name, dtype)
    prompts = [prompt(ours, 40 + LONGER_BY * i, seed=i) for i in range(8)]
    alone_first, alone_next = [], []
    for tokens in prompts:
        bench = Bench(ours.model)
        seq = bench.sequence(len(tokens) + 2)
        alone_first.append(bench.step([(seq, tokens)])[0])
        alone_next.append([bench.step([], [(seq, token)])[0] for token in (7, 9)])
    bench = Bench(ours.model, n_pages=128, poison=True)
    seqs = [bench.sequence(len(tokens) + 2) for tokens in prompts]
    first = bench.step(list(zip(seqs, prompts, strict=True)))
    assert torch.equal(first, torch.stack(alone_first))
    second = bench.step([], [(seq, 7) for seq in seqs])
    assert torch.equal(second, torch.stack([rows[0] for rows in alone_next]))
    extra = bench.sequence(130)
    third = bench.step([(extra, prompt(ours, 130))], [(seq, 9) for seq in reversed(seqs)])
    assert torch.equal(third[1:], torch.stack([rows[1] for rows in reversed(alone_next)]))


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_threads_compute_with_one_model_at_once(name: str, loaded: Callable[..., LoadedModel]) -> None:
    """Engines in one process do: what layers keep from step to step is that of the thread's own step."""
    ours = loaded(name)

    def logits_of(seed: int) -> list[torch.Tensor]:
        tokens, bench = prompt(ours, 40 + LONGER_BY * seed, seed=seed), Bench(ours.model, n_pages=16, n_slots=2)
        seq = bench.sequence(len(tokens) + 4)
        return [bench.step([(seq, tokens)]), *(bench.step([], [(seq, token)]) for token in (7, 9, 8))]

    def is_alike(seed: int) -> bool:
        numerics.prepare_process()
        return all(torch.equal(*rows) for _ in range(8) for rows in zip(logits_of(seed), alone[seed], strict=True))

    alone = [logits_of(seed) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(alone)) as threads:
            assert list(threads.map(is_alike, range(len(alone)))) == [True] * len(alone)
    finally:
        sys.setswitchinterval(before)


def known_tokens(ours: LoadedModel, of_prompts: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of tokens that follow two prompts, in turn and at once with another prompt, and of a next token.

    `of_prompts`: those that come at once are rows of prompts, not decoding rows.
    """
    prompts, known = [prompt(ours, 62), prompt(ours, 30)], [7, 9, 11, 8]  # across the end of a page
    in_turn, at_once = (Bench(ours.model, poison=True) for _ in range(2))
    one, other = ([bench.sequence(100) for _ in prompts] for bench in (in_turn, at_once))
    for bench, seqs in ((in_turn, one), (at_once, other)):
        bench.step(list(zip(seqs, prompts, strict=True)))
    wanted = torch.cat([in_turn.step([], [(seq, token)]) for seq in one for token in known])
    beside = (at_once.sequence(20), prompts[1][:20])
    if of_prompts:
        got = at_once.step([beside, *((seq, known) for seq in other)], every_row=True)[20:]
    else:
        got = at_once.step([beside], [(seq, token) for seq in other for token in known])[1:]
    after = [bench.step([], [(seq, 5) for seq in seqs]) for bench, seqs in ((in_turn, one), (at_once, other))]
    return wanted, got, torch.stack(after)


@pytest.mark.parametrize(("name", "dtype"), in_both_dtypes(FAMILIES))
def test_logits_of_several_tokens_in_one_step_equal_them_in_turn(
    name: str, dtype: str, loaded: Callable[..., LoadedModel]
) -> None:
    """Also with a prompt, and with another sequence's; later tokens read the states and keys that they leave."""
    wanted, got, (after, after_got) = known_tokens(loaded(name, dtype))
    assert torch.equal(got, wanted)
    assert torch.equal(after_got, after)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_were_decoded_and_are_rows_of_prompts_then_are_found(
    name: str, loaded: Callable[..., LoadedModel]
) -> None:
    """The control of the test above."""
    wanted, got, (after, after_got) = known_tokens(loaded(name), of_prompts=True)
    assert (got - wanted).abs().max() < 1e-4
    assert not torch.equal(got, wanted)
    assert not torch.equal(after_got, after)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_kept_of_a_draft_equal_the_counted_ones(name: str, loaded: Callable[..., LoadedModel]) -> None:
    ours = loaded(name)
    bench = Bench(ours.model)
    seq = bench.sequence(20)
    bench.step([(seq, prompt(ours, 10))])
    bench.step([], [(seq, 3), (seq, 4), (seq, 5)], drafted=(2,), accepted=(0,))
    kept = sum(part[0, 0].nbytes for parts in bench.states.kept.values() for part in parts)
    assert kept == ours.spec.draft_bytes


# steps of two sequences: how many drafts each has, and how many of them are right
STEPS = [((3, 2), (2, 0)), ((1, 4), (0, 4)), ((0, 2), (0, 1)), ((5, 0), (5, 0)), ((0, 0), (0, 0)), ((2, 2), (1, 2))]
ANSWERS = [[7, 9, 11, 8, 6, 5, 12, 13, 9, 10, 4, 7, 9, 8, 5], [3, 4, 12, 6, 9, 4, 5, 11, 7, 13, 8, 9, 5, 6, 7]]
NO_DECODING: dict[str, Any] = {
    "token_N": torch.empty(0, dtype=torch.int64),
    "decode_slot_B": torch.empty(0, dtype=torch.int64),
    "decode_tables": (),
    "parents": (),
    "drafted": (),
    "accepted": (),
}


def differs_after_drafts(ours: LoadedModel) -> list[str]:
    """Decode two answers with drafts, with prompts in every second step; name differences from plain decoding."""
    prompts = [prompt(ours, 62), prompt(ours, 30)]  # across the end of a page
    plain, drafting = (Bench(ours.model, poison=True) for _ in range(2))
    one, other = ([bench.sequence(100) for _ in prompts] for bench in (plain, drafting))
    for bench, seqs in ((plain, one), (drafting, other)):
        bench.step(list(zip(seqs, prompts, strict=True)))
    wanted = [[plain.step([], [(seq, token)])[0] for token in answer] for seq, answer in zip(one, ANSWERS, strict=True)]
    at, accepted, differing = [0, 0], (0, 0), list[str]()
    for number, (drafted, right) in enumerate(STEPS):
        rows, expected = [], []
        for i, (seq, answer) in enumerate(zip(other, ANSWERS, strict=True)):
            guesses = answer[at[i] + 1 : at[i] + 1 + right[i]]
            guesses += [token + 14 for token in answer[: drafted[i] - right[i]]]
            rows += [(seq, token) for token in (answer[at[i]], *guesses)]
            expected += [wanted[i][at[i] + n] if n <= right[i] else None for n in range(1 + drafted[i])]
        beside = [(drafting.sequence(20), prompts[1][:20])] if number % 2 else []
        found = drafting.step(beside, rows, drafted=drafted, accepted=accepted)[len(beside) :]
        pairs = [(row, its) for row, its in enumerate(expected) if its is not None]
        differing += [f"row {row} of step {number}" for row, its in pairs if not torch.equal(found[row], its)]
        at = [n + 1 + its for n, its in zip(at, right, strict=True)]
        accepted = right
    assert at == [14, 13]
    left = [[(other[0], ANSWERS[0][14]), (other[1], ANSWERS[1][13])], [(other[1], ANSWERS[1][14])]]
    found = [drafting.step([], left[0], accepted=accepted), drafting.step([], left[1])]
    if not torch.equal(torch.cat(found), torch.stack([wanted[0][14], *wanted[1][13:]])):
        differing.append("the last rows")
    states = [[bench.states.bytes_RB[seq.slot] for seq in seqs] for bench, seqs in ((plain, one), (drafting, other))]
    if not all(torch.equal(*pair) for pair in zip(*states, strict=True)):
        differing.append("states")
    return differing


@pytest.mark.parametrize(("name", "dtype"), in_both_dtypes(FAMILIES))
def test_drafts_have_the_bits_of_plain_decoding_and_leave_no_trace(
    name: str, dtype: str, loaded: Callable[..., LoadedModel]
) -> None:
    assert differs_after_drafts(loaded(name, dtype)) == []


@pytest.mark.parametrize("name", ["qwen3_5", "jamba_moe", "kimi_linear"])
def test_a_state_that_is_promoted_one_row_too_far_shows(
    name: str, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: a sequence's first draft advances its state."""
    whole = StepBatch.decode_sequences.func

    def one_too_far(batch: StepBatch) -> tuple[Any, ...]:
        slots, firsts, drafts = whole(batch)
        return slots, firsts, np.minimum(drafts + 1, firsts[1:])

    monkeypatch.setattr(StepBatch, "decode_sequences", property(one_too_far))
    differing = differs_after_drafts(loaded(name))
    assert "row 0 of step 0" not in differing
    assert "row 0 of step 1" in differing
    assert "states" in differing


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "ring", "kimi_linear", "jamba_moe"])
def test_accepted_drafts_that_are_replayed_as_one_parallel_sum_show(
    name: str, loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: they advance the state as a chunk of a prompt does, in a sum over rows at once."""
    pytest.importorskip("numba", reason="numba is not installed")
    from headwater.mixers.cpu.recurrent import RecurrentOnCpu

    whole, replayed = RecurrentOnCpu.decode_into, list[int]()

    def in_parallel(
        layer: RecurrentOnCpu,
        out_BX: torch.Tensor,
        products: tuple[torch.Tensor, ...],
        batch: StepBatch,
        state: LayerState,
    ) -> None:
        first_positions = batch.position_N[batch.decode_rows][batch.firsts[:-1]].tolist()
        for slot, position, n in zip(batch.decode_sequences[0], first_positions, batch.accepted, strict=False):
            if n:
                chunk = Slice(0, n, position - n, int(slot), torch.empty(0, dtype=torch.int64), 0)
                at = replace(batch, position_N=torch.arange(chunk.start, chunk.end), slices=(chunk,), **NO_DECODING)
                rows = layer.mixer.rows(tuple(part[slot, :n].clone() for part in state.kept.parts), at)
                layer.mixer.prefill_into(rows, at.rounds[0], state)
                replayed.append(n)
        whole(layer, out_BX, products, replace(batch, accepted=()), state)

    assert differs_after_drafts(loaded(name)) == []
    monkeypatch.setattr(RecurrentOnCpu, "decode_into", in_parallel)
    differing = differs_after_drafts(loaded(name))
    assert max(replayed) == 5
    assert not any(of.endswith("step 0") for of in differing), "nothing is replayed before"
    assert "states" in differing


def test_bfloat16_is_near_float32(loaded: Callable[..., LoadedModel]) -> None:
    tokens = None
    logits = []
    for dtype in ("float32", "bfloat16"):
        ours = loaded("qwen3_5_bfloat16", dtype)
        tokens = tokens or prompt(ours, 300)
        bench = Bench(ours.model)
        logits.append(bench.prefill(bench.sequence(300), tokens))
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].abs().max()


def legs_are_alike(ours: LoadedModel) -> list[bool]:
    """Return whether the last 1, 7, 16 and 63 rows of a prompt have the logits that they have in a leg of 1,024."""
    tokens, bench = prompt(ours, 1024), Bench(ours.model)
    whole, alike = bench.prefill(bench.sequence(1024), tokens), []
    for rows in (1, 7, 16, 63):
        end, bench = 960 + rows, Bench(ours.model)
        found = bench.prefill(bench.sequence(end), tokens[:end], cuts=(960,))
        alike.append(torch.equal(found[960:], whole[960:end]))
    return alike


def steps_are_alike(ours: LoadedModel) -> list[bool]:
    """Return whether 1, 32, 33 and 65 decoding sequences have the logits that each has by itself."""
    first, alone, alike = list(range(7, 72)), [], []
    for at, token in enumerate(first):
        bench = Bench(ours.model, n_pages=1, n_slots=1)
        alone.append(bench.step([], [(bench.sequence(1), token)])[0])
        assert at == 0 or not torch.equal(alone[at], alone[0])
    for rows in (1, 32, 33, 65):
        bench = Bench(ours.model, n_pages=rows, n_slots=rows)
        found = bench.step([], [(bench.sequence(1), token) for token in first[:rows]])
        alike.append(torch.equal(found, torch.stack(alone[:rows])))
    return alike


@pytest.mark.parametrize("alike", [legs_are_alike, steps_are_alike])
@pytest.mark.parametrize(("name", "dtype"), in_both_dtypes(["qwen3_5", "qwen3_5_moe"]))
def test_the_number_of_rows_changes_no_bit(
    name: str, dtype: str, alike: Callable[[LoadedModel], list[bool]], loaded: Callable[..., LoadedModel]
) -> None:
    assert alike(loaded(name, dtype)) == [True] * 4


@pytest.mark.parametrize(("alike", "rows"), [(legs_are_alike, 64), (steps_are_alike, 33)])
def test_a_product_that_depends_on_the_number_of_rows_is_seen(
    alike: Callable[[LoadedModel], list[bool]],
    rows: int,
    loaded: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x, *n: product(self, x, *n) * (1 + (len(x) < rows) * 1e-3))
    assert not all(alike(loaded("qwen3_5")))
