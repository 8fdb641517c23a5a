"""A depth model of others as a component: its map is what a depth pipeline diffuses the residual around.

What comes out of it is always a map of the picture's size, in depth or disparity, with or without a unit: models differ
in how they want their pictures, and in what they return.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

__all__ = [
    "BASELINES", "OPENERS", "UNMEASURED", "BaselineNetwork", "DepthBaseline", "ModelMixin", "RegisteredBaseline",
    "register_baseline",
]  # fmt: skip

Space: TypeAlias = Literal["depth", "disparity"]
DepthFunction: TypeAlias = Callable[[Tensor], Tensor]
"""Pictures (B, 3, H, W) in [0, 1] -> maps (B, h, w)."""
UNMEASURED = 1.0
"""The `residual_scale` of a baseline around which nothing has learnt yet."""
_NETWORK = "network"
"""Subfolder of a baseline that is saved by value."""
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class BaselineNetwork(nn.Module):
    """What makes the maps, and in which space: subclasses say how."""

    space: Space
    metric: bool
    options: dict[str, Any]
    """What its opener needs besides the name to open it again."""

    def forward(self, images: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in [0, 1] -> maps (B, h, w); metric disparities are 1 / m."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write what `open_saved` of its kind reads."""
        raise ValueError(f"a baseline of this kind ({type(self).__name__}) can only be saved by reference")


# --------------------------------------------------------------------------------------------------- functions of users


@dataclass(frozen=True)
class RegisteredBaseline:
    """A function of the user's, and what its maps mean."""

    function: DepthFunction
    space: Space
    metric: bool


BASELINES: dict[str, RegisteredBaseline] = {}
"""Name -> what `register_baseline` added."""


def register_baseline(name: str, *, space: Space, metric: bool = False) -> Callable[[DepthFunction], DepthFunction]:
    """Decorator: make a function, or a module, available as a baseline under this name.

    It takes pictures (B, 3, H, W) in [0, 1] and returns maps (B, h, w), of any resolution. A picture's map must not
    depend on the others of its batch.

    Args:
        name: What `from_baseline` and `--baseline` name.
        space: What the maps hold.
        metric: Whether they hold metres (or 1 / metres).
    """

    def register(function: DepthFunction) -> DepthFunction:
        BASELINES[name] = RegisteredBaseline(function, space, metric)
        return function

    return register


class FunctionNetwork(BaselineNetwork):
    """A registered function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in BASELINES:
            raise ValueError(
                f"baseline {name!r} is a function that is not registered in this program: import the module that calls "
                f"register_baseline({name!r}, ...) first (--import of a command)"
            )
        found = BASELINES[name]
        self.function, self.space, self.metric, self.options = found.function, found.space, found.metric, {}

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


# ----------------------------------------------------------------------------------------------- models of transformers


@dataclass(frozen=True)
class InputOptions:
    """How a model wants its pictures.

    Attributes:
        height, width: Size that the picture is resized to; None keeps its own.
        keep_aspect: Scale by whichever of the two changes less, instead of to exactly this size.
        multiple: Edges are multiples of it.
        round_down: To the next lower multiple instead of the nearest.
        mean, std: Of the colours it was trained on.
        one_by_one: Pictures of a batch influence each other, so each goes alone.
    """

    height: int | None = None
    width: int | None = None
    keep_aspect: bool = True
    multiple: int = 1
    mean: tuple[float, ...] = _HALVES[0]
    std: tuple[float, ...] = _HALVES[1]
    one_by_one: bool = False
    round_down: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture of (height, width) pixels is given."""
        rows, columns = (self.height or height) / height, (self.width or width) / width
        if self.keep_aspect:
            rows = columns = columns if abs(1 - columns) < abs(1 - rows) else rows
        return self._whole(rows * height), self._whole(columns * width)

    def _whole(self, edge: float) -> int:
        parts = edge / self.multiple
        return max(self.multiple, (int(parts + 1e-6) if self.round_down else round(parts)) * self.multiple)


