"""Extras of the package that commands need, and the commands that install them."""

from __future__ import annotations

from importlib.util import find_spec

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGES = {
    "serve": ("torch", "fastapi", "uvicorn", "llguidance", "safetensors", "prometheus_client", "numba"),
    "cluster": ("ray",),
}
OPTIONAL = ("numba",)  # not on each interpreter


def require(*extras: str) -> None:
    """Raise ModuleNotFoundError for the first package of extras that is not installed, without an import."""
    for extra in extras:
        for package in PACKAGES[extra]:
            if package not in OPTIONAL and find_spec(package) is None:
                raise ModuleNotFoundError(name=package)


def remedy(missing: ModuleNotFoundError) -> str | None:
    """Return the lines that name a missing package and install its extra; None for a package of no extra."""
    package = (missing.name or "").partition(".")[0]
    extra = next((extra for extra, packages in PACKAGES.items() if package in packages), None)
    if extra is None:
        return None
    return "\n".join((f"{package} is not installed, type one of these:", *install_commands(extra), GPU))


def install_commands(extra: str) -> tuple[str, ...]:
    """Return the commands that install an extra with torch's build for CPUs, by pip and by uv."""
    wanted = f'install "headwater[{extra}]"'
    return f"  pip {wanted} \\\n    --extra-index-url {CPU_INDEX}", f"  uv pip {wanted} --torch-backend cpu"


GPU = "For a GPU leave out the last option: torch for CUDA takes 3 GB more."
