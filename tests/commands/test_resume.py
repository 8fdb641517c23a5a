"""What a second run of `marigold-uq depth` does with the results of the first, option by option."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.cli_runs import depth, noisy_scene, read_npz, run, save_models, save_picture
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_depth import tiny_pipeline

from marigold_uq.commands import pictures
from marigold_uq.commands.pictures import default_batch
from marigold_uq.depth.video import write_video

FIRST = ["--formats", "npz", "--coverage", "0.5", "--uncertainty", "ensemble"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_models(tmp_path_factory.mktemp("models"))
    other = tiny_pipeline("gaussian", default_processing_resolution=16)
    other.default_denoising_steps = 1
    other.save_pretrained(folder / "other")
    shutil.copytree(folder / "gaussian", folder / "copy")
    (folder / "points.csv").write_text("x,y,depth\n1,1,2\n12,9,4\n3,10,3\n")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(2):
        save_picture(folder / f"p{index}.png", seed=index)
    return folder


def again(models: Path, photos: Path, *words: object) -> tuple[int, float]:
    """A second run after one with `FIRST`: its exit code, and when the result of p0 was written."""
    out = photos.parent / "out"
    command = ["depth", photos, "-o", out, "--device", "cpu", "--batch_size", 2]
    given = [str(word).format(models=models) for word in words]
    base = [*command, "--ensemble_size", 3, "--model", models / "gaussian", *FIRST]
    if not out.exists():
        assert run(*base) == 0
    before = (out / "p0.npz").stat().st_mtime_ns
    code = run(*base, *given)
    return code, (out / "p0.npz").stat().st_mtime_ns - before


# Option changed between the runs -> the word with which the second run refuses; None where it skips, "made" where it
# makes what is missing.
MATRIX: list[tuple[list[str], str | None]] = [
    ([], None),
    (["--model", "{models}/copy"], None),  # the same model elsewhere
    (["--batch_size", "1"], None),
    (["--num_inference_steps", "2"], None),  # the model's default, said
    (["--max_pixels", "0"], None),
    (["--formats", "npz", "png16"], "made"),
    (["--model", "{models}/other"], "model was"),
    (["--seed", "1"], "seed was 0, now 1"),
    (["--ensemble_size", "4"], "ensemble_size was 3, now 4"),
    (["--num_inference_steps", "1"], "num_inference_steps was 2, now 1"),
    (["--processing_resolution", "8"], "processing_resolution was 16, now 8"),
    (["--coverage", "0.9"], "coverage was 0.5, now 0.9"),
    (["--uncertainty", "trajectory"], "uncertainty was 'ensemble', now 'trajectory'"),
    (["--output_epistemic"], "output_epistemic was False, now True"),
    (["--fov", "40"], "fov was None, now 40"),
    (["--intrinsics", "20", "20", "8", "6"], "intrinsics was None"),
    (["--metric-points", "{models}/points.csv"], "metric_points was None"),
]


@pytest.mark.parametrize(("words", "outcome"), MATRIX, ids=lambda value: " ".join(value) if value else str(value))
def test_results_are_skipped_completed_or_refused_by_what_was_asked(
    words: list[str], outcome: str | None, models: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, later = again(models, photos, *words)
    told = capsys.readouterr()
    if outcome is None:
        assert (code, later) == (0, 0)
        assert told.out.count("done before, skipped") == 2
    elif outcome == "made":
        assert code == 0
        assert later > 0
        assert (photos.parent / "out" / "p0_depth_16bit.png").exists()
    else:
        assert (code, later) == (2, 0)
        assert outcome in told.err
        assert "--overwrite replaces them, another -o keeps them" in told.err
        if "--metric-points" in words:  # random weights may see the points inside out
            return
        code, later = again(models, photos, *words, "--overwrite")
        assert code == 0
        assert later > 0
        assert again(models, photos, *words) == (0, 0)


def test_another_picture_under_the_same_name_is_refused_and_a_copy_of_the_same_is_not(
    models: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert again(models, photos)[0] == 0
    shutil.copytree(photos, photos.parent / "moved" / "photos")  # copies have another time
    os.utime(photos.parent / "moved" / "photos" / "p0.png", (1, 1))
    out = photos.parent / "out"
    words = ["-o", out, "--device", "cpu", "--model", models / "gaussian", "--ensemble_size", 3, *FIRST]
    assert run("depth", photos.parent / "moved" / "photos", *words) == 0
    save_picture(photos / "p0.png", seed=7)
    capsys.readouterr()
    assert run("depth", photos, *words) == 2
    assert "p0 was made with other settings: it was made of" in capsys.readouterr().err


def test_files_that_nothing_vouches_for_are_not_replaced(
    models: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = photos.parent / "out"
    out.mkdir()
    (out / "p1.npz").write_bytes(b"mine")
    assert depth(models, photos, "-o", out, "--formats", "npz") == 2
    assert "p1.npz exists, and nothing beside it says what made it" in capsys.readouterr().err
    assert not (out / "p0.npz").exists()
    (out / "p1.json").write_text("not a record")
    assert depth(models, photos, "-o", out, "--formats", "npz") == 2
    assert (out / "p1.npz").read_bytes() == b"mine"


def test_what_a_stopped_run_began_is_finished(models: Path, photos: Path) -> None:
    out = photos.parent / "out"
    words = ["--formats", "npz", "tiff"]
    assert depth(models, photos, "-o", out, *words) == 0
    record = json.loads((out / "p0.json").read_text())
    assert record["complete"]
    assert record["files"] == ["p0.npz", "p0_depth.tiff", "p0_uncertainty.tiff"]
    (out / "p0.json").write_text(json.dumps({**record, "complete": False}))
    (out / "p0.npz").write_bytes(b"half")
    assert depth(models, photos, "-o", out, *words) == 0
    assert read_npz(out / "p0.npz")["depth"].shape == (12, 16)
    assert json.loads((out / "p0.json").read_text())["complete"]


def test_overwriting_with_other_settings_leaves_nothing_of_the_old_ones(models: Path, photos: Path) -> None:
    out = photos.parent / "out"
    assert depth(models, photos, "-o", out, "--formats", "npz", "tiff") == 0
    assert depth(models, photos, "-o", out, "--formats", "npz", "--seed", 3, "--overwrite") == 0
    assert sorted(path.name for path in out.iterdir()) == ["p0.json", "p0.npz", "p1.json", "p1.npz"]


def test_a_video_of_other_settings_is_refused_too(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = write_video(tmp_path / "clip.avi", noisy_scene(2), fps=10)
    words = ["-o", tmp_path / "out", "--formats", "color"]
    assert depth(models, clip, *words) == 0
    assert depth(models, clip, *words, "--seed", 1) == 2
    assert "clip was made with other settings: seed was 0, now 1" in capsys.readouterr().err
    assert depth(models, clip, *words, "--seed", 1, "--overwrite") == 0


# ------------------------------------------------------------------------------------------------------------- names


def test_names_do_not_depend_on_how_a_folder_was_spelt(
    models: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "inner").mkdir()
    save_picture(photos / "inner" / "deep.png", seed=4)
    (photos.parent / "link").symlink_to(photos)
    monkeypatch.chdir(photos.parent)
    spellings = ["photos", "./photos", "photos/", str(photos), "link", "photos/../photos"]
    for count, spelling in enumerate(spellings):
        assert depth(models, spelling, "-o", "out", "--formats", "npz", "--recursive") == 0
        skipped = capsys.readouterr().out.count("done before, skipped")
        assert skipped == (3 if count else 0), spelling
    found = {path.relative_to("out").as_posix() for path in Path("out").rglob("*.npz")}
    assert found == {"p0.npz", "p1.npz", "inner/deep.npz"}
    monkeypatch.chdir(photos)
    assert depth(models, ".", "-o", "../out", "--formats", "npz", "--recursive") == 0
    assert capsys.readouterr().out.count("done before, skipped") == 3


def test_names_do_not_depend_on_company_and_one_file_counts_once(
    models: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(photos.parent)
    assert depth(models, "photos/p1.png", "-o", "out", "--formats", "npz") == 0
    many = ["photos/p0.png", "./photos/p1.png", photos / "p1.png", "photos/../photos/p1.png"]
    capsys.readouterr()
    assert depth(models, *many, "-o", "out", "--formats", "npz") == 0
    assert capsys.readouterr().out.count("p1.png: done before, skipped") == 1
    assert {path.name for path in Path("out").glob("*.npz")} == {"p0.npz", "p1.npz"}


# --------------------------------------------------------------------------------------------------------- batching


def test_pictures_of_one_size_share_a_network_call(models: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from marigold_uq.commands import pictures

    for index in range(2, 5):
        save_picture(photos / f"p{index}.png", seed=index)
    save_picture(photos / "tall.png", height=16, width=12)
    predict, sizes = pictures.predict, []

    def noted(given: list[object], *arguments: object, **options: object) -> object:
        sizes.append(len(given))
        return predict(given, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pictures, "predict", noted)
    words = ["--formats", "npz", "--uncertainty", "trajectory"]
    assert depth(models, photos, "-o", photos.parent / "many", *words, "--batch_size", 4) == 0
    assert sorted(sizes) == [1, 1, 4]
    assert depth(models, photos, "-o", photos.parent / "single", *words, "--batch_size", 1) == 0
    for path in (photos.parent / "many").glob("*.npz"):
        together, alone = read_npz(path), read_npz(photos.parent / "single" / path.name)
        for name in ("depth", "uncertainty"):
            assert abs(together[name] - alone[name]).max() < 1e-5


def test_all_networks_of_a_model_decide_whether_its_pictures_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = conditioned_pipeline()
    assert default_batch(pipeline) == 8
    sizes = {name: sum(one.numel() for one in getattr(pipeline, name).parameters()) for name in ("unet", "vae")}
    monkeypatch.setattr(pictures, "_SMALL_MODEL", sum(sizes.values()) + 1)
    assert default_batch(pipeline) == 1  # the image encoder counts


def test_pictures_and_the_sample_together_are_refused(
    models: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert depth(models, photos, "--sample", "-o", photos.parent / "out") == 2
    assert "give images, or --sample for the pictures in the package, not both" in capsys.readouterr().err
