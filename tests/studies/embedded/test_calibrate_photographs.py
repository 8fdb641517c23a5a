"""The study of calibrating on photographs, on a few tiny pictures: what it prints, and what it refuses."""

import re
from pathlib import Path

from support.photographs import write_photographs
from support.tiny_depth import tiny_pipeline

from scripts.studies.embedded.calibrate_photographs import main


def test_the_table_has_a_row_per_calibration_and_says_where_units_are_too_few(tmp_path: Path, capsys) -> None:
    root = write_photographs(tmp_path / "photographs", 24, 4)
    model = tmp_path / "model"
    tiny_pipeline("gaussian", default_processing_resolution=16, default_denoising_steps=1).save_pretrained(model)
    words = ["--data.root", str(root), "--model", str(model), "--ensemble_size", "4", "--num_pixels", "50"]
    assert main([*words, "--splits", "2", "--output", str(tmp_path / "table.md")]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert text.startswith("24 pictures of 6 sources, trajectory, 4 members")
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()[4:]}
    assert list(rows) == ["members", "other sources, unit image", "other sources, unit source"]  # it came uncalibrated
    shares = [float(one) for one in re.findall(r"([\d.]+) ±", rows["other sources, unit image"])]
    assert shares == sorted(shares)
    assert len(shares) == 3  # 15 of 20 pictures set the intervals: 95 % needs 19
    assert abs(shares[0] - 50) < 20
    assert rows["other sources, unit source"].count("too few units") == 2  # 4 sources promise 80 %
    assert main([*words, "--output", str(tmp_path / "table.md")]) == 2
    assert "exists" in capsys.readouterr().err
