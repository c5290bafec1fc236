# /// script
# dependencies = ["aiperf==0.13.0"]
# [tool.headwater]
# shows = ["load"]
# ///
"""AIPerf: streamed chats of drawn text, two at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

work = Path(os.environ["WORK"])
command = [
    *(Path(sys.executable).with_name("aiperf"), "profile", "--ui", "none"),
    *("--model", os.environ["MODEL"], "--url", os.environ["BASE_URL"], "--tokenizer", os.environ["TOKENIZER"]),
    *("--endpoint-type", "chat", "--streaming", "--artifact-dir", work / "report"),
    *("--isl", "128", "--osl", "8", "--request-count", "6", "--concurrency", "2"),
    *("--extra-inputs", "ignore_eos:true"),
]
offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}  # with these, a folder is taken for a repository's name
environment = {key: value for key, value in os.environ.items() if key not in offline}
ran = subprocess.run(command, capture_output=True, text=True, env=environment)
assert ran.returncode == 0, ran.stdout + ran.stderr
records = [json.loads(line) for line in (work / "report" / "profile_export.jsonl").read_text().splitlines()]
failed = [record for record in records if "error" in record]
output = sum(record["metrics"]["usage_completion_tokens"]["value"] for record in records if record not in failed)
print(json.dumps({"load": {"completed": len(records) - len(failed), "failed": len(failed), "output": output}}))
