"""The page of a calibration: numbers of its own computation, no file beside it, and its pictures."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.labelled_maps import LabelledMaps, write_maps

from marigold_uq.calibration import COVERAGES
from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.calibration import DepthCalibration, calibrate_files, leave_out, run_calibration
from marigold_uq.depth.calibration.files import stated_interval
from marigold_uq.depth.calibration.fitting import covered_before
from marigold_uq.depth.evaluation import FileOptions


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, DepthCalibration, LabelledMaps]:
    root = tmp_path_factory.mktemp("report")
    maps = write_maps(root / "maps", 24, "mean+std")
    options = DepthCalibration(output=root / "out <b>", files=FileOptions(maps), num_pixels=80, kappa_share=0.2)
    data = LabelledMaps(24)
    call = Invocation("marigold-uq calibrate depth --note '<script>alert(1)</script>'", "")
    assert run_calibration(options, call, dataset=data) == 0
    return options.report_path.read_text(encoding="utf-8"), options, data


def test_the_table_has_the_coverage_before_and_of_units_left_out(made) -> None:
    page, options, data = made
    again = calibrate_files(
        DepthCalibration(output=options.output.with_name("again"), files=options.files, num_pixels=80, kappa_share=0.2),
        data,
    )
    pixels = tuple(again.collected.pixels.values())
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)[1:]]
    before, after = covered_before(pixels, stated_interval), leave_out(pixels, options).summary
    for row, level in zip(rows, (0.5, 0.8, 0.9, 0.95), strict=True):
        place = COVERAGES.index(level)
        assert row[0] == f"{level:.0%}"
        assert row[1].startswith(f"{before.share[place]:.1%}")
        expected = (
            f"{after.share[place]:.1%}" if level < 0.95 else "-"
        )  # 20 units set them, without some of them too few
        assert row[3].startswith(expected)
    assert before.share[COVERAGES.index(0.9)] < 0.5  # the maps state a third of their deviation
    assert 0.87 < after.share[COVERAGES.index(0.9)] < 0.97


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_executed(made) -> None:
    page, _, _ = made
    assert "<script" not in page
    assert "&lt;script&gt;" in page

    class Addresses(HTMLParser):
        found: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [value or "" for name, value in attrs if name in ("src", "href")]

    parser = Addresses()
    parser.found = []
    parser.feed(page)
    assert len(parser.found) > 10
    assert all(address.startswith("data:image/png;base64,") for address in parser.found)
    for address in parser.found:
        with Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))) as picture:
            assert np.asarray(picture.convert("RGB")).size


def test_the_page_lies_beside_the_output_and_not_in_it(made) -> None:
    _, options, _ = made
    assert options.report_path.parent == options.output.parent
    assert not list(options.output.rglob("*.html"))
    assert not list(Path(options.output.parent).glob(".marigold-uq-*"))
