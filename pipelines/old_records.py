"""Calibration records of versions before the first release."""

from typing import Any

from marigold_uq.schedulers.distributional import DistributionalScheduler

__all__ = ["with_scheduler_tau"]


def with_scheduler_tau(
    records: list[dict[str, Any]] | None, scheduler: DistributionalScheduler
) -> list[dict[str, Any]] | None:
    """The same records; one without a tau, which old versions kept in the scheduler alone, takes the scheduler's."""
    if not isinstance(records, list):
        return records
    return [{"tau": float(scheduler.config.tau), **record} for record in records]
