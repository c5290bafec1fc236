"""Weights that `--weights` has quantised, kept in the cache folder for later starts: a safetensors file for each.

There is one folder for a model, a format and the vector instructions that torch uses, since sums of errors choose among
forms. It has what the latest version of code, torch and checkpoint made. A file's name ends in the digest of its
content: a file that is damaged or cut off is made again.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwater.cache_folder import own_folder
from headwater.hub_name import HubName, name_of
from headwater.machine import in_units
from headwater.mixers.quantised import TABLE_BITS, Quantised
from headwater.models.digest import file_digest, weights_digest
from headwater.models.packing import unpacked
from headwater.models.quantiser import converted

PACKAGE = Path(__file__).parents[1]
CODE = ("models/**/*.py", "mixers/quantised.py", "mixers/weights.py")  # on which converted weights depend
PARTS = ("code", "scale", "zero")
MAX_WRITING_SECONDS = 3600.0  # an unfinished file that is older belongs to no process

log = logging.getLogger("headwater.models")


class KeptWeights:
    """The weights of one folder; converts those that are not there, and adds them.

    After an error of the system the files of this start are removed, so that no disk stays full, and none is added.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the folder cannot be read."""
        self.folder = folder
        self.n_read = 0
        self._written: list[Path] | None = []  # None after an error
        self._files: dict[str, Path] = {}
        for file in folder.iterdir():
            if not file.name.startswith("."):
                self._files[file.name.rpartition("-")[0]] = file
            elif time.time() - file.stat().st_mtime > MAX_WRITING_SECONDS:
                file.unlink(missing_ok=True)

    def __call__(self, name: str, read: Callable[[], Tensor], bits: int) -> Quantised:
        """Return a weight in integers, as `converted` does."""
        weight = self._read(name, bits)
        if weight is None:
            weight = converted(name, read, bits)
            if self._written is not None:
                self._write(name, weight)
        return weight

    def report(self) -> None:
        """Log the folder, its bytes, and what of it this start has read and written."""
        files = [file for file in self.folder.iterdir() if file.is_file()]
        size, written = in_units(sum(file.stat().st_size for file in files)), len(self._written or ())
        log.info("converted weights in %s: %s; %d read, %d added", self.folder, size, self.n_read, written)

    def _read(self, name: str, bits: int) -> Quantised | None:
        file = self._files.get(name)
        if file is None:
            return None
        try:
            if not file.stem.endswith(file_digest(file)):
                raise ValueError("its content does not have the digest in its name")
            with safe_open(file, framework="pt") as opened:
                code_NK, scale_NX, zero_NX = map(opened.get_tensor, PARTS)
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("the kept weight %s is damaged and converted again: %s", file, error)
            with suppress(OSError):
                file.unlink()
            return None
        self.n_read += 1
        return Quantised(unpacked(code_NK, bits) if bits <= TABLE_BITS else code_NK, bits, scale_NX, zero_NX)

    def _write(self, name: str, weight: Quantised) -> None:
        assert self._written is not None
        code_NK = weight.code_NK
        if weight.bits <= TABLE_BITS:
            code_NK = code_NK[:, 0::2] | code_NK[:, 1::2] << 4
        tensors = dict(zip(PARTS, (code_NK, weight.scale_NX, weight.zero_NX), strict=True))
        unfinished = self.folder / f".{secrets.token_hex(8)}"
        try:
            save_file({part: tensor.contiguous() for part, tensor in tensors.items()}, unfinished)
            file = self.folder / f"{name}-{file_digest(unfinished)}.safetensors"
            unfinished.replace(file)
            self._written.append(file)
        except (OSError, SafetensorError) as error:
            log.warning("converted weights cannot be kept for later starts: %s", error)
            _remove([unfinished, *self._written])
            self._written = None


def open_kept_weights(model: Path, weights: str) -> KeptWeights | None:
    """Open the folder of a model's converted weights, and remove those of earlier versions.

    If there can be none, log why and return None.
    """
    where = str(HubName.of_folder(model) or model.absolute())
    name = re.sub(r"[^\w.-]", "-", name_of(model))
    kind = torch.backends.cpu.get_cpu_capability().replace(" ", "-").lower()
    texts = (file.read_bytes() for pattern in CODE for file in sorted(PACKAGE.glob(pattern)))
    version = blake3(b"\0".join((torch.__version__.encode(), weights_digest(model).encode(), *texts)))
    of_model = f"{name}-{blake3(where.encode()).hexdigest()[:8]}-{weights}-{kind}"
    try:
        folder = own_folder("weights", of_model, version.hexdigest()[:16])
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return KeptWeights(folder)
    except OSError as error:
        log.warning("converted weights cannot be kept for later starts: %s", error)
        return None


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)
