"""The `marigold-uq` command, run as a user would, on random weights."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from support.cli_runs import depth, read_npz, run, save_models, save_picture

import marigold_uq
from marigold_uq.cli import COMMANDS
from marigold_uq.commands import depth as depth_command
from marigold_uq.commands import pictures
from marigold_uq.commands.depth import DepthOptions
from marigold_uq.commands.runner import Command
from marigold_uq.depth import model as model_command
from marigold_uq.depth.export import FORMATS


def made(folder: Path) -> set[str]:
    """Names of the outputs, without the records of what made them."""
    return {path.name for path in folder.iterdir() if path.suffix != ".json"}


DEFAULT_ENDINGS = [".npz", "_depth_color.png", "_uncertainty_color.png", "_sheet.png"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(3):
        save_picture(folder / f"p{index}.png", seed=index)
    return folder


# ------------------------------------------------------------------------------------------------------ many images


def test_a_broken_image_is_reported_at_the_end_and_the_rest_is_done(models, photos, tmp_path, capsys):
    (photos / "p1b.png").write_text("not a picture")
    (photos / "p0b.jpg").write_bytes(b"")
    (photos / "notes.txt").write_text("left alone")
    assert depth(models, photos, "-o", tmp_path / "out") == 1
    printed = capsys.readouterr()
    done = [line for line in printed.out.splitlines() if "mean uncertainty" in line]
    assert [line.split(":")[0] for line in done] == ["p0.png", "p1.png", "p2.png"]
    assert all("16 x 12" in line and "4 files" in line for line in done)
    failed = [line for line in printed.err.splitlines() if line.startswith("failed")]
    assert len(failed) == 2
    assert "p0b.jpg is empty" in failed[0]
    assert "p1b.png is not an image" in failed[1]
    expected = {f"p{i}{ending}" for i in range(3) for ending in DEFAULT_ENDINGS}
    assert made(tmp_path / "out") == expected


def test_an_unexpected_error_of_one_image_does_not_stop_the_others(models, photos, tmp_path, capsys, monkeypatch):
    """Whatever a decoder, the network or a format of the output raises: a night's work must not end with it."""
    load = pictures.read_array

    def fail(path, limit):
        if path.name == "p1.png":
            raise TypeError("a decoder met what its authors did not think of")
        return load(path, limit)

    monkeypatch.setattr(pictures, "read_array", fail)
    assert depth(models, photos, "-o", tmp_path / "out") == 1
    printed = capsys.readouterr()
    assert "p1.png: TypeError: a decoder met" in printed.err
    assert {path.stem for path in (tmp_path / "out").glob("*.npz")} == {"p0", "p2"}


def test_pictures_above_the_limit_are_refused_with_their_size(models, photos, tmp_path, capsys):
    save_picture(photos / "large.png", height=40, width=50)
    assert depth(models, photos, "-o", tmp_path / "out", "--max_pixels", 500) == 1
    assert "large.png has 50 x 40 = 2,000 pixels, more than the 500 allowed" in capsys.readouterr().err
    assert depth(models, photos, "-o", tmp_path / "out", "--max_pixels", 0) == 0


