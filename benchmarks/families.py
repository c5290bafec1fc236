"""The page of model families, written from the code and the profiles: `make families`.

python -m benchmarks.families [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from headwater.cli.common import prepare_outputs
from headwater.models.families import ALL_REFUSE, FAMILIES
from headwater.models.families.family import Family, Refusal
from headwater.models.profiles import PROFILES, Profile

HEAD = """\
# Families of models

The families that `headwater serve` loads, their cache costs, their tests, and unsupported configurations. Generated
from the code by `make families`; a test compares both.

A checkpoint is a folder in Hugging Face's format. From a multimodal checkpoint only the text model is loaded; other
parts (a vision tower, layers that predict further tokens) are skipped, and a log line reports their size.
Weights may be float32, bfloat16 or float16.
"""
TESTED = """\
## Tests of each family

Tests use small random checkpoints with odd numbers of heads, with and without biases, with tied and untied embeddings,
with and without experts, as far as the family supports them:

| property | compared with | test |
| --- | --- | --- |
| logits of every token within 1e-4, and 24 tokens of greedy text | the oracle of the table above | `tests/models/test_hybrid.py` |
| a prompt cut at any pages, in a batch with other prompts: no bit changes | the same prompt, whole and alone | `tests/models/test_hybrid.py` |
| a hit changes no bit of the answer, in seven situations | a server without a cache | `tests/exactness/test_matrix.py` |
| every mixer: outputs, states, transitions, extreme gates | its recurrence token by token in float64 | `tests/contract/test_mixers.py` |
| FLOPs, weights, bytes of KV and of a checkpoint | the operations counted and the bytes stored | `tests/models/test_counted_costs.py` |
| the server answers the `openai` client, cold and from the cache; `headwater inspect` | the cold answer | `tests/test_families_serve.py` |
| every refusal below | the config.json of the small checkpoint with these keys | `tests/models/test_families.py` |
"""  # noqa: E501
REFUSED = """\
## Unsupported configurations

A config.json with an unsupported value is refused before any weight is read; the error names the key.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *families(), "", TESTED, REFUSED, *refusals()]) + "\n"


def families() -> list[str]:
    """Return a table with one row for each family, with the sizes of a published model."""
    header = (
        "family",
        "model types",
        "for example",
        "layers",
        "bytes of KV a token",
        "bytes of a checkpoint",
        "bytes of a tail of 63 tokens",
        "in float32",
        "oracle",
    )
    return table(header, [_row(family, PROFILES[family.profile]) for family in FAMILIES])


def _row(family: Family, profile: Profile) -> tuple[str, ...]:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    layers = ", ".join(f"{n} {kind}" for kind, n in profile.layers_by_kind.items())
    sizes = (f"{profile.kv_bytes_per_token:,}", f"{profile.checkpoint_bytes:,}")
    tails = (replace(profile, dtype_name=name).tail_bytes(63, 64) for name in ("bfloat16", "float32"))
    return family.name, types, profile.name, layers, *sizes, *map("{:,}".format, tails), family.oracle


def refusals() -> list[str]:
    """Return a table with one row for each unsupported configuration."""
    rows = [("all", refusal) for refusal in ALL_REFUSE]
    rows += [(family.name, refusal) for family in FAMILIES for refusal in family.refuses]
    header = ("family", "unsupported part", "configuration", "error")
    return table(header, [_refusal(name, refusal) for name, refusal in rows])


def _refusal(family: str, refusal: Refusal) -> tuple[str, ...]:
    asked = ", ".join(f"{key} = {value!r}" for key, value in refusal.keys.items())
    return family, refusal.part, f"`{asked}`", refusal.error + ("…" if refusal.error.endswith(" ") else "")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "families.md")
    given = parser.parse_args()
    prepare_outputs(given.out)
    given.out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
