"""docs/files.md: files of much-run hybrids, with sizes computed from the layers of the lab's profiles."""

from __future__ import annotations

import math
from dataclasses import replace

from headwater.models.profiles import PROFILES
from headwater.models.published import CONTEXTS, MODELS, Published, cache_bytes, file_bytes, packed
from pages.markdown import table

HEAD = """\
# Which file do I take

Files of ten hybrids that many people run: sizes, memory and command. Generated from the code by `make pages`: sizes
follow from the shapes of the layers, by the code that serves. **None of these files was downloaded here.** Names are
those that public code and documentation quoted in autumn 2026.
"""
FILES = """\
## GGUF files of 4 bits

`Q4_K_M` is llama.cpp's usual mixture: Q4_K, with Q6_K for the head, half of the `v_proj` and half of the `down_proj`,
and Q5_K for the joined projection of Gated DeltaNet (`llama_tensor_get_type_impl` of llama.cpp). *File* is its size
without metadata. `tests/test_pages.py` compares six of them with the bytes that public sources quote.

*Weights* is the memory that they take once they are loaded. Codes of 5 and 6 bits take a byte there. The last two
columns are the least `--memory` for a conversation of that many tokens with 8 checkpoints, and the states of a running
request. Together they are what the model needs ([sizing.md](sizing.md) has the rest).

`hf download REPOSITORY FILE --local-dir .` fetches a file, `headwater inspect FILE` counts the bytes of this very file,
and `headwater serve FILE --memory 4GB` serves it.
"""
FOLDERS = """\
Nemotron's width of 2,688 fits no K type, so llama.cpp takes Q5_0 and Q8_0 in their place: its folder with `--weights
int4` takes half the memory.

## Folders of 16 bits

A publisher's own repository is served by its name: `headwater serve REPOSITORY --weights int4 --memory 4GB`. `int4` or
`int8` rounds the weights while they are loaded. Sizes are those of the text model, without a vision tower and an MTP
head:
"""
OTHERS = """\
## Other forms

- **Fewer bits**: files with IQ4_XS, Q3_K or IQ3 types, dynamic mixtures (`UD-Q3_K_XL`) and files in parts are read as
  well ([weights.md](weights.md#gguf-files)). In memory their weights take 4.4 to 5.2 bits.
- **8 bits**: `Q8_0` takes 8.5 bits a weight, in the file and in memory; an FP8 folder takes 8.3.
- **MLX, NVFP4, AWQ and GPTQ** folders are served by their names
  ([formats](weights.md#formats-of-hugging-face-checkpoints)).
- Of a multimodal model only the text model is loaded: no `mmproj` file is needed.
- **Not served**: Gemma, Llama, Mistral and other families that are not in [families.md](families.md). Their files are
  refused by the name of the architecture, before the weights are read.
"""


def page() -> str:
    """Return the whole page."""
    names = ("model", "repository, file", "file, GB", "weights, GB", *(f"{n:,} tokens" for n in CONTEXTS))
    files = table(names, [_file_row(one) for one in MODELS], "llrrrr")
    folders = table(
        ("repository", "download, GB", "int8, GB", "int4, GB"), [_folder_row(one) for one in MODELS], "lrrr"
    )
    return "\n".join([HEAD, FILES, files, "", FOLDERS, folders, "", OTHERS])


def _file_row(one: Published) -> tuple[str, ...]:
    profile = PROFILES[one.profile]
    held = replace(profile, packed=packed(profile))
    caches = (f"`--memory {math.ceil(cache_bytes(profile, tokens) / 1e8) / 10}GB`" for tokens in CONTEXTS)
    place = f"`{one.gguf}`, `{one.file}`"
    return one.name, place, f"{file_bytes(profile) / 1e9:.1f}", f"{held.weight_bytes / 1e9:.1f}", *caches


def _folder_row(one: Published) -> tuple[str, ...]:
    profile = PROFILES[one.profile]
    forms = (replace(profile, weights=weights).weight_bytes for weights in ("auto", "int8", "int4"))
    return f"`{one.folder}`", *(f"{n / 1e9:.1f}" for n in forms)
