"""What the depth task feeds to the network, and what it scores."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from scoringrules import crps_normal
from support.tiny_training import tiny_pipeline
from torch import Tensor, nn

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.depth.task import DepthTask
from marigold_uq.training.objective import ObjectiveConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "point": {},
    "gaussian": {},
    "mixture": {"num_components": 3},
    "low_rank": {"rank": 2},
    "low_rank_mixture": {"num_components": 2, "rank": 1},
    "sample": {},
}


def make_task(family: str = "gaussian", prediction_type: str = "v_prediction", **objective: Any) -> DepthTask:
    pipeline = tiny_pipeline(prediction_type).with_family(family, **FAMILIES[family])
    return DepthTask(pipeline, [], ObjectiveConfig(**{"noise_strength": 0.9, **objective}))


def sample(seed: int, height: int = 32, width: int = 48) -> dict[str, Any]:
    source = torch.Generator().manual_seed(seed)
    valid = torch.ones(1, height, width, dtype=torch.bool)
    valid[:, :6, :6] = False
    return {
        "image": torch.rand(3, height, width, generator=source),
        "depth": 1 + 9 * torch.rand(1, height, width, generator=source),
        "valid": valid,
        "name": f"sample-{seed}",
    }


def losses(
    task: DepthTask, samples: list[dict[str, Any]], seeds: list[int], network: nn.Module | None = None
) -> Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return task.losses(network or task.network, task.collate(samples), generators)


class Recorder(nn.Module):
    """A network that says zero and remembers what it was asked."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, t: Tensor, encoder_hidden_states: Tensor, return_dict: bool) -> tuple[Tensor]:
        self.calls.append((x, t, encoder_hidden_states))
        return (torch.zeros(len(x), self.channels, *x.shape[2:], requires_grad=True),)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_loss_is_the_masked_crps_of_the_target_of_each_prediction_type(prediction_type: str) -> None:
    """By hand from what the network saw: x_t = sqrt(abar) x_0 + sqrt(1 - abar) noise."""
    task, network = make_task("gaussian", prediction_type), Recorder(8)
    item = sample(0)
    value = losses(task, [item], [5], network)
    (x, t, text) = network.calls[0]
    image, x_0, mask = task.encoder.encode(task.collate([item])[0][1])
    assert torch.equal(x[:, :4], image)
    assert torch.equal(text[0], task.pipeline.prompt_embedding.embedding[0])
    alpha_bar = task.pipeline.scheduler.alphas_cumprod[t[0]].double()
    x_0, x_t = x_0.double(), x[:, 4:].double()
    noise = (x_t - alpha_bar.sqrt() * x_0) / (1 - alpha_bar).sqrt()
    assert noise.std() == pytest.approx(1.0, abs=1e-4)
    velocity = alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * x_0
    target = {"epsilon": noise, "v_prediction": velocity, "sample": x_0}[prediction_type]
    scale = torch.nn.functional.softplus(torch.tensor(0.0)).item() + 1e-6
    expected = crps_normal(target[mask.expand_as(target)].numpy(), 0.0, scale).mean()
    assert value.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["gaussian", "low_rank", "sample"])
def test_invalid_pixels_do_not_reach_the_loss(family: str) -> None:
    task = make_task(family)
    clean, dirty = sample(0), sample(0)
    dirty["depth"][~dirty["valid"]] = 777.0
    assert torch.equal(losses(task, [clean], [1]), losses(task, [dirty], [1]))
    dirty["depth"][~dirty["valid"]] = torch.nan
    assert torch.equal(losses(task, [clean], [1]), losses(task, [dirty], [1]))
    dirty["depth"][dirty["valid"]] *= torch.linspace(1, 2, int(dirty["valid"].sum()))
    assert not torch.equal(losses(task, [clean], [1]), losses(task, [dirty], [1]))


def test_cells_with_an_invalid_pixel_are_not_scored() -> None:
    task = make_task()
    _, _, mask = task.encoder.encode(task.collate([sample(0)])[0][1])
    assert mask.shape == (1, 1, 4, 6)
    assert (~mask).nonzero().tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_samples_loss_does_not_depend_on_its_company_or_size_of_the_others(family: str) -> None:
    task = make_task(family)
    samples = [sample(0), sample(1, 16, 64), sample(2), sample(3, 16, 64)]
    together = losses(task, samples, [10, 11, 12, 13])
    alone = torch.cat([losses(task, [item], [10 + i]) for i, item in enumerate(samples)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)  # convolutions of a batch round differently
    assert task.describe(task.collate(samples)) == [f"sample-{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("score", "options"),
    [("projected", {"patch_size": 2, "num_boxes": 4}), ("energy", {}), ("energy", {"patch_size": 2}), ("log", {})],
)
def test_other_scores_of_the_low_rank_law_draw_directions_for_each_sample(score: str, options: dict[str, Any]) -> None:
    task = make_task("low_rank", score=score, score_options=options)
    samples = [sample(i) for i in range(3)]
    together = losses(task, samples, [10, 11, 12])
    assert torch.equal(together, losses(task, samples, [10, 11, 12]))
    torch.testing.assert_close(together[1:2], losses(task, samples[1:2], [11]), rtol=1e-4, atol=1e-5)
    together.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.network.conv_out.parameters())  # type: ignore[union-attr,operator]