def test_a_name_that_no_encoding_can_say_does_not_stop_the_batch(models, photos, tmp_path):
    (photos / "p0.png").rename(photos / os.fsdecode(b"p\xff.png"))
    words = ["depth", photos, "-o", tmp_path / "out", "--model", models / "gaussian", "--device", "cpu"]
    command = [sys.executable, "-m", "marigold_uq.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert done.returncode == 0, done.stderr.decode()
    assert b"p\\udcff.png: 16 x 12" in done.stdout
    assert len(made(tmp_path / "out")) == 3 * len(DEFAULT_ENDINGS)


def test_finished_images_are_skipped_unfinished_ones_made_and_overwrite_makes_all_again(
    models, photos, tmp_path, capsys
):
    out = tmp_path / "out"
    assert depth(models, photos, "-o", out) == 0
    for name in made(out):
        (out / name).write_bytes(b"mine")
    (out / "p1_sheet.png").unlink()
    capsys.readouterr()
    assert depth(models, photos, "-o", out) == 0
    assert capsys.readouterr().out.count("done before, skipped") == 2
    assert (out / "p0.npz").read_bytes() == b"mine"
    assert read_npz(out / "p1.npz")["depth"].shape == (12, 16)
    assert depth(models, photos, "-o", out, "--overwrite") == 0
    assert read_npz(out / "p0.npz")["depth"].shape == (12, 16)
    assert "skipped" not in capsys.readouterr().out


def test_the_same_seed_gives_the_same_file_alone_or_in_company_and_another_seed_another(models, photos, tmp_path):
    depth(models, photos, "-o", tmp_path / "all")
    depth(models, photos / "p2.png", "-o", tmp_path / "one", "--batch_size", 3)
    depth(models, photos / "p2.png", "-o", tmp_path / "other", "--seed", 1)
    company, alone, other = (read_npz(tmp_path / name / "p2.npz") for name in ("all", "one", "other"))
    assert set(company) == {"depth", "uncertainty", "metadata"}
    for name in ("depth", "uncertainty"):
        assert np.abs(company[name] - alone[name]).max() < 1e-5  # batches of 1 and 3 round differently
        assert np.abs(company[name] - other[name]).max() > 1e-3
    assert (tmp_path / "all" / "p2_depth_color.png").read_bytes() == (
        tmp_path / "one" / "p2_depth_color.png"
    ).read_bytes()


def test_the_data_file_says_what_made_it(models, photos, tmp_path):
    depth(models, photos / "p0.png", "-o", tmp_path / "out", "--seed", 5, "--num_inference_steps", 1, "--coverage", 0.9)
    content = read_npz(tmp_path / "out" / "p0.npz")
    metadata = json.loads(str(content["metadata"]))
    assert metadata["model"] == str(models / "gaussian")
    chosen = {"seed": 5, "num_inference_steps": 1, "ensemble_size": 3, "uncertainty": "trajectory", "units": "relative"}
    assert {name: metadata[name] for name in chosen} == chosen
    assert content["coverage"] == 0.9
    assert content["interval"].shape == (2, 12, 16)
    assert (content["interval"][0] <= content["depth"]).mean() > 0.9


def test_every_format_is_written_and_nothing_else(models, photos, tmp_path):
    out = tmp_path / "out"
    words = ["--formats", *FORMATS, "--uncertainty", "ensemble", "--output_epistemic"]
    assert depth(models, photos / "p0.png", "-o", out, *words) == 0
    maps = ("depth", "uncertainty", "epistemic")
    data = [f"p0_{name}{ending}" for name in maps for ending in ("_16bit.png", ".tiff")]
    pictures = [f"p0_{name}_color.png" for name in maps]
    assert made(out) == {*data, *pictures, "p0.npz", "p0.ply", "p0_sheet.png"}


def test_files_that_would_be_written_alike_are_refused_and_below_one_folder_keep_apart(
    models, photos, tmp_path, capsys
):
    other = tmp_path / "others"
    other.mkdir()
    save_picture(other / "p0.png", seed=9)
    out = tmp_path / "out"
    assert depth(models, photos, other, "-o", out, "--formats", "npz") == 2
    told = capsys.readouterr().err
    assert f"{photos / 'p0.png'} and {other / 'p0.png'} would both be written as p0" in told
    assert depth(models, tmp_path, "-o", out, "--formats", "npz", "--recursive") == 0
    found = {path.relative_to(out).as_posix() for path in out.rglob("*.npz")}
    assert found == {"photos/p0.npz", "photos/p1.npz", "photos/p2.npz", "others/p0.npz"}


def test_files_that_differ_by_their_suffix_alone_need_it_in_their_names(models, photos, tmp_path, capsys):
    save_picture(photos / "p0.jpg", seed=9)
    assert depth(models, photos, "-o", tmp_path / "out", "--formats", "npz") == 2
    assert "--keep_suffix" in capsys.readouterr().err
    assert depth(models, photos, "-o", tmp_path / "out", "--formats", "npz", "--keep_suffix") == 0
    assert made(tmp_path / "out") == {"p0.jpg.npz", "p0.png.npz", "p1.png.npz", "p2.png.npz"}


def test_folders_inside_folders_are_for_recursive(models, photos, tmp_path):
    inner = photos / "inner"
    inner.mkdir()
    save_picture(inner / "deep.png")
    depth(models, photos, "-o", tmp_path / "flat", "--formats", "npz")
    depth(models, photos, "-o", tmp_path / "deep", "--formats", "npz", "--recursive")
    assert not (tmp_path / "flat" / "deep.npz").exists()
    assert (tmp_path / "deep" / "inner" / "deep.npz").exists()


def test_a_model_without_a_variance_head_gives_depth_alone_unless_an_ensemble_is_asked_for(models, photos, tmp_path):
    image = photos / "p0.png"
    assert depth(models, image, "-o", tmp_path / "a", family="point") == 0
    assert made(tmp_path / "a") == {"p0.npz", "p0_depth_color.png", "p0_sheet.png"}
    assert "uncertainty" not in read_npz(tmp_path / "a" / "p0.npz")
    assert depth(models, image, "-o", tmp_path / "b", "--uncertainty", "ensemble", family="point") == 0
    assert read_npz(tmp_path / "b" / "p0.npz")["uncertainty"].mean() > 0
    assert depth(models, image, "-o", tmp_path / "c", "--coverage", 0.5, family="point") == 0
    assert read_npz(tmp_path / "c" / "p0.npz")["interval"].shape == (2, 12, 16)


# ------------------------------------------------------------------------------------------------- options and errors


def test_a_config_file_gives_options_and_words_on_the_line_win(models, photos, tmp_path):
    config = tmp_path / "options.yaml"
    config.write_text(
        f"images: [{photos}]\nmodel: {models / 'gaussian'}\nensemble_size: 2\nformats: [npz, tiff]\nseed: 3\n"
    )
    assert run("depth", "--config", config, "-o", tmp_path / "out", "--seed", 4, "--device", "cpu") == 0
    assert len(list((tmp_path / "out").glob("*.tiff"))) == 6
    metadata = json.loads(str(read_npz(tmp_path / "out" / "p0.npz")["metadata"]))
    assert (metadata["ensemble_size"], metadata["seed"]) == (2, 4)


SINGLE = {name: command for name, command in COMMANDS.items() if isinstance(command, Command)}


@pytest.mark.parametrize("command", SINGLE)
def test_help_lists_every_option_with_a_description(command, capsys):
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    module, _, name = SINGLE[command].options.partition(":")
    for field in dataclasses.fields(getattr(import_module(module), name)):
        positional = field.name == SINGLE[command].positional
        _, found, after = text.rpartition(f" {field.name} " if positional else f"--{field.name} ")
        assert found, field.name
        assert len(after.split()) > 3, field.name


def test_the_choices_of_formats_are_those_that_can_be_written():
    assert set(get_args(depth_command.FormatName)) == set(FORMATS)
    assert set(DepthOptions().formats) <= set(FORMATS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--colour"], "unrecognized arguments: --colour"),
        (["--formats", "jpeg"], "jpeg"),
        (["--dtype", "float8"], "float8"),
        (["--uncertainty", "magic"], "magic"),
        (["--ensemble_size", "many"], "many"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_wrong_flag_or_value_ends_with_two_and_names_it(models, photos, words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        depth(models, photos, *words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_key_in_a_config_file_is_an_error(tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("stepz: 3\n")
    with pytest.raises(SystemExit) as stop:
        run("depth", "--config", tmp_path / "options.yaml")
    assert stop.value.code == 2
    assert "stepz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ensemble_size", 1], "at least 2 members"),
        (["--num_inference_steps", 0], "num_inference_steps must be at least 1"),
        (["--batch_size", 0], "batch_size"),
        (["--processing_resolution", 33], "multiple of 2"),
        (["--coverage", 95], "coverage"),
        (["--coverage", 0.9, "--uncertainty", "none"], "--coverage needs an uncertainty"),
        (["--uncertainty", "marginal"], "maps quantiles to quantiles"),
        (["--uncertainty", "none", "--formats", "uncertainty"], "needs an uncertainty"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--device", "cuda:99"], "there is no device 'cuda:99' here"),
    ],
)
def test_options_that_cannot_be_served_end_with_two_before_any_image(models, photos, tmp_path, words, message, capsys):
    out = tmp_path / "out"
    arguments = ["depth", photos, "-o", out, "--model", models / "gaussian", "--device", "cpu", *words]
    assert run(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert error[-1].startswith("marigold-uq depth: ")
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder / "nowhere", "no such file or folder"),
        (lambda folder: (folder / "empty").mkdir() or folder / "empty", "no image found"),
        (lambda folder: None, "no images given"),
    ],
)
def test_nothing_to_do_is_an_error_of_one_line(models, tmp_path, prepare, message, capsys):
    source = prepare(tmp_path)
    words = [] if source is None else [source]
    assert depth(models, *words, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("./mistyped", "no such folder"),
        ("mistyped", "Hub names have the form user/name"),
        ("{folder}", "holds no model_index.json"),
        ("{folder}/p0.png", "is a file"),
        ("nobody/no-such-model", "nobody/no-such-model"),
    ],
)
def test_an_unknown_model_ends_with_two_and_is_named(photos, tmp_path, name, message, capsys, monkeypatch):
    def offline(*arguments, **options):
        raise OSError(f"Cannot load model {arguments[0]}: not cached")

    monkeypatch.setattr(marigold_uq.MarigoldUQDepthPipeline, "from_pretrained", offline)  # no network in tests
    name = name.format(folder=photos)
    assert run("depth", photos, "-o", tmp_path / "out", "--model", name) == 2
    assert message in capsys.readouterr().err


