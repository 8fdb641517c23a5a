"""Random laws of every registered family. Shapes come from the registry: a new family is tested by registering it."""

import torch
from torch import Tensor

from marigold_uq.distributions import FAMILIES, HeadOptions, NoiseDistribution
from marigold_uq.scores import SCORES

NUM_COMPONENTS, RANK, NUM_DRAWS, BATCH = 3, 2, 5, 2
HEAD = HeadOptions(NUM_COMPONENTS, RANK)
EVENT_SHAPES = {"scalar": (1,), "vector": (3,), "line": (2, 5), "map": (1, 3, 4), "latent": (4, 2, 3)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def is_flat(name: str) -> bool:
    """Whether the family reads a flat vector of numbers (cholesky) and not so many channels per target channel."""
    try:
        FAMILIES[name].num_blocks(HEAD)
    except ValueError:
        return True
    return False


def raw_shape(name: str, event_shape: tuple[int, ...], batch: int = BATCH) -> tuple[int, ...]:
    """Shape of the raw output; families that learn from draws get NUM_DRAWS of them on a leading axis."""
    count, space = event_shape[0], event_shape[1:]
    if is_flat(name):
        count, space = torch.Size(event_shape).numel(), ()
    shape = (batch, FAMILIES[name].num_raw_channels(count, HEAD), *space)
    return (NUM_DRAWS, *shape) if FAMILIES[name].noise_channels else shape


def random_raw(
    name: str, event_shape: tuple[int, ...], *, batch: int = BATCH, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Standard normal raw output: moderate scales, weights and correlations."""
    return torch.randn(raw_shape(name, event_shape, batch), generator=generator(seed), dtype=dtype)


def law_from(name: str, raw: Tensor, event_shape: tuple[int, ...]) -> NoiseDistribution:
    """`from_raw`, and `stack` for the families that learn from draws."""
    family = FAMILIES[name]
    if family.noise_channels:
        return family.stack([family.from_raw(one, HEAD, event_shape=event_shape) for one in raw])
    return family.from_raw(raw, HEAD, event_shape=event_shape)


def random_law(
    name: str, event_shape: tuple[int, ...], *, batch: int = BATCH, seed: int = 0, dtype: torch.dtype = torch.float64
) -> NoiseDistribution:
    return law_from(name, random_raw(name, event_shape, batch=batch, seed=seed, dtype=dtype), event_shape)


def random_value(law: NoiseDistribution, seed: int = 1) -> Tensor:
    """A target near the law."""
    return law.mean.detach() + torch.randn(law.mean.shape, generator=generator(seed), dtype=law.mean.dtype)


def has_density(name: str) -> bool:
    return FAMILIES[name].has_density


def scores_of(name: str) -> list[str]:
    """The scores that exist for a family: a log score needs a density, a projected one a joint density."""
    missing = set() if has_density(name) else {"log", "projected"}
    if not FAMILIES[name].joint:
        missing.add("projected")
    return sorted(set(SCORES) - missing)


FAMILY_NAMES = sorted(FAMILIES)
JOINT_NAMES = [name for name in FAMILY_NAMES if FAMILIES[name].joint]
DENSITY_NAMES = [name for name in FAMILY_NAMES if has_density(name)]
JOINT_DENSITY_NAMES = [name for name in JOINT_NAMES if has_density(name)]
FAMILY_SCORES = [(name, score) for name in FAMILY_NAMES for score in scores_of(name)]
