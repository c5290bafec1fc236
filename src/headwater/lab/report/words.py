"""What the page's figures mean."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.section import empty, section

MEANING = (
    (
        "Hit rate",
        "Σ of the positions at which requests resumed ÷ Σ of their prompt tokens: the share that was not computed. "
        "With segments, composed tokens are added, and taken off is what was computed to make them.",
    ),
    (
        "Ideal hit rate",
        "The same with endless memory and a checkpoint at every unit: the bound of every policy, at this order of "
        "requests. It is that of prefixes: segments may go beyond.",
    ),
    (
        "Checkpoint",
        "The states of all recurrent layers after exactly n tokens. Work can resume there, and nowhere between.",
    ),
    (
        "Stranded",
        "KV beyond the deepest checkpoint: it saves no prefill. In the table, of what requests matched; in the memory, "
        "KV with no checkpoint at or below it.",
    ),
    (
        "Placement, eviction, pool",
        "At which positions of a prefill checkpoints are taken; which page or checkpoint is given up first; whether KV "
        "and states share one memory (unified) or have one each (split; elastic ones trade).",
    ),
    (
        "FLOPs saved",
        "Of the prefill that hits made needless, by the model's profile; the share is of all prompts' FLOPs.",
    ),
    ("Checkpoints taken, hit", "All that were saved; of them, those at which a request resumed, once or more."),
    (
        "Evicted",
        "Checkpoints and pages of KV given up for memory. Speculative checkpoints take free pages only, and go first.",
    ),
    (
        "Composed, seam, made",
        "Tokens of stored segments that were not computed again; those at their ends that were; and those computed so "
        "that segments are stored.",
    ),
    ("Private and running", "Pages of running requests alone: their states, and KV that the index does not hold."),
    (
        "TTFT",
        "From a request's arrival to its first token, by the virtual clock of the cost model. Percentiles are "
        "interpolated linearly between neighbours (type 7).",
    ),
    ("Queue", "Requests that wait to be started, averaged over time."),
    ("Tokens not hit", "Prompt tokens beyond the position at which a request resumed, summed by the request's reason."),
    ("Replay", "Processor seconds of the row, without reading and tokenising the trace."),
    ("GB", "10⁹ bytes; k and M on axes of lengths are 2¹⁰ and 2²⁰ tokens."),
)


def words(notes: Sequence[str]) -> Markup:
    """Notes on this run, and the definitions."""
    said = tag("ul", (tag("li", note) for note in notes), class_="notes") if notes else empty("Nothing is to be noted.")
    terms = tag("dl", (tag("div", tag("dt", name), tag("dd", meaning)) for name, meaning in MEANING), class_="terms")
    return section("notes", "Notes", "on this run", said, tag("h3", "What the figures mean"), terms)
