"""`marigold-uq demo`: a page in the browser, on this computer alone."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from marigold_uq.commands.runner import Invocation

__all__ = ["DemoOptions", "run_demo"]


@dataclass(frozen=True)
class DemoOptions:
    """Open a page in the browser: drop a picture, see depth and where it is unsure.

    Args:
        model: "embedded" (inside the package), a folder, or a Hub name.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        port: Of the page; default: the first free one from 7860 on. It is reached from this computer alone.
        ensemble_size: Members that make the uncertainty.
        max_megabytes: Larger files are refused.
        max_pixels: Larger pictures are refused.
        browser: Also open the browser.
    """

    model: str = "embedded"
    device: str = "auto"
    port: int | None = None
    ensemble_size: int = 10
    max_megabytes: float = 25.0
    max_pixels: int = 2**24
    browser: bool = False

    def __post_init__(self) -> None:
        if self.max_pixels < 1 or self.max_megabytes <= 0 or self.ensemble_size < 2:
            raise ValueError(
                "max_pixels must be at least 1, max_megabytes above 0 and ensemble_size at least 2; got "
                f"{self.max_pixels}, {self.max_megabytes:g} and {self.ensemble_size}"
            )


def run_demo(options: DemoOptions, invocation: Invocation | None = None) -> int:
    """Load the model, serve until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then, too, temporary files go
    with TemporaryDirectory(prefix="marigold-uq-demo-") as folder:
        prepare_gradio(Path(folder))
        from marigold_uq.commands.pictures import sample_pictures
        from marigold_uq.depth.demo_page import Demo, serve
        from marigold_uq.depth.model import load_pipeline

        pipeline = load_pipeline(options.model, device=options.device)
        demo = Demo(
            pipeline,
            options.model,
            Path(folder),
            options.max_pixels,
            options.ensemble_size,
            examples=sample_pictures(),
        )
        server = serve(demo, port=options.port, max_megabytes=options.max_megabytes, open_browser=options.browser)
        print(f"open {server.url} in a browser; Ctrl-C ends", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("ended")
        finally:
            server.close()
    return 0


def prepare_gradio(folder: Path) -> None:
    """Settings that gradio reads when it is imported: no counters, and its files where they are deleted."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise ValueError(f'the demo needs gradio: pip install "marigold_uq[demo]" ({error})') from error
