"""A whole model on the GPU's path, in Triton's interpreter: the CPU's logits, and no bit by cut or company."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import attention as attention
from headwater.mixers.gpu import mla as latent_attention
from headwater.mixers.gpu.gdn import GatedDeltaNetKernels
from headwater.mixers.gpu.kda import KimiDeltaAttentionKernels
from headwater.models.load import load_model
from tests.models.decode_rig import prefilled
from tests.models.segment_rig import SegmentRig
from tests.support import Bench

KERNELS = (
    (attention, "prefill"),
    (attention, "decode"),
    (latent_attention, "decode"),
    (GatedDeltaNetKernels, "prefill"),
    (KimiDeltaAttentionKernels, "prefill"),
)


def noted(kernel: Callable[..., torch.Tensor], ran: list[str]) -> Callable[..., torch.Tensor]:
    def run(*given: object, **named: object) -> torch.Tensor:
        ran.append(kernel.__name__)
        return kernel(*given, **named)

    return run


@pytest.mark.parametrize(
    ("name", "prefills", "decodes"),
    [
        ("qwen3_5", 2, 1),
        ("qwen3_window_odd_heads", 3, 3),
        ("kimi_linear", 2, 1),
        ("gpt_oss", 2, 2),
        ("olmo_hybrid", 2, 1),
        ("lara_mini", 3, 2),
    ],  # attention and delta rule
)
def test_model_gives_the_logits_of_the_cpu(
    name: str,
    prefills: int,
    decodes: int,
    gpu_path: Callable[[bool], None],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(name)
    ran: list[str] = []
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, noted(getattr(module, kernel), ran))
    tokens = list(range(300, 370))
    logits = {}
    for gpu in (False, True):
        gpu_path(gpu)
        assert not ran
        model = load_model(folder, "float32").model
        bench = Bench(model, poison=True)
        seq = bench.sequence(80)
        first = bench.prefill(seq, tokens)
        logits[gpu] = torch.cat((first, bench.step([], [(seq, 301)]), bench.step([], [(seq, 302)])))
    assert (ran.count("prefill"), ran.count("decode")) == (prefills, 2 * decodes)
    assert (logits[True] - logits[False]).abs().max() < 1e-4
    bench = Bench(model, poison=True)
    seq, other = bench.sequence(80), bench.sequence(30)
    first = bench.prefill(seq, tokens, (64,))
    bench.step([(other, tokens[30:50])])
    rest = [bench.step([], [(other, 400 + token), (seq, token)])[1:] for token in (301, 302)]
    assert torch.equal(torch.cat((first, *rest)), logits[True])


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_window_odd_heads", "kimi_linear"])
def test_several_tokens_of_a_sequence_in_one_step_equal_them_in_turn(
    name: str, gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another sequence's; the state after them, pages or rings are read by the next token."""
    gpu_path(True)
    model, known = load_model(checkpoint(name), "float32").model, [301, 302, 303]
    prompts = prefilled(model, (62, 3))

    def decoded(at_once: bool) -> torch.Tensor:
        bench = prefilled(model, (62, 3), prompts)
        seqs = bench.seqs
        rows = [*((seqs[0], token) for token in known), (seqs[1], known[0])]
        steps = [rows] if at_once else [[row] for row in rows]
        logits = [bench.step([], step) for step in steps]
        return torch.cat([*logits, bench.step([], [(seq, 304) for seq in seqs])])

    in_turn = decoded(at_once=False)
    assert torch.equal(decoded(at_once=True), in_turn)
    parts = StepBatch.__dict__["decode_parts"].func
    monkeypatch.setattr(StepBatch, "decode_parts", property(lambda batch: parts(batch)[::-1]))
    assert not torch.equal(decoded(at_once=True), in_turn), "control: later rows of a sequence first"


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_window_odd_heads"])
def test_a_composed_prompt_is_that_of_the_cpu(
    name: str, gpu_path: Callable[[bool], None], checkpoint: Callable[[str], Path]
) -> None:
    """Compare the logits around the interiors, and of decoded tokens after them: with pages, and with rings."""
    folder = checkpoint(name)
    found = []
    for gpu in (False, True):
        gpu_path(gpu)
        rig = SegmentRig(load_model(folder, "float32").model)
        first, second = rig.make(list(range(300, 350))), rig.make(list(range(400, 420)))
        sequence, logits = rig.compose([list(range(500, 520)), second, first, list(range(600, 605))])
        decoded = [rig.step([], [(sequence, token)]) for token in (301, 302)]
        found.append(torch.cat([torch.stack(list(logits.values())), *decoded]))
    assert (found[0] - found[1]).abs().max() < 1e-4
