"""The U-Net for 2-D fields (B, C, H, W); the module's path is written into checkpoints."""

from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_utils import ModelMixin

from marigold_uq.models.unet_blocks import FieldUNet

__all__ = ["ModelMixin", "UNet2d"]  # diffusers looks for ModelMixin in the module of a component


class UNet2d(FieldUNet):
    """Raw channels of a distribution for 2-D fields (B, C, H, W) of any size.

    The defaults are the paper's (15.2 M parameters).

    Args:
        in_channels: of the whole input; the paper's: x_t and twelve condition channels.
        out_channels: raw channels of the family; or start with those of the target and use `models.widen`.
        block_out_channels: channels per level; each level has half the resolution of the one before.
        layers_per_block: residual blocks per level on the way down; one more on the way up.
        attention_levels: levels with self-attention, beside the bottleneck, which always has it.
        periodic: per spatial axis, whether the domain closes on itself; the other axes are padded with zeros.
        max_period: slowest period / 2 pi of the timestep embedding, in timesteps.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 13,
        out_channels: int = 1,
        block_out_channels: tuple[int, ...] = (64, 128, 128, 128),
        layers_per_block: int = 4,
        attention_levels: tuple[int, ...] = (),
        periodic: tuple[bool, bool] = (False, False),
        embedding_channels: int = 256,
        dropout: float = 0.1,
        max_period: float = 10_000.0,
    ) -> None:
        super().__init__()
        if len(periodic) != 2:
            raise ValueError(f"periodic has one entry per spatial axis, 2 in UNet2d; got {periodic}")
        self._build(
            in_channels,
            out_channels,
            block_out_channels,
            layers_per_block,
            attention_levels,
            periodic,
            embedding_channels=embedding_channels,
            dropout=dropout,
            max_period=max_period,
        )
