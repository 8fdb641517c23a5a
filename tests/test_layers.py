"""The house has floors: imports between its rooms point downward only, and the three tasks never meet."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    {
        "alignment", "calibration", "component_config", "denoising", "distributions", "likelihood", "metrics",
        "novelty", "precision", "randomness", "sampling", "schedulers", "scores", "uncertainty",
    },
    {"models"},
    {
        "array_files", "commands.runner", "files", "folder_lock", "hub", "loading", "model_card", "picture_files",
        "plotting", "results", "terminal", "training",
    },
    {"pipelines"},
    {"depth", "field", "tabular"},
    {"cli", "commands"},
)  # fmt: skip
"""From the ground up: method, models, plumbing, inference, tasks, commands."""
TASKS = FLOORS[4]
STUBS = {"marigold_uq.tabular.experts"}
"""Paths that saved checkpoints name, kept importable."""


def modules() -> dict[str, Path]:
    """Dotted name -> file of everything that is installed."""
    found = {}
    for folder, prefix in ((ROOT / "marigold_uq", "marigold_uq"), (ROOT / "pipelines", "marigold_uq.pipelines")):
        for path in sorted(folder.rglob("*.py")):
            parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """What a file imports of ours at run time, functions included; imports for type checkers alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("marigold_uq"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("marigold_uq"))


def room(module: str) -> str | None:
    """The room of a module; None for the package itself, which only names what loads lazily."""
    inner = module.removeprefix("marigold_uq").removeprefix(".")
    return "commands.runner" if inner == "commands.runner" else (inner.split(".")[0] or None)


def floor(name: str) -> int:
    """How high a room lies."""
    return next(height for height, names in enumerate(FLOORS) if name in names)


def test_every_room_has_its_floor() -> None:
    known = set().union(*FLOORS)
    assert {name for module in MODULES if (name := room(module))} <= known


@pytest.mark.parametrize("module", sorted(set(MODULES) - STUBS - {"marigold_uq", "marigold_uq.commands"}))
def test_imports_point_downward(module: str) -> None:
    own = room(module)
    assert own is not None
    for imported in imports(MODULES[module]):
        other = room(imported)
        if other is None or other == own:
            continue
        assert floor(other) <= floor(own), f"{module} imports {imported}, which lies above it"
        assert not {own, other} <= TASKS, f"{module} imports {imported}, another task"


def test_rooms_do_not_need_each_other_in_circles() -> None:
    needs: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        own = room(module)
        if own is not None and module not in STUBS:
            others = {other for imported in imports(path) if (other := room(imported)) and other != own}
            needs.setdefault(own, set()).update(others)
    while free := [name for name, others in needs.items() if not others & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs, f"these rooms import each other in a circle: {needs}"
