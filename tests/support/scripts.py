"""Scripts that are in no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from marigold_uq.commands.runner import make_parser

ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    """The module of a file below the repository, for instance "eval/eval_depth.py"."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # worker processes look its functions up by name
    spec.loader.exec_module(module)
    return module


def parse_options(options: type[Any], *arguments: str, defaults: dict[str, Any] | None = None) -> Any:
    """The options that a command would run with."""
    parser = make_parser("test", options, defaults)
    values = parser.instantiate(parser.parse_args(list(arguments)))
    values.pop("config", None)
    return options(**values)
