"""What all pipelines share: loading by name without running remote code, publishing, and one calibration contract."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import logging
from torch import Tensor

from marigold_uq.calibration import Calibration, read_calibrations, with_calibration
from marigold_uq.loading import default_dtype_kept, fetch_pretrained
from marigold_uq.novelty import Novelty, NoveltyReference
from marigold_uq.schedulers.distributional import DistributionalScheduler

logger = logging.get_logger(__name__)

_LEAST = {"default_denoising_steps": 1, "default_processing_resolution": 0}


@contextmanager
def _explaining(name: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever damaged files and wrong values make their readers raise into one error that names the model."""
    try:
        yield
    except (OSError, ValueError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{name} is damaged, or not of this kind: {type(error).__name__}: {error}") from error


class ConfigEntry:
    """An entry of a pipeline's config under its own name as an attribute; assigning it changes the config."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, pipeline: Any, owner: type | None = None) -> Any:
        return self if pipeline is None else pipeline.config[self.name]

    def __set__(self, pipeline: Any, value: Any) -> None:
        pipeline.register_to_config(**{self.name: value})


class UncertaintyPipeline(DiffusionPipeline):
    """A pipeline that knows how sure it is.

    Subclasses take `calibration: list[dict] | None = None` in `__init__` and register it in the config; then
    `calibrate` stores, `save_pretrained` and `push_to_hub` keep, and `calibration_for` finds what was chosen on
    held-out data.
    """

    uncertainty_modes: ClassVar[tuple[str | None, ...]] = (None,)
    """Ways to uncertainty, each with a calibration of its own; a pipeline with one way has the mode None."""
    scheduler: DistributionalScheduler

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """As in diffusers, a folder or a name on the Hub; our own components need no `trust_remote_code`.

        Weights are read from safetensors; pickles (.bin) only with `use_safetensors=None`, at your own risk.

        Raises:
            ValueError: The files are damaged, or a config holds values that no pipeline has.
        """
        kwargs.setdefault("use_safetensors", True)
        with _explaining(pretrained_model_name_or_path), default_dtype_kept():
            folder, own = fetch_pretrained(cls, pretrained_model_name_or_path, kwargs)
            pipeline = super().from_pretrained(folder, **{**own, **kwargs})
            pipeline._complete_calibration()
            pipeline._check_config()
        return pipeline

    def _check_config(self) -> None:
        """Refuse values that a call would trip over."""
        for name, least in _LEAST.items():
            value = self.config.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r} in the pipeline's config; expected a whole number from {least}")
        read_calibrations(self.config.get("calibration"))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in diffusers, without the places on this machine that the parts were loaded from."""
        from marigold_uq.hub import forget_local_paths

        super().save_pretrained(save_directory, *args, **kwargs)
        forget_local_paths(Path(save_directory))

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """A saved config, in today's names: `upgrade_config` translates those of versions before the first release."""
        loaded = super().load_config(*args, **kwargs)
        if isinstance(loaded, tuple):
            return (cls.upgrade_config(loaded[0]), *loaded[1:])
        return cls.upgrade_config(loaded)

    @classmethod
    def upgrade_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Replace old entries, here `calibration`; a pipeline with further ones extends this.

        A record without tau takes that of the scheduler it is loaded with.
        """
        stored = config.get("calibration")
        if not isinstance(stored, Mapping):
            return dict(config)
        return {**config, "calibration": [one.to_dict() for one in read_calibrations(stored)] or None}

    def _complete_calibration(self) -> None:
        """Give upgraded records without a tau the scheduler's, which old versions kept there alone."""
        stored = self.config.get("calibration") or []
        if any("tau" not in one for one in stored):
            tau = float(self.scheduler.config.tau)
            self.register_to_config(calibration=[{"tau": tau, **one} for one in stored])

    @property
    def num_calibrated_outputs(self) -> int | None:
        """How many entries kappa and the intervals have; None: as many as were calibrated."""
        return None

    def calibrate(self, calibration: Calibration) -> Self:
        """Keep what was chosen on held-out data; saving, loading and publishing keep it too.

        tau goes into the scheduler. A record for the same way to uncertainty is replaced.
        """
        if calibration.uncertainty not in self.uncertainty_modes:
            raise ValueError(
                f"Calibration(uncertainty=...) must be one of {list(self.uncertainty_modes)} for a "
                f"{type(self).__name__}; got {calibration.uncertainty!r}"
            )
        self._check_num_outputs(calibration)
        records = with_calibration(self.calibrations, calibration)
        self.scheduler.calibrate(calibration.tau)
        self.register_to_config(calibration=[one.to_dict() for one in records])
        return self

    def _check_num_outputs(self, calibration: Calibration) -> None:
        expected, grid = self.num_calibrated_outputs, calibration.interval
        if expected is None:
            return
        if isinstance(calibration.kappa, tuple) and len(calibration.kappa) != expected:
            raise ValueError(f"kappa needs {expected} entries, one per output; got {len(calibration.kappa)}")
        if grid is not None and grid.num_outputs != expected:
            raise ValueError(f"intervals need {expected} half widths, one per output; got {grid.num_outputs}")

    @property
    def calibrations(self) -> tuple[Calibration, ...]:
        """All stored records."""
        return read_calibrations(self.config.get("calibration"))

    def calibration_for(self, uncertainty: str | None = None, **call: int | None) -> Calibration:
        """The record for a way to uncertainty, without effect where none was stored.

        A call under other conditions (`num_inference_steps`, `ensemble_size`) is warned; a scheduler with another tau
        is refused, because the intervals would promise what was never calibrated.
        """
        for record in self.calibrations:
            if record.uncertainty == uncertainty:
                break
        else:
            return Calibration(tau=float(self.scheduler.config.tau), uncertainty=uncertainty)
        if record.tau != self.scheduler.config.tau:
            raise ValueError(
                f"the stored calibration was made with tau = {record.tau}, but the scheduler has tau = "
                f"{self.scheduler.config.tau}: set it back with scheduler.calibrate(...), or calibrate again"
            )
        for difference in record.mismatches(**call):
            logger.warning(f"{difference}: kappa and intervals may not hold")
        return record

    def fit_novelty(self, inputs: Any, *, false_alarm_rate: float = 0.05, **call: Any) -> Self:
        """Learn what inputs in distribution look like, so that `output_novelty=True` can recognise others.

        Run it after `calibrate`, with the arguments of later calls; it becomes part of the calibration.

        Args:
            inputs: As a call takes them: independent, not trained on, 40 or better hundreds of them.
            false_alarm_rate: Share of inputs in distribution that may be flagged.
            call: Further arguments of the call, such as ensemble_size or uncertainty.
        """
        seen = self(inputs, output_novelty=True, **call).novelty
        reference = NoveltyReference.fit(
            seen.features, false_alarm_rate=false_alarm_rate, conditions=dict(seen.conditions)
        )
        record = replace(self.calibration_for(seen.uncertainty), novelty=reference)
        return UncertaintyPipeline.calibrate(
            self, record
        )  # a subclass's own would drop what it keeps beside the record

    def _novelty(self, features: Tensor, calibration: Calibration, **conditions: int) -> Novelty:
        """Features (N, D) of a call beside the stored reference; other conditions than its own are warned."""
        reference = calibration.novelty
        if reference is not None and dict(reference.conditions) != conditions:
            logger.warning(
                f"novelty was fitted with {dict(reference.conditions)}, called with {conditions}: p-values may not hold"
            )
        return Novelty(features.numpy(force=True), reference, conditions, calibration.uncertainty)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        commit_message: str = "Upload model",
        endpoint: str | None = None,
        **save_options: Any,
    ) -> str:
        """Upload weights, configs and a model card that others can load, and return the commit's address.

        diffusers' own method uploads components of our classes without the files through which `from_pretrained` finds
        them, and no card.

        Args:
            repo_id: "user/name"; the repository is created where there is none.
            token: Access token; by default that of `hf auth login` or HF_TOKEN.
            private: Visibility of a new repository; None takes the account's default.
            commit_message: Of the upload.
            endpoint: Another Hub than the public one.
            save_options: Arguments of `save_pretrained`, for instance variant="fp16".
        """
        from marigold_uq.hub import check_repo_id, push_to_hub

        check_repo_id(repo_id)
        with TemporaryDirectory() as folder:
            model = Path(folder) / repo_id.split("/")[-1]
            self.save_pretrained(model, **save_options)
            return push_to_hub(
                model, repo_id, token=token, private=private, commit_message=commit_message, endpoint=endpoint
            )
