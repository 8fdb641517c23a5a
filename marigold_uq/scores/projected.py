"""The training recipe for joint Gaussian laws along directions: marginals + patches + random boxes."""

import torch
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.distributions.base import check_value
from marigold_uq.distributions.linear_algebra import expand_mask, full_precision
from marigold_uq.scores.crps import crps
from marigold_uq.scores.directions import box_directions, isotropic_directions
from marigold_uq.scores.energy import patch_projected_crps, projected_crps


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
    value = check_value(dist, value)
    keep = torch.ones_like(value, dtype=torch.bool) if mask is None else expand_mask(mask, value)
    safe = torch.where(keep, value, dist.mean.detach())
    count = keep.flatten(1).sum(1).clamp(min=1)
    score = (crps(dist, safe) * keep).flatten(1).sum(1) / count
    if patch_size:
        score = score + patch_projected_crps(dist, safe, patch_size, num_directions, mask=keep, generator=generator)
    if num_boxes:
        boxes = box_directions(value.shape[1:], num_boxes, like=value, generator=generator)
        score = score + projected_crps(dist, safe, boxes, keep).mean(1)
    if num_isotropic:
        sphere = isotropic_directions(value[0].numel(), num_isotropic, like=value, generator=generator)
        score = score + projected_crps(dist, safe, sphere.reshape(-1, *value.shape[1:]), keep).mean(1)
    return score