@dataclass(frozen=True)
class Convention:
    """What a kind of model returns, and how it wants its pictures."""

    space: Space
    metric: bool
    inputs: InputOptions


def _convention(config: Any) -> Convention | None:
    """What is known of a model by its config; None for kinds that are not."""
    kind = config.model_type
    edge = _image_edge(config)
    if kind == "depth_anything":
        patch = int(getattr(config, "patch_size", None) or 14)
        inputs = InputOptions(edge, edge, True, patch, *_IMAGENET)
        is_metric = config.depth_estimation_type == "metric"
        return Convention("depth" if is_metric else "disparity", is_metric, inputs)
    if kind == "dpt":
        return Convention("disparity", False, InputOptions(edge, edge, False, 1, *_HALVES))
    if kind == "glpn":
        return Convention("depth", True, InputOptions(None, None, True, 32, (0.0,) * 3, (1.0,) * 3, round_down=True))
    if kind == "zoedepth":  # its choice between indoor and outdoor heads is a vote of the whole batch
        return Convention("depth", True, InputOptions(384, 512, True, 32, *_HALVES, one_by_one=True))
    if kind == "depth_pro":
        return Convention("disparity", True, InputOptions(1536, 1536, False, 1, *_HALVES))
    return None


def _image_edge(config: Any) -> int | None:
    """Pixels that the backbone was made for."""
    for part in (config, getattr(config, "backbone_config", None)):
        size = getattr(part, "image_size", None)
        if size is not None:
            return int(size if isinstance(size, int) else size[0])
    return None


def _from_processor(inputs: InputOptions, processor: Mapping[str, Any]) -> InputOptions:
    """The options with what the model's own preprocessor_config.json says."""
    found: dict[str, Any] = {}
    size = processor.get("size")
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        found |= {"height": int(size["height"]), "width": int(size["width"])}
    if processor.get("keep_aspect_ratio") is not None:
        found["keep_aspect"] = bool(processor["keep_aspect_ratio"])
    multiple = processor.get("ensure_multiple_of") or processor.get("size_divisor")
    if multiple and multiple >= 1:
        found["multiple"] = int(multiple)
    if processor.get("do_normalize") is False:
        found |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    elif processor.get("image_mean") and processor.get("image_std"):
        found |= {"mean": tuple(processor["image_mean"]), "std": tuple(processor["image_std"])}
    return replace(inputs, **found)


class TransformersNetwork(BaselineNetwork):
    """A model of `transformers.AutoModelForDepthEstimation`, its pictures prepared here."""

    def __init__(self, model: nn.Module, space: Space, metric: bool, inputs: InputOptions) -> None:
        super().__init__()
        self.model, self.space, self.metric, self.inputs = model, space, metric, inputs
        self.options = asdict(inputs)

    def forward(self, images: Tensor) -> Tensor:
        """Where a model also tells the field of view (Depth Pro), its disparity is brought to 1 / m by it."""
        own = self.inputs
        size = own.size(*images.shape[-2:])
        resized = F.interpolate(images, size=size, mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (images.new_tensor(values).view(1, 3, 1, 1) for values in (own.mean, own.std))
        pixels = (resized - mean) / std
        parts = pixels.split(1) if own.one_by_one else (pixels,)
        return torch.cat([self._maps(part) for part in parts])

    def _maps(self, pixels: Tensor) -> Tensor:
        output = self.model(pixel_values=pixels)
        maps = output.predicted_depth
        view = getattr(output, "field_of_view", None)
        if view is not None:  # canonical: of a camera whose focal length is the picture's width
            maps = maps * (2 * torch.tan(torch.deg2rad(view.float()) / 2)).view(-1, 1, 1)
        return maps

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)  # type: ignore[operator]


