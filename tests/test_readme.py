"""README and docs name tests, files and pages that exist, and the index of the docs has every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "promises.md").read_text(encoding="utf-8"))
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "training/README.md",
            "stress/README.md",
            "benchmarks/README.md",
        )
    ),
    ROOT / "src" / "headwater" / "assets" / "headwater-tiny" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
SUFFIXES = "py|md|json|toml|jinja|png|service"


def paths(text: str) -> set[str]:
    """Return the paths that a page has in backticks outside of its examples: of folders, and of files in folders."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return set(re.findall(rf"`((?:[a-z][\w-]*/)+(?:[\w.*-]+\.(?:{SUFFIXES}))?)(?:::\w+)?`", prose))


def links(text: str) -> set[str]:
    """Return the relative links of a page, without their anchors."""
    return {link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link}


def test_readme_begins_with_plain_words_picture_and_two_commands() -> None:
    title, paragraph, picture, commands, *_ = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    assert title == "# Headwater"
    assert re.findall(r"(?i)checkpoint|\bKV\b|prefix|recurren|\bstates?\b|radix|prefill|segment", paragraph) == []
    assert picture.startswith("[![")
    assert len(commands.splitlines()) == 2 + len(("fence", "fence"))
    assert commands.startswith("```sh")


def test_promises_name_tests() -> None:
    assert len(NAMED) > 10


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_promise_names_existing_test(file: str, test: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {test}(" in text if test else "def test_" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_of_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    bases = (ROOT, ROOT / "src" / "headwater", page.parent)
    missing = {path for path in paths(text) if not any(list(base.glob(path)) for base in bases)}
    missing |= {link for link in links(text) if not (page.parent / link).exists()}
    assert missing == set()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as GitHub names them, and explicit ones."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_in_links_of_page_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    linked = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text)
    targets = [(page.parent / file if file else page, anchor) for file, anchor in linked]
    assert [(file.name, anchor) for file, anchor in targets if anchor not in anchors(file)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_root_paths_and_modules_in_examples_exist(page: Path) -> None:
    """Paths that begin with a folder of the repository, and `python -m benchmarks.x`, wherever a page has them."""
    text = page.read_text(encoding="utf-8")
    folders = "benchmarks|examples|papers|src/headwater|stress|tests|training"
    named = set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./*-]*[\w/])", text))
    modules = set(re.findall(r"python3? -m ((?:benchmarks|papers|stress|training)[\w.]*\w)", text))
    files = {module: module.replace(".", "/") for module in modules}
    missing = {path for path in named if not list(ROOT.glob(path))}
    missing |= {
        module
        for module, path in files.items()
        if not ((ROOT / path).is_dir() or (ROOT / path).with_suffix(".py").exists())
    }
    assert missing == set()


def test_paths_in_examples_are_ignored() -> None:
    assert paths("`cache/index.py` `lab/` `tests/a.py::test_b`\n```\n`no/such.py`\n```\n`4/5` `a/b`") == {
        "cache/index.py",
        "lab/",
        "tests/a.py",
    }


def test_files_of_request_path_exist() -> None:
    drawing = (DOCS / "path.md").read_text(encoding="utf-8").split("```")[1]
    files = re.findall(r"(?:[a-z]\w*/)+(?:\w+\.py)?", drawing)
    assert len(files) > 15
    assert [file for file in files if not (ROOT / "src" / "headwater" / file).exists()] == []


def test_glossary_classes_exist() -> None:
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for module, name in re.findall(r"`(\w+)\.([A-Z]\w+)`", glossary):
        assert f"class {name}" in (ROOT / "src" / "headwater" / f"{module}.py").read_text(encoding="utf-8")


def test_index_lists_every_page() -> None:
    indexes = DOCS / "README.md", DOCS / "decisions" / "README.md"
    indexed = {(file.parent / link).resolve() for file in indexes for link in links(file.read_text(encoding="utf-8"))}
    assert set(DOCS.rglob("*.md")) - indexed == {DOCS / "README.md"}