def test_an_image_in_place_of_the_output_folder_is_an_error(models, photos, capsys):
    assert depth(models, photos, "-o", photos / "p0.png") == 2
    assert "a file is in the way" in capsys.readouterr().err


def test_an_output_folder_without_write_permission_is_found_before_the_model_loads(
    photos, tmp_path, capsys, monkeypatch
):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    out = tmp_path / "locked"
    out.mkdir()
    if os.access(out, os.W_OK) and os.geteuid() == 0:  # nothing is forbidden to root
        monkeypatch.setattr(pictures.tempfile, "TemporaryFile", refuse)
    out.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr(pictures, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
    assert run("depth", photos, "-o", out, "--model", "any/model") == 2
    assert f"cannot write into the folder {out}: Permission denied" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_and_what_failed_before_is_still_told(models, photos, tmp_path, capsys, monkeypatch):
    (photos / "a.png").write_text("broken")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures, "export", full)
    assert depth(models, photos, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "failed" in error
    assert "a.png is not an image" in error
    assert "No space left on device" in error


def test_memory_running_out_on_one_image_does_not_stop_the_others(models, photos, tmp_path, capsys, monkeypatch):
    predict = pictures.predict

    def limited(given, *arguments, **options):
        if any(one.size[1] > 100 for one in given):
            raise RuntimeError("not enough memory: you tried to allocate 9 PB")
        return predict(given, *arguments, **options)

    save_picture(photos / "huge.png", width=200, height=150)  # as the others for the network: in one batch with them
    monkeypatch.setattr(pictures, "predict", limited)
    assert depth(models, photos, "-o", tmp_path / "out", "--formats", "npz") == 1
    assert "huge.png: not enough memory" in capsys.readouterr().err
    assert made(tmp_path / "out") == {"p0.npz", "p1.npz", "p2.npz"}


def test_interrupting_leaves_whole_files_and_the_next_run_resumes(models, photos, tmp_path, capsys, monkeypatch):
    predict, calls = pictures.predict, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return predict(*arguments, **options)

    monkeypatch.setattr(pictures, "predict", interrupted)
    words = [photos, "-o", tmp_path / "out", "--batch_size", 1]
    assert depth(models, *words) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert made(tmp_path / "out") == {f"p0{ending}" for ending in DEFAULT_ENDINGS}
    assert depth(models, *words) == 0
    assert "p0.png: done before, skipped" in capsys.readouterr().out
    assert len(calls) == 4


@pytest.mark.parametrize("size", [(1, 1), (10, 2000), (2000, 10)])
def test_extreme_sizes_and_black_pictures_pass(models, tmp_path, size):
    Image.new("RGB", size).save(tmp_path / "odd.png")
    assert depth(models, tmp_path / "odd.png", "-o", tmp_path / "out", "--formats", "npz", "png16", "tiff") == 0
    assert read_npz(tmp_path / "out" / "odd.npz")["depth"].shape == size[::-1]


def test_info_says_what_is_installed_and_which_model_would_be_used(capsys):
    assert run("info") == 0
    text = capsys.readouterr().out
    for word in (marigold_uq.__version__, torch.__version__, "diffusers", "cpu", "model:"):
        assert word in text


def test_auto_chooses_a_device_that_is_there():
    assert model_command.choose_device("auto").type in ("cpu", "cuda", "mps")


# ------------------------------------------------------------------------------------------------- several processes


def test_processes_share_the_files(models, photos, tmp_path, monkeypatch):
    """The quick twin of the next test: one of two processes, without the other."""
    state = SimpleNamespace(num_processes=2, process_index=1, wait_for_everyone=lambda: None)
    monkeypatch.setattr(pictures, "process_state", lambda: state)
    assert depth(models, photos, "-o", tmp_path / "out", "--formats", "npz") == 0
    assert made(tmp_path / "out") == {"p1.npz"}


@pytest.mark.slow
def test_two_processes_share_the_files_and_a_failure_in_one_does_not_stop_the_other(models, photos, tmp_path):
    (photos / "p1.png").write_text("broken")  # the second process has only this one, and is done at once
    command = [
        "--no-python",
        sys.executable,
        "-m",
        "marigold_uq.cli",
        "depth",
        str(photos),
        "-o",
        str(tmp_path / "out"),
    ]
    options = ["--model", str(models / "gaussian"), "--ensemble_size", "3", "--formats", "npz"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29571"]
    result = subprocess.run(
        [*launcher, *command, *options],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "process 1 of 2: 2 of 3 inputs" in result.stdout
    assert "process 2 of 2: 1 of 3 inputs" in result.stdout
    assert "failed: " + str(photos / "p1.png") in result.stderr
    assert made(tmp_path / "out") == {"p0.npz", "p2.npz"}


def test_a_folder_that_is_input_and_output_is_refused_and_no_photograph_is_replaced(models, photos, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in photos.iterdir()}
    assert depth(models, photos, "-o", photos) == 2
    assert "both input and output" in capsys.readouterr().err
    save_picture(photos / "p0_sheet.png", seed=9)
    before["p0_sheet.png"] = (photos / "p0_sheet.png").read_bytes()
    assert depth(models, photos / "p0.png", photos / "p0_sheet.png", "-o", photos) == 2
    assert "is one of the images" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in photos.iterdir()} == before


def test_results_inside_a_folder_that_is_read_recursively_are_not_taken_for_photographs(models, photos):
    out = photos / "out"
    for _ in range(2):
        assert depth(models, photos, "-o", out, "--recursive") == 0
    assert len(made(out)) == 3 * len(DEFAULT_ENDINGS)
