"""The condition encoder: shapes, cached features, other backbones, and its file."""

from pathlib import Path

import pytest
import torch

from marigold_uq.models.condition_encoder import ConditionEncoder

SMALL = {
    "widths": [8, 8, 12, 16],
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 3, 2],
    "windows": [3, 3, 4, 3],
    "neck_channels": 6,
}
DINO = {
    "model_type": "dinov2",
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "out_features": ["stage1", "stage2"],
}


def tiny_encoder(**options: object) -> ConditionEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"backbone_options": SMALL, "condition_channels": 10, "guide_channels": 8, **options}
        return ConditionEncoder(**config).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(64, 96), (32, 80)])
def test_channels_lie_on_the_grid_of_the_latents_and_the_guide_on_its_parts(size: tuple[int, int]) -> None:
    encoder = tiny_encoder()
    condition = encoder(torch.rand(2, 3, *size) * 2 - 1)
    assert condition.channels.shape == (2, encoder.out_channels, size[0] // 16, size[1] // 16)
    assert condition.guide.shape == (2, 8, size[0] // 8, size[1] // 8)


def test_kept_features_give_what_the_picture_gives() -> None:
    encoder, pixels = tiny_encoder(), torch.rand(1, 3, 64, 64) * 2 - 1
    whole, kept = encoder(pixels), encoder.fuse(encoder.features(pixels), encoder.thumbnail(pixels))
    assert whole.channels.equal(kept.channels)
    assert whole.guide.equal(kept.guide)


def test_two_channels_say_where_a_cell_lies() -> None:
    condition = tiny_encoder()(torch.zeros(1, 3, 48, 64))
    rows, columns = condition.channels[0, -2:]
    assert rows[:, 0].tolist() == [-1, 0, 1]
    torch.testing.assert_close(columns[0], torch.linspace(-1, 1, 4))


def test_a_backbone_of_transformers_goes_by_its_config() -> None:
    encoder = tiny_encoder(backbone="transformers", backbone_options=DINO, levels=[0, 1])
    condition = encoder(torch.rand(1, 3, 64, 96) * 2 - 1)
    assert condition.channels.shape == (1, encoder.out_channels, 4, 6)
    assert condition.guide.shape == (1, 8, 8, 12)


def test_it_survives_its_file(tmp_path: Path) -> None:
    encoder, pixels = tiny_encoder(), torch.rand(1, 3, 64, 64) * 2 - 1
    encoder.save_pretrained(tmp_path)
    again = ConditionEncoder.from_pretrained(tmp_path)
    assert again(pixels).channels.equal(encoder(pixels).channels)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="unknown backbone 'tiny'"):
        ConditionEncoder(backbone="tiny")
    with pytest.raises(ValueError, match="strides"):
        tiny_encoder(cell=8)
    with pytest.raises(ValueError, match="model_type"):
        tiny_encoder(backbone="transformers", backbone_options={"hidden_size": 8})
