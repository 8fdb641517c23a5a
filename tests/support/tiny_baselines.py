"""Depth models of transformers with random weights, of each kind that is known, as folders; nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BeitConfig,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    GLPNConfig,
    GLPNForDepthEstimation,
    ZoeDepthConfig,
    ZoeDepthForDepthEstimation,
)

KINDS = ("depth_anything", "depth_anything_metric", "dpt", "glpn", "zoedepth")
METRIC = ("depth_anything_metric", "glpn", "zoedepth")
SIZE: dict[str, dict[str, int]] = {"zoedepth": {"height": 32, "width": 32}}
"""Options that a tiny model needs, where its config does not say how large its pictures are."""


def _depth_anything(kind: str) -> Any:
    backbone = Dinov2Config(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14,
        out_features=["stage1", "stage2"], apply_layernorm=True, reshape_hidden_states=False,
    )  # fmt: skip
    return DepthAnythingForDepthEstimation(
        DepthAnythingConfig(
            backbone_config=backbone,
            reassemble_hidden_size=8,
            reassemble_factors=[1, 1],
            neck_hidden_sizes=[4, 4],
            fusion_hidden_size=4,
            head_hidden_size=4,
            depth_estimation_type=kind,
            max_depth=20 if kind == "metric" else 1,
        )
    )


def _dpt() -> Any:
    return DPTForDepthEstimation(
        DPTConfig(
            hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8, image_size=32, patch_size=8,
            backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[4, 4, 4, 4], fusion_hidden_size=4, is_hybrid=False,
        )
    )  # fmt: skip


def _glpn() -> Any:
    return GLPNForDepthEstimation(
        GLPNConfig(
            hidden_sizes=[4, 4, 8, 8], num_attention_heads=[1, 1, 2, 2], depths=[1, 1, 1, 1], mlp_ratios=[1, 1, 1, 1],
            decoder_hidden_size=8,
        )
    )  # fmt: skip


def _zoedepth() -> Any:
    backbone = BeitConfig(
        image_size=32, patch_size=8, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8,
        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
        use_relative_position_bias=True,
    )  # fmt: skip
    heads = [
        {"name": "near", "min_depth": 0.1, "max_depth": 10.0, "n_bins": 8},
        {"name": "far", "min_depth": 0.1, "max_depth": 80.0, "n_bins": 8},
    ]
    return ZoeDepthForDepthEstimation(
        ZoeDepthConfig(
            backbone_config=backbone, neck_hidden_sizes=[4, 4, 4, 4], fusion_hidden_size=16, bottleneck_features=16,
            num_relative_features=4, bin_embedding_dim=8, num_attractors=[2, 2, 2, 1], bin_configurations=heads,
            num_patch_transformer_layers=4, patch_transformer_hidden_size=128, patch_transformer_intermediate_size=8,
            patch_transformer_num_attention_heads=2,
        )
    )  # fmt: skip


MAKERS = {
    "depth_anything": lambda: _depth_anything("relative"),
    "depth_anything_metric": lambda: _depth_anything("metric"),
    "dpt": _dpt,
    "glpn": _glpn,
    "zoedepth": _zoedepth,
}


def tiny_model(kind: str, seed: int = 0) -> Any:
    """A model whose maps are no constants: random weights of some size in every layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAKERS[kind]().eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=(1.5 / parameter[0].numel()) ** 0.5)
            elif "bias" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    if kind in ("depth_anything", "dpt"):  # relative disparities end in a ReLU
        last = [module for module in model.head.modules() if isinstance(module, torch.nn.Conv2d)][-1]
        torch.nn.init.constant_(last.bias, 3.0)
    return model


def write_model(kind: str, folder: Path, seed: int = 0) -> str:
    """The folder of a tiny model, as `from_pretrained` takes it."""
    tiny_model(kind, seed).save_pretrained(folder)
    return str(folder)
