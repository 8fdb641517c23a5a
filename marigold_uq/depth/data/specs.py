"""The published depth data sets, one declaration each: file format, range, crop, mask, and where to get them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_LISTS = "filename lists: data_split/ of https://github.com/prs-eth/Marigold"
_TARS = "prepared tars: https://share.phys.ethz.ch/~pf/bingkedata/marigold/evaluation_dataset/"


@dataclass(frozen=True)
class DepthSpec:
    """How one data set stores its depth.

    Args:
        name: the name in `DATASETS`.
        title: the name in print.
        role: "train" or "eval", what the data set is used for in the paper.
        depth_format: a name in `DEPTH_FORMATS`.
        depth_scale: metres = stored value / depth_scale.
        min_depth, max_depth: a pixel is valid if min_depth < depth < max_depth (metres, both strict).
        image_pattern: regular expression of an image's path, to find samples without a filename list.
        depth_template: the depth path that belongs to it, as a replacement for `re.Match.expand`.
        mask_template: the same for a file that is nonzero where depth is valid (third column of the list).
        depth_may_be_absent: a list says `None` where a frame has no ground truth; such lines are counted and left out.
        crop, mask: names in `CROPS` and `MASKS`; the mask is laid over the cropped picture.
        resize: final (H, W); depth by nearest-exact.
        num_published: samples of the published evaluation split, if it is one.
        example: one line of the filename list.
        source: where to download.
    """

    name: str
    title: str
    role: str
    depth_format: str
    min_depth: float
    max_depth: float
    image_pattern: str
    depth_template: str
    example: str
    source: str
    depth_scale: float = 1.0
    mask_template: str | None = None
    depth_may_be_absent: bool = False
    crop: str | None = None
    mask: str | None = None
    resize: tuple[int, int] | None = None
    num_published: int | None = None

    @property
    def num_columns(self) -> int:
        """Columns of a list that are read: image, depth and, if there is one, the mask; further ones are ignored."""
        return 2 if self.mask_template is None else 3

    def match(self, path: str) -> re.Match[str] | None:
        """Match an image's path, None if it is another file."""
        return re.fullmatch(self.image_pattern, path)


_HYPERSIM = DepthSpec(
    name="hypersim",
    title="Hypersim (prepared)",
    role="train",
    depth_format="png",
    depth_scale=1000.0,
    min_depth=1e-5,
    max_depth=65.0,
    resize=(480, 640),
    image_pattern=r"(?P<scene>(?:.*/)?ai_\d+_\d+)/rgb_(?P<frame>cam_\d+_fr\d+)\.png",
    depth_template=r"\g<scene>/depth_plane_\g<frame>.png",
    example="ai_001_001/rgb_cam_00_fr0000.png ai_001_001/depth_plane_cam_00_fr0000.png",
    source=(
        "HDF5 frames: https://github.com/apple/ml-hypersim (dataset_download_images.py) and its "
        "metadata_images_split_scene_v1.csv, then scripts/prepare_hypersim.py"
    ),
)
_VKITTI2 = DepthSpec(
    name="vkitti2",
    title="Virtual KITTI 2",
    role="train",
    depth_format="png",
    depth_scale=100.0,
    min_depth=1e-5,
    max_depth=80.0,
    crop="kitti_benchmark",
    image_pattern=r"rgb/(?P<scene>Scene\d+/[^/]+)/frames/rgb/(?P<camera>Camera_\d+)/rgb_(?P<frame>\d+)\.jpg",
    depth_template=r"depth/\g<scene>/frames/depth/\g<camera>/depth_\g<frame>.png",
    example=(
        "rgb/Scene02/clone/frames/rgb/Camera_0/rgb_00000.jpg depth/Scene02/clone/frames/depth/Camera_0/depth_00000.png"
    ),
    source=(
        "vkitti_2.0.3_rgb.tar unpacked into rgb/ and vkitti_2.0.3_depth.tar into depth/: "
        "https://europe.naverlabs.com/research/computer-vision/proxy-virtual-worlds-vkitti-2/"
    ),
)
NYU = DepthSpec(
    name="nyu",
    title="NYUv2 (labelled)",
    role="eval",
    depth_format="png",
    depth_scale=1000.0,
    min_depth=1e-3,
    max_depth=10.0,
    mask="nyu_eigen",
    image_pattern=r"(?P<scene>(?:.*/)?[^/]+)/rgb_(?P<frame>\d+)\.png",
    depth_template=r"\g<scene>/depth_\g<frame>.png",
    num_published=654,
    example="test/kitchen_0004/rgb_0001.png test/kitchen_0004/depth_0001.png test/kitchen_0004/filled_0001.png",
    source=f"{_TARS}nyuv2/; original: https://cs.nyu.edu/~fergus/datasets/nyu_depth_v2.html; {_LISTS}",
)
_KITTI_EIGEN = DepthSpec(
    name="kitti_eigen",
    title="KITTI, Eigen split",
    role="eval",
    depth_format="png",
    depth_scale=256.0,
    min_depth=1e-5,
    max_depth=80.0,
    crop="kitti_benchmark",
    mask="kitti_eigen",
    depth_may_be_absent=True,
    image_pattern=r"\d{4}_\d\d_\d\d/(?P<drive>[^/]+_sync)/(?P<camera>image_0[23])/data/(?P<frame>\d+)\.png",
    depth_template=r"\g<drive>/proj_depth/groundtruth/\g<camera>/\g<frame>.png",
    num_published=652,
    example=(
        "2011_09_26/2011_09_26_drive_0002_sync/image_02/data/0000000069.png "
        "2011_09_26_drive_0002_sync/proj_depth/groundtruth/image_02/0000000069.png 721.5377"
    ),
    source=(
        f"{_TARS}kitti/; original: raw data and data_depth_annotated.zip of "
        f"https://www.cvlibs.net/datasets/kitti/eval_depth.php?benchmark=depth_prediction; {_LISTS}"
    ),
)
ETH3D = DepthSpec(
    name="eth3d",
    title="ETH3D (high-resolution training set)",
    role="eval",
    depth_format="raw_float32",
    min_depth=1e-5,
    max_depth=float("inf"),
    image_pattern=r"rgb/(?P<scene>[^/]+)/images/dslr_images/(?P<frame>[^/]+)",
    depth_template=r"depth/\g<scene>_dslr_depth/\g<scene>/ground_truth_depth/dslr_images/\g<frame>",
    example=(
        "rgb/office/images/dslr_images/DSC_0219.JPG "
        "depth/office_dslr_depth/office/ground_truth_depth/dslr_images/DSC_0219.JPG"
    ),
    source=(f"{_TARS}eth3d/; original (distorted DSLR images and depth): https://www.eth3d.net/datasets; {_LISTS}"),
)
_SCANNET = DepthSpec(
    name="scannet",
    title="ScanNet (colour resized to the depth's 480 x 640)",
    role="eval",
    depth_format="png",
    depth_scale=1000.0,
    min_depth=1e-3,
    max_depth=10.0,
    image_pattern=r"(?P<scene>(?:.*/)?scene\d+_\d+)/color/(?P<frame>\d+)\.jpg",
    depth_template=r"\g<scene>/depth/\g<frame>.png",
    num_published=800,
    example="scene0406_02/color/000300.jpg scene0406_02/depth/000300.png",
    source=f"{_TARS}scannet/; original: http://www.scan-net.org/; {_LISTS}",
)
DIODE = DepthSpec(
    name="diode",
    title="DIODE (validation, indoor 325 + outdoor 446)",
    role="eval",
    depth_format="npy",
    min_depth=0.6,
    max_depth=350.0,
    image_pattern=r"(?P<stem>(?:.*/)?scene_\d+/scan_\d+/[^/]+)\.png",
    depth_template=r"\g<stem>_depth.npy",
    mask_template=r"\g<stem>_depth_mask.npy",
    num_published=771,
    example=(
        "indoors/scene_00021/scan_00189/00021_00189_indoors_200_010.png "
        "indoors/scene_00021/scan_00189/00021_00189_indoors_200_010_depth.npy "
        "indoors/scene_00021/scan_00189/00021_00189_indoors_200_010_depth_mask.npy"
    ),
    source=f"{_TARS}diode/; original (val.tar.gz): https://diode-dataset.org/; {_LISTS}",
)

