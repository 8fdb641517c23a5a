"""What is fuzzed: each part makes a case from a random generator and runs it; only the errors it names may come out.

A part is a class with `errors` and `run(rng)`; `run` returns a word for the outcome. What it needs it makes once, in a
folder of its own.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from PIL import Image, features
from support.colmap_models import write_binary_model, write_text_model
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import picture
from support.tiny_depth import tiny_pipeline as tiny_depth_pipeline
from support.tiny_field import tiny_pipeline as tiny_field_pipeline
from support.tiny_field import tiny_trajectories
from support.tiny_sets import quick_model
from support.toy_task import ToyTask, toy_config
from support.weather_records import record

from marigold_uq.array_files import ArrayFileError, read_npy, read_npz
from marigold_uq.commands.depth import DepthOptions
from marigold_uq.commands.runner import run_command
from marigold_uq.depth.data import SPECS, DepthDataError, ListedDepth
from marigold_uq.depth.metric_points import read_metric_points
from marigold_uq.field.data import Trajectories, open_weather, read_trajectories
from marigold_uq.field.data.storage import write_trajectories
from marigold_uq.models.field_grid import FieldDataError
from marigold_uq.picture_files import ImageError
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.images import load_images
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.tabular.pipeline import TabularRegressionPipeline
from marigold_uq.tabular.data import TableError, TableSource, read_table
from marigold_uq.training.loop import Trainer
from scripts.fuzz.damage import Bomb, damaged, with_wrong_value

Random = np.random.Generator
_MARGINAL: dict[str, Any] = {"uncertainty": "marginal", "ensemble_size": 3, "processing_resolution": 32}


class Part(ABC):
    """One thing to fuzz."""

    errors: ClassVar[tuple[type[Exception], ...]] = (ValueError, OSError)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.witness = folder / "code-was-executed"
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def run(self, rng: Random) -> None:
        """One case; raises one of `errors` or gives a result."""

    def write(self, name: str, content: bytes) -> Path:
        """A file of this case."""
        path = self.folder / name
        path.write_bytes(content)
        return path


class Pictures(Part):
    """Files in all formats, damaged; the error names the file."""

    errors = (ImageError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = _pictures()

    def run(self, rng: Random) -> None:
        suffix, content = self.files[int(rng.integers(len(self.files)))]
        path = self.write(f"case{suffix}", damaged(content, rng))
        _load_named(path)


def _load_named(path: Path) -> None:
    try:
        (tensor,) = load_images(path, max_pixels=10**6)
    except ImageError as error:
        if str(path) not in str(error):
            raise RuntimeError("the message does not name the file") from error
        raise
    assert tensor.ndim == 3
    assert bool(tensor.isfinite().all())


def _pictures() -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65536, (12, 16), dtype=np.uint16))
    grey, palette, alpha = colour.convert("L"), colour.convert("P"), colour.convert("RGBA")
    kinds: list[tuple[str, Image.Image, dict[str, Any]]] = [
        (".png", colour, {}), (".png", palette, {}), (".png", alpha, {}), (".png", deep, {}), (".jpg", colour, {}),
        (".jpg", grey, {"progressive": True}), (".jpg", colour.convert("CMYK"), {}), (".gif", palette, {}),
        (".gif", palette, {"save_all": True, "append_images": [palette]}), (".bmp", colour, {}), (".ppm", colour, {}),
        (".pgm", grey, {}), (".tif", colour, {}), (".tif", deep, {"compression": "tiff_adobe_deflate"}),
        (".tif", colour, {"compression": "tiff_lzw"}), (".webp", colour, {}), (".webp", alpha, {"lossless": True}),
    ]  # fmt: skip
    kinds += [(".jp2", colour, {})] if features.check("jpg_2000") else []
    kinds += [(".avif", colour, {})] if features.check("avif") else []
    return [(suffix, _saved(image, suffix, **options)) for suffix, image, options in kinds]


def _saved(image: Image.Image, suffix: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=Image.registered_extensions()[suffix], **options)
    return buffer.getvalue()


class Exif(Part):
    """Whole pictures whose EXIF is random: wrong types, counts and offsets around a true orientation."""

    errors = (ImageError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        image = Image.fromarray(np.zeros((6, 8, 3), np.uint8))
        self.kinds = [(suffix, image) for suffix in (".jpg", ".png", ".webp", ".tif")]

    def run(self, rng: Random) -> None:
        suffix, image = self.kinds[int(rng.integers(len(self.kinds)))]
        block = _exif(rng)
        if suffix == ".tif":  # its own tags are of the same kind
            content = damaged(_saved(image, suffix), rng)
        else:
            content = _saved(image, suffix, exif=b"Exif\0\0" + block)
        _load_named(self.write(f"case{suffix}", content))


def _exif(rng: Random) -> bytes:
    """A TIFF block with 1 to 8 entries of any tag, type, count and value, the orientation often among them."""
    order = "<" if rng.integers(2) else ">"
    common = (0x0112, 0x011A, 0x011B, 0x0128, 0x8769, 0x8825, 0xA005, 0x0201, 0x010F)
    entries = []
    for _ in range(int(rng.integers(1, 9))):
        tag = common[int(rng.integers(len(common)))] if rng.integers(4) else int(rng.integers(65536))
        count = int(rng.choice([0, 1, 1, 1, 2, 4, 5, 1000, 2**32 - 1]))
        value = (
            rng.integers(0, 256, 4, dtype=np.uint8).tobytes() if rng.integers(2) else struct.pack(order + "HH", 6, 0)
        )
        entries.append(struct.pack(order + "HHI", tag, int(rng.integers(0, 14)), count) + value)
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8)
    block = head + struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4) + bytes(int(rng.integers(40)))
    return damaged(block, rng) if rng.integers(3) == 0 else block


class Arrays(Part):
    """npy and npz, with pickles among them."""

    errors = (ArrayFileError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        array, plain, packed, zipped = np.arange(12.0).reshape(3, 4), io.BytesIO(), io.BytesIO(), io.BytesIO()
        np.save(plain, array)
        np.savez(packed, x=array)
        np.savez_compressed(zipped, x=array)
        objects = np.empty(1, object)
        objects[0] = Bomb(self.witness)
        harmful, archive = io.BytesIO(), io.BytesIO()
        np.save(harmful, objects, allow_pickle=True)
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("x.npy", harmful.getvalue())
        self.plain, self.archives = [plain, harmful], [packed, zipped, archive]

    def run(self, rng: Random) -> None:
        if rng.integers(2):
            read_npy(damaged(self.plain[int(rng.integers(2))].getvalue(), rng), "case.npy", max_bytes=10**7)
        else:
            content = self.archives[int(rng.integers(3))].getvalue()
            read_npz(damaged(content, rng) if rng.integers(9) else content, "case.npz", ["x"], max_bytes=10**7)


class Fields(Part):
    """HDF5 files of ours."""

    errors = (FieldDataError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / "whole.h5"
        path.unlink(missing_ok=True)
        states = np.zeros((2, 3, 8), np.float32)
        write_trajectories(path, [(0, states)], states.shape, np.arange(8.0), np.arange(3.0), {"seed": 0})
        self.content = path.read_bytes()

    def run(self, rng: Random) -> None:
        found = read_trajectories(self.write("case.h5", damaged(self.content, rng)), max_bytes=10**7)
        assert isinstance(found, Trajectories)


class Weather(Part):
    """netCDF files and zarr folders."""

    errors = (FieldDataError, FileNotFoundError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        data = record(8, step=20.0)
        self.netcdf, self.zarr = folder / "whole.nc", folder / "whole.zarr"
        if not self.netcdf.exists():
            data.to_netcdf(self.netcdf)
        shutil.rmtree(self.zarr, ignore_errors=True)
        data.to_zarr(self.zarr, zarr_format=2)

    def run(self, rng: Random) -> None:
        if rng.integers(2):
            path = self.write("case.nc", damaged(self.netcdf.read_bytes(), rng))
        else:
            path = self.folder / "case.zarr"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.zarr, path)
            files = sorted(file for file in path.rglob("*") if file.is_file())
            file = files[int(rng.integers(len(files)))]
            file.write_bytes(damaged(file.read_bytes(), rng))
        data = open_weather(str(path), ["2m_temperature"])
        data.read(0, 0, 2)


class Tables(Part):
    """CSV files and npz tables."""

    errors = (TableError, ArrayFileError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rows = "\n".join(f"{i},{i * 0.5},{'ab'[i % 2]},{i + 0.25}" for i in range(12))
        self.csv = f"a,b,c,y\n{rows}\n".encode()
        buffer = io.BytesIO()
        np.savez(buffer, X=np.zeros((4, 2)), y=np.zeros(4))
        self.npz = buffer.getvalue()

    def run(self, rng: Random) -> None:
        if rng.integers(2):
            read_table(TableSource(self.write("case.csv", damaged(self.csv, rng)), target=["y"]))
        else:
            read_table(TableSource(self.write("case.npz", damaged(self.npz, rng)), max_bytes=10**7))


class Indices(Part):
    """Lists of files: nothing outside the folder is read."""

    errors = (DepthDataError, ValueError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "set").mkdir(exist_ok=True)
        Image.fromarray(np.zeros((6, 8, 3), np.uint8)).save(folder / "set" / "a.png")
        Image.fromarray(np.full((6, 8), 1000, np.uint16)).save(folder / "set" / "d.png")
        (folder / "outside.png").write_bytes((folder / "set" / "a.png").read_bytes())

    def run(self, rng: Random) -> None:
        names = ["a.png", "d.png", "../outside.png", str(self.folder / "outside.png"), "set/../../outside.png", "", "."]
        line = " ".join(names[int(rng.integers(len(names)))] for _ in range(int(rng.integers(1, 4))))
        content = "\n".join(["a.png d.png", line]).encode()
        path = self.write("list.txt", damaged(content, rng) if rng.integers(2) else content)
        data = ListedDepth(SPECS["scannet"], self.folder / "set", path)
        for index in range(len(data)):
            sample = data.read(index)
            assert "outside" not in sample["name"], "a file outside the folder was read"


class Points(Part):
    """Metric points as CSV and as COLMAP models, text and binary."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        shutil.rmtree(folder / "text", ignore_errors=True)
        shutil.rmtree(folder / "binary", ignore_errors=True)
        write_text_model(folder / "text")
        write_binary_model(folder / "binary")
        self.models = [list((folder / kind).iterdir()) for kind in ("text", "binary")]
        self.csv = b"x,y,depth,image\n1,2,3,a.jpg\n4,5,6,a.jpg\n7,8,9,b.jpg\n"

    def run(self, rng: Random) -> None:
        path, kind = self.folder / "case", int(rng.integers(3))
        shutil.rmtree(path, ignore_errors=True)
        if kind == 2:
            path = self.write("case.csv", damaged(self.csv, rng))
        else:
            shutil.copytree(self.models[kind][0].parent, path)
            file = path / self.models[kind][int(rng.integers(3))].name
            file.write_bytes(damaged(file.read_bytes(), rng))
        try:
            read = read_metric_points(path)
        except ValueError as error:
            if str(path) not in str(error):
                raise RuntimeError("the message does not name the file") from error
            raise
        for points in read.by_picture.values():
            found = points.at_size(64, 48)
            assert np.isfinite(found.xy).all()
            assert np.isfinite(found.depth).all()


