"""Generate trajectories of a partial differential equation into an HDF5 file. Resumable: run the same command again.

python scripts/generate_pde.py ks --output ks.h5 --trajectories 1000 --seed 0
python scripts/generate_pde.py burgers --output burgers.h5 --trajectories 1000 --point-stride 4
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from marigold_uq.field.data import EQUATIONS, PeriodicEquation, generate


def add_equation(parser: argparse.ArgumentParser, equation: type[PeriodicEquation]) -> None:
    """One option per parameter of the equation."""
    group = parser.add_argument_group(f"parameters of {equation.name}")
    for parameter in fields(equation):
        option = f"--{parameter.name.replace('_', '-')}"
        group.add_argument(option, type=type(parameter.default), default=parameter.default, help="(%(default)s)")


def build_parser() -> argparse.ArgumentParser:
    """A subcommand per equation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="equation", required=True)
    for name, equation in EQUATIONS.items():
        command = commands.add_parser(name, help=equation.name)
        command.add_argument("--output", type=Path, required=True, help="HDF5 file to write; must not exist")
        command.add_argument("--trajectories", type=int, default=10_000, help="(%(default)s)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--batch-size", type=int, default=64, help="solved at once; does not change the results")
        command.add_argument("--point-stride", type=int, default=1, help="store every n-th point (%(default)s)")
        command.add_argument("--device", default="cpu", help="torch device (%(default)s)")
        add_equation(command, equation)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the equation from the options and generate."""
    args = build_parser().parse_args(arguments)
    kind = EQUATIONS[args.equation]
    try:
        equation = kind(**{parameter.name: getattr(args, parameter.name) for parameter in fields(kind)})
        options = {"seed": args.seed, "batch_size": args.batch_size, "point_stride": args.point_stride}
        path = generate(equation, args.output, args.trajectories, device=args.device, **options)
    except (ValueError, FileExistsError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.trajectories} trajectories of {equation.name} in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
