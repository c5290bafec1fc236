"""Models of a hub such as huggingface.co: those in huggingface_hub's cache, and the listing of their files.

huggingface_hub is imported at its first use, and only for a model that is given by name: it takes 0.1 s.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headwater.errors import CheckpointError, DownloadError
from headwater.hub_name import HubName
from headwater.models.families import read_folder
from headwater.models.files import (
    CONFIG,
    INDEX,
    QUANTISATION,
    SINGLE,
    TOKENIZER,
    TOKENIZERS,
    WITHOUT_TOKENIZER,
    embedded,
    is_whole,
)

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")  # ends of names
HASH = re.compile("[0-9a-f]{40,64}")
MAX_NAMED_FILES = 2  # with weights of other formats


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a model on a hub."""

    name: str
    size: int  # bytes
    sha256: str | None  # known for large files; None: git itself stores the file


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model on a hub at one commit."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]

    @classmethod
    def of(cls, name: HubName) -> Listing:
        """Ask the hub, and resolve the revision to a commit. Raises DownloadError."""
        from huggingface_hub import HfApi, constants

        with explained(name):
            info = HfApi(**sender()).model_info(
                name.repository, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        if info.sha is None:
            raise DownloadError(f"{constants.ENDPOINT} does not name the commit of {name}: it is not a complete hub")
        listed = info.siblings or []
        hashes = [info.sha, *(one.lfs.sha256 for one in listed if one.lfs)]
        if not all(map(HASH.fullmatch, hashes)):  # they become names of files in the cache
            raise DownloadError(f"{constants.ENDPOINT} lists an invalid hash of {name}: it is not to be trusted")
        files = (HubFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else None) for one in listed)
        return cls(name, info.sha, {file.name: file for file in files})

    def check_loadable(self) -> None:
        """Raise DownloadError, which names the weights that there are, if the files that a model needs are missing."""
        if SINGLE not in self.files and INDEX not in self.files:
            others = [name for name in self.files if name.endswith(WEIGHTS)]
            more = f" and {len(others) - MAX_NAMED_FILES} more" if len(others) > MAX_NAMED_FILES else ""
            found = f"but {', '.join(others[:MAX_NAMED_FILES])}{more}" if others else "and no other weights"
            raise DownloadError(f"{self.name} has no {SINGLE}, {found}: only safetensors are read")
        if CONFIG not in self.files:
            raise DownloadError(f"{self.name} has no {CONFIG}, which is needed: is it a part of another model?")
        if self.files.keys().isdisjoint(TOKENIZERS):
            raise DownloadError(f"{self.name} has no {TOKENIZER}: {WITHOUT_TOKENIZER}")

    def get(self, file: str) -> Path:
        """Return the path of a file in the cache; download it with huggingface_hub if it is not there."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        with explained(self.name):
            return Path(hf_hub_download(self.name.repository, file, revision=self.commit, **sender()))

    def shapes(self, files: Iterable[str]) -> dict[str, list[int]]:
        """Return the shapes of all tensors in some files: only the files' headers are downloaded."""
        from huggingface_hub import HfApi

        with explained(self.name):
            read = HfApi(**sender()).parse_safetensors_file_metadata
            headers = [read(self.name.repository, file, revision=self.commit).tensors for file in files]
        return {name: tensor.shape for header in headers for name, tensor in header.items()}

    def config(self) -> Path:
        """Download config.json, and return its folder. Raises CheckpointError for a model that is not supported."""
        if CONFIG not in self.files:
            raise DownloadError(f"{self.name} has no {CONFIG}: it is not a model in Hugging Face format")
        folder = self.get(CONFIG).parent
        if QUANTISATION in self.files:
            self.get(QUANTISATION)
        try:
            read_folder(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        self._keep_revision(folder.parents[1])
        return folder

    def _keep_revision(self, model: Path) -> None:
        """Write the commit of the revision to the model's part of the cache, for later starts without a network."""
        if self.name.revision != self.commit:
            kept = model / "refs" / self.name.revision
            kept.parent.mkdir(parents=True, exist_ok=True)
            new = kept.with_name(f"{kept.name}.{self.commit}")
            new.write_text(self.commit, encoding="utf-8")
            new.replace(kept)


def folder_of(model: Path | HubName | None) -> Path:
    """Return the folder of a model: the embedded one for None, and for a name the one in the cache.

    The network is not used. Raises CheckpointError, and DownloadError for a model that is not whole in the cache.
    """
    if not isinstance(model, HubName):
        return model or embedded()
    folder = cached(model)
    if folder is None:
        raise DownloadError(f"{model} is not complete in the cache: `headwater serve {model}` downloads it")
    return folder


def cached(name: HubName) -> Path | None:
    """Return the folder of a model in the cache; None if a file that it needs is missing."""
    folder = cached_config(name)
    return folder if folder is not None and is_whole(folder) else None


def cached_config(name: HubName) -> Path | None:
    """Return the folder of a model in the cache that has at least its config.json; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    with explained(name):
        found = try_to_load_from_cache(name.repository, CONFIG, revision=name.revision)
    return Path(found).parent if isinstance(found, str) else None


def sender() -> dict[str, Any]:
    """Return the name and version that requests to a hub carry."""
    return {"library_name": "headwater", "library_version": version("headwater")}


def http_client() -> Any:
    """Return the package of huggingface_hub's HTTP client, which has its errors: httpx, and httpx2 from 2.0 on."""
    from huggingface_hub.utils import get_session

    return import_module(type(get_session()).__module__.partition(".")[0])


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Raise DownloadError, which says what helps, for errors of huggingface_hub, of its HTTP client and of the disk."""
    client = http_client()
    try:
        yield
    except (client.HTTPError, OSError, ValueError) as error:
        reason = error.__cause__ if isinstance(error, FileNotFoundError) else None  # why the file is not in the cache
        raise DownloadError(_explanation(name, reason or error)) from error


def _explanation(name: HubName, error: BaseException) -> str:
    from huggingface_hub import constants, errors

    hub, cache, model = constants.ENDPOINT, constants.HF_HUB_CACHE, name.repository
    if isinstance(error, errors.HFValidationError):
        return f"{model} is neither a folder nor a name that a hub could have: {error}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{name} is not complete in {cache}, and HF_HUB_OFFLINE is set: unset it or give a folder"
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its licence at {hub}/{model}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {name.revision!r} on {hub}"
    if isinstance(error, errors.HfHubHTTPError):
        return _answered(name, error.response.status_code, error.response.headers.get("X-Error-Message", ""))
    if isinstance(error, ValueError | errors.FileMetadataError):
        return f"{hub} does not answer as a hub does: check HF_ENDPOINT and the proxy"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{name} does not fit: the disk of {cache} is full; make room, or set HF_HOME"
    if isinstance(error, OSError):
        return f"{name} cannot be kept in {cache}: {error}; set HF_HOME to another folder"
    return f"{hub} cannot be reached ({error or type(error).__name__}): give a folder, or set HF_ENDPOINT to a mirror"


def _answered(name: HubName, status: int, why: str) -> str:
    from huggingface_hub import constants

    hub = constants.ENDPOINT
    if status == 401 and why.startswith("Invalid credentials"):
        return f"{hub} refuses the token (401): renew HF_TOKEN, or unset it for a public model"
    if status in (401, 404):  # 401, too, is the answer for a model that does not exist
        return f"no folder {name}, and no such model on {hub}: check the spelling; a private model needs HF_TOKEN"
    return f"{hub} answers {status} for {name}: try again later, or give a folder"
