"""Head only and LoRA: what learns, what stays to the bit, and what is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from support.tiny_training import tiny_pipeline
from support.tiny_unets import EMBEDDING_DIM
from torch import Tensor

from marigold_uq.depth.config import DepthTrainConfig
from marigold_uq.depth.task import DepthTask
from marigold_uq.distributions import NoiseDistribution
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.scores import crps
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.loop import Trainer
from marigold_uq.training.objective import ObjectiveConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "mixture": {"num_components": 3},
    "low_rank": {"rank": 2},
}


class TwoLevels:
    """Latents whose depth is noise of standard deviation 0.1 where the image's first channel is -3, 1.5 where it is 3.

    So the best law has mean 0 and a scale that the image tells; a constant scale must compromise.
    """

    def __init__(self, length: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        sign = torch.randint(2, (length, 1, 2, 2), generator=source) * 2.0 - 1
        sign = sign.repeat_interleave(4, 2).repeat_interleave(4, 3)  # blocks of 4 x 4 in 8 x 8
        self.image = torch.cat([3 * sign, torch.zeros(length, 3, 8, 8)], 1)
        level = torch.where(sign > 0, 1.5, 0.1)
        self.depth = level * torch.randn(length, 4, 8, 8, generator=source)

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> dict[str, Any]:
        valid = torch.ones(1, 8, 8, dtype=torch.bool)
        return {
            "image_latent": self.image[index],
            "depth_latent": self.depth[index],
            "latent_valid": valid,
            "name": "x",
        }


def pretrained(family: str) -> MarigoldUQDepthPipeline:
    """A point model whose predictions are near the right mean, 0, with the head of a family around them."""
    pipeline = tiny_pipeline("sample")
    with torch.no_grad():
        pipeline.unet.conv_out.weight.mul_(0.1)
    return pipeline.with_family(family, **FAMILIES[family], initial_scale=0.8)


def run(
    output: Path,
    family: str,
    trainable: Any,
    max_steps: int,
    *,
    rate: float = 3e-2,
    dataset: Any = None,
    **changes: Any,
) -> DepthTask:
    task = DepthTask(
        pretrained(family),
        dataset or TwoLevels(64, seed=0),
        ObjectiveConfig(noise_strength=0.9),
        trainable=trainable,
        lora_rank=2,
    )
    optimizer = OptimizerConfig(learning_rate=rate, warmup_steps=0, decay="constant")
    settings: dict[str, Any] = {"batch_size": 8, "ema_decay": 0.0, "validate_every": 0, "tracker": "none", "cpu": True}
    config = TrainingConfig(output=output, max_steps=max_steps, optimizer=optimizer, **{**settings, **changes})
    Trainer(task, config).run()
    return task


@torch.no_grad()
def law_of(pipeline: MarigoldUQDepthPipeline, image: Tensor, x_t: Tensor, t: int = 999) -> NoiseDistribution:
    text = pipeline.prompt_embedding(len(image))
    raw = pipeline.unet(torch.cat([image, x_t], 1), t, encoder_hidden_states=text, return_dict=False)[0]
    return pipeline.scheduler.noise_distribution(raw, x_t.shape[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_head_only_leaves_the_mean_to_the_bit_and_beats_every_constant_scale(tmp_path: Path, family: str) -> None:
    """A constant scale may even be chosen on the held-out data itself."""
    before = pretrained(family)
    run(tmp_path, family, "head", 110, ema_decay=0.9)
    after = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model")

    changed = {
        name: (value != before.unet.state_dict()[name]).flatten(1).any(1) if value.ndim > 1 else value
        for name, value in after.unet.state_dict().items()
        if not torch.equal(value, before.unet.state_dict()[name])
    }
    assert set(changed) == {"conv_out.weight", "conv_out.bias"}
    blocks = before.scheduler.family.initial_blocks(before.scheduler.head_options, 1)
    moved = changed["conv_out.weight"].reshape(len(blocks), 4).any(1)
    assert moved.tolist() == [not block.moves_mean for block in blocks]

    held_out = TwoLevels(32, seed=1)
    x_t = torch.randn(held_out.depth.shape, generator=torch.Generator().manual_seed(2))  # zero signal at the last step
    old, new = law_of(before, held_out.image, x_t), law_of(after, held_out.image, x_t)
    assert torch.equal(old.mean, new.mean)
    trained = crps(new.marginal(), held_out.depth).mean()
    constants = [crps(old.scaled(tau).marginal(), held_out.depth).mean() for tau in (0.05, 0.1, 0.2, 0.4, 0.7, 1, 2, 4)]
    assert trained < 0.95 * min(constants)


def test_families_without_a_spread_have_no_head_to_train() -> None:
    with pytest.raises(ValueError, match="no output channels besides its mean"):
        DepthTask(tiny_pipeline(), [], ObjectiveConfig(), trainable="head")


def test_weight_decay_would_move_the_mean_and_is_refused_with_head_only() -> None:
    decaying = TrainingConfig(optimizer=OptimizerConfig(weight_decay=0.01))
    with pytest.raises(ValueError, match=r"must not touch the prediction.*weight_decay"):
        DepthTrainConfig(trainable="head", training=decaying)
    DepthTrainConfig(trainable="full", training=decaying)


def raw_output(unet: Any) -> Tensor:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(2, 8, 8, 8, generator=source)
    text = torch.randn(2, 2, EMBEDDING_DIM, generator=source)
    with torch.no_grad():
        return unet(x, 500, encoder_hidden_states=text, return_dict=False)[0]


def test_lora_trains_adapters_and_both_ends_and_saves_a_plain_network(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    start = pretrained("gaussian").unet.state_dict()
    task = run(tmp_path, "gaussian", "lora", 6)
    trained = task.pipeline.unet
    for name, value in trained.state_dict().items():
        if "lora" not in name and not name.startswith(("conv_in", "conv_out")):
            assert torch.equal(value, start[name.replace(".base_layer", "")]), name
    adapters = [value for name, value in trained.state_dict().items() if "lora_B" in name]
    assert adapters
    assert any(value.abs().max() > 0 for value in adapters)

    stock = UNet2DConditionModel.from_pretrained(tmp_path / "model" / "unet")
    assert stock.state_dict().keys() == start.keys()
    # Folding B A into W and applying them one after the other differ by float32's rounding.
    torch.testing.assert_close(raw_output(stock), raw_output(trained.eval()), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(raw_output(stock), raw_output(stock_start(start)), atol=1e-3)
    loaded = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model")
    assert torch.equal(raw_output(loaded.unet), raw_output(stock))


def stock_start(weights: dict[str, Tensor]) -> Any:
    unet = pretrained("gaussian").unet
    unet.load_state_dict(weights)
    return unet


def test_a_resumed_lora_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run(tmp_path / "whole", "gaussian", "lora", 6, ema_decay=0.9)
    torch.rand(1)  # whatever else draws from the global stream, the adapters start the same
    run(tmp_path / "parts", "gaussian", "lora", 3, ema_decay=0.9)
    run(tmp_path / "parts", "gaussian", "lora", 6, ema_decay=0.9)
    whole, parts = (
        UNet2DConditionModel.from_pretrained(tmp_path / name / "model" / "unet") for name in ("whole", "parts")
    )
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name


def test_gradient_checkpointing_changes_memory_and_not_the_result(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", "gaussian", "full", 2, rate=1e-3)
    saving = run(tmp_path / "saving", "gaussian", "full", 2, rate=1e-3, gradient_checkpointing=True)
    assert saving.pipeline.unet.is_gradient_checkpointing
    assert not plain.pipeline.unet.is_gradient_checkpointing
    torch.testing.assert_close(
        raw_output(saving.pipeline.unet.eval()), raw_output(plain.pipeline.unet.eval()), rtol=1e-5, atol=1e-6
    )
