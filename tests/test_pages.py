"""Generated pages are up to date, and all others are short: words a page, a paragraph, a sentence and a table cell.

An issue raises a budget only in a commit of its own that says why.
"""

import json
import re
from pathlib import Path

import pytest

import pages
from headwater.models.profiles import PROFILES
from headwater.models.published import file_bytes
from pages.numbers import Number

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_WORDS = 34_500  # of all pages that are not generated
MAX_GUIDE_WORDS = 1_500
MAX_README_LINES = 120
MAX_PARAGRAPH_WORDS = 90
MAX_SENTENCE_WORDS = 35
MAX_CELL_WORDS = 40
GUIDES = ("cluster.md", "comparison.md", "lab.md", "policy.md", "speculation.md", "tiers.md")


def generated() -> set[Path]:
    """Return the pages that docs/README.md lists as generated."""
    section = (DOCS / "README.md").read_text(encoding="utf-8").split("\n## Generated pages\n")[1].split("\n## ")[0]
    return {DOCS / link for link in re.findall(r"\]\(([^)#]+)\)", section)}


WRITTEN = [ROOT / "README.md", *sorted(set(DOCS.glob("*.md")) - generated())]


def words(text: str) -> int:
    return len(text.split())


def outside_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its examples, tables and headings."""
    return re.sub(r"^(\||#).*$", "", outside_code(page), flags=re.MULTILINE)


def paragraphs(page: Path) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", prose(page)) if part.strip()]


def sentences(page: Path) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", prose(page).replace("\n", " "))


def cells(page: Path) -> list[str]:
    rows = [line for line in outside_code(page).splitlines() if line.startswith("|")]
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|"))]


@pytest.mark.parametrize("name", pages.PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    assert pages.PAGES[name]() == (ROOT / name).read_text(encoding="utf-8"), "run `make pages`"


@pytest.mark.parametrize(
    ("profile", "quoted"),  # bytes of Q4_K_M files that public code names with their repository
    [
        ("qwen3.5-35b-a3b", 21_166_757_728),  # of Qwen3.6-35B-A3B
        ("qwen3-next-80b-a3b", 48_410_988_384),
        ("falcon-h1-7b", 4_598_344_960),
        ("lfm2.5-8b-a1b", 5_155_564_768),
        ("granite-4.0-h-tiny", 4_230_000_000),
        ("kimi-linear-48b-a3b", 30_100_000_000),
    ],
)
def test_computed_size_of_a_published_file_is_the_quoted_one(profile: str, quoted: int) -> None:
    assert file_bytes(PROFILES[profile]) == pytest.approx(quoted, rel=0.012)


def test_pages_together_stay_within_their_words() -> None:
    assert sum(words(page.read_text(encoding="utf-8")) for page in WRITTEN) <= MAX_WORDS


@pytest.mark.parametrize("name", GUIDES)
def test_guide_stays_within_its_words(name: str) -> None:
    assert words((DOCS / name).read_text(encoding="utf-8")) <= MAX_GUIDE_WORDS


def test_readme_stays_within_its_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_sentences_and_cells_of_page_are_short(page: Path) -> None:
    assert [part[:60] for part in paragraphs(page) if words(part) > MAX_PARAGRAPH_WORDS] == []
    assert [part[:60] for part in sentences(page) if words(part) > MAX_SENTENCE_WORDS] == []
    assert [part[:60] for part in cells(page) if words(part) > MAX_CELL_WORDS] == []


def test_number_in_prose_follows_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"rows": [{"name": "ratio", "values": [1.0, 4.25, 9.0]}]}))
    monkeypatch.setattr("pages.numbers.ROOT", tmp_path)
    number = Number("page.md", "takes {} times as long", "r.json", "ratio", 1)
    assert number.fill("It takes\n7,000.5 times as long.") == "It takes\n4.2 times as long."
    with pytest.raises(ValueError, match="0 times, not once"):
        number.fill("It takes long.")
    with pytest.raises(KeyError, match="no row 'other'"):
        Number("page.md", "{}", "r.json", "other", 0).value()
