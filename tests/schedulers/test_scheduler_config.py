"""The constructor is the config is the file format: stock configs in, ours out and in again."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, PNDMScheduler
from support.oracles import SIZES

from marigold_uq.distributions import FAMILIES
from marigold_uq.schedulers import DistributionalDDIMScheduler

DISTRIBUTIONAL = sorted(set(FAMILIES) - {"point"})
STABLE_DIFFUSION_2 = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.10.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
MARIGOLD_1_0 = {**STABLE_DIFFUSION_2, "_class_name": "DDIMScheduler"}
MARIGOLD_1_1 = {**MARIGOLD_1_0, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
SHIPPED = {
    "stable-diffusion-2-pndm": STABLE_DIFFUSION_2,
    "stable-diffusion-2-ddim": {**STABLE_DIFFUSION_2, "_class_name": "DDIMScheduler"},
    "marigold-1-0": MARIGOLD_1_0,
    "marigold-1-1": MARIGOLD_1_1,
}
EVERY_ARGUMENT: dict[str, Any] = {
    "num_train_timesteps": 120,
    "beta_start": 0.001,
    "beta_end": 0.03,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "prediction_type": "v_prediction",
    "dynamic_thresholding_ratio": 0.9,
    "clip_sample_range": 2.0,
    "sample_max_value": 3.0,
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
    "noise_family": "low_rank_mixture",
    "num_components": 4,
    "rank": 3,
    "pooled_weights": True,
    "eta": 0.25,
    "tau": 0.5,
}


def own_arguments(scheduler: DistributionalDDIMScheduler) -> dict[str, Any]:
    return {name: value for name, value in scheduler.config.items() if not name.startswith("_")}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("shipped", SHIPPED.values(), ids=SHIPPED)
def test_configs_that_checkpoints_ship_become_any_family(shipped: dict[str, Any], family: str) -> None:
    before = dict(shipped)
    scheduler = DistributionalDDIMScheduler.from_config(shipped, noise_family=family, eta=1.0, tau=0.5, **SIZES[family])
    assert shipped == before
    stock = DDIMScheduler.from_config({**shipped, "_class_name": "DDIMScheduler"})
    assert torch.equal(scheduler.alphas_cumprod, stock.alphas_cumprod)
    assert torch.equal(scheduler.final_alpha_cumprod, stock.final_alpha_cumprod)
    for name in DDIMScheduler().config:
        if not name.startswith("_"):
            assert scheduler.config[name] == stock.config[name], name
    assert (scheduler.config.noise_family, scheduler.config.eta, scheduler.config.tau) == (family, 1.0, 0.5)
    scheduler.set_timesteps(10)
    stock.set_timesteps(10)
    assert torch.equal(scheduler.timesteps, stock.timesteps)


@pytest.mark.parametrize("family", DISTRIBUTIONAL)
@pytest.mark.parametrize("stock", [DDIMScheduler, DDPMScheduler, PNDMScheduler])
def test_the_config_of_a_live_stock_scheduler_becomes_any_family(stock: type, family: str) -> None:
    betas = {"beta_start": 0.002, "beta_end": 0.03, "num_train_timesteps": 77}
    scheduler = DistributionalDDIMScheduler.from_config(stock(**betas).config, noise_family=family, **SIZES[family])
    assert torch.equal(scheduler.betas, stock(**betas).betas)
    assert scheduler.config.clip_sample is False


@pytest.mark.parametrize("name", ["clip_sample", "thresholding"])
def test_clipping_of_a_stock_config_is_turned_off_with_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = {**MARIGOLD_1_0, name: True}
    scheduler = DistributionalDDIMScheduler.from_config(config, noise_family="gaussian")
    assert scheduler.config[name] is False
    assert f"{name} is off: it would change the distribution of family 'gaussian'" in caplog.text


def test_a_config_without_clipping_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    DistributionalDDIMScheduler.from_config(MARIGOLD_1_1, noise_family="gaussian")
    assert caplog.text == ""


@pytest.mark.parametrize("family", DISTRIBUTIONAL)
def test_asking_for_clipping_with_a_law_is_an_error(family: str) -> None:
    for extra in ({"clip_sample": True}, {"thresholding": True}):
        with pytest.raises(ValueError, match="would change the distribution"):
            DistributionalDDIMScheduler(noise_family=family, **extra)
        with pytest.raises(ValueError, match="would change the distribution"):
            DistributionalDDIMScheduler.from_config(MARIGOLD_1_0, noise_family=family, **extra)


def test_clipping_defaults_to_stock_for_a_point_and_to_off_for_a_law() -> None:
    assert DistributionalDDIMScheduler().config.clip_sample is True
    assert DistributionalDDIMScheduler(noise_family="gaussian").config.clip_sample is False
    assert DistributionalDDIMScheduler.from_config({**MARIGOLD_1_0, "clip_sample": True}).config.clip_sample is True
    point = DistributionalDDIMScheduler()
    assert DistributionalDDIMScheduler.from_config(point.config, noise_family="gaussian").config.clip_sample is False


@pytest.mark.parametrize("stock", [DDIMScheduler, DDPMScheduler])
def test_a_family_survives_a_detour_through_a_saved_stock_scheduler(stock: type, tmp_path: Path) -> None:
    """Stock classes keep entries they do not know; their clipping, on by default, must not stop the way back."""
    ours = DistributionalDDIMScheduler(noise_family="low_rank", rank=2, tau=0.3)
    stock.from_config(ours.config).save_pretrained(tmp_path)
    back = DistributionalDDIMScheduler.from_pretrained(tmp_path)
    assert {name: back.config[name] for name in own_arguments(ours)} == own_arguments(ours)


def test_every_argument_survives_save_and_load(tmp_path: Path) -> None:
    scheduler = DistributionalDDIMScheduler(**EVERY_ARGUMENT)
    scheduler.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert written["_class_name"] == "DistributionalDDIMScheduler"
    assert {name: written[name] for name in EVERY_ARGUMENT} == EVERY_ARGUMENT
    loaded = DistributionalDDIMScheduler.from_pretrained(tmp_path)
    assert own_arguments(loaded) == own_arguments(scheduler)
    assert torch.equal(loaded.alphas_cumprod, scheduler.alphas_cumprod)
    assert own_arguments(DistributionalDDIMScheduler.from_config(scheduler.config)) == own_arguments(scheduler)


def test_no_argument_of_stock_is_missing_or_has_another_default() -> None:
    stock, ours = DDIMScheduler().config, DistributionalDDIMScheduler().config
    assert {name: ours[name] for name in stock if not name.startswith("_")} == {
        name: value for name, value in stock.items() if not name.startswith("_")
    }
    covered = {*EVERY_ARGUMENT, "trained_betas", "thresholding"}  # these two have tests of their own
    assert set(own_arguments(DistributionalDDIMScheduler())) == covered


@pytest.mark.parametrize("betas", [np.linspace(0.1, 0.2, 7), [0.1, 0.2, 0.3]], ids=["array", "list"])
def test_trained_betas_survive_save_and_load(betas: Any, tmp_path: Path) -> None:
    scheduler = DistributionalDDIMScheduler(
        noise_family="gaussian", trained_betas=betas, num_train_timesteps=len(betas)
    )
    scheduler.save_pretrained(tmp_path)
    loaded = DistributionalDDIMScheduler.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.betas, torch.tensor(betas, dtype=torch.float32))


def test_a_calibrated_tau_survives_saving_loading_copying_and_from_config(tmp_path: Path) -> None:
    scheduler = DistributionalDDIMScheduler(noise_family="gaussian")
    scheduler.calibrate(tau=0.125)
    scheduler.save_pretrained(tmp_path)
    others = [
        DistributionalDDIMScheduler.from_pretrained(tmp_path),
        DistributionalDDIMScheduler.from_config(scheduler.config),
        DistributionalDDIMScheduler.from_config(scheduler.config, eta=1.0),
        copy.deepcopy(scheduler),
        pickle.loads(pickle.dumps(scheduler)),
    ]
    assert [other.config.tau for other in others] == [0.125] * len(others)
    assert DistributionalDDIMScheduler.from_pretrained(tmp_path, tau=1.0).config.tau == 1.0


def test_a_family_can_be_chosen_when_a_stock_folder_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "scheduler_config.json").write_text(json.dumps(MARIGOLD_1_1))
    scheduler, unused = DistributionalDDIMScheduler.from_pretrained(
        tmp_path, noise_family="mixture", num_components=3, return_unused_kwargs=True, elsewhere=1
    )
    assert (scheduler.config.noise_family, scheduler.config.num_components) == ("mixture", 3)
    assert scheduler.config.prediction_type == "v_prediction"
    assert scheduler.alpha_bar(999) == 0
    assert unused["elsewhere"] == 1


def test_going_back_to_stock_keeps_the_schedule() -> None:
    scheduler = DistributionalDDIMScheduler.from_config(MARIGOLD_1_1, noise_family="gaussian")
    stock = DDIMScheduler.from_config(scheduler.config)
    assert torch.equal(stock.alphas_cumprod, scheduler.alphas_cumprod)
    assert stock.config.timestep_spacing == "trailing"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"noise_family": "laplace"}, "unknown noise family 'laplace'; choose one of cholesky, gaussian"),
        ({"prediction_type": "flow"}, "one of epsilon, sample, v_prediction; got 'flow'"),
        ({"num_components": 0}, "num_components must be at least 1"),
        ({"rank": -1}, "rank at least 0"),
        ({"noise_family": "low_rank"}, "family 'low_rank' needs .* a rank of at least 1; got 1 and 0"),
        ({"noise_family": "mixture"}, "family 'mixture' needs num_components of at least 2 .* got 1 and 0"),
        ({"noise_family": "low_rank_mixture", "rank": 2}, "num_components of at least 2 .* got 1 and 2"),
        ({"eta": -0.1}, "eta must be finite and at least 0"),
        ({"eta": float("nan")}, "eta must be finite and at least 0"),
        ({"tau": float("inf")}, "must be positive and finite"),
        ({"tau": 0.0}, "must be positive"),
        ({"tau": float("nan")}, "must be positive"),
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributionalDDIMScheduler(**bad)


def test_a_typo_in_an_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="noise_familly"):
        DistributionalDDIMScheduler(noise_familly="gaussian")


def test_a_bad_calibration_is_refused_and_changes_nothing() -> None:
    scheduler = DistributionalDDIMScheduler(noise_family="gaussian")
    with pytest.raises(ValueError, match="must be positive"):
        scheduler.calibrate(0.0)
    assert scheduler.config.tau == 1.0


def test_pooled_weights_reach_the_law() -> None:
    raw = torch.randn(2, 9, 4, 5, generator=torch.Generator().manual_seed(0))
    options = {"noise_family": "mixture", "num_components": 3}
    pooled = DistributionalDDIMScheduler(**options, pooled_weights=True).noise_distribution(raw).weights
    free = DistributionalDDIMScheduler(**options).noise_distribution(raw).weights
    torch.testing.assert_close(pooled, pooled[..., :1, :1].expand_as(pooled))
    assert not torch.allclose(pooled, free)
