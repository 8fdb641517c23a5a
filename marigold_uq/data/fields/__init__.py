"""Fields: generators of PDE trajectories, their files (and PDEBench's), and training samples."""

from marigold_uq.data.fields.burgers import Burgers
from marigold_uq.data.fields.equation import FieldDataError, PeriodicEquation, trajectory_generator
from marigold_uq.data.fields.generation import generate
from marigold_uq.data.fields.kuramoto_sivashinsky import KuramotoSivashinsky
from marigold_uq.data.fields.storage import PAPER_POINTS, PAPER_STATES, read_trajectories, write_trajectories
from marigold_uq.data.fields.trajectories import FieldStatistics, Split, Trajectories
from marigold_uq.data.fields.transitions import RandomTransitions, Transitions

EQUATIONS: dict[str, type[PeriodicEquation]] = {"ks": KuramotoSivashinsky, "burgers": Burgers}

__all__ = [
    "EQUATIONS",
    "PAPER_POINTS",
    "PAPER_STATES",
    "Burgers",
    "FieldDataError",
    "FieldStatistics",
    "KuramotoSivashinsky",
    "PeriodicEquation",
    "RandomTransitions",
    "Split",
    "Trajectories",
    "Transitions",
    "generate",
    "read_trajectories",
    "trajectory_generator",
    "write_trajectories",
]
