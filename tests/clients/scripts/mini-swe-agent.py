# /// script
# dependencies = ["mini-swe-agent==2.4.6"]
# [tool.headwater]
# shows = ["answer", "cached", "error"]
# ///
"""mini-swe-agent with the prompts that it comes with: three steps, of which none runs on this machine."""

import json
import os
from pathlib import Path

os.environ |= {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = os.environ["WORK"]

import litellm
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import BASH_TOOL, LitellmModel

task = json.loads(Path(os.environ["TASK"]).read_text())
config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
server = {"api_base": os.environ["BASE_URL"] + "/v1", "api_key": "none", "num_retries": 0, "_skip_mcp_handler": True}
BASH_TOOL["function"]["parameters"]["additionalProperties"] = False  # else a small model's calls do not end
BASH_TOOL["function"]["parameters"]["properties"]["command"]["maxLength"] = 20


class Pretended(LocalEnvironment):
    """An environment that runs no command: a small model writes nonsense."""

    def execute(self, action, *args, **kwargs):
        return {"output": task["result"], "returncode": 0, "exception_info": ""}


def agent(**settings):
    """Return an agent whose model must call its tool in each step."""
    model = LitellmModel(
        model_name="openai/" + os.environ["MODEL"],
        model_kwargs={**server, "tool_choice": "required", "max_tokens": 100, "temperature": 0, **settings},
        cost_tracking="ignore_errors",
        **templates("model"),
    )
    return DefaultAgent(model, Pretended(), step_limit=3, **templates("agent"))


def templates(part):
    return {key: value for key, value in config[part].items() if key.endswith("_template")}


def refused():
    try:
        agent(temperature=3).run(task["order"])
    except litellm.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


tried = agent()
ended = tried.run(task["order"])
assert tried.n_calls == 3, ended
results = [message for message in tried.messages if message["role"] == "tool"]
assert len(results) == 3, tried.messages
print(json.dumps({"answer": ended["exit_status"], "error": refused()}))
