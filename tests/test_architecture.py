"""docs/architecture.md has one sentence for each folder and exactly the imports that the code has.

`python -m tests.test_architecture` writes the blocks of the page again and lists folders that have no sentence.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headwater"
PAGE = ROOT / "docs" / "architecture.md"
AROUND = ("papers", "tests", "benchmarks", "stress", "training", "examples", "docs", "pages")
COLUMNS = 80
HELP = "run `python -m tests.test_architecture` to write the block again"

Arrows = dict[str, set[str]]


def room_of(file: Path, source: Path = SOURCE) -> str:
    """Return the top-level folder of a source file, or the module's name if it is in none."""
    parts = file.relative_to(source).parts
    return parts[0] if len(parts) > 1 else file.stem


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of `headwater` that a module imports, at module level and inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this repository"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports(source: Path = SOURCE) -> Arrows:
    """Return the rooms that each room of the package imports from, by parsing all of its files."""
    arrows: Arrows = {}
    for file in sorted(source.rglob("*.py")):
        room = room_of(file, source)
        targets = arrows.setdefault(room, set())
        for name in imported(ast.parse(file.read_text(encoding="utf-8"))):
            package, _, rest = name.partition(".")
            if package == "headwater" and rest:
                targets.add(rest.split(".")[0])
        targets.discard(room)
    return {room: targets for room, targets in arrows.items() if targets or room != "__init__"}


def levels(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Return each room's level: 0 imports no other room, n imports one of level n - 1 and none above.

    Raises AssertionError if rooms import each other in a circle.
    """
    found: dict[str, int] = {}

    def level(room: str, above: tuple[str, ...] = ()) -> int:
        assert room not in above, f"imports in a circle: {' -> '.join([*above, room])}"
        if room not in found:
            found[room] = 1 + max((level(below, (*above, room)) for below in arrows.get(room, ())), default=-1)
        return found[room]

    for room in arrows:
        level(room)
    return found


def rows(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the rooms of each level, from the highest level to level 0."""
    level = levels(arrows)
    return [sorted(room for room in level if level[room] == at) for at in range(max(level.values()), -1, -1)]


def drawing(arrows: Mapping[str, set[str]]) -> str:
    """Return the levels as a text drawing: every import goes from a row to one further down."""
    lines = []
    for number, row in enumerate(rows(arrows)):
        if number:
            lines.append("    │")
        boxes = textwrap.wrap("   ".join(f"[{room}]" for room in row), COLUMNS - len("    ▼  "))
        lines += [("    ▼  " if number and not at else "       ") + box for at, box in enumerate(boxes)]
    return "\n".join(line.rstrip() for line in lines)


def listing(arrows: Mapping[str, set[str]]) -> str:
    """Return one line for each room: its name, an arrow, and the rooms that it imports, wrapped at 80 columns."""
    width = max(map(len, arrows))
    lines = []
    for room in (room for row in rows(arrows) for room in row):
        targets = " ".join(sorted(arrows.get(room, ()))) or "(no other)"
        lines += textwrap.wrap(f"{room:<{width}} -> {targets}", COLUMNS, subsequent_indent=" " * (width + 4))
    return "\n".join(lines)


def block(page: str, title: str) -> str:
    """Return the first fenced block below a heading of the page."""
    return page.split(f"\n## {title}\n")[1].split("```text\n")[1].split("\n```")[0]


def listed(text: str) -> Arrows:
    """Return the imports that the page's list states."""
    joined = re.sub(r"\n {2,}", " ", text)
    lines = (line.split(" -> ") for line in joined.splitlines())
    return {room.strip(): set() if "(" in targets else set(targets.split()) for room, targets in lines}


def folders(source: Path = SOURCE) -> set[str]:
    """Return all folders of the package that hold Python files, relative to it."""
    return {str(file.parent.relative_to(source)) for file in source.rglob("*.py")} - {"."}


def modules(source: Path = SOURCE) -> set[str]:
    """Return the modules that are in no folder."""
    return {file.name for file in source.glob("*.py")}


def described(page: str) -> list[str]:
    """Return the names in the first column of the page's tables, `name/` for a folder."""
    return re.findall(r"^\| `([\w./]+)` \| .+ \|$", page, re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_each_folder_and_module_of_the_package_has_its_one_sentence(page: str) -> None:
    names = described(page)
    expected = {f"{folder}/" for folder in folders()} | modules() | {f"{folder}/" for folder in AROUND}
    assert set(names) == expected, f"missing: {expected - set(names)}, too many: {set(names) - expected}"
    assert len(names) == len(expected), "a folder has two rows"


def test_the_listed_imports_are_those_of_the_code(page: str) -> None:
    code, stated = imports(), listed(block(page, "Imports between folders"))
    missing = [f"{room} -> {target}" for room in code for target in sorted(code[room] - stated.get(room, set()))]
    too_many = [f"{room} -> {target}" for room in stated for target in sorted(stated[room] - code.get(room, set()))]
    assert (missing, too_many) == ([], []), f"missing in the page: {missing}; not in the code: {too_many}; {HELP}"


def test_the_drawing_is_that_of_the_code_and_fits_80_columns(page: str) -> None:
    shown = block(page, "Drawing")
    assert shown == drawing(imports()), HELP
    assert max(map(len, shown.splitlines())) <= COLUMNS


def test_folders_import_each_other_without_circles() -> None:
    with pytest.raises(AssertionError, match="circle: a -> b -> a"):
        levels({"a": {"b"}, "b": {"a"}})
    assert levels(imports())


RIDDLE = re.compile(r"(What|Who|Whom|Whose|Of|Where|How|Which|Why|That|Those|Such)\b")


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    """Search all folders for docstrings that are a clause, which only the code around it completes."""
    files = [file for folder in ("src", *AROUND) for file in sorted((ROOT / folder).rglob("*.py"))]
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            text = ast.get_docstring(node) if documented else None
            if text is not None and RIDDLE.match(text):
                found.append(f"{file.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert len(files) > 500
    assert found == []


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    for name, text in {
        "low/one.py": "import os\n",
        "high/two.py": "def f():\n    from headwater.low.one import os\n    import headwater.single\n",
        "single.py": "from headwater import low\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    arrows = imports(tmp_path)
    assert arrows == {"low": set(), "high": {"low", "single"}, "single": {"low"}}
    assert rows(arrows) == [["high"], ["single"], ["low"]]
    assert listed(listing(arrows)) == arrows


def main() -> None:
    """Write both blocks of the page from the code, and print the folders without a sentence."""
    text, arrows = PAGE.read_text(encoding="utf-8"), imports()
    for title, made in (("Drawing", drawing(arrows)), ("Imports between folders", listing(arrows))):
        text = text.replace(f"```text\n{block(text, title)}\n```", f"```text\n{made}\n```")
    PAGE.write_text(text, encoding="utf-8")
    expected = {f"{folder}/" for folder in folders()} | modules() | {f"{folder}/" for folder in AROUND}
    print("no sentence:", sorted(expected - set(described(text))))
    print("no such folder:", sorted(set(described(text)) - expected))


if __name__ == "__main__":
    main()
