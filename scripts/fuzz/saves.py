"""The saves that `crash_points` disturbs: training, exports, caches, cells, calibrations."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from support.depth_record import random_record
from support.tiny_depth import tiny_pipeline
from support.tiny_field import tiny_pipeline as tiny_field_pipeline
from support.tiny_field import tiny_trajectories
from support.toy_task import Points, ToyTask, metrics_of, toy_config, weights_of

from marigold_uq.calibration import Calibration
from marigold_uq.depth.calibration.options import DepthCalibration
from marigold_uq.depth.calibration.pipelines import _write_copy
from marigold_uq.depth.data.shards import write_shard
from marigold_uq.depth.export import FORMATS, export
from marigold_uq.field import calibrate as field_calibration
from marigold_uq.field.data import KuramotoSivashinsky, generate
from marigold_uq.files import clear_leftovers, fingerprint
from marigold_uq.hub import make_card
from marigold_uq.results import write_json
from marigold_uq.training.loop import Trainer
from scripts.fuzz.crash_points import Save
from scripts.studies.uci.cells import Cell, CellKey, CellStore


class Training(Save):
    """A finished run is extended: three checkpoints, of which two are kept, metrics, and a model over the old one."""

    first, last = 2, 8

    def prepare(self, folder: Path) -> None:
        """The short run, and one that is extended undisturbed."""
        self._train(folder, self.first)
        for steps in (self.first, self.last):
            self._train(folder.parent / "whole", steps)

    def save(self, folder: Path) -> None:
        self._train(folder, self.last)

    def check(self, folder: Path) -> None:
        clear_leftovers(folder)
        weights = weights_of(folder)
        first = torch.load(folder.parent / "before" / "model" / "weights.pt")
        last = weights_of(folder.parent / "whole")
        same = [all(torch.equal(weights[name], one[name]) for name in one) for one in (first, last)]
        assert any(same), "the model is neither the old nor the new one"

    def check_end(self, folder: Path) -> None:
        whole = folder.parent / "whole"
        weights, expected = weights_of(folder), weights_of(whole)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), "other weights"
        assert metrics_of(folder) == metrics_of(whole), "other metrics"
        newest = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert newest == sorted(path.name for path in (whole / "checkpoints").iterdir()), f"checkpoints {newest}"

    def _train(self, output: Path, steps: int) -> None:
        changes = {"max_steps": steps, "checkpoint_every": 2, "checkpoint_limit": 2, "ema_decay": 0.9}
        task = ToyTask(Points(44), hidden=6, dropout=0.4)
        Trainer(task, toy_config(output, validate_every=4, **changes)).run(config_text=f"steps: {steps}\n")


class Written(Save, ABC):
    """Files that are the same whenever they are written: each must be that of before or of after, byte for byte."""

    results: tuple[str, ...]
    """Files and folders that count."""

    @abstractmethod
    def write(self, folder: Path, version: int) -> None:
        """Version 0 is there before, version 1 is saved over it."""

    def prepare(self, folder: Path) -> None:
        self.write(folder, 0)
        for name, versions in (("old", (0,)), ("new", (0, 1))):
            made = folder.parent / name
            made.mkdir()
            for version in versions:
                self.write(made, version)

    def save(self, folder: Path) -> None:
        self.write(folder, 1)

    def check(self, folder: Path) -> None:
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            clear_leftovers(place)
        for name in self.results:
            allowed = [_contents(folder.parent / which / name) for which in ("old", "new")]
            assert _contents(folder / name) in allowed, f"{name} is neither the old nor the new one"

    def check_end(self, folder: Path) -> None:
        for name in self.results:
            assert _contents(folder / name) == _contents(folder.parent / "new" / name), f"{name} is not the new one"


def _contents(path: Path) -> str | None:
    """A fingerprint of a file or folder; None where there is none."""
    return fingerprint(path) if path.exists() else None


class Export(Written):
    """All formats of a depth map, over those of another one."""

    def __init__(self) -> None:
        self.record = random_record()
        self.results = tuple(path.name for path in self._paths())

    def _paths(self) -> list[Path]:
        from marigold_uq.depth.export import output_paths

        return list(output_paths(Path(), "photo", list(FORMATS), self.record.layers))

    def write(self, folder: Path, version: int) -> None:
        record = dataclasses.replace(self.record, depth=self.record.depth + version)
        export(record, folder, "photo", list(FORMATS), overwrite=True)


class Forecast(Written):
    """A forecast as netCDF and zarr, which never replace anything."""

    results = ("forecast.zarr",)

    def write(self, folder: Path, version: int) -> None:
        if version == 0 or (folder / self.results[0]).exists():
            return
        states = torch.stack([tiny_trajectories().read(0, 0, 2)])
        generator = torch.Generator().manual_seed(0)
        tiny_field_pipeline()(states, 2, ensemble_size=2, generator=generator).save(folder / self.results[0])


class DepthModel(Written):
    """The calibrated copy of a depth model."""

    results = ("start", "calibrated")

    def write(self, folder: Path, version: int) -> None:
        if version == 0:
            tiny_pipeline("gaussian").save_pretrained(folder / "start")
        elif not (folder / "calibrated").exists():
            pipeline = tiny_pipeline("gaussian").calibrate(Calibration(kappa=1.5, uncertainty="ensemble"))
            options = DepthCalibration(str(folder / "start"), folder / "calibrated")
            _write_copy(pipeline, options)


class FieldModel(Written):
    """The calibrated model of a field run and, last, what was found."""

    results = ("calibrated", "calibration.json")

    def write(self, folder: Path, version: int) -> None:
        if version == 0:
            tiny_field_pipeline().save_pretrained(folder / "model")
            (folder / "config.yaml").write_text(yaml.safe_dump({}))
            return
        if (folder / "calibration.json").exists():
            return
        config = mock.Mock()
        config.training.seed = 0
        with mock.patch.multiple(  # the numbers do not matter here, the files do
            field_calibration,
            read_config=lambda words: (config, ""),
            open_split=lambda data: mock.Mock(),
            load_quietly=lambda model: tiny_field_pipeline(),
            require_data=lambda encoder, data: None,
            target_hours=lambda data: None,
            calibrate_field=lambda pipeline, *rest, **more: (
                pipeline.calibrate(Calibration(kappa=1.5)) and {"kappa": 1.5}
            ),
            calibration_settings=lambda run, options: {},
        ):
            field_calibration.calibrate_run(folder, field_calibration.CalibrationOptions())


class Cells(Written):
    """Splits of an unfinished cell, another one, then the finished cell."""

    results = ("cells",)  # parts of a finished cell may stay behind: nobody reads them

    def write(self, folder: Path, version: int) -> None:
        store, key = CellStore(folder), CellKey("default", "gaussian", "concrete", 40)
        if version == 0:
            store.save_splits(key, {"seed": 0}, [{"crps": 1.0}])
        elif store.load(key) is None:
            splits: list[Any] = [{"crps": 1.0}, {"crps": 2.0}]
            store.save_splits(key, {"seed": 0}, splits)
            store.save(Cell(key, 40, splits, {"identity": {"seed": 0}}))

    def check(self, folder: Path) -> None:
        """Nothing that was finished may be lost; the parts of a finished cell are not needed."""
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            clear_leftovers(place)
        store, key = CellStore(folder), CellKey("default", "gaussian", "concrete", 40)
        cell = store.load(key)
        splits = store.load_splits(key, {"seed": 0}) if cell is None else cell.splits
        assert splits[0] == {"crps": 1.0}, "a split is lost"


class Latents(Written):
    """A shard of ready-made latents."""

    results = ("0000000", "0000002")

    def write(self, folder: Path, version: int) -> None:
        target = folder / self.results[version]
        if not target.exists():
            write_shard(target, {"image_latent": np.arange(16.0).reshape(2, 8) + version}, ["a", "b"])


class Generated(Written):
    """A field file, batch by batch."""

    results = ("ks.h5",)

    def write(self, folder: Path, version: int) -> None:
        target = folder / "ks.h5"
        if version and not target.exists():
            equation = KuramotoSivashinsky(num_points=16, num_states=3, length=20.0)
            generate(equation, target, 4, batch_size=2, progress=False)


class Card(Written):
    """The card of a model and numbers beside it, written anew."""

    results = ("model/README.md", "numbers.json")

    def write(self, folder: Path, version: int) -> None:
        if version == 0:
            tiny_pipeline("gaussian").save_pretrained(folder / "model")
        make_card(folder, repo_id=f"someone/model-{version}", overwrite=True)
        write_json(folder / "numbers.json", {"version": version, "text": "x" * 5000}, overwrite=True)

    def check(self, folder: Path) -> None:
        super().check(folder)
        json.loads((folder / "numbers.json").read_text())


SAVES: dict[str, type[Save]] = {
    "training": Training,
    "export": Export,
    "forecast": Forecast,
    "depth_model": DepthModel,
    "field_model": FieldModel,
    "cells": Cells,
    "latents": Latents,
    "generated": Generated,
    "card": Card,
}
