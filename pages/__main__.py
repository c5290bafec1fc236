"""Write the generated pages: `python -m pages` from the root of a clone; `--check` lists those that differ instead."""

from __future__ import annotations

import sys

from pages import PAGES, ROOT


def main(arguments: list[str]) -> int:
    """Write all pages, or with `--check` return 1 if one of them differs."""
    stale = []
    for name, make in PAGES.items():
        file, text = ROOT / name, make()
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    print("\n".join(stale) or "all pages are up to date")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
