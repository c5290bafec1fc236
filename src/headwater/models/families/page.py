"""docs/families.md, made of what families and profiles say: `python -m headwater.models.families.page FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from headwater.models.families.family import Family, Refusal
from headwater.models.families.table import ALL_REFUSE, FAMILIES
from headwater.models.profiles import PROFILES, Profile

HEAD = """\
# Families of models

What `headwater serve` loads, what it costs, how it is tested, and what it does not take. Made from the code by
`make families`; a test compares them.

A checkpoint is a folder in Hugging Face's format. Of a multimodal one the text model is loaded, and what else there is
(a vision tower, layers that predict further tokens) is skipped with a line in the log that says how much it was.
Weights may be float32, bfloat16 or float16.
"""
TESTED = """\
## What is tested, of each family

On small random checkpoints with odd numbers of heads, with biases and without, tied and untied, with experts and
without, as far as the family has them:

| what | against what | where |
| --- | --- | --- |
| logits of every token within 1e-4, and 24 tokens of greedy text | the oracle of the table above | `tests/models/test_hybrid.py` |
| a prompt cut at any pages, other prompts beside it: no bit changes | itself, whole and alone | `tests/models/test_hybrid.py` |
| a hit changes no bit of the answer, in seven situations | a server without a cache | `tests/exactness/test_matrix.py` |
| every mixer: outputs, states, transitions, extreme gates | its recurrence token by token in float64 | `tests/contract/test_mixers.py` |
| FLOPs, weights, bytes of KV and of a checkpoint | what is counted, stored and written | `tests/models/test_counted_costs.py` |
| the server answers the `openai` client, cold and from the cache; `headwater inspect` | itself | `tests/test_families_serve.py` |
| every refusal below | the config.json of the small checkpoint, with those keys | `tests/models/test_families.py` |
"""  # noqa: E501
REFUSED = """\
## What is not supported

A config.json that asks for something that there is no code for is refused before any weight is read, by the key that
asks for it.
"""


def page() -> str:
    """The whole of it."""
    return "\n".join([HEAD, *families(), "", TESTED, REFUSED, *refusals()]) + "\n"


def families() -> list[str]:
    """One row a family, with the sizes of a published model."""
    rows = [(family, PROFILES.get(family.profile)) for family in FAMILIES]
    header = (
        "family", "model types", "for example", "layers", "bytes of KV a token", "bytes of a checkpoint", "oracle",
    )  # fmt: skip
    return table(header, [_row(family, profile) for family, profile in rows])


def _row(family: Family, profile: Profile | None) -> tuple[str, ...]:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    if profile is None:
        return family.name, types, "", "", "", "", family.oracle
    layers = ", ".join(f"{n} {kind}" for kind, n in profile.layers_by_kind().items())
    sizes = (f"{profile.kv_bytes_per_token:,}", f"{profile.checkpoint_bytes:,}")
    return family.name, types, profile.name, layers, *sizes, family.oracle


def refusals() -> list[str]:
    """One row for each thing that is refused."""
    rows = [("all", refusal) for refusal in ALL_REFUSE]
    rows += [(family.name, refusal) for family in FAMILIES for refusal in family.refuses]
    return table(("family", "what", "asked for by", "error"), [_refusal(name, refusal) for name, refusal in rows])


def _refusal(family: str, refusal: Refusal) -> tuple[str, ...]:
    asked = ", ".join(f"{key} = {value!r}" for key, value in refusal.keys.items())
    return family, refusal.part, f"`{asked}`", refusal.error + ("…" if refusal.error.endswith(" ") else "")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """In markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
