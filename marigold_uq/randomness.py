"""Random numbers as an argument: one generator for a batch, or one per batch element.

With one generator per element, element b draws its numbers from its own stream, so what it gets depends neither on the
size of the batch nor on who else is in it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator] | None


def randn(
    sample_shape: Sequence[int], batch_shape: Sequence[int], *, like: Tensor, generator: Generators = None
) -> Tensor:
    """Standard normal numbers of shape (*sample_shape, *batch_shape); batch_shape[0] is the batch axis."""
    return _draw(torch.randn, sample_shape, batch_shape, like, generator)


def rand(
    sample_shape: Sequence[int], batch_shape: Sequence[int], *, like: Tensor, generator: Generators = None
) -> Tensor:
    """Uniform numbers in [0, 1) of shape (*sample_shape, *batch_shape)."""
    return _draw(torch.rand, sample_shape, batch_shape, like, generator)


def randint(high: int, batch: int, *, generator: Generators = None) -> Tensor:
    """Whole numbers within 0..high - 1, uniform, of shape (batch,)."""
    return _draw(partial(torch.randint, high), (), (batch,), torch.empty((), dtype=torch.int64), generator)


def _draw(
    source: Callable[..., Tensor],
    sample_shape: Sequence[int],
    batch_shape: Sequence[int],
    like: Tensor,
    generator: Generators,
) -> Tensor:
    def draw(shape: Sequence[int], one: torch.Generator | None) -> Tensor:
        device = like.device if one is None else one.device
        return source(tuple(shape), generator=one, device=device, dtype=like.dtype).to(like.device)

    batch, *event = batch_shape
    if isinstance(generator, Sequence) and len(generator) == 1 < batch:  # it serves all of them, as in diffusers
        (generator,) = generator
    if generator is None or isinstance(generator, torch.Generator):
        return draw((*sample_shape, *batch_shape), generator)
    if len(generator) != batch:
        raise ValueError(
            f"got {len(generator)} generators for a batch of {batch}: pass one generator per batch element, "
            "a single generator for the whole batch, or None"
        )
    if not batch:
        return draw((*sample_shape, *batch_shape), None)  # no numbers, from no stream
    return torch.stack([draw((*sample_shape, *event), one) for one in generator], dim=len(sample_shape))


def member_seed(base: int, *indices: int) -> int:
    """The seed of member `indices` (say image i, member m) of a run with seed `base`: a hash, so streams differ."""
    sequence = np.random.SeedSequence(base, spawn_key=indices)  # the list [base, *indices] is padded with zeros
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def member_generators(
    base: int, num_members: int, *, prefix: Sequence[int] = (), device: str = "cpu"
) -> list[torch.Generator]:
    """One generator per member: member m is the same whether 1 or 1000 members are asked for."""
    return [torch.Generator(device).manual_seed(member_seed(base, *prefix, m)) for m in range(num_members)]


def base_seed(generator: torch.Generator | None) -> int:
    """A seed drawn from `generator`, or from torch's default stream as torch's own functions do with None."""
    return int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else "cpu").item())


def forked(generator: torch.Generator, index: int = 0) -> torch.Generator:
    """Stream `index` of those that follow from the state of `generator`, which stays as it is."""
    twin = torch.Generator(generator.device)
    twin.set_state(generator.get_state())
    return torch.Generator(generator.device).manual_seed(member_seed(base_seed(twin), index))
