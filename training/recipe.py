"""Recipes of training: model, stages, tasks and rates in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

VOCABULARY = 4096
EXAMPLES = 3000  # of the mixture, from which a new tokenizer learns


@dataclass(frozen=True)
class Stage:
    """So many steps on sequences of one length."""

    length: int  # tokens of a sequence
    sequences: int  # of a step
    steps: int
    shares: Mapping[str, float]  # of sequences, by kind of task; they need not add up to 1


@dataclass(frozen=True)
class Recipe:
    """One training run. The learning rates rise over `warm_up` steps, stay, and fall to zero over the last `cool`."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    stages: tuple[Stage, ...]
    head_dim: int = 64
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    warm_up: int = 50
    cool: float = 0.3  # share of all steps
    seed: int = 7
    vocabulary: int = VOCABULARY
    tokenizer_examples: int = EXAMPLES
    apart: float = 0.0  # share of the steps in which segments see only themselves (`training.segments`)
    held_out: int = 20_000  # tokens of each kind of question at each length, after a stage
    context: float = 0.1  # share of the targets that are not an answer's which are learned from

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        return sum(stage.steps * stage.sequences * stage.length for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        """Raises ValueError past the last step."""
        left = step
        for stage in self.stages:
            if left < stage.steps:
                return stage
            left -= stage.steps
        raise ValueError(f"step {step} of {self.steps}")

    def lengths_until(self, step: int) -> list[int]:
        """Return the lengths of sequences so far if a stage ends after `step` steps, else an empty list."""
        ends = list(accumulate(stage.steps for stage in self.stages))
        done = self.stages[: ends.index(step) + 1] if step in ends else ()
        return list(dict.fromkeys(stage.length for stage in done))

    def rate_at(self, step: int) -> float:
        """Return the factor of the learning rates at a step."""
        to_end = (self.steps - step) / max(1, round(self.cool * self.steps))
        return min(1.0, (step + 1) / self.warm_up, to_end)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model, as Hugging Face's Qwen3.5 has it."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "full_attention_interval": 4,
            "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(self.layers)],
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.heads,
            "linear_num_value_heads": self.heads,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": self.head_dim,
            "linear_conv_kernel_dim": 4,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        }


RECALL = {"single": 1.0, "two_hop": 0.6, "absent": 0.3}
ALL = {**RECALL, "memory": 0.3, "persona": 0.2, "tool": 0.3, "text": 0.3}
FIRST = {"pairs": 1.0, "single": 0.2}
SECOND = {"pairs": 0.4, "single": 1.0, "two_hop": 0.1, "absent": 0.1, "memory": 0.2, "text": 0.1}
FURTHER = {"single": 1.0, "two_hop": 1.0, "absent": 0.6, "memory": 0.2, "persona": 0.2, "tool": 0.8, "text": 0.2}
THIRD = {"single": 1.2, "two_hop": 2.0, "absent": 1.0, "memory": 0.15, "persona": 0.2, "tool": 1.0, "text": 0.15}
LAST = {"single": 2.0, "two_hop": 1.5, "absent": 0.7, "memory": 0.15, "persona": 0.3, "tool": 0.5, "text": 0.15}
CPU = Recipe(
    hidden=192,
    layers=8,
    heads=3,
    intermediate=512,
    stages=(
        Stage(256, 16, 600, FIRST),
        Stage(384, 12, 700, SECOND),
        Stage(768, 6, 900, ALL),
        Stage(1280, 4, 500, ALL),
        Stage(2304, 2, 200, ALL),
        Stage(4352, 2, 80, ALL),
    ),
)
RECIPES: dict[str, Recipe] = {
    "cpu": CPU,
    "further": replace(
        CPU,
        stages=(
            Stage(768, 6, 1200, FURTHER),
            Stage(1280, 4, 1000, FURTHER),
            Stage(2304, 2, 750, FURTHER),
            Stage(4352, 1, 650, FURTHER),
        ),
        cool=1.0,
        apart=0.6,
    ),
    "third": replace(
        CPU,
        stages=(
            Stage(768, 6, 500, THIRD),
            Stage(1280, 4, 1100, THIRD),
            Stage(2304, 2, 1500, THIRD),
            Stage(4352, 1, 520, LAST),
        ),
        muon_lr=0.015,
        adam_lr=0.002,
        cool=1.0,
        seed=8,
        apart=0.4,
    ),
    "head": replace(
        CPU,
        stages=(
            Stage(384, 12, 400, {**THIRD, "pairs": 0.2}),
            Stage(768, 6, 400, THIRD),
            Stage(2304, 2, 80, LAST),
        ),
        cool=0.5,
        seed=11,
    ),
    "smoke-head": replace(CPU, stages=(Stage(256, 4, 20, ALL),), warm_up=5),
    "smoke": Recipe(
        hidden=64,
        layers=4,
        heads=1,
        intermediate=128,
        stages=(Stage(256, 4, 20, ALL), Stage(512, 2, 5, ALL)),
        warm_up=5,
        held_out=1_000,
        tokenizer_examples=100,
    ),
}
