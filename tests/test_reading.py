"""Counts of wording and size that may only fall: hard names and sentences, lines by room, long files and functions.

`tests/reading.toml` has the budgets. After a change that lowers counts, `python -m tests.test_reading` writes the lower
ones; it also merges a file with conflict marks, and never raises a budget. A budget is raised by hand, in a commit of
its own that says why. `python -m tests.test_reading PATH ...` lists the findings in files and folders.
"""

import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_name("reading.toml")
MAX_SHOWN = 20
MAX_FUNCTION_LINES = 50

TEST_NAMES = {
    "begins with a pronoun": r"^test_(what|how|where|who|whoever|whatever|nobody|it|its|they|those|such|of)_",
    "told, said, says (reported, returned)": r"_(told|said|says)(_|$)",
    "is_no (is_not_a)": r"_(is|are|was|were)_no_(?!longer|more)",
    "alone, beside, anew, goes_on, taken": r"_(alone|beside|anew|goes_on|go_on|taken|as_far_as|once_more)(_|$)",
    "what, goes, who, nobody inside": r"_(what|goes|who|whoever|whatever|nobody|so_many|so_much)(_|$)",
    "more than 12 words": r"^test(_[^_]+){13,}$",
}
WORDS = {
    "told, said (reported, returned)": r"\b(is|are|was|be|been) (told|said)\b",
    "anew, once more (again)": r"\b(anew|once more)\b",
    "goes on (continues)": r"\b(goes|go|went) on\b",
    "goes (is evicted)": r"\b(may|might|can) go\b|\bgoes (first|next|last)\b|\bwhat goes\b|\bgo first\b",
    "is no (is not a)": r"(?<!here )\b(is|are|was|were) no (?!longer|more|less|fewer|reason|need|point|limit|room)\w",
    "begins with Of": r"(?:^|[.;:] )Of (?!the figures)\w",
    "alone (only)": r"\balone\b",
    "so many, so much (at most N)": r"\bso (many|much)\b",
    "what is, what was (a noun)": r"\b[Ww]hat (is|was|are|were|has|had) ",
    "in place of (instead of)": r"\bin (the )?place of\b",
    "as far as (if), beside (next to)": r"\b(as far as|beside)\b",
    "nobody, whoever (a noun)": r"\b([Nn]obody|[Ww]hoever)\b",
}
CONSTANTS = {
    "least, most (MIN, MAX)": r"(^|_)(LEAST|MOST)(_|$)",
    "no subject or unit": r"(^|_)(AT_ONCE|AGAIN|ALONE|KEPT|TOLD|TOGETHER|OF_A|FEW)(_|$)|^OF_"
    r"|^(LATE|ROOM|MANY|SOON|RARELY|ALIKE|EACH|NEAR|FAR|CHEAP|LONG|SHORT|LARGE|SMALL|LIKELY|APART|UNIT)$",
}
# comments and strings, so that code is what remains; a string that begins its line in three quotes is a docstring
LEXER = re.compile(
    r"(?P<comment>#[^\n]*)|(?P<docstring>^[ \t]*[rR]?\"\"\".*?\"\"\")"
    r"|[rbfuRBFU]{0,2}(?P<string>\"\"\".*?\"\"\"|'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')",
    re.S | re.M,
)
# an attribute `_name` of something other than self and cls; the underscored names of the standard library are public
PRIVATE = re.compile(r"(?<=[\w)\]])(?<!\bself)(?<!\bcls)\._(?!_|replace\b|asdict\b|fields\b|exit\b|getframe\b)\w+")
FUNCTION = re.compile(r"^( *)(?:async )?def (\w+).*(?:\n(?:\1[ )\]].*| *$))*", re.M)
GENERATED = re.compile(r"[Gg]enerated\s(by|from)|generates this page|Made by `")


class Finding(NamedTuple):
    kind: str
    path: str
    line: int
    text: str


class Source(NamedTuple):
    """A Python file: its text, its code without prose, and pieces of prose with kind and line."""

    path: str
    text: str
    code: str
    prose: list[tuple[str, int, str]]


