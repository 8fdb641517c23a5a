"""Crops and evaluation masks of the published depth benchmarks, as row and column ranges of a picture."""

from collections.abc import Callable, Mapping

Region = Callable[[int, int], tuple[slice, slice]]  # (H, W) -> rows, columns

KITTI_CROP = (352, 1216)
NYU_SIZE = (480, 640)


def kitti_benchmark_crop(height: int, width: int) -> tuple[slice, slice]:
    """The 352 x 1216 window of the KITTI depth benchmark: bottom rows, centred columns."""
    crop_height, crop_width = KITTI_CROP
    if height < crop_height or width < crop_width:
        raise ValueError(f"the KITTI benchmark crop needs at least 352 x 1216 pixels (H x W), got {height} x {width}")
    top, left = height - crop_height, (width - crop_width) // 2
    return slice(top, height), slice(left, left + crop_width)


def nyu_eigen_mask(height: int, width: int) -> tuple[slice, slice]:
    """Rows 45:471 and columns 41:601 of a 480 x 640 NYUv2 frame (Eigen et al., 2014)."""
    if (height, width) != NYU_SIZE:
        raise ValueError(f"the NYU Eigen mask is defined for 480 x 640 pixels (H x W), got {height} x {width}")
    return slice(45, 471), slice(41, 601)


def kitti_eigen_mask(height: int, width: int) -> tuple[slice, slice]:
    """Eigen et al. (2014): rows .3324324 to .91351351 and columns .0359477 to .96405229 of the size."""
    return _fraction(height, 0.3324324, 0.91351351), _fraction(width, 0.0359477, 0.96405229)


def kitti_garg_mask(height: int, width: int) -> tuple[slice, slice]:
    """Garg et al. (2016): rows .40810811 to .99189189 and columns .03594771 to .96405229 of the size."""
    return _fraction(height, 0.40810811, 0.99189189), _fraction(width, 0.03594771, 0.96405229)


def _fraction(length: int, start: float, stop: float) -> slice:
    return slice(int(start * length), int(stop * length))


CROPS: dict[str, Region] = {"kitti_benchmark": kitti_benchmark_crop}
MASKS: dict[str, Region] = {"nyu_eigen": nyu_eigen_mask, "kitti_eigen": kitti_eigen_mask, "kitti_garg": kitti_garg_mask}


def lookup(regions: Mapping[str, Region], key: str) -> Region:
    """The region called `key`; an unknown name is an error that lists the known ones."""
    if key not in regions:
        raise ValueError(f"unknown region {key!r}; known: {', '.join(sorted(regions))}")
    return regions[key]