class Configs(Part):
    """YAML of the depth command: one line of error and exit code 2, or options."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.content = {
            "images": ["a.png"], "output": "out", "model": "embedded", "uncertainty": "ensemble", "ensemble_size": 4,
            "coverage": 0.9, "formats": ["npz", "color"], "seed": 1, "overwrite": True, "max_pixels": 1000,
        }  # fmt: skip

    def run(self, rng: Random) -> None:
        text = yaml.safe_dump(with_wrong_value(self.content, rng)).encode()
        if rng.integers(3) == 0:
            text = damaged(text, rng)
        if rng.integers(20) == 0:
            text += b"\nmodel: !!python/object/apply:os.mkdir ['" + str(self.witness).encode() + b"']\n"
        path = self.write("case.yaml", text)
        try:
            code = run_command("fuzz", DepthOptions, lambda *_: 0, ["--config", str(path)])
        except SystemExit as leave:
            code = leave.code  # type: ignore[assignment]
        assert code in (0, 2), f"exit code {code}"
        if code == 2:
            raise ValueError("refused")


class Models(Part):
    """Saved pipelines of all tasks with one wrong value, damaged bytes or a pickle; loaded and called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        table = quick_model(num_models=1, max_epochs=1, baseline_epochs=1)
        rng = np.random.default_rng(0)
        features = rng.normal(size=(30, 2))
        table.fit(features, features.sum(1))
        made: dict[str, Any] = {
            "depth": tiny_depth_pipeline("gaussian"),
            "conditioned": conditioned_pipeline("low_rank"),
            "field": tiny_field_pipeline(),
            "tabular": table.pipeline_,
        }
        for name, pipeline in made.items():
            pipeline.save_pretrained(folder / name)
        states = torch.stack([tiny_trajectories().read(0, 0, 2)])
        self.calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "depth": (MarigoldUQDepthPipeline, lambda pipeline: pipeline(picture(8, 8), processing_resolution=8)),
            "conditioned": (MarigoldUQDepthPipeline, lambda pipeline: pipeline(picture(32, 32), **_MARGINAL)),
            "field": (FieldForecastPipeline, lambda pipeline: pipeline(states, 1, ensemble_size=2)),
            "tabular": (TabularRegressionPipeline, lambda pipeline: pipeline(features[:2], 2)),
        }

    def run(self, rng: Random) -> None:
        name = list(self.calls)[int(rng.integers(len(self.calls)))]
        case = self.folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self.folder / name, case)
        files = sorted(file for file in case.rglob("*") if file.is_file())
        self._change(files[int(rng.integers(len(files)))], rng)
        kind, call = self.calls[name]
        pipeline = kind.from_pretrained(case)
        pipeline.set_progress_bar_config(disable=True)
        call(pipeline)

    def _change(self, file: Path, rng: Random) -> None:
        how = rng.integers(4)
        if how == 0:
            file.write_bytes(damaged(file.read_bytes(), rng))
        elif file.suffix == ".json":
            content = with_wrong_value(json.loads(file.read_text()), rng)
            file.write_text(json.dumps(content))
        else:
            torch.save(Bomb(self.witness), file if how == 1 else file.with_suffix(".bin"))
            if how == 2:
                file.unlink()


