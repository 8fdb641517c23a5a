"""Fields: generators of PDE trajectories, their files (and PDEBench's), weather records, and training samples."""

from marigold_uq.field.data.burgers import Burgers
from marigold_uq.field.data.equation import PeriodicEquation, trajectory_generator
from marigold_uq.field.data.generation import generate
from marigold_uq.field.data.kuramoto_sivashinsky import KuramotoSivashinsky
from marigold_uq.field.data.navier_stokes import NavierStokes, PlaneTrajectories, as_plane
from marigold_uq.field.data.sequences import FieldSequences
from marigold_uq.field.data.statistics import statistics_of
from marigold_uq.field.data.storage import PAPER_POINTS, PAPER_STATES, read_trajectories, write_trajectories
from marigold_uq.field.data.trajectories import Split, Trajectories
from marigold_uq.field.data.transitions import RandomTransitions, Transitions, WindowedTransitions
from marigold_uq.field.data.weather import WEATHERBENCH2, WeatherSequences, latitude_weights, open_weather
from marigold_uq.models.field_grid import FieldDataError

EQUATIONS: dict[str, type[PeriodicEquation]] = {
    "ks": KuramotoSivashinsky,
    "burgers": Burgers,
    "navier_stokes": NavierStokes,
}

__all__ = [
    "EQUATIONS",
    "PAPER_POINTS",
    "PAPER_STATES",
    "WEATHERBENCH2",
    "Burgers",
    "FieldDataError",
    "FieldSequences",
    "KuramotoSivashinsky",
    "NavierStokes",
    "PeriodicEquation",
    "PlaneTrajectories",
    "RandomTransitions",
    "Split",
    "Trajectories",
    "Transitions",
    "WeatherSequences",
    "WindowedTransitions",
    "as_plane",
    "generate",
    "latitude_weights",
    "open_weather",
    "read_trajectories",
    "statistics_of",
    "trajectory_generator",
    "write_trajectories",
]
