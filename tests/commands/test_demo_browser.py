"""`marigold-uq demo` in a real Chromium, with the embedded model; run with `pytest -m browser -n 0`.

It needs the extra `demo`, playwright (`pip install playwright`) and a Chromium, found as `chromium` or through
MARIGOLD_UQ_CHROMIUM. MARIGOLD_UQ_SCREENSHOTS names a folder for screenshots.
"""

import io
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from PIL import Image

import marigold_uq

pytestmark = pytest.mark.browser
STREET = Path(marigold_uq.__file__).parent / "assets" / "samples" / "street.jpg"
PATIENCE = 300_000  # milliseconds: the machine may be busy
FLAGS = ["--no-sandbox", "--enable-unsafe-swiftshader", "--use-angle=swiftshader"]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a demo that runs as a user starts it."""
    pytest.importorskip("gradio", reason='the demo needs gradio: pip install ".[demo]"')
    words = [sys.executable, "-m", "marigold_uq.cli", "demo", "--device", "cpu", "--max_pixels", "1000000"]
    words += ["--max_megabytes", "1"]
    started = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"http://\S+", running.stdout.readline())
            assert found is not None, "the demo did not start"
            process = psutil.Process(running.pid)
            wall = time.perf_counter() - started
            print(f"\nfrom the command to the page: {wall:.1f} s, {cpu_seconds(process):.1f} s of the processor")
            yield found.group(), process
        finally:
            running.terminate()


@pytest.fixture
def address(server: tuple[str, psutil.Process]) -> str:
    return server[0]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright: pip install playwright")
    program = os.environ.get("MARIGOLD_UQ_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip(
            "no Chromium here: install it (Debian: apt-get install chromium), or name it in MARIGOLD_UQ_CHROMIUM"
        )
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, and every address that it asks for."""
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    opened.set_default_timeout(PATIENCE)
    opened.requested = []
    opened.on("request", lambda request: opened.requested.append(request.url))
    opened.goto(address)
    opened.wait_for_selector("#picture input[type=file]", state="attached")
    yield opened
    opened.close()


def upload(page: Any, path: Path) -> None:
    page.set_input_files("#picture input[type=file]", str(path))


def upload_street(page: Any) -> None:
    upload(page, STREET)
    page.wait_for_selector("#depth img")
    page.wait_for_selector("#uncertainty img")


def click_into_depth(page: Any, x: float, y: float) -> str:
    """The answer to a click at shares of width and height."""
    before = page.inner_text("#answer")
    box = page.locator("#depth img").bounding_box()
    page.locator("#depth img").click(position={"x": x * box["width"], "y": y * box["height"]})
    answered = "b => (t => t !== b && t.includes('interval'))(document.querySelector('#answer').innerText)"
    page.wait_for_function(answered, arg=before)
    return str(page.inner_text("#answer"))


def set_slider(page: Any, name: str, value: float) -> None:
    box = page.locator(f"#{name} input[type=number]")
    box.fill(str(value))
    box.press("Enter")
    box.blur()


def drag_slider(page: Any, name: str, share: float) -> None:
    """Move the handle to a share of its way, as a hand does."""
    box = page.locator(f"#{name} input[type=range]").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()


def ends(answer: str) -> tuple[float, float]:
    found = re.search(r"interval (-?\d+\.\d+) to (-?\d+\.\d+)", answer)
    assert found is not None, answer
    return float(found[1]), float(found[2])


