"""Arguments of kernels that sum: at multiples of 16 bytes, and as many chunks in each batch, whatever the step has."""

import torch

from headwater.layers.kda import DeltaAttention
from headwater.mixers.gpu import ALIGNED, dense
from headwater.mixers.gpu import norm as norms
from headwater.mixers.gpu.kda import CHUNK_BATCH, KimiDeltaAttentionKernels
from headwater.mixers.gpu.ragged import Ragged
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights

WIDTH = 32


def test_one_row_of_a_wider_tensor_is_copied_to_an_aligned_address() -> None:
    wide_NC = torch.randn(3, 7)
    for row in range(3):
        one = wide_NC[row : row + 1, 1:6]
        assert one.is_contiguous(), "so `contiguous` alone copies nothing"
        found = dense(one)
        assert torch.equal(found, one)
        assert found.data_ptr() % ALIGNED == 0
    whole = torch.randn(4, 8)
    assert dense(whole) is whole
    assert dense(whole.T).is_contiguous()


def test_norms_are_given_aligned_rows(monkeypatch) -> None:
    seen, stream = [], norms._norm

    class Noted:
        def __getitem__(self, grid):
            return lambda x, *rest, **more: (seen.append(x.data_ptr()), stream[grid](x, *rest, **more))

    monkeypatch.setattr(norms, "_norm", Noted())
    x_NC = torch.randn(5, 7)
    alone = torch.cat([norms.rms_norm(x_NC[i : i + 1, 1:6], torch.ones(5), 1e-6, torch.float32) for i in range(5)])
    together = norms.rms_norm(x_NC[:, 1:6], torch.ones(5), 1e-6, torch.float32)
    assert torch.equal(alone, together)
    assert len(seen) == 6
    assert not any(address % ALIGNED for address in seen)


def test_chunks_are_prepared_in_batches_of_one_size(monkeypatch) -> None:
    shape = DeltaAttention(WIDTH, heads=2, head_dim=16, conv=4)
    mixer = KimiDeltaAttention(shape, Weights({name: torch.zeros(size) for name, size in shape.tensors().items()}))
    prepare, batches = mixer.prepare, []
    monkeypatch.setattr(mixer, "prepare", lambda mixed, gates: (batches.append(len(mixed)), prepare(mixed, gates))[1])
    for tokens in (3, 64, 64 * CHUNK_BATCH + 1):
        ragged = Ragged.of([Slice(0, tokens, 0, 0, torch.empty(0, dtype=torch.int64), 0)], "cpu")
        rows = torch.zeros(tokens, 3 * shape.width), torch.zeros(tokens, shape.width + shape.heads)
        KimiDeltaAttentionKernels(mixer).prefill(*rows, torch.zeros(1, 2, 16, 16), ragged)
    assert batches == [CHUNK_BATCH] * 4
