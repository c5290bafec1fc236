"""How long prompts and answers are."""

from __future__ import annotations

from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.workloads import AGENT, CHAT, CODE, DIALOGUES
from papers.quantile import quantile

SHARES = (0.05, 0.5, 0.95)


def run(lab: Lab) -> Found:
    lines, prompts = [], {}
    for workload in (CHAT, CODE, DIALOGUES, AGENT):
        requests = workload.read(lab).requests
        prompts[workload.name] = [request.prompt_tokens for request in requests]
        answers = [request.output_tokens for request in requests]
        label = f"{workload.name} ({workload.dataset})"
        for what, lengths in (("prompt", prompts[workload.name]), ("answer", answers)):
            lines += [Line(f"{label}: {what}, P{100 * q:.0f}", None, quantile(lengths, q), "tokens") for q in SHARES]
    return Found(
        tuple(lines),
        (
            Shape("the agent's prompts reach tens of thousands of tokens", quantile(prompts["agent"], 0.95) > 10_000),
            Shape("and begin with hundreds", min(prompts["agent"]) < 1_000),
            Shape("most of the chat's are below 10K", quantile(prompts["chat"], 0.5) < 10_000),
            Shape("most of the dialogues' are below 2K", quantile(prompts["dialogues"], 0.75) < 2_000),
            Shape(
                "the agent's are spread widest, from P5 to P95",
                _spread(prompts["agent"]) == max(_spread(prompts[name]) for name in ("chat", "dialogues", "agent")),
            ),
        ),
    )


def _spread(lengths: list[int]) -> float:
    return quantile(lengths, 0.95) - quantile(lengths, 0.05)


FIGURE = Figure(
    name="marconi-6",
    title="Lengths of prompts and answers",
    paper="Marconi, figure 6 and section 5.2",
    claim="SWE-bench spans hundreds to tens of thousands of tokens; LMSys is mostly below 10K, ShareGPT below 2K.",
    difference=(
        "Agent and dialogues have the paper's order of lengths, but our agent's first prompt already holds a long"
        " task description, and the dialogues are shorter than ShareGPT's. Claude Code's contexts are far longer "
        "than LMSys's: they stand for long chat beside Mooncake's, not for the paper's lengths."
    ),
    run=run,
)
