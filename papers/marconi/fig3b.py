"""What a checkpoint at every block costs."""

from __future__ import annotations

from headwater.models.profiles import Profile, load_profile
from headwater.models.profiles.marconi import marconi
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

TOKENS = 10_000
BLOCK = 16
TRANSFORMER_LAYERS = 32  # of a usual 7B one


def run(lab: Lab) -> Found:
    hybrid, deep = load_profile("marconi-7b"), load_profile("marconi-7b-attention")
    transformer = marconi("transformer", TRANSFORMER_LAYERS, 0)
    ratios = [_ratio(hybrid, transformer, block) for block in (BLOCK, 32, 64, 128)]
    return Found(
        lines=(
            Line("10,000 tokens, a checkpoint every 16", 17.4, cached(hybrid, TOKENS, BLOCK) / 1e9, "GB"),
            Line("over the KV of a Transformer of 32 layers", 3.3, ratios[0], "x"),
            Line("over the KV of one of 36 layers, as in figure 12a", None, _ratio(hybrid, deep, BLOCK), "x"),
            Line("an SSM layer's state over an attention layer's KV of a block", 4, _layer_ratio(hybrid), "x"),
            *(
                Line(f"every {n}, over 32 layers", None, ratio, "x")
                for n, ratio in zip((32, 64, 128), ratios[1:], strict=True)
            ),
        ),
        shapes=(Shape("the larger the block, the less memory", ratios == sorted(ratios, reverse=True)),),
    )


def cached(profile: Profile, tokens: int, block: int) -> int:
    """Bytes of a sequence with its KV and a checkpoint at every block."""
    return profile.kv_bytes_per_token * tokens + tokens // block * profile.checkpoint_bytes


def _ratio(hybrid: Profile, transformer: Profile, block: int) -> float:
    return cached(hybrid, TOKENS, block) / cached(transformer, TOKENS, block)


def _layer_ratio(profile: Profile) -> float:
    """Without the convolution, as the paper's footnote has it."""
    layers = {layer.kind: layer for layer, _ in profile.layers}
    return layers["ssm"].state_elements["recurrent"] / (layers["attention"].kv_elements(1) * BLOCK)


FIGURE = Figure(
    name="marconi-3b",
    title="Memory of one sequence with a checkpoint at every block",
    paper="Marconi, figure 3b and section 3",
    claim="one sequence of 10K tokens takes 17.4 GB at block 16, 3.3 times a Transformer of the same size.",
    difference="None. The Transformer that gives the paper's ratio has 32 attention layers; figure 12a's has 36.",
    run=run,
)
