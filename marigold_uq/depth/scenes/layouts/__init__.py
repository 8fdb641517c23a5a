"""Layouts: functions that furnish a stage and place the camera, one per kind of scene."""

from __future__ import annotations

from collections.abc import Callable

from marigold_uq.depth.scenes.layouts.open_air import landscape, square, street
from marigold_uq.depth.scenes.layouts.passage import corridor, stairs
from marigold_uq.depth.scenes.layouts.room import room, stand_before
from marigold_uq.depth.scenes.layouts.still_life import still_life
from marigold_uq.depth.scenes.layouts.tabletop import from_above, tabletop
from marigold_uq.depth.scenes.scene import Scene, Stage

LAYOUTS: dict[str, Callable[[Stage], Scene]] = {
    "room": room,
    "stand_before": stand_before,
    "tabletop": tabletop,
    "from_above": from_above,
    "still_life": still_life,
    "corridor": corridor,
    "stairs": stairs,
    "street": street,
    "square": square,
    "landscape": landscape,
}

DEFAULT_KINDS: dict[str, float] = {
    "room": 0.26,
    "stand_before": 0.06,
    "tabletop": 0.24,
    "from_above": 0.07,
    "still_life": 0.09,
    "corridor": 0.06,
    "stairs": 0.02,
    "street": 0.11,
    "square": 0.06,
    "landscape": 0.03,
}