def open_transformers(name: str, revision: str | None, options: Mapping[str, Any]) -> TransformersNetwork:
    """A folder or a name on the Hub.

    `options` replace what is known of its kind: those of `InputOptions`, and `space` and `metric`, which kinds of
    models that are not known here need.
    """
    from transformers import AutoConfig, AutoModelForDepthEstimation

    source = {} if revision is None else {"revision": revision}
    config = AutoConfig.from_pretrained(name, **source)
    known = _convention(config)
    own = {key: value for key, value in options.items() if value is not None}
    space, metric = own.pop("space", None), own.pop("metric", None)
    if known is None and (space is None or metric is None):
        raise ValueError(
            f"{name} is a {config.model_type!r}, whose maps are not known here: say what they hold with the options "
            "space ('depth' or 'disparity') and metric (true or false)"
        )
    unknown = set(own) - set(InputOptions.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"unknown options of a baseline: {', '.join(sorted(unknown))}; known: space, metric, "
            f"{', '.join(InputOptions.__dataclass_fields__)}"
        )
    known = known or Convention(space, metric, InputOptions())
    inputs = replace(_from_processor(known.inputs, _processor(name, source)), **own)
    model = AutoModelForDepthEstimation.from_pretrained(name, use_safetensors=True, **source)
    return TransformersNetwork(
        model, known.space if space is None else space, known.metric if metric is None else metric, inputs
    )


