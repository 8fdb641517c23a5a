"""Fields: generators of PDE trajectories, their files (and PDEBench's), weather records, and training samples."""

from marigold_uq.data.fields.burgers import Burgers
from marigold_uq.data.fields.equation import FieldDataError, PeriodicEquation, trajectory_generator
from marigold_uq.data.fields.generation import generate
from marigold_uq.data.fields.kuramoto_sivashinsky import KuramotoSivashinsky
from marigold_uq.data.fields.sequences import FieldSequences, require_grid
from marigold_uq.data.fields.statistics import FieldStatistics, require_statistics, statistics_of
from marigold_uq.data.fields.storage import PAPER_POINTS, PAPER_STATES, read_trajectories, write_trajectories
from marigold_uq.data.fields.trajectories import Split, Trajectories
from marigold_uq.data.fields.transitions import RandomTransitions, Transitions
from marigold_uq.data.fields.weather import WEATHERBENCH2, WeatherSequences, latitude_weights, open_weather

EQUATIONS: dict[str, type[PeriodicEquation]] = {"ks": KuramotoSivashinsky, "burgers": Burgers}

__all__ = [
    "EQUATIONS",
    "PAPER_POINTS",
    "PAPER_STATES",
    "WEATHERBENCH2",
    "Burgers",
    "FieldDataError",
    "FieldSequences",
    "FieldStatistics",
    "KuramotoSivashinsky",
    "PeriodicEquation",
    "RandomTransitions",
    "Split",
    "Trajectories",
    "Transitions",
    "WeatherSequences",
    "generate",
    "latitude_weights",
    "open_weather",
    "read_trajectories",
    "require_grid",
    "require_statistics",
    "statistics_of",
    "trajectory_generator",
    "write_trajectories",
]
