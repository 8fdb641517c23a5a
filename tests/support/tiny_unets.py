"""Small random U-Nets with the structure of Stable Diffusion's: a cross-attention level and a plain one."""

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

EMBEDDING_DIM = 8  # of the prompt


def tiny_unet(in_channels: int = 4, out_channels: int = 4, *, width: int = 8, seed: int = 0) -> UNet2DConditionModel:
    """About 20 thousand random parameters; the global random stream is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return UNet2DConditionModel(
            sample_size=8,
            in_channels=in_channels,
            out_channels=out_channels,
            block_out_channels=(width, width),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=EMBEDDING_DIM,
            attention_head_dim=width // 2,
            norm_num_groups=4,
        ).eval()


@torch.no_grad()
def run_unet(unet: UNet2DConditionModel, x: Tensor, timestep: int = 500) -> Tensor:
    """The U-Net's raw output for a zero prompt."""
    prompt = torch.zeros(len(x), 2, EMBEDDING_DIM, dtype=x.dtype)
    return unet(x, timestep, encoder_hidden_states=prompt, return_dict=False)[0]