def screenshot(page: Any, name: str) -> None:
    folder = os.environ.get("MARIGOLD_UQ_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(5000)  # the cloud is drawn last
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def next_cloud(page: Any, seen: int = 0) -> int:
    """Points in the next cloud that the page loads, after so many addresses."""
    deadline = time.perf_counter() + PATIENCE / 1000
    while not (urls := [url for url in page.requested[seen:] if url.endswith(".glb")]):
        assert time.perf_counter() < deadline, "no new cloud"
        page.wait_for_timeout(300)
    content = page.request.get(urls[-1]).body()
    size = struct.unpack_from("<I", content, 12)[0]
    found = re.search(rb'"count":(\d+)', content[20 : 20 + size])
    assert found is not None
    return int(found[1])


def test_a_picture_gives_depth_uncertainty_and_a_cloud_and_nothing_is_asked_of_the_network(
    page: Any, server: tuple[str, psutil.Process]
) -> None:
    started, used = time.perf_counter(), cpu_seconds(server[1])
    upload_street(page)
    wall, used = time.perf_counter() - started, cpu_seconds(server[1]) - used
    print(f"\nfrom the picture to the depth: {wall:.1f} s, {used:.1f} s of the server's processor")
    assert "512 x 384 pixels" in page.inner_text("#message")
    with Image.open(io.BytesIO(page.request.get(page.get_attribute("#depth img", "src")).body())) as depth:
        assert depth.size == (512, 384)
        pixels = np.asarray(depth.convert("RGB")).astype(float)
    assert pixels[-40:, :, 0].mean() > pixels[-40:, :, 2].mean() + 40  # the ground in front is near, which is warm
    page.wait_for_selector("#cloud canvas")
    assert next_cloud(page) > 10_000
    hosts = {urlsplit(url).hostname for url in page.requested if url.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"}
    screenshot(page, "demo")


def test_a_click_gives_the_interval_and_the_level_widens_it(page: Any) -> None:
    upload_street(page)
    far = click_into_depth(page, 0.5, 0.3)
    near = click_into_depth(page, 0.5, 0.9)
    assert "90% interval" in near
    assert sum(ends(near)) < sum(ends(far))
    set_slider(page, "level", 0.5)
    page.wait_for_function("() => document.querySelector('#answer').innerText.includes('50% interval')")
    narrow = ends(page.inner_text("#answer"))
    assert ends(near)[0] < narrow[0] < narrow[1] < ends(near)[1]
    screenshot(page, "demo_click")


def test_the_threshold_takes_uncertain_points_out_of_the_cloud(page: Any) -> None:
    upload_street(page)
    whole, seen = next_cloud(page), len(page.requested)
    drag_slider(page, "share", 0.3)
    assert next_cloud(page, seen) < 0.5 * whole
    screenshot(page, "demo_certain")


def test_a_broken_file_is_named_and_the_page_lives_on(page: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(STREET.read_bytes()[:2000])
    upload(page, broken)
    page.wait_for_function("() => document.querySelector('#message').innerText.includes('cannot be used')")
    told = page.inner_text("#message")
    assert "broken.jpg is damaged or truncated" in told
    assert str(tmp_path) not in told
    assert page.locator("#depth img").count() == 0
    page.locator("#picture button[aria-label='Clear']").first.click()
    page.wait_for_selector("#picture input[type=file]", state="attached")
    upload_street(page)


def test_a_picture_of_too_many_pixels_or_bytes_is_refused(page: Any, tmp_path: Path) -> None:
    Image.new("RGB", (1200, 1000)).save(tmp_path / "large.png")
    upload(page, tmp_path / "large.png")
    page.wait_for_function("() => document.querySelector('#message').innerText.includes('1,200,000 pixels')")
    page.reload()
    page.wait_for_selector("#picture input[type=file]", state="attached")
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "heavy.png")  # 1.4 MB, of noise
    upload(page, tmp_path / "heavy.png")
    page.get_by_text(re.compile("exceeds|too large|maximum", re.IGNORECASE)).first.wait_for()
    assert page.locator("#depth img").count() == 0


def test_files_can_be_downloaded(page: Any) -> None:
    upload_street(page)
    page.locator("#make").click()
    page.wait_for_selector("#files a")
    names = page.inner_text("#files")
    assert all(part in names for part in ("npz", "ply", "png"))
    with page.expect_download() as waiting:
        page.locator("#files a[href$='.npz']").first.click()
    with np.load(waiting.value.path()) as content:
        assert content["depth"].shape == (384, 512)
        assert content["coverage"] == 0.9


def test_the_page_is_served_to_this_computer_alone(address: str) -> None:
    """The loopback address answers, another address of this computer does not."""
    import socket

    port = urlsplit(address).port
    assert port is not None
    assert urlsplit(address).hostname == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    outside = socket.gethostbyname(socket.gethostname())
    if outside.startswith("127."):
        pytest.skip("this computer has no other address by its name")
    with pytest.raises(OSError), socket.create_connection((outside, port), timeout=3):  # noqa: PT011
        pass