def test_the_sample_family_asks_the_network_for_each_draw_with_noise_of_its_own() -> None:
    task, network = make_task("sample", num_draws=3), Recorder(4)
    losses(task, [sample(0), sample(1)], [1, 2], network)
    assert len(network.calls) == 3
    noise = torch.stack([x[:, 8] for x, _, _ in network.calls])
    assert not torch.equal(noise[0], noise[1])
    assert all(torch.equal(x[:, :8], network.calls[0][0][:, :8]) for x, _, _ in network.calls)


def test_the_sample_family_learns_to_listen_to_its_noise_channel() -> None:
    """The channel starts with zero weights, where all draws are equal; the gradient must lead away from there."""
    task = make_task("sample", num_draws=3)
    losses(task, [sample(0)], [1]).mean().backward()
    gradient = task.network.conv_in.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    assert gradient.isfinite().all()
    assert gradient[:, 8].abs().max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_without_any_valid_cell_costs_nothing_and_breaks_nothing(family: str) -> None:
    task = make_task(family)
    item = sample(0)
    item["valid"][:, ::8, ::8] = False  # one pixel of every cell
    value = losses(task, [item], [1])
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    value.mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in task.network.parameters())


def test_the_bandwidth_follows_past_residuals_only_and_all_of_the_steps_samples() -> None:
    task = make_task("low_rank")
    first = losses(task, [sample(0), sample(1)], [1, 2])
    assert torch.equal(first, losses(task, [sample(0), sample(1)], [1, 2]))  # unchanged until the step is over
    assert (task.objective.scale.mean_square == 1).all()
    task.after_step(1)
    assert (task.objective.scale.mean_square != 1).any()
    assert not torch.equal(first, losses(task, [sample(0), sample(1)], [1, 2]))


def test_a_bandwidth_can_be_given_instead() -> None:
    fixed = {
        "score": "kernel",
        "adaptive_bandwidth": False,
        "score_options": {"bandwidth": 75.0, "per_dimension": False},
    }
    task = make_task("low_rank", **fixed)
    before = losses(task, [sample(0)], [1])
    task.after_step(1)
    assert torch.equal(before, losses(task, [sample(0)], [1]))
    assert (task.objective.scale.mean_square == 1).all()


@pytest.mark.parametrize(("uniform", "least", "most"), [(False, 10, 38), (True, 0, 2)])
def test_half_of_the_timesteps_can_be_the_last(uniform: bool, least: int, most: int) -> None:
    task, seen = make_task(uniform_timesteps=uniform), []
    add_noise = task.pipeline.scheduler.add_noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task.pipeline.scheduler, "add_noise", lambda *given: seen.append(given[2]) or add_noise(*given))
        losses(task, [sample(0)] * 48, list(range(48)))
    timesteps = torch.cat(seen)
    assert len(timesteps) == 48
    assert least <= int((timesteps == 999).sum()) <= most  # 24 expected, 4 standard deviations of 3.5; else nearly none


def test_a_disparity_model_is_trained_on_inverse_depth() -> None:
    task = make_task()
    item = sample(0)
    depth = task.encoder.encode(task.collate([item])[0][1])[1]
    inverted = copy.deepcopy(item)
    inverted["depth"] = 1 / inverted["depth"]
    task.pipeline.register_to_config(prediction_type="disparity")
    disparity = task.encoder.encode(task.collate([inverted])[0][1])[1]
    torch.testing.assert_close(depth, disparity, rtol=1e-3, atol=1e-4)  # 1 / (1 / x) and a VAE between them


def test_a_pipeline_that_promises_metres_is_refused() -> None:
    pipeline = tiny_pipeline()
    pipeline.register_to_config(scale_invariant=False)
    with pytest.raises(ValueError, match="absolute depth"):
        DepthTask(pipeline, [], ObjectiveConfig())


def test_latents_may_come_ready_made() -> None:
    task = make_task()
    item = sample(0)
    image, depth, valid = task.encoder.encode(task.collate([item])[0][1])
    ready = {"image_latent": image[0], "depth_latent": depth[0], "latent_valid": valid[0], "name": "ready"}
    torch.testing.assert_close(losses(task, [item], [3]), losses(task, [ready], [3]), rtol=1e-6, atol=0)


def test_the_saved_pipeline_needs_no_text_encoder(tmp_path: Path) -> None:
    task = make_task()
    task.save(task.network, tmp_path / "model")
    assert not (tmp_path / "model" / "text_encoder").exists()
    assert (tmp_path / "model" / "prompt_embedding").exists()


def test_the_frozen_autoencoder_may_encode_in_bfloat16_and_stays_what_it_is(tmp_path: Path) -> None:
    whole, pipeline = make_task(), tiny_pipeline()
    task = DepthTask(pipeline, [], ObjectiveConfig(), encoder_dtype=torch.bfloat16)
    batch = task.collate([sample(0)])[0][1]
    one, two = (each.encoder.encode(batch) for each in (whole, task))
    torch.testing.assert_close(one.target, two.target, rtol=0.05, atol=0.05)
    assert not torch.equal(one.target, two.target)
    assert two.target.dtype == torch.float32
    assert pipeline.vae.dtype == torch.float32
    task.save(task.network, tmp_path / "model")
    saved = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "model").vae.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.pipeline.vae.state_dict().items())
