"""The loop on a toy with a known answer: learning, batches, clipping, averages, precision, records, trackers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.toy_task import SLOPES, Points, ToyTask, assert_same_weights, metrics_of, toy_config, weights_of
from torch import Tensor, nn

from marigold_uq.training import tracking
from marigold_uq.training.config import OptimizerConfig
from marigold_uq.training.loop import NonFiniteLossError, Trainer


def test_it_learns_the_known_slopes(tmp_path: Path) -> None:
    result = Trainer(ToyTask(), toy_config(tmp_path, max_steps=200, checkpoint_every=200)).run()
    assert result.finished
    assert result.step == 200
    # 0.1 noise over the last few of 8 x 200 samples: the slopes are known to about 0.1/sqrt(100)
    torch.testing.assert_close(weights_of(tmp_path)["weight"][0], SLOPES, atol=0.05, rtol=0)


def test_the_same_effective_batch_gives_the_same_weights_for_any_micro_batch(tmp_path: Path) -> None:
    runs = [tmp_path / str(micro) for micro in (8, 4, 2, 1)]
    for run in runs:
        task = ToyTask(hidden=5)
        Trainer(task, toy_config(run, micro_batch_size=int(run.name))).run()
        assert len(task.seen) == 12 * 8 // int(run.name)
    for run in runs[1:]:
        # Sums in another order: 12 Adam steps of 0.05 amplify float32's 1e-7 where a gradient is near 0.
        assert_same_weights(weights_of(runs[0]), weights_of(run), tolerance=1e-4)
        for one, other in zip(metrics_of(runs[0]), metrics_of(run), strict=True):
            assert one == pytest.approx(other, rel=1e-3)  # the norm too: Adam alone would hide a wrong factor


class Steep(ToyTask):
    """Losses a million times as large."""

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        return 1e6 * super().losses(network, batch, generators)


def test_gradients_are_clipped_to_the_norm_and_the_true_norm_is_logged(tmp_path: Path) -> None:
    applied = []

    class Watched(Steep):
        def after_step(self, step: int) -> None:
            applied.append(1)

    rate = OptimizerConfig(learning_rate=0.05, warmup_steps=0, decay="constant", max_grad_norm=0.25)
    trainer = Trainer(Watched(), toy_config(tmp_path, optimizer=rate, max_steps=1))
    norms = []
    step = trainer.optimizer.step

    def watched_step(*args: Any, **options: Any) -> Any:
        norms.append(float(torch.cat([p.grad.flatten() for p in trainer.trainable if p.grad is not None]).norm()))
        return step(*args, **options)

    trainer.optimizer.step = watched_step
    trainer.run()
    assert norms == [pytest.approx(0.25, rel=1e-5)]
    assert metrics_of(tmp_path)[0]["gradient_norm"] > 1e5


def test_the_average_is_the_exponential_one_with_diffusers_warm_up(tmp_path: Path) -> None:
    """By hand: decay_n = min(decay, n / (n + 9)) after step n, and 0 after the first."""
    history: list[dict[str, Tensor]] = []

    class Noted(ToyTask):
        def after_step(self, step: int) -> None:
            history.append({name: value.detach().clone() for name, value in self.network.state_dict().items()})

    Trainer(Noted(), toy_config(tmp_path, ema_decay=0.4)).run()
    average = {name: torch.zeros_like(value) for name, value in history[0].items()}
    for number, weights in enumerate(history, start=1):
        decay = 0.0 if number == 1 else min(0.4, number / (number + 9))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
    assert_same_weights(weights_of(tmp_path), average, tolerance=1e-6)
    assert not torch.allclose(average["weight"], history[-1]["weight"], atol=1e-3)


def test_validation_sees_the_average_and_training_goes_on_with_the_weights(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Watched(ToyTask):
        def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
            seen.append(network.weight.detach().clone())  # type: ignore[union-attr,arg-type,operator]
            return super().validate(network, step, pictures)

    Trainer(Watched(), toy_config(tmp_path / "a", ema_decay=0.9, validate_every=6)).run()
    Trainer(ToyTask(), toy_config(tmp_path / "b", ema_decay=0.9, max_steps=6)).run()
    torch.testing.assert_close(seen[0], weights_of(tmp_path / "b")["weight"], rtol=0, atol=0)
    Trainer(ToyTask(), toy_config(tmp_path / "c", ema_decay=0.9)).run()
    assert_same_weights(weights_of(tmp_path / "a"), weights_of(tmp_path / "c"))


def test_bf16_trains_on_the_cpu_and_keeps_float32_weights(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path, mixed_precision="bf16", max_steps=100, checkpoint_every=100)).run()
    weight = weights_of(tmp_path)["weight"]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight[0], SLOPES, atol=0.1, rtol=0)  # bfloat16 has 3 digits


def test_a_process_may_train_again_in_another_precision(tmp_path: Path) -> None:
    for number, precision in enumerate(("no", "bf16", "no")):
        trainer = Trainer(ToyTask(), toy_config(tmp_path / str(number), mixed_precision=precision, max_steps=2))
        assert trainer.accelerator.mixed_precision == precision
        assert trainer.run().finished


def test_a_network_that_was_loaded_for_evaluation_is_trained_in_training_mode(tmp_path: Path) -> None:
    task = ToyTask(hidden=4, dropout=0.5)
    task.network.eval()
    modes = []
    task.network.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    Trainer(task, toy_config(tmp_path, max_steps=1)).run()
    assert modes == [True]


def test_gradient_checkpointing_is_asked_of_the_network_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear cannot checkpoint gradients"):
        Trainer(ToyTask(), toy_config(tmp_path, gradient_checkpointing=True))


def test_a_frozen_network_is_refused(tmp_path: Path) -> None:
    task = ToyTask()
    task.network.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(task, toy_config(tmp_path))


def test_a_non_finite_loss_stops_with_step_and_sample_and_leaves_the_checkpoints(tmp_path: Path) -> None:
    healthy = ToyTask(Points(32))
    Trainer(healthy, toy_config(tmp_path / "healthy", max_steps=4)).run()
    name = healthy.seen[2][5]
    task = ToyTask(Points(32, broken=int(name.removeprefix("point-"))))
    with pytest.raises(NonFiniteLossError, match=rf"loss is not finite at step 3 for samples {name};.*checkpoint-2\."):
        Trainer(task, toy_config(tmp_path / "broken", checkpoint_every=1)).run()
    kept = [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()]
    assert sorted(kept) == ["checkpoint-1", "checkpoint-2"]
    assert all(parameter.isfinite().all() for parameter in task.network.parameters())


def test_a_non_finite_gradient_stops_before_it_reaches_the_weights(tmp_path: Path) -> None:
    class InfiniteSlope(ToyTask):
        def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
            zero = 0 * super().losses(network, batch, generators)
            return zero.abs().sqrt()  # 0 with an infinite slope

    task = InfiniteSlope()
    before = task.network.weight.detach().clone()  # type: ignore[union-attr,operator]
    with pytest.raises(NonFiniteLossError, match=r"gradient is not finite at step 1 for samples point-\d+, point"):
        Trainer(task, toy_config(tmp_path)).run()
    assert torch.equal(task.network.weight, before)


def test_the_run_folder_tells_what_was_asked_for_with_which_versions_and_what_came_out(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path, validate_every=6, log_every=5)).run(config_text="a: 1\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert versions["num_processes"] == 1
    assert versions["device"] == "cpu"
    records = metrics_of(tmp_path)
    assert [(record["step"], sorted(record)) for record in records] == [
        (5, ["gradient_norm", "learning_rate", "loss", "step"]),
        (6, ["step", "validation/error"]),
        (10, ["gradient_norm", "learning_rate", "loss", "step"]),
        (12, ["gradient_norm", "learning_rate", "loss", "step"]),
        (12, ["step", "validation/error"]),
    ]
    assert records[0]["learning_rate"] == 0.05


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    Trainer(ToyTask(), toy_config(tmp_path, max_steps=11, checkpoint_every=2, checkpoint_limit=3)).run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint-10", "checkpoint-11", "checkpoint-8"]


def test_broken_samples_that_were_skipped_are_listed_with_their_reasons(tmp_path: Path) -> None:
    class Skipping(Points):
        problems = (("b.png", "corrupt"), ("a.png", "no depth"))

    Trainer(ToyTask(Skipping()), toy_config(tmp_path)).run()
    listed = json.loads((tmp_path / "data_problems.json").read_text())
    assert listed == {"a.png": "no depth", "b.png": "corrupt"}


class Drawing(ToyTask):
    """Writes a picture at each validation."""

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        pictures.mkdir(parents=True)
        Image.fromarray(np.full((4, 6, 3), step, dtype=np.uint8)).save(pictures / "sheet.png")
        return super().validate(network, step, pictures)


def test_tensorboard_gets_numbers_and_validation_pictures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Trainer(Drawing(), toy_config(tmp_path, validate_every=6, tracker="tensorboard")).run()
    (tmp_path / "validation" / "step-0000006" / "sheet.png").stat()
    events = accumulator.EventAccumulator(str(tmp_path / "marigold_uq"))
    events.Reload()
    assert {"loss", "learning_rate", "gradient_norm", "validation/error"} <= set(events.Tags()["scalars"])
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    written = [(record["step"], record["loss"]) for record in metrics_of(tmp_path) if "loss" in record]
    np.testing.assert_allclose(logged, written, rtol=1e-6)  # events hold float32
    pictures = events.Images("validation/sheet")
    assert [(picture.step, picture.height, picture.width) for picture in pictures] == [(6, 4, 6), (12, 4, 6)]


def test_a_tracker_that_is_not_installed_warns_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [])
    with pytest.warns(UserWarning, match=r"'tensorboard' is not installed.*marigold_uq\[tracking\].*metrics.jsonl"):
        result = Trainer(Drawing(), toy_config(tmp_path, validate_every=6, tracker="tensorboard")).run()
    assert result.finished
    assert len(metrics_of(tmp_path)) == 14
    assert not (tmp_path / "marigold_uq").exists()
    assert (tmp_path / "validation" / "step-0000012" / "sheet.png").exists()
