"""No modules of headwater import each other in a circle: at module level, within functions, or for type checking."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import headwater

SOURCE = Path(headwater.__file__).parents[1]


def modules() -> dict[str, Path]:
    """Return the file of each module; a package is its `__init__`."""
    files = {path.relative_to(SOURCE): path for path in (SOURCE / "headwater").rglob("*.py")}
    return {".".join(at.with_suffix("").parts).removesuffix(".__init__"): path for at, path in files.items()}


def imported(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Return the modules that a module imports."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in known else node.module for name in inner]
    return {name for name in names if name in known}


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    imports = {name: imported(ast.parse(path.read_text("utf-8")), known) for name, path in known.items()}
    assert sum(map(len, imports.values())) > 1000
    assert cycle(imports) == []


def test_import_within_a_function_counts() -> None:
    tree = ast.parse("def build():\n    from headwater.engine.engine import Engine\n")
    assert imported(tree, modules()) == {"headwater.engine.engine"}


@pytest.mark.parametrize("imports", [{"a": {"b"}, "b": {"c"}, "c": {"a"}}, {"a": {"a"}}])
def test_circle_is_found(imports: dict[str, set[str]]) -> None:
    assert cycle(imports)
