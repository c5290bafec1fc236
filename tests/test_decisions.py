"""Decision pages are few, short and have a status; the index of docs/decisions lists every number ever used.

`python -m tests.test_decisions` writes the index again, and leads links to a merged number to its page.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "README.md"
MAX_PAGES = 45
MAX_WORDS = 300
NEVER_USED = (6, 61)
LONG_TEXTS = "d74987f5"  # the last commit with the longer pages, before numbers were merged
SUBJECTS = {
    "policies": "Policies: eviction, placement, and how they are compared",
    "requests": "Requests: answers, memory, fairness, constraints, privacy",
    "computing": "Computing and exactness",
    "speculation": "Speculative decoding",
    "segments": "Segments",
    "tiers": "Tiers",
    "cluster": "Clusters",
    "product": "Product",
}
STATUS = re.compile(r"Status: (accepted|replaced by \d{3}|rejected experiment)(?: \([\w ]+\))?\. Subject: (\w+)\.")
LINK = re.compile(r"decisions/(\d{3})-[\w-]+\.md(?:#[\w-]+)?")
HELP = "run `python -m tests.test_decisions` to write the index again"


@dataclass(frozen=True)
class Decision:
    """A decision page: its number, title, status and subject, and the earlier numbers that it includes."""

    file: Path
    number: int
    title: str
    status: str
    subject: str
    included: dict[int, str]

    @classmethod
    def read(cls, file: Path) -> Decision:
        """Read a page. Raises ValueError if its first lines are no title and status."""
        heading, _, status, *rest = file.read_text(encoding="utf-8").splitlines()
        matched = STATUS.fullmatch(status)
        if not heading.startswith(f"# {file.name[:3]} ") or not matched:
            raise ValueError(f"{file.name} begins with {heading!r} and {status!r}, not with its number and a status")
        listed = rest[0].removeprefix("Includes: ").rstrip(".") if rest[0].startswith("Includes: ") else ""
        included = {int(item[:3]): item[4:] for item in listed.split("; ") if item}
        return cls(file, int(file.name[:3]), heading[6:], matched[1], matched[2], included)


@cache
def decisions() -> list[Decision]:
    return [Decision.read(file) for file in sorted(FOLDER.glob("[0-9]*.md"))]


def successors() -> dict[int, Decision]:
    """Return the page that holds each number: its own, or the one that includes it."""
    return {number: page for page in decisions() for number in (page.number, *page.included)}


def mentions(text: str) -> Iterator[int]:
    """Yield the numbers that a text refers to: "decision 012", "decisions 012 and 013", "decisions/012-name.md"."""
    for listed in re.findall(r"\b[Dd]ecisions? (\d{3}(?:(?:, | and | or )\d{3})*)\b", text):
        yield from map(int, re.findall(r"\d{3}", listed))
    yield from map(int, re.findall(r"decisions/(\d{3})-", text))


def tracked() -> list[Path]:
    """Return the repository's files of text; without git, all of the folders that refer to decisions."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    folders = ("src", "tests", "docs", "papers", "benchmarks", "training", "stress")
    found = [ROOT / name for name in listed] or [f for folder in folders for f in (ROOT / folder).rglob("*")]
    return [file for file in found if file.suffix in {".py", ".md", ".toml"} and file.exists()]


def index() -> str:
    """Return the index: pages by subject, and where each merged number went."""
    lines = ["# Decisions", ""]
    lines += [
        "A decision that could have gone the other way has a page: problem, decision, alternatives, measurements and",
        f"limits, at most {MAX_PAGES} pages of at most {MAX_WORDS} words. Numbers are never reused: the last table has",
        "the page of each merged number. `python -m tests.test_decisions` writes this index.",
        "",
        f"The pages before they were merged, with all tables: `git show {LONG_TEXTS}:docs/decisions/`.",
        "",
    ]
    for subject, title in SUBJECTS.items():
        lines += [f"## {title}", "", "| page | decision | status |", "| --- | --- | --- |"]
        chosen = [page for page in decisions() if page.subject == subject]
        lines += [f"| {link(page)} | {page.title} | {page.status} |" for page in chosen]
        lines.append("")
    lines += ["## Merged numbers", "", "| number | subject | now in |", "| --- | --- | --- |"]
    merged = sorted((number, text, page) for page in decisions() for number, text in page.included.items())
    lines += [f"| {number:03} | {text} | {link(page)} |" for number, text, page in merged]
    unused = " and ".join(f"{number:03}" for number in NEVER_USED)
    return "\n".join([*lines, "", f"{unused} were never used.", ""])


def link(page: Decision) -> str:
    return f"[{page.number:03}]({page.file.name})"


def relinked(text: str) -> str:
    """Return a text whose links to merged numbers, and the words "decision NNN" before them, lead to the page."""
    pages = successors()

    def named(found: re.Match[str]) -> str:
        page = pages.get(int(found[1]))
        return f"decision {page.number:03}]" if page else found[0]

    def linked(found: re.Match[str]) -> str:
        page = pages.get(int(found[1]))
        return f"decisions/{page.file.name}" if page and page.file.name not in found[0] else found[0]

    return LINK.sub(linked, re.sub(r"\bdecision (\d{3})\]", named, text))


def test_decisions_are_at_most_45() -> None:
    assert 0 < len(decisions()) <= MAX_PAGES


@pytest.mark.parametrize("page", sorted(FOLDER.glob("[0-9]*.md")), ids=lambda page: page.stem)
def test_decision_has_status_and_at_most_300_words(page: Path) -> None:
    read = Decision.read(page)
    assert read.subject in SUBJECTS
    assert len(page.read_text(encoding="utf-8").split()) <= MAX_WORDS
    assert "**Problem.**" in page.read_text(encoding="utf-8")


def test_every_decision_number_leads_to_one_page() -> None:
    held = [number for page in decisions() for number in (page.number, *page.included)]
    assert sorted([*held, *NEVER_USED]) == list(range(1, max(held) + 1))


def test_decision_index_is_complete() -> None:
    assert INDEX.read_text(encoding="utf-8") == index(), HELP


def test_mentioned_decision_numbers_exist() -> None:
    known = set(successors())
    unknown = {
        (str(file.relative_to(ROOT)), number)
        for file in tracked()
        for number in mentions(file.read_text(encoding="utf-8"))
        if number not in known
    }
    assert unknown == set()


def test_mentions_are_found_in_prose_and_links() -> None:
    assert list(mentions("decision 002, decisions 013 and 055; [046](decisions/046-a.md), 1,012")) == [2, 13, 55, 46]


def test_links_to_merged_numbers_lead_to_their_page() -> None:
    old = "[decision 048](decisions/048-no-compressed-memory-tier.md#a), [why](../decisions/045-no-write-back.md#b)"
    assert relinked(old) == (
        "[decision 045](decisions/045-no-write-back.md), [why](../decisions/045-no-write-back.md#b)"
    )


def test_decision_without_status_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "099-name.md"
    page.write_text("# 099 Name\n\n**Decision.** Yes.\n")
    with pytest.raises(ValueError, match=r"099-name\.md begins with"):
        Decision.read(page)


def main() -> None:
    """Write the index, and mend the links of all pages."""
    INDEX.write_text(index(), encoding="utf-8")
    for file in tracked():
        text = file.read_text(encoding="utf-8")
        if file != Path(__file__) and relinked(text) != text:
            file.write_text(relinked(text), encoding="utf-8")


if __name__ == "__main__":
    main()
