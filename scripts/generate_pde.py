"""Generate trajectories of a partial differential equation into an HDF5 file. Resumable: run the same command again.

python scripts/generate_pde.py ks --output ks.h5 --trajectories 1000 --seed 0
python scripts/generate_pde.py burgers --output burgers.h5 --trajectories 1000 --point_stride 4
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.data import EQUATIONS, PeriodicEquation, generate

COMMON: list[tuple[str, type, Any]] = [
    ("output", Path, MISSING),  # HDF5 file to write; must not exist
    ("trajectories", int, 10_000),
    ("seed", int, 0),
    ("batch_size", int, 64),  # solved at once; does not change the results
    ("point_stride", int, 1),  # store every n-th point
    ("device", str, "cpu"),
]


def options_of(equation: type[PeriodicEquation]) -> type[Any]:
    """The common options, and one per parameter of the equation."""
    own = [(one.name, type(one.default), one.default) for one in fields(equation)]
    options = make_dataclass(
        "Options", [(name, kind, field(default=default)) for name, kind, default in [*COMMON, *own]], frozen=True
    )
    options.__doc__ = f"Generate trajectories of {equation.name} into the HDF5 file --output, which must not exist."
    return options


def run(kind: type[PeriodicEquation], options: Any, invocation: Invocation) -> int:
    """Build the equation from the options and generate."""
    equation = kind(**{one.name: getattr(options, one.name) for one in fields(kind)})
    path = generate(
        equation,
        options.output,
        options.trajectories,
        seed=options.seed,
        batch_size=options.batch_size,
        point_stride=options.point_stride,
        device=options.device,
    )
    print(f"{options.trajectories} trajectories of {equation.name} in {path}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The first word names the equation, the rest are its options."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in EQUATIONS:
        print(f"scripts/generate_pde.py: name an equation first: {', '.join(EQUATIONS)}", file=sys.stderr)
        return 2
    kind = EQUATIONS[words[0]]
    return run_command(f"scripts/generate_pde.py {words[0]}", options_of(kind), partial(run, kind), words[1:])


if __name__ == "__main__":
    sys.exit(main())
