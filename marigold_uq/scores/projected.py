"""The training recipe for joint Gaussian families along directions: marginals + patches + random boxes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.precision import full_precision
from marigold_uq.scores.crps import crps
from marigold_uq.scores.directions import box_directions, isotropic_directions, patch_shape
from marigold_uq.scores.energy import patch_projected_crps, projected_crps
from marigold_uq.scores.masking import masked_mean, masked_target, needs_generator


class Directions(NamedTuple):
    """What the projected score looks along; None leaves a part out."""

    patches: Tensor | None  # (N, *patch)
    boxes: Tensor | None  # (N, *event)
    isotropic: Tensor | None  # (N, *event)


def random_directions(
    event_shape: Sequence[int],
    *,
    like: Tensor,
    patch_size: int = 8,
    num_directions: int = 8,
    num_boxes: int = 32,
    num_isotropic: int = 8,
    generator: torch.Generator | None,
) -> Directions:
    """Those that `projected_score` draws by itself, with the same numbers."""
    if patch_size or num_boxes or num_isotropic:
        generator = needs_generator(generator, "the projected score looks along random lines")
    patch = patch_shape(event_shape, patch_size)
    return Directions(
        isotropic_directions(patch, num_directions, like=like, generator=generator) if patch_size else None,
        box_directions(event_shape, num_boxes, like=like, generator=generator) if num_boxes else None,
        isotropic_directions(event_shape, num_isotropic, like=like, generator=generator) if num_isotropic else None,
    )


@full_precision
def projected_score(
    dist: NoiseDistribution,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    patch_size: int = 8,
    num_directions: int = 8,
    num_boxes: int = 32,
    num_isotropic: int = 8,
    generator: torch.Generator | None = None,
    directions: Directions | None = None,
) -> Tensor:
    """Mean CRPS along the coordinate axes, in patches, over random boxes and along isotropic directions, (B,).

    Each part is proper, so their sum is. The axes fix the marginals, the patches everything within a patch, the boxes
    long-range correlations along a line; on a map boxes are products of intervals and cannot tell the two diagonals of
    a rectangle apart. A few isotropic directions, weak as they are in high dimension, make the score strictly proper. A
    number of 0 (or `patch_size` 0) leaves a part out. A compiled graph can hold no generator: draw `random_directions`
    outside and pass them.
    """
    parts, (value, keep) = dist.components(), masked_target(dist, value, mask)
    if directions is None:
        directions = random_directions(
            value.shape[1:],
            like=value,
            patch_size=patch_size,
            num_directions=num_directions,
            num_boxes=num_boxes,
            num_isotropic=num_isotropic,
            generator=generator,
        )
    score = masked_mean(crps(dist, value), keep)
    if directions.patches is not None:
        size = directions.patches.shape[-1]
        score = score + patch_projected_crps(parts, value, size, directions.patches, keep)
    for along in (directions.boxes, directions.isotropic):
        if along is not None:
            score = score + projected_crps(parts, value, along, keep).mean(1)
    return score
