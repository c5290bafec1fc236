# /// script
# dependencies = ["lm_eval[api]==0.4.13"]
# [tool.headwater]
# shows = ["scores", "cached"]
# ///
"""lm-evaluation-harness: a task of its own by log-likelihood and by greedy text, as completions and as chats."""

import json
import os
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

task = json.loads(Path(os.environ["TASK"]).read_text())
work, url, model = Path(os.environ["WORK"]), os.environ["BASE_URL"], os.environ["MODEL"]
rows = [{"question": question, "choices": task["answers"], "label": n} for n, question in enumerate(task["questions"])]
(work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(work / "rows.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
choice = common | {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}],
    "filter_list": [{"name": "plain", "filter": [{"function": "take_first"}]}],
}
text = common | {
    "task": "text",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[label]}}",
    "generation_kwargs": {"max_gen_toks": task["max_tokens"], "until": ["\n"]},
    "metric_list": [{"metric": "exact_match", "ignore_punctuation": True}],
    "filter_list": [{"name": "plain", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
}


def score(kind, route, config, **arguments):
    """Run a task and return its main metric."""
    given = {"model": model, "base_url": f"{url}/v1/{route}", "num_concurrent": 1, "max_retries": 1, **arguments}
    ran = lm_eval.simple_evaluate(
        model=kind,
        model_args=given,
        tasks=[config],
        system_instruction=task["system"],
        apply_chat_template=kind == "local-chat-completions",
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    metric = config["metric_list"][0]["metric"]
    return ran["results"][config["task"]][f"{metric},plain"]


remote = {"tokenizer_backend": "remote"}  # the server's
scores = {
    "choice": score("local-completions", "completions", choice, **remote),
    "text": score("local-completions", "completions", text, **remote),
    "chat": score("local-chat-completions", "chat/completions", text),
}
print(json.dumps({"scores": scores}))