def read(path: Path) -> Source:
    """Return the parts of a Python file."""
    text, prose, line, end = path.read_text(encoding="utf-8"), [], 1, 0
    for match in LEXER.finditer(text):
        line += text.count("\n", end, match.start())
        end = match.start()
        kind = match.lastgroup or ""
        if kind != "string" or " " in match[kind]:
            prose.append((kind + "s", line, match[kind].lstrip(" \t#").strip("'\"")))
    code = LEXER.sub(lambda match: '""' * (match.lastgroup == "string") + "\n" * match[0].count("\n"), text)
    return Source(str(path.relative_to(ROOT)), text, code, prose)


@cache
def sources() -> list[Source]:
    """Return all Python files of the package and of the tests."""
    return [read(path) for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def pages() -> dict[str, str]:
    """Return the pages and decisions that people write, without those that a program generates."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}
    return {path: text for path, text in texts.items() if not GENERATED.search(text[:1000])}


def functions(source: Source) -> Iterator[tuple[str, int, int]]:
    """Yield name, line and length of each function that is in no other."""
    for match in FUNCTION.finditer(source.code):
        yield match[2], source.code.count("\n", 0, match.start()) + 1, match[0].rstrip().count("\n") + 1


def matches(kind: str, patterns: dict[str, str], pieces: Iterable[tuple[str, int, str]]) -> Iterator[Finding]:
    """Yield a finding for each piece of text that a pattern matches, once a pattern."""
    for name, pattern in patterns.items():
        expression = re.compile(pattern, re.M)
        yield from (Finding(f"{kind}: {name}", *piece) for piece in pieces if expression.search(piece[2]))


@cache
def findings() -> list[Finding]:
    """Return all findings in names, prose and code."""
    found: list[Finding] = []
    prose: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    names, constants = [], []
    for source in sources():
        tested = source.path.startswith("tests/")
        for name, line, length in functions(source):
            if tested and name.startswith("test_"):
                names.append((source.path, line, name))
            elif not tested and length > MAX_FUNCTION_LINES:
                found.append(Finding("code: functions above 50 lines", source.path, line, f"{name}: {length} lines"))
        for line, text in enumerate(source.code.splitlines(), 1):
            if tested and not text.startswith(("from ", "import ")):
                kind = "code: private attributes read in tests"
                found += [Finding(kind, source.path, line, text) for _ in PRIVATE.findall(text)]
            elif match := re.match(r"(?:    )?([A-Z][A-Z0-9_]+)(?:: [^=]+)? = ", text):
                constants.append((source.path, line, match[1]))
        for kind, line, text in source.prose:
            prose[kind if not tested else f"tests' {kind}"].append((source.path, line, text))
    for path, text in pages().items():
        prose["pages"] += [(path, line, piece) for line, piece in enumerate(text.splitlines(), 1)]
    del prose["tests' strings"]  # mostly prompts and bodies
    found += matches("test names", TEST_NAMES, names)
    found += matches("constants", CONSTANTS, constants)
    return found + [finding for kind, pieces in prose.items() for finding in matches(kind, WORDS, pieces)]


def room(path: str) -> str:
    """Return the folder to which a file's lines are counted: two levels below src, one below tests."""
    parts = Path(path).parts[:-1]
    return "/".join(parts[1:4] if parts[0] == "src" else parts[:2])


@cache
def counts() -> dict[str, dict[str, float]]:
    """Return all counts by section and name, as `tests/reading.toml` has the budgets."""
    lines = {source.path: source.text.count("\n") for source in sources()}
    inside = {path: count for path, count in lines.items() if path.startswith("src/")}
    words = {path: len(text.split()) for path, text in pages().items()}
    decisions = {path: count for path, count in words.items() if "/decisions/" in path}
    rooms: Counter[str] = Counter()
    for path, count in lines.items():
        rooms[room(path)] += count
    names = [name for source in sources() for name in re.findall(r"def (test_\w+)", source.code)]
    return {
        "findings": dict(sorted(Counter(finding.kind for finding in findings()).items())),
        "sizes": {
            "words of a test's name, on average": round(sum(name.count("_") for name in names) / len(names), 2),
            "longest file of src": max(inside.values()),
            "test files above 400 lines": sum(path not in inside and count > 400 for path, count in lines.items()),
            "files of src": len(inside),
            "lines of src": sum(inside.values()),
            "lines of src outside lab": sum(count for path, count in inside.items() if "/lab/" not in path),
            "lines of tests": sum(lines.values()) - sum(inside.values()),
            "words of pages": sum(words.values()) - sum(decisions.values()),
            "words of decisions": sum(decisions.values()),
            "decisions": len(decisions),
        },
        "rooms": dict(sorted(rooms.items())),
        "pages": {path: count for path, count in words.items() if path not in decisions},
    }


def merged(text: str) -> dict[str, dict[str, float]]:
    """Return the budgets of a file, the lower of two where conflict marks leave a name twice."""
    budgets: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if match := re.match(r"\[(\w+)\]", line):
            section = budgets.setdefault(match[1], {})
        elif match := re.match(r'"(.+)" = ([\d.]+)$', line):
            section[match[1]] = min(float(match[2]), section.get(match[1], float("inf")))
    return budgets


def written(old: dict[str, dict[str, float]], new: dict[str, dict[str, float]]) -> str:
    """Return the file for new counts: the lower of budget and count, or the count if it has no budget."""
    parts = ["# Budgets of tests/test_reading.py; `python -m tests.test_reading` lowers them, and never raises one."]
    # slack: by how much of a budget, or of 100 if that is more, its count may exceed it; at 1 nothing is compared
    for section, values in {"slack": old.get("slack", dict.fromkeys(new, 0)), **new}.items():
        parts += ["", f"[{section}]"]
        for name, value in values.items():
            if value or section == "slack":
                parts.append(f'"{name}" = {min(old.get(section, {}).get(name, value), value):.10g}')
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("section", ["findings", "sizes", "rooms", "pages"])
def test_counts_of_wording_and_size_stay_within_their_budgets(section: str) -> None:
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    slack, over = budgets["slack"][section], []
    for name, count in counts()[section].items() if slack < 1 else ():
        budget = budgets[section].get(name, 0)
        if count > budget + slack * max(budget, 100):
            shown = [f"{at.path}:{at.line} {at.text}" for at in findings() if at.kind == name]
            over += [f"{name}: {count}, budget {budget}", *shown[:MAX_SHOWN]]
        elif count < budget:
            print(f"{name}: {count}, budget {budget}: `python -m tests.test_reading` lowers it")
    assert not over, "\n".join([*over, "`python -m tests.test_reading PATH` lists the findings in a file or folder"])


def test_budgets_with_conflict_marks_merge_to_the_lower_ones() -> None:
    text = '[sizes]\n<<<<<<< ours\n"a" = 5\n=======\n"a" = 4\n>>>>>>> theirs\n"b" = 71248\n'
    assert merged(text) == {"sizes": {"a": 4, "b": 71248}}
    lower = written(merged(text), {"sizes": {"a": 6, "b": 71000, "c": 8.67}})
    assert tomllib.loads(lower)["sizes"] == {"a": 4, "b": 71000, "c": 8.67}


def test_findings_see_hard_names_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_file.py"
    file.write_text('def test_what_is_told() -> None:\n    """Go on alone."""\n    assert a.b._c == "x._y"  # anew\n')
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source = read(file)
    assert source.prose == [("docstrings", 2, "Go on alone."), ("comments", 3, "anew")]
    assert list(functions(source)) == [("test_what_is_told", 1, 3)]
    assert PRIVATE.findall(source.code) == ["._c"]
    assert len(list(matches("test names", TEST_NAMES, [("", 1, "test_what_is_told")]))) == 3


def main(paths: list[str]) -> None:
    """List the findings in files and folders; without any, write lower budgets."""
    for finding in findings():
        if any(finding.path.startswith(path) for path in paths):
            print(f"{finding.path}:{finding.line}: {finding.kind}: {' '.join(finding.text.split())[:150]}")
    if not paths:
        BUDGETS.write_text(written(merged(BUDGETS.read_text(encoding="utf-8")), counts()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