class Checkpoints(Part):
    """Checkpoints of a training with damaged bytes, a pickle or a missing file; resumed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.whole = folder / "whole"
        if not self.whole.exists():
            Trainer(ToyTask(), toy_config(self.whole, max_steps=2, checkpoint_every=2, ema_decay=0.9)).run()

    def run(self, rng: Random) -> None:
        case = self.folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self.whole, case)
        files = sorted(path for path in (case / "checkpoints" / "checkpoint-2").iterdir() if path.is_file())
        file = files[int(rng.integers(len(files)))]
        how = rng.integers(4)
        if how == 0:
            torch.save(Bomb(self.witness), file)
        elif how == 1:
            torch.save({"states": [Bomb(self.witness)], "validated": 0}, file)
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        Trainer(ToyTask(), toy_config(case, max_steps=3, checkpoint_every=3, ema_decay=0.9)).run()


class Calls(Part):
    """Numeric calls of all pipelines: any shape, type and value."""

    errors = (ValueError, TypeError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        models = Models(folder)
        self.pipelines = {name: kind.from_pretrained(folder / name) for name, (kind, _) in models.calls.items()}
        for pipeline in self.pipelines.values():
            pipeline.set_progress_bar_config(disable=True)

    def run(self, rng: Random) -> None:
        name = list(self.pipelines)[int(rng.integers(len(self.pipelines)))]
        usual = {"depth": (8, 8, 3), "conditioned": (16, 16, 3), "field": (1, 2, 1, 16), "tabular": (3, 2)}[name]
        values = _any_array(rng, usual)
        options = {"num_inference_steps": _any_number(rng), "ensemble_size": _any_number(rng)}
        if rng.integers(2):
            options["coverage"] = [0.9, 0.0, 1.0, -1, 2, float("nan")][int(rng.integers(6))]
        output = self.pipelines[name](values, **options)
        found = output.prediction if name in ("depth", "conditioned") else output.samples
        if (
            bool(np.isfinite(np.asarray(values, np.float64)).all())
            and np.abs(np.asarray(values, np.float64)).max() < 10
        ):
            assert bool(np.isfinite(np.asarray(found)).all()), "numbers in range gave NaN"


def _any_number(rng: Random) -> Any:
    return [1, 1, 1, 2, 2, 3, 0, -1, 1.5, "x", True][int(rng.integers(11))]


def _any_array(rng: Random, usual: tuple[int, ...]) -> np.ndarray:
    shape = list(usual)
    if rng.integers(3) == 0:
        shape[int(rng.integers(len(shape)))] = int(rng.choice([0, 1, 2, 5]))
    if rng.integers(6) == 0:
        shape = shape[1:]
    values = rng.random(shape) * float(rng.choice([1, 1, 1, 1e-300, 1e30, 1e300, 0]))
    if rng.integers(6) == 0 and values.size:
        values.flat[int(rng.integers(values.size))] = rng.choice([np.nan, np.inf, -np.inf])
    kind = rng.choice(
        ["float64", "float64", "float32", "float16", "int64", "uint8", "bool", "complex128", "object", "U8"]
    )
    with np.errstate(all="ignore"):
        return values.astype(kind)


PARTS: dict[str, type[Part]] = {
    re.sub("(?<!^)([A-Z])", r"_\1", part.__name__).lower(): part
    for part in (Pictures, Exif, Arrays, Fields, Weather, Tables, Indices, Points, Configs, Models, Checkpoints, Calls)
}
