"""Depth data: published sets, your own folders, Hugging Face datasets, mixing, augmentation and normalisation.

Every data set returns a `DepthSample`: image (3, H, W) in [0, 1], depth (1, H, W) in metres, valid (1, H, W), name.
"""

from marigold_uq.depth.data.augmentation import AugmentedDataset, DepthTransform, flip_sample
from marigold_uq.depth.data.base import DepthDataset, Problem
from marigold_uq.depth.data.folder import FolderRecord, ImageDepthFolder
from marigold_uq.depth.data.huggingface import HuggingFaceDepth
from marigold_uq.depth.data.layout import LayoutReport, check_layout, check_samples, describe
from marigold_uq.depth.data.listed import ListedDepth, ListEntry
from marigold_uq.depth.data.mixture import MixtureDataset, SharedEpoch, sample_generator
from marigold_uq.depth.data.normalization import denormalize_depth, latent_mask, normalize_depth
from marigold_uq.depth.data.photometric import PhotometricTransform
from marigold_uq.depth.data.registry import DATASETS, build_dataset, register_dataset
from marigold_uq.depth.data.sample import DepthDataError, DepthSample, assemble_sample, resize_sample
from marigold_uq.depth.data.shards import LatentShards, RenderedScenes
from marigold_uq.depth.data.specs import CROPS, MASKS, SPECS, DepthSpec
from marigold_uq.depth.data.storage import FolderStorage, TarStorage, open_storage

__all__ = [
    "CROPS",
    "DATASETS",
    "MASKS",
    "SPECS",
    "AugmentedDataset",
    "DepthDataError",
    "DepthDataset",
    "DepthSample",
    "DepthSpec",
    "DepthTransform",
    "FolderRecord",
    "FolderStorage",
    "HuggingFaceDepth",
    "ImageDepthFolder",
    "LatentShards",
    "LayoutReport",
    "ListEntry",
    "ListedDepth",
    "MixtureDataset",
    "PhotometricTransform",
    "Problem",
    "RenderedScenes",
    "SharedEpoch",
    "TarStorage",
    "assemble_sample",
    "build_dataset",
    "check_layout",
    "check_samples",
    "denormalize_depth",
    "describe",
    "flip_sample",
    "latent_mask",
    "normalize_depth",
    "open_storage",
    "register_dataset",
    "resize_sample",
    "sample_generator",
]