def _processor(name: str, source: Mapping[str, str]) -> dict[str, Any]:
    """preprocessor_config.json; {} where there is none."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        return dict(ImageProcessingMixin.get_image_processor_dict(name, **source)[0])
    except OSError:
        return {}


# -------------------------------------------------------------------------------------------------------- the component

Opener: TypeAlias = Callable[[str, str | None, Mapping[str, Any]], BaselineNetwork]
OPENERS: dict[str, Opener] = {
    "transformers": open_transformers,
    "function": lambda name, revision, options: FunctionNetwork(name),
}
"""Kind -> what opens a network by name, revision and options; a folder written by its `save` is such a name."""


class DepthBaseline(ModelMixin, ConfigMixin):
    """Depth maps of pictures by another model, which does not learn.

    Made by `open`. Saved by reference it is its name, its revision, and a hash of its weights, which must be the same
    when it is opened again; saved by value it is its weights.

    Args:
        name: Folder, name on the Hub, or name of a registered function.
        kind: Key of `OPENERS`.
        revision: Branch, tag or commit on the Hub.
        options: What the opener needs besides.
        stored: "reference" or "value".
        space: What its maps hold.
        metric: Whether they hold metres (or 1 / metres, which `forward` turns into metres).
        weights: Hash of its weights; None for a function without any.
        residual_scale: Standard deviation of what it leaves over, in units of the latents: what is diffused is the
            residual divided by it.
    """

    _keep_in_fp32_modules: ClassVar[list[str] | None] = None

    @register_to_config
    def __init__(
        self,
        name: str,
        kind: str = "transformers",
        revision: str | None = None,
        options: Mapping[str, Any] | None = None,
        stored: Literal["reference", "value"] = "reference",
        space: Space = "depth",
        metric: bool = False,
        weights: str | None = None,
        residual_scale: float = UNMEASURED,
    ) -> None:
        super().__init__()
        if stored not in ("reference", "value"):
            raise ValueError(f"stored is 'reference' or 'value'; got {stored!r}")
        if space not in ("depth", "disparity"):
            raise ValueError(f"space is 'depth' or 'disparity'; got {space!r}")
        self.register_buffer("_place", torch.zeros(()), persistent=False)  # device and dtype of one without weights
        self.network: BaselineNetwork | None = None

    @classmethod
    def open(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        stored: Literal["reference", "value"] = "reference",
        **options: Any,
    ) -> Self:
        """The baseline of this name.

        Args:
            name: A registered function, a folder of one of our depth pipelines ("embedded" for the model inside this
                package), or a folder or Hub name of a depth model of transformers.
            revision: Branch, tag or commit on the Hub; what was loaded is remembered as a commit.
            stored: How it is saved with a pipeline.
            options: Of transformers' models: `space`, `metric`, and the fields of `InputOptions`.
        """
        name = str(name)
        kind = _kind_of(name)
        network = OPENERS[kind](name, revision, options)
        commit = getattr(getattr(getattr(network, "model", None), "config", None), "_commit_hash", None)
        baseline = cls(
            name,
            kind,
            commit or revision,
            network.options,
            stored,
            network.space,
            network.metric,
            weights_hash(network),
        )
        return baseline._with(network)

    def _with(self, network: BaselineNetwork) -> Self:
        self.network = network.eval().requires_grad_(False)
        return self

    @property
    def output_space(self) -> Space:
        """What `forward` returns: metric maps are depth."""
        return "depth" if self.config.metric else self.config.space

    def forward(self, pixels: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in [-1, 1] -> maps (B, 1, H, W) in float32: metres, or depth or disparity as it is.

        A map with a NaN or an infinity is an error.
        """
        assert self.network is not None, "made by DepthBaseline.open or from_pretrained"
        maps = self.network((pixels.to(self.dtype) + 1) / 2).float()
        if maps.ndim != 3 or len(maps) != len(pixels):
            raise ValueError(
                f"baseline {self.config.name!r} must return maps (B, h, w) for {len(pixels)} pictures; got shape "
                f"{tuple(maps.shape)}"
            )
        if not bool(maps.isfinite().all()):
            raise ValueError(f"the map of baseline {self.config.name!r} has NaN or infinite values")
        if self.config.metric and self.config.space == "disparity":
            maps = 1 / maps.clamp(min=1e-4)
        return F.interpolate(maps[:, None], size=pixels.shape[-2:], mode="bilinear", align_corners=False)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """The config, and by value the network beside it."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_config(folder)
        if self.config.stored == "value":
            assert self.network is not None
            self.network.save(folder / _NETWORK)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        subfolder: str | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Self:
        """What `save_pretrained` wrote; weights other than those it was saved with are an error.

        `name` is where the same model lies now, in place of what a reference says.
        """
        folder = Path(pretrained_model_name_or_path) / (subfolder or "")
        config = cls.load_config(folder)
        baseline = cls.from_config(config)
        own = baseline.config
        if own.kind not in OPENERS:
            raise ValueError(f"unknown kind of baseline {own.kind!r}; known: {', '.join(sorted(OPENERS))}")
        given = {**(own.options or {}), "space": own.space, "metric": own.metric}
        if name is not None:
            baseline.register_to_config(name=name, kind=_kind_of(name), revision=None, stored="reference")
            network = OPENERS[own.kind](name, None, given)
        elif own.stored == "value":
            network = OPENERS[own.kind](str(folder / _NETWORK), None, given)
        else:
            network = OPENERS[own.kind](own.name, own.revision, given)
        found = weights_hash(network)
        if found != own.weights:
            raise ValueError(
                f"baseline {own.name!r} does not hold the weights that {folder} was trained with (hash {found}, "
                f"expected {own.weights}): what is left over would not fit"
            )
        baseline._with(network)
        return baseline if dtype is None else baseline.to(dtype)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """torch's own `to`: diffusers' (0.42) warns of modules to be kept in float32 where there are none."""
        return nn.Module.to(self, *args, **kwargs)


def _kind_of(name: str) -> str:
    if name in BASELINES:
        return "function"
    if name == "embedded" or (Path(name) / "model_index.json").is_file():
        return "pipeline"
    if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        registered = ", ".join(sorted(BASELINES)) or "none"
        raise FileNotFoundError(
            f"no baseline {name!r}: expected a folder, a name user/model on the Hub, 'embedded', or a registered "
            f"function ({registered})"
        )
    return "transformers"


def weights_hash(network: nn.Module) -> str | None:
    """A hash of names, shapes and values of all weights; None where there are none."""
    state = network.state_dict()
    if not state:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(state.items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
