# /// script
# dependencies = ["aider-chat==0.86.2"]
# [tool.headwater]
# shows = ["answer", "cached"]
# ///
"""aider: two edits of a file, without a terminal. The embedded model writes no edits; its answers reach the user."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

work = Path(os.environ["WORK"])
(work / "boats.py").write_text("def boats():\n    return 12\n")
command = [
    *(Path(sys.executable).with_name("aider"), "boats.py"),
    *("--model", "openai/" + os.environ["MODEL"]),
    *("--openai-api-base", os.environ["BASE_URL"] + "/v1", "--openai-api-key", "none"),
    *("--message", "Return 13 boats."),
    *("--no-git", "--yes-always", "--no-pretty", "--no-check-update", "--no-show-release-notes", "--analytics-disable"),
    *("--no-show-model-warnings", "--no-detect-urls", "--no-suggest-shell-commands", "--no-auto-lint"),
]


def edit():
    """Run aider once and return the answer as it stands in its history."""
    history = work / "history.md"
    history.unlink(missing_ok=True)
    ran = subprocess.run([*command, "--chat-history-file", history], capture_output=True, text=True, cwd=work)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"Tokens: \S+ sent, \S+ received", ran.stdout), ran.stdout + ran.stderr
    return "\n".join(line for line in history.read_text().splitlines() if line and line[0] not in "#>")


answers = [edit() for _ in "12"]
assert answers[0] == answers[1], answers
print(json.dumps({"answer": answers[0]}))
