# /// script
# dependencies = ["guidellm==0.8.1", "torch==2.13.0"]
# [tool.headwater]
# shows = ["load"]
# ///
"""GuideLLM: chats of drawn text, two at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

report = Path(os.environ["WORK"]) / "report.json"
command = [
    *(Path(sys.executable).with_name("guidellm"), "run", "--disable-console"),
    *("--backend", f"kind=openai_http,target={os.environ['BASE_URL']},model={os.environ['MODEL']}"),
    *("--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}"),
    *("--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=8"),
    *("--profile", "kind=concurrent,streams=2"),
    *("--constraint", "kind=max_requests,count=6"),
    *("--output", f"kind=json,path={report}"),
]
ran = subprocess.run(command, capture_output=True, text=True)
assert ran.returncode == 0, ran.stdout + ran.stderr
requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
load = {
    "completed": len(requests["successful"]),
    "failed": len(requests["errored"]) + len(requests["incomplete"]),
    "output": sum(request["output_metrics"]["text_tokens"] for request in requests["successful"]),
}
print(json.dumps({"load": load}))
