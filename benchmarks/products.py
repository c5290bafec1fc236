"""Speed of products with weights by format and number of rows, beside torch's and oneDNN's in float32.

    python -m benchmarks.products [--repeats 7] [--threads 2] [--outputs 3584] [--inputs 1024] [--small]

Several matrices are multiplied in turn, so many that no cache holds them. Rows are in the dtype that the format's
product computes with: bfloat16 if the processor multiplies it, else float32. GB/s are bytes of the weight as held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks import measure
from benchmarks.measure import Row, timed
from headwater import machine
from headwater.mixers.linear import Linear, prompts_product
from headwater.mixers.quantised import Quantised
from headwater.models.quantiser import in_float8

HEIGHTS, SMALL_HEIGHTS = (1, 2, 8, 16, 32, 64, 256, 1024), (1, 8)  # rows
IN_TURN, SMALL_IN_TURN = 2 * 10**8, 10**6  # bytes of matrices that are multiplied in turn
GROUP = 64  # inputs that share a scale
FEW = 8  # rows up to which a product is bound by memory
WORK = 4 * 10**9  # multiply-adds of a figure, at most: high products take fewer turns
Product = Callable[[torch.Tensor], torch.Tensor]


def quantised(weight_NK: torch.Tensor, bits: int) -> Quantised:
    """Round a weight to integers around the middle code, in groups of 64 inputs."""
    middle, groups_NXg = 2 ** (bits - 1), weight_NK.unflatten(1, (-1, GROUP))
    scale_NX = groups_NXg.abs().amax(-1).div(middle - 1).half()
    code_NXg = (groups_NXg / scale_NX.float()[:, :, None]).round_().add_(middle)
    zero_N1 = torch.full((len(weight_NK), 1), middle, dtype=torch.uint8)
    return Quantised(code_NXg.flatten(1).to(torch.uint8), bits, scale_NX, zero_N1)


def packed_by_onednn(weight_NK: torch.Tensor) -> Product:
    weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK, FEW)
    return lambda x_RK: torch.ops.mkldnn._linear_pointwise(x_RK, weight, None, "none", [], "")


HELD: dict[str, Callable[[torch.Tensor], torch.Tensor | Quantised]] = {
    "float32": torch.Tensor.float,
    "bfloat16": torch.Tensor.bfloat16,
    "float16": torch.Tensor.half,
    "float8": in_float8,
    "int8": lambda weight_NK: quantised(weight_NK, 8),
    "int4": lambda weight_NK: quantised(weight_NK, 4),
}
BESIDE: dict[str, Callable[[torch.Tensor], Product]] = {
    "torch, float32": lambda weight_NK: lambda x_RK: F.linear(x_RK, weight_NK),
    "oneDNN, packed float32": packed_by_onednn,
}


def bytes_of(weight: torch.Tensor | Quantised) -> int:
    return weight.bytes if isinstance(weight, Quantised) else weight.nbytes


def products(name: str, n_out: int, n_in: int, in_turn: int) -> tuple[list[Product], int, torch.dtype]:
    """Return products with as many random weights as are multiplied in turn, one's bytes, and the dtype of rows."""
    first = torch.randn(n_out, n_in) * n_in**-0.5
    held = HELD.get(name, HELD["float32"])
    n_bytes = bytes_of(held(first))
    weights_NK = [torch.randn(n_out, n_in) * n_in**-0.5 for _ in range(max(1, in_turn // n_bytes))]
    if name in BESIDE:
        return [BESIDE[name](weight_NK) for weight_NK in weights_NK], n_bytes, torch.float32
    dtype = torch.bfloat16 if machine.cpu().native_bfloat16 and name != "float32" else torch.float32
    return [prompts_product(Linear(held(weight_NK), dtype=dtype)) for weight_NK in weights_NK], n_bytes, dtype


def rows_at(
    height: int, weights: dict[str, tuple[list[Product], int, torch.dtype]], n_in: int, n_out: int, turns: int
) -> list[Row]:
    n_products = max(1, WORK // (height * n_in * n_out))

    def work(some: list[Product], dtype: torch.dtype) -> Callable[[], object]:
        x_RK = torch.randn(height, n_in).to(dtype)
        return lambda: [product(x_RK) for product in some[:n_products]]

    figures = measure.in_turns({name: timed(work(some, dtype)) for name, (some, _, dtype) in weights.items()}, turns)
    rows, at = [], f"{height:,} row{'s' * (height > 1)}"
    for name, (some, n_bytes, _) in weights.items():
        taken = [seconds / len(some[:n_products]) for seconds in figures[name]]
        rows.append(Row(f"{at}, {name}", "us", [1e6 * seconds for seconds in taken]))
        if height <= FEW:
            rows.append(Row(f"{at}, {name}", "GB/s", [n_bytes / seconds / 1e9 for seconds in taken]))
        else:
            flops = 2 * height * n_in * n_out
            rows.append(Row(f"{at}, {name}", "GFLOP/s", [flops / seconds / 1e9 for seconds in taken]))
    return rows


def main() -> None:
    parser = measure.parser(__doc__, "products", repeats=7)
    parser.add_argument("--outputs", type=int, default=3584)
    parser.add_argument("--inputs", type=int, default=1024)
    given = measure.prepared(parser)
    torch.manual_seed(given.seed)
    n_out, n_in, in_turn = given.outputs, given.inputs, IN_TURN
    if given.small:
        n_out, n_in, in_turn = 64, 128, SMALL_IN_TURN
    with torch.inference_mode():
        weights = {name: products(name, n_out, n_in, in_turn) for name in (*HELD, *BESIDE)}
        heights = SMALL_HEIGHTS if given.small else HEIGHTS
        rows = [row for height in heights for row in rows_at(height, weights, n_in, n_out, given.repeats)]
    measure.report(given, rows, inputs=n_in, outputs=n_out)


if __name__ == "__main__":
    main()
