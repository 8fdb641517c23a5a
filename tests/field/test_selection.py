"""model.noise_family auto: the family is chosen on validation trajectories, and the run is then that of the family."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marigold_uq.field.config import FieldData, FieldModel, FieldTrainConfig, PdeData, read_config
from marigold_uq.field.data import write_trajectories
from marigold_uq.field.run import train_field
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.selection import FamilyCandidate, SelectionConfig

UNET = {"block_out_channels": [8, 8], "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}
CANDIDATES = [FamilyCandidate("gaussian"), FamilyCandidate("mixture", 2)]


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """u_s = 0.7 u_{s-1} + 0.1 noise on eight points."""
    pytest.importorskip("h5py", reason="field files are HDF5")
    path, generator = tmp_path_factory.mktemp("fields") / "decaying.h5", torch.Generator().manual_seed(0)
    states = [torch.randn(20, 8, generator=generator)]
    for _ in range(4):
        states.append(0.7 * states[-1] + 0.1 * torch.randn(20, 8, generator=generator))
    array = torch.stack(states, 1).numpy()
    write_trajectories(path, [(0, array)], array.shape, np.arange(8.0), np.arange(5.0), {})
    return path


def config(data_file: Path, output: Path, **model: Any) -> FieldTrainConfig:
    options: dict[str, Any] = {"num_train_timesteps": 10, "beta_end": 0.5, "prediction_type": "v_prediction"}
    options |= {"zero_terminal_snr": True, "unet": UNET, "default_denoising_steps": 1, **model}
    optimizer = OptimizerConfig(learning_rate=5e-3, warmup_steps=1, decay="constant")
    training = TrainingConfig(
        output, 8, 4, optimizer=optimizer, ema_decay=0.9, checkpoint_every=4, validate_every=0, tracker="none", cpu=True
    )
    data = FieldData(pde=PdeData(str(data_file), test=0.2, validation=0.25))
    selection = SelectionConfig(CANDIDATES, trunk_steps=2, final_steps=2, num_units=8, ensemble_size=3)
    return FieldTrainConfig(data, FieldModel(**options), selection=selection, validation_samples=0, training=training)


def test_the_run_is_number_for_number_that_of_the_chosen_family(data_file: Path, tmp_path: Path) -> None:
    auto = config(data_file, tmp_path / "auto", noise_family="auto")
    assert train_field(auto, "text").finished
    found = json.loads((tmp_path / "auto" / "selection.json").read_text())
    chosen = FamilyCandidate(**found["chosen"])
    assert chosen in CANDIDATES
    assert found["num_units"] == 4  # validation trajectories: 8 windows are not 8 units
    assert not (tmp_path / "auto" / "selection").exists()
    assert train_field(config(data_file, tmp_path / "named", **asdict(chosen))).finished
    one, other = (FieldForecastPipeline.from_pretrained(tmp_path / name / "model") for name in ("auto", "named"))
    assert one.scheduler.config.noise_family == chosen.noise_family
    for left, right in zip(one.unet.parameters(), other.unet.parameters(), strict=True):
        assert torch.equal(left, right)

    made = (tmp_path / "auto" / "selection.json").stat().st_mtime_ns
    longer = replace(auto, training=replace(auto.training, max_steps=10))
    assert train_field(longer, "text").step == 10  # resumes with the family that was chosen
    assert (tmp_path / "auto" / "selection.json").stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="was made with other settings"):
        train_field(replace(auto, model=replace(auto.model, eta=0.5)))


def test_what_cannot_be_chosen_is_explained(data_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give num_components and rank under selection"):
        config(data_file, tmp_path, noise_family="auto", num_components=3)
    lonely = config(data_file, tmp_path / "lonely", noise_family="auto")
    assert lonely.data.pde is not None
    pde = replace(lonely.data.pde, validation=0.05)
    with pytest.raises(ValueError, match=r"at least 2 trajectories, .*; got \d windows of 1"):
        train_field(replace(lonely, data=FieldData(pde=pde)))


def test_candidates_are_read_from_flags() -> None:
    words = ["--data.pde.path", "x.h5", "--model.noise_family", "auto", "--selection.score", "energy"]
    words += ["--selection.candidates", "[{noise_family: gaussian}, {noise_family: low_rank, rank: 2}]"]
    read, text = read_config(words)
    assert read.selection.candidates == [FamilyCandidate("gaussian"), FamilyCandidate("low_rank", rank=2)]
    assert "noise_family: auto" in text
