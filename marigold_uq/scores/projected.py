"""The training recipe for joint Gaussian families along directions: marginals + patches + random boxes."""

import math

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.precision import full_precision
from marigold_uq.scores.crps import crps
from marigold_uq.scores.directions import box_directions, isotropic_directions
from marigold_uq.scores.energy import patch_projected_crps, projected_crps
from marigold_uq.scores.masking import masked_mean, masked_target, needs_generator


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
) -> Tensor:
    """Mean CRPS along the coordinate axes, in patches, over random boxes and along isotropic directions, (B,).

    Each part is proper, so their sum is. The axes fix the marginals, the patches everything within a patch, the boxes
    long-range correlations along a line; on a map boxes are products of intervals and cannot tell the two diagonals of
    a rectangle apart. A few isotropic directions, weak as they are in high dimension, make the score strictly proper. A
    number of 0 (or `patch_size` 0) leaves a part out.
    """
    parts, (value, keep) = dist.components(), masked_target(dist, value, mask)
    if patch_size or num_boxes or num_isotropic:
        generator = needs_generator(generator, "the projected score looks along random lines")
    score = masked_mean(crps(dist, value), keep)
    if patch_size:
        score = score + patch_projected_crps(parts, value, patch_size, num_directions, mask=keep, generator=generator)
    if num_boxes:
        boxes = box_directions(value.shape[1:], num_boxes, like=value, generator=generator)
        score = score + projected_crps(parts, value, boxes, keep).mean(1)
    if num_isotropic:
        sphere = isotropic_directions(math.prod(value.shape[1:]), num_isotropic, like=value, generator=generator)
        score = score + projected_crps(parts, value, sphere.unflatten(1, value.shape[1:]), keep).mean(1)
    return score
