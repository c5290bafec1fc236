"""FLOPs by kind of layer over the length."""

from __future__ import annotations

from headwater.models.profiles import load_profile
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

LENGTHS = (1_000, 10_000, 30_000, 100_000)
KINDS = ("attention", "ssm", "mlp")


def run(lab: Lab) -> Found:
    profile = load_profile("marconi-7b")
    shares = {}
    for tokens in LENGTHS:
        flops = profile.flops_by_kind(0, tokens)
        shares.update({(kind, tokens): 100 * flops[kind] / sum(flops.values()) for kind in KINDS})
    layers = profile.layers_by_kind()
    lines = [Line("attention's share of the layers", 7.1, 100 * layers["attention"] / sum(layers.values()), "%")]
    lines += [Line(f"{kind}, {n:,} tokens", None, shares[kind, n], "% of FLOPs") for n in LENGTHS for kind in KINDS]
    short, long = LENGTHS[0], LENGTHS[-1]
    return Found(
        tuple(lines),
        (
            Shape(
                "attention has the fewest FLOPs of short sequences",
                shares["attention", short] < min(shares["ssm", short], shares["mlp", short]),
            ),
            Shape("and more than the SSM layers of long ones", shares["attention", long] > shares["ssm", long]),
        ),
    )


FIGURE = Figure(
    name="marconi-14",
    title="FLOPs by kind of layer",
    paper="Marconi, figure 14",
    claim="attention costs the least at short lengths and a large share at long ones, with 7.1% of the layers.",
    difference="None: the same formulas. The paper prints no other numbers.",
    run=run,
)
