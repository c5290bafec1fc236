"""Prefix and segment caching for hybrid LLM serving. Importing it on Windows ends the process with one sentence."""

import sys

if sys.platform == "win32":
    print("headwater: Windows is not supported; use Linux or macOS, or Linux in WSL 2", file=sys.stderr)
    raise SystemExit(2)
