"""The page of `marigold-uq demo`: gradio components around `marigold_uq.depth.demo`, and nothing from the network."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from marigold_uq.depth.demo import Shown, predict
from marigold_uq.files import remove
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

TITLE = "marigold_uq: depth that says how sure it is"
_HELP = "Drop a picture, or take one of the examples."
_CLICK = "Click into a picture to ask how sure the model is at that point."
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; worker-src 'self' blob:; frame-ancestors 'none'"
)
"""The browser is told to load nothing from elsewhere: no fonts, scripts or counters."""
_OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
_FORGET = 3600
"""Seconds after which maps and files of a visitor go."""
_SUFFIXES = [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"]


@dataclass(frozen=True)
class Demo:
    """The model behind the page, and its limits.

    Args:
        pipeline: The model.
        name: Its name.
        folder: For files that visitors download.
        max_pixels: Of a picture.
        ensemble_size: Members.
        examples: Pictures to try.
    """

    pipeline: MarigoldUQDepthPipeline
    name: str
    folder: Path
    max_pixels: int
    ensemble_size: int = 10
    examples: Sequence[Path] = ()

    def show(self, path: str | None, share: float) -> dict[str, Any]:
        """Everything that a new picture changes, by component; of a file that is none, why it cannot be used."""
        if path is None:
            return {"message": _HELP}
        started = time.perf_counter()
        try:
            found = predict(
                self.pipeline, path, max_pixels=self.max_pixels, ensemble_size=self.ensemble_size, model=self.name
            )
        except (OSError, ValueError, RuntimeError) as error:
            return {"message": f"**This file cannot be used.** {str(error).replace(path, Path(path).name)}"}
        seconds = time.perf_counter() - started
        height, width = found.size
        return {
            "shown": found,
            "message": f"{width} x {height} pixels, {seconds:.2f} s. {_CLICK}",
            "photograph": found.photograph(),
            "depth": found.depth_picture(),
            "uncertainty": found.uncertainty_picture(),
            "cloud": self.fade(found, share),
        }

    def ask(self, shown: Shown | None, place: tuple[int, int] | None, level: float) -> str:
        """What is known of the pixel that was clicked."""
        if shown is None or place is None:
            return ""
        return shown.sentence(*place, level)

    def click(self, shown: Shown | None, level: float, event: gr.SelectData) -> tuple[Any, str]:
        """Remember the pixel, and say what is known of it."""
        if shown is None:
            return None, ""
        place = shown.pixel_of(*event.index)
        return place, self.ask(shown, place, level)

    def fade(self, shown: Shown | None, share: float) -> str | None:
        """The cloud of the most certain points."""
        if shown is None:
            return None
        forget_old(self.folder)
        return str(shown.write_cloud(share, self.folder))

    def files(self, shown: Shown | None, level: float, share: float, path: str | None) -> list[str]:
        """Files to download."""
        if shown is None or path is None:
            return []
        return [str(one) for one in shown.write_files(level, share, self.folder, Path(path).stem)]


def forget_old(folder: Path) -> None:
    """Delete what earlier visits left, so that a long day of clouds does not fill the disk."""
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > _FORGET:
            remove(path)


def build_page(demo: Demo) -> gr.Blocks:
    """All components and what they do."""
    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(_FORGET, _FORGET)) as page:
        gr.Markdown(f"# {TITLE}\nModel: {demo.name}. Everything stays on this computer.")
        parts = _components(demo)
        results = {name: parts[name] for name in _RESULTS}

        def show(path: str | None, share: float) -> list[Any]:
            found = demo.show(path, share)
            return [found.get(name, "" if name == "answer" else None) for name in results]

        def files(shown: Shown | None, level: float, share: float, path: str | None) -> Any:
            written = demo.files(shown, level, share, path)
            return gr.update(value=written or None, visible=bool(written))

        shown, place, level, share = (parts[name] for name in ("shown", "place", "level", "share"))
        hidden: dict[str, Any] = {"api_visibility": "private"}
        quiet: dict[str, Any] = {**hidden, "show_progress": "hidden"}
        waiting = [parts[name] for name in ("photograph", "depth", "uncertainty", "cloud")]
        parts["picture"].change(
            show, [parts["picture"], share], list(results.values()), show_progress_on=waiting, **hidden
        )
        for name in ("photograph", "depth", "uncertainty"):
            parts[name].select(demo.click, [shown, level], [place, parts["answer"]], **quiet)
        level.change(demo.ask, [shown, place, level], parts["answer"], **quiet)
        share.release(demo.fade, [shown, share], parts["cloud"], **hidden)
        parts["make"].click(files, [shown, level, share, parts["picture"]], parts["files"], **hidden)
    return page


_RESULTS = ("shown", "message", "photograph", "depth", "uncertainty", "cloud", "files", "answer", "place")
"""What a new picture replaces."""


def _components(demo: Demo) -> dict[str, Any]:
    """From top to bottom; each has its name as `elem_id`."""
    parts: dict[str, Any] = {"shown": gr.State(None, time_to_live=_FORGET), "place": gr.State(None)}
    with gr.Row():
        with gr.Column():
            parts["picture"] = gr.File(label="Picture", file_types=_SUFFIXES, height=120, elem_id="picture")
            if demo.examples:
                gr.Examples([[str(path)] for path in demo.examples], inputs=[parts["picture"]], cache_examples=False)
        parts["message"] = gr.Markdown(_HELP, elem_id="message")
    labels = {
        "photograph": "Picture",
        "depth": "Depth: warm is near",
        "uncertainty": "Standard deviation: bright is unsure",
    }
    with gr.Row():
        for name, label in labels.items():
            parts[name] = gr.Image(
                label=label, interactive=False, elem_id=name, format="png", buttons=["download", "fullscreen"]
            )
    with gr.Row():
        parts["level"] = gr.Slider(0.5, 0.99, 0.9, step=0.01, label="Level of the interval", elem_id="level")
        parts["answer"] = gr.Markdown("", elem_id="answer")
    with gr.Row():
        parts["share"] = gr.Slider(
            0.01, 1.0, 0.9, step=0.01, label="Share of the points kept: the most certain", elem_id="share"
        )
        parts["make"] = gr.Button("Make files to download", elem_id="make")
    parts["cloud"] = gr.Model3D(
        label="Point cloud: drag to turn", height=420, elem_id="cloud", clear_color=(0.1, 0.11, 0.14, 1.0)
    )
    parts["files"] = gr.File(label="Files", file_count="multiple", interactive=False, visible=False, elem_id="files")
    return parts


@dataclass
class Server:
    """A page that is being served.

    Args:
        page: It.
        url: Where.
    """

    page: gr.Blocks
    url: str

    def wait(self) -> None:
        """Until interrupted."""
        threading.Event().wait()

    def close(self) -> None:
        """Stop serving."""
        self.page.close(verbose=False)


def serve(demo: Demo, *, port: int | None, max_megabytes: float, open_browser: bool = False) -> Server:
    """Serve the page on the loopback interface alone; port None takes a free one from 7860 on."""
    page = build_page(demo)
    page.queue(default_concurrency_limit=1, max_size=16)  # one picture at a time uses all cores
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    try:
        _, url, _ = page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=False,
            inbrowser=open_browser,
            prevent_thread_lock=True,
            quiet=True,
            max_file_size=round(max_megabytes * 2**20),
            ssr_mode=False,
            theme=theme,
            footer_links=[],
            run_history=False,
            app_kwargs={"middleware": [Middleware(_SameOrigin)]},
        )
    except OSError as error:
        raise OSError(f"cannot serve on 127.0.0.1: {error}; choose another --port") from error
    return Server(page, url)


class _SameOrigin:
    """Adds the policy to every answer, and answers to this computer's own names alone.

    A page elsewhere whose name was made to mean 127.0.0.1 (DNS rebinding) would else count as this page.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not _is_own_name(scope):
            refusal = PlainTextResponse("This page answers to http://127.0.0.1 and http://localhost.", 403)
            await refusal(scope, receive, send)
            return

        async def with_policy(event: dict[str, Any]) -> None:
            if event["type"] == "http.response.start":
                event = {**event, "headers": [*event["headers"], (b"content-security-policy", _POLICY.encode())]}
            await send(event)

        await self.app(scope, receive, with_policy)


def _is_own_name(scope: Any) -> bool:
    """Whether a request asks for a loopback name; the port may be that of a tunnel."""
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    return re.sub(r":\d+$", "", host).lower() in _OWN_NAMES
