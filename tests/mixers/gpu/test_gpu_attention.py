"""Paged attention's kernels, in Triton's interpreter: held to plain attention, and to their own bits."""

import pytest
import torch

from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import attention as gpu
from headwater.mixers.gpu import mla
from headwater.mixers.gpu.attention import PagedStep
from headwater.mixers.slices import Slice

PAGES, PAGE = 40, 64
NONE = torch.empty(0, dtype=torch.int64)


class Memory:
    """Pages in shuffled order, filled with NaN where no token was written."""

    def __init__(self, kv_heads: int, width: int) -> None:
        self.kv_heads, self.width = kv_heads, width
        flat = torch.full((PAGES, 2, PAGE * kv_heads * width), float("nan"))
        self.pages = (flat[:, 0], flat[:, 1])
        self.free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).tolist()

    def filled(self, k_LGD: torch.Tensor, v_LGD: torch.Tensor) -> torch.Tensor:
        """The page table of a sequence with these keys and values; NaN follows them in the last page."""
        n = -(-len(k_LGD) // PAGE)
        table, self.free = torch.tensor(self.free[:n]), self.free[n:]
        for pages, x_LGD in zip(self.pages, (k_LGD, v_LGD), strict=True):
            whole = torch.full((n * PAGE, self.kv_heads * self.width), float("nan"))
            whole[: len(x_LGD)] = x_LGD.flatten(1)
            pages[table] = whole.view(n, -1)
        return table


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(q_LHD: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    shared = q_LHD.shape[1] // k_KGD.shape[1]
    k, v = (x.double().repeat_interleave(shared, 1) for x in (k_KGD, v_KGD))
    score = torch.einsum("qhd,khd->hqk", q_LHD.double(), k) * scale
    hidden = torch.arange(len(k)) > start + torch.arange(len(q_LHD))[:, None]
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)


def batch_of(slices: list[Slice], tables: list[torch.Tensor], lengths: list[int]) -> StepBatch:
    positions = [p for s in slices for p in range(s.start, s.end)] + [n - 1 for n in lengths]
    return StepBatch(NONE, torch.tensor(positions), tuple(slices), torch.arange(len(tables)), tuple(tables), NONE)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 32), (5, 1, 24)])
def test_prefill_equals_plain_attention_for_any_cut_and_other_slices(heads: int, kv_heads: int, width: int) -> None:
    q, k, v = random(200, heads, width), random(200, kv_heads, width, seed=1), random(200, kv_heads, width, seed=2)
    memory = Memory(kv_heads, width)
    table = memory.filled(k, v)
    scale = width**-0.5

    def run(slices: list[Slice], q_PHD: torch.Tensor) -> torch.Tensor:
        return gpu.prefill(q_PHD, memory.pages, PagedStep.of(batch_of(slices, [], []), PAGE), PAGE, scale)

    whole = run([Slice(0, 200, 0, 0, table, 0)], q)
    assert (whole.double() - plain(q, k, v, 0, scale)).abs().max() < 1e-5
    other = memory.filled(random(90, kv_heads, width, seed=3), random(90, kv_heads, width, seed=4))
    for cut in (64, 128):
        first = run([Slice(0, cut, 0, 0, table[: cut // PAGE], 0)], q[:cut])
        slices = [Slice(0, 90, 0, 1, other, 0), Slice(90, 200 - cut, cut, 0, table, 0)]
        rest = run(slices, torch.cat((random(90, heads, width, seed=5), q[cut:])))
        assert torch.equal(torch.cat((first, rest[90:])), whole)


def test_decode_equals_plain_attention_among_any_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SPLIT", 128)
    heads, kv_heads, width, scale = 6, 2, 16, 0.3
    memory, lengths = Memory(kv_heads, width), [1, 64, 300, 129]
    q = random(4, heads, width)
    kv = [(random(n, kv_heads, width, seed=n), random(n, kv_heads, width, seed=n + 1)) for n in lengths]
    tables = [memory.filled(*pair) for pair in kv]
    step = PagedStep.of(batch_of([], tables, lengths), PAGE)
    assert step.splits == 3
    together = gpu.decode(q, memory.pages, step, PAGE, scale)
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        wanted = plain(q[i : i + 1], *kv[i], length - 1, scale)
        assert (together[i].double() - wanted[0]).abs().max() < 1e-5
        alone = gpu.decode(q[i : i + 1], memory.pages, PagedStep.of(batch_of([], [table], [length]), PAGE), PAGE, scale)
        assert torch.equal(alone[0], together[i])


def test_a_page_that_blocks_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="a page has 96 tokens, kernels take multiples of 64"):
        PagedStep.of(batch_of([], [], []), 96)


@pytest.mark.parametrize(("heads", "latent", "place"), [(4, 32, 8), (19, 24, 20), (1, 16, 0)])
def test_decode_over_latents_equals_plain_attention_among_any_sequences(
    heads: int, latent: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SPLIT", 128)
    lengths, width, scale = [1, 64, 300, 129], latent + place, 0.2
    rows = [random(n, width, seed=n) for n in lengths]
    q_BHX = random(4, heads, width)
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))
    pages = torch.full((PAGES, 2, PAGE * width), float("nan"))[:, 0]
    tables = []
    for row_LX in rows:
        n = -(-len(row_LX) // PAGE)
        tables.append(free[:n])
        free = free[n:]
        whole = torch.full((n * PAGE, width), float("nan"))
        whole[: len(row_LX)] = row_LX
        pages[tables[-1]] = whole.view(n, -1)
    together = mla.decode(q_BHX, pages, PagedStep.of(batch_of([], tables, lengths), PAGE), PAGE, scale, latent)
    for i, row_LX in enumerate(rows):
        score_HL = q_BHX[i].double() @ row_LX.double().T * scale
        wanted = score_HL.softmax(-1) @ row_LX[:, :latent].double()
        assert (together[i].double() - wanted).abs().max() < 1e-5
        step = PagedStep.of(batch_of([], tables[i : i + 1], lengths[i : i + 1]), PAGE)
        assert torch.equal(mla.decode(q_BHX[i : i + 1], pages, step, PAGE, scale, latent)[0], together[i])
