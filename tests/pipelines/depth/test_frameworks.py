"""Depth pipelines with EDM and flow matching."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from support.tiny_depth import generator, picture, prompt, tiny_unet, tiny_vae

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.models.prompt_embedding import PromptEmbedding
from marigold_uq.schedulers import DistributionalEDMScheduler, DistributionalFlowMatchScheduler

KINDS = {
    "edm": (DistributionalEDMScheduler, {"sigma_data": 0.7}),
    "flow": (DistributionalFlowMatchScheduler, {"shift": 3.0}),
}


def build(kind: str) -> MarigoldUQDepthPipeline:
    own, options = KINDS[kind]
    pipeline = MarigoldUQDepthPipeline(
        unet=tiny_unet(),
        vae=tiny_vae(),
        scheduler=own(**options),
        prompt_embedding=PromptEmbedding.from_tensor(prompt()),
        default_denoising_steps=2,
        default_processing_resolution=32,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_keeps_its_framework_through_a_new_family_and_saving(kind: str, tmp_path: Path) -> None:
    pipeline, (own, options) = build(kind), KINDS[kind]
    before = pipeline(picture(), generator=generator()).prediction
    pipeline.with_family("gaussian")
    after = pipeline(picture(), generator=generator()).prediction
    np.testing.assert_allclose(after, before, atol=1e-3)  # the mean stays the old prediction
    pipeline.save_pretrained(tmp_path)
    loaded = MarigoldUQDepthPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.scheduler) is own
    assert loaded.scheduler.family.name == "gaussian"
    assert all(loaded.scheduler.config[name] == value for name, value in options.items())
    for mode in ("ensemble", "trajectory"):
        output = loaded(picture(), ensemble_size=3, uncertainty=mode, generator=generator())
        assert np.isfinite(output.prediction).all()
        assert float(output.uncertainty.max()) > 0


def test_a_stock_scheduler_of_another_framework_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot turn a FlowMatchEulerDiscreteScheduler"):
        MarigoldUQDepthPipeline(tiny_unet(), tiny_vae(), FlowMatchEulerDiscreteScheduler())


def test_float_timesteps_reach_the_network() -> None:
    pipeline, seen = build("edm"), []
    pipeline.unet.register_forward_pre_hook(lambda _, args: seen.append(torch.as_tensor(args[1])))
    pipeline(picture(), generator=generator())
    torch.testing.assert_close(torch.stack(seen), pipeline.scheduler.for_chain(len(seen)).timesteps)
