# /// script
# dependencies = ["llm==0.36"]
# [tool.headwater]
# shows = ["reply", "stream", "usage", "cached", "tools", "structured", "overlong"]
# ///
"""The command `llm` with a model of `extra-openai-models.yaml`: prompts, a conversation, a tool, a schema."""

import json
import os
import subprocess
import sys
from pathlib import Path

task = json.loads(Path(os.environ["TASK"]).read_text())
home = Path(os.environ["WORK"])
MODEL = os.environ["MODEL"]
CONFIG = f"""\
- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {os.environ["BASE_URL"]}/v1
  api_key_name: headwater
  supports_tools: true
  supports_schema: true
"""
TOOL = f"""
def count_boats(town: str, number: int) -> str:
    "Count the boats."
    return {task["result"]!r}
"""
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", str(task["max_tokens"]))


def run(*words, check=True):
    command = [Path(sys.executable).with_name("llm"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LLM_USER_PATH": str(home)})
    assert ran.returncode == 0 or not check, ran.stderr
    return ran


def prompt(*words, check=True, system=task["system"]):
    return run("prompt", "-m", MODEL, "-s", system, "--key", "none", *words, check=check)


def logged():
    return json.loads(run("logs", "-n", "1", "--json").stdout)[0]


def second_turn():
    prompt(task["questions"][0], *GREEDY)
    run("prompt", "-c", task["questions"][1], "--key", "none", *GREEDY)
    row = logged()
    cached = json.loads(row["token_details"])["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": row["input_tokens"], "cached": cached, "output": row["output_tokens"]}


def streamed():
    """Read the output of a prompt as it is written, in pieces."""
    command = [Path(sys.executable).with_name("llm"), "prompt", "-m", MODEL, "-s", task["system"], "--key", "none"]
    environment = {**os.environ, "LLM_USER_PATH": str(home), "PYTHONUNBUFFERED": "1"}
    command = [*command, task["questions"][0], *GREEDY]
    pieces = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        while piece := os.read(process.stdout.fileno(), 4096):
            pieces.append(piece.decode())
    return {"pieces": pieces, "whole": logged()["response"] + "\n"}


def tool_call():
    (home / "tools.py").write_text(TOOL)
    words = ("prompt", "-m", MODEL, "--key", "none", "--functions", str(home / "tools.py"), task["order"], *GREEDY)
    answer = run(*words).stdout
    rows = json.loads(run("logs", "-n", "2", "--json").stdout)
    calls = [call for row in rows for call in row.get("tool_calls") or ()]
    return {"calls": [{"name": call["name"], "arguments": call["arguments"]} for call in calls], "answer": answer}


def structured():
    words = ("--schema", json.dumps(task["schema"]), task["questions"][1], "-o", "temperature", "0")
    return json.loads(prompt(*words).stdout)


def overlong():
    (home / "long").write_text("the quiet river " * 20000)
    words = ("prompt", "-m", MODEL, "--key", "none", "-f", str(home / "long"), *GREEDY)
    ran = run(*words, check=False)
    return {"type": f"exit code {ran.returncode}", "message": ran.stderr}


(home / "extra-openai-models.yaml").write_text(CONFIG)
seen = {
    "reply": prompt(task["questions"][0], "--no-stream", *GREEDY).stdout,
    "stream": streamed(),
    "usage": second_turn(),
    "tools": tool_call(),
    "structured": structured(),
    "overlong": overlong(),
}
print(json.dumps(seen))
