"""What scripts take from the package is there: studies run too seldom to notice that something moved."""

import ast
import importlib
from pathlib import Path

import pytest
from support.scripts import ROOT

SCRIPTS = [path for folder in ("studies", "benchmarks") for path in sorted((ROOT / "scripts" / folder).rglob("*.py"))]


def missing_names(script: Path) -> list[str]:
    """Modules of the package, and names in them, that a script imports and that do not exist."""
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if (node.module or "").split(".")[0] == "marigold_uq"]
    names = [(node.module, alias.name) for node in own for alias in node.names]
    return [f"{module}.{name}" for module, name in names if not _exists(module, name)]


def _exists(module: str | None, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(str(module)), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_a_study_imports_only_what_the_package_has(script: Path) -> None:
    assert missing_names(script) == []
