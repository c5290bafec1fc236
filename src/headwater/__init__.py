"""Prefix and segment caching for hybrid LLM serving. Importing it on Windows ends the process with one sentence."""

import os
import sys

if sys.platform == "win32":
    print("headwater: Windows is not supported; use Linux or macOS, or Linux in WSL 2", file=sys.stderr)
    raise SystemExit(2)

if "torch" not in sys.modules:  # GNU's OpenMP reads it when torch is imported; see `mixers/numerics.py`
    os.environ.setdefault("GOMP_SPINCOUNT", "40000")