SPECS: dict[str, DepthSpec] = {
    spec.name: spec for spec in (_HYPERSIM, _VKITTI2, NYU, _KITTI_EIGEN, ETH3D, _SCANNET, DIODE)
}


# --------------------------------------------------------- crops and masks: row and column ranges of a picture

_Region = Callable[[int, int], tuple[slice, slice]]  # (H, W) -> rows, columns

_KITTI_CROP = (352, 1216)
_NYU_SIZE = (480, 640)


def _kitti_benchmark_crop(height: int, width: int) -> tuple[slice, slice]:
    """The 352 x 1216 window of the KITTI depth benchmark: bottom rows, centred columns."""
    crop_height, crop_width = _KITTI_CROP
    if height < crop_height or width < crop_width:
        raise ValueError(f"the KITTI benchmark crop needs at least 352 x 1216 pixels (H x W), got {height} x {width}")
    top, left = height - crop_height, (width - crop_width) // 2
    return slice(top, height), slice(left, left + crop_width)


def _nyu_eigen_mask(height: int, width: int) -> tuple[slice, slice]:
    """Rows 45:471 and columns 41:601 of a 480 x 640 NYUv2 frame (Eigen et al., 2014)."""
    if (height, width) != _NYU_SIZE:
        raise ValueError(f"the NYU Eigen mask is defined for 480 x 640 pixels (H x W), got {height} x {width}")
    return slice(45, 471), slice(41, 601)


def _kitti_eigen_mask(height: int, width: int) -> tuple[slice, slice]:
    """Eigen et al. (2014): rows .3324324 to .91351351 and columns .0359477 to .96405229 of the size."""
    return _fraction(height, 0.3324324, 0.91351351), _fraction(width, 0.0359477, 0.96405229)


def _kitti_garg_mask(height: int, width: int) -> tuple[slice, slice]:
    """Garg et al. (2016): rows .40810811 to .99189189 and columns .03594771 to .96405229 of the size."""
    return _fraction(height, 0.40810811, 0.99189189), _fraction(width, 0.03594771, 0.96405229)


def _fraction(length: int, start: float, stop: float) -> slice:
    return slice(int(start * length), int(stop * length))


CROPS: dict[str, _Region] = {"kitti_benchmark": _kitti_benchmark_crop}
MASKS: dict[str, _Region] = {
    "nyu_eigen": _nyu_eigen_mask,
    "kitti_eigen": _kitti_eigen_mask,
    "kitti_garg": _kitti_garg_mask,
}


def lookup(regions: Mapping[str, _Region], key: str) -> _Region:
    """The region called `key`; an unknown name is an error that lists the known ones."""
    if key not in regions:
        raise ValueError(f"unknown region {key!r}; known: {', '.join(sorted(regions))}")
    return regions[key]
