"""How unsure, and why: what the head says along a trajectory, and what several models say against each other.

Variances add, standard deviations do not. So everything in the middle of a formula is a variance and is called one;
what is handed to a user (`epistemic`, `total`, `aleatoric`, `initial_std`) is a standard deviation in the units of x_0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marigold_uq.precision import at_least_float32
from marigold_uq.sampling import ReverseStep
from marigold_uq.schedulers.distributional import DistributionalScheduler

BatchLayout = Literal["input_major", "member_major"]
"""How inputs and members share the batch axis: all members of the first input first, or all inputs of member one."""


@dataclass(frozen=True)
class OriginalMoments:
    """What the head says about x_0 at one step, given x_t."""

    timestep: int | float
    mean: Tensor  # xhat_0(x_t), (B, *event)
    variance: Tensor  # U_t = Var[x_0 | x_t], marginal, (B, *event)


@dataclass
class _Trajectory:
    """Running sums over the steps of one call of `reverse_diffusion`."""

    initial_mean: Tensor  # xhat_0 at the first step
    initial_variance: Tensor  # tau U_t at the first step
    sum_variance: Tensor  # sum of U_t
    sum_reverse: Tensor  # sum of V[mu_theta]
    steps: list[OriginalMoments]
    num_steps: int = 0

    @classmethod
    def empty(cls, mean: Tensor, variance: Tensor) -> "_Trajectory":
        return cls(mean, variance, torch.zeros_like(variance), torch.zeros_like(variance), [])


class TrajectoryUncertainty:
    """Observer for `reverse_diffusion`: the head's own uncertainty along the way, at no extra network call.

    One observer may watch several calls, batch after batch of one long list of inputs and members; results are joined
    along the batch axis in the order of the calls. `keep_steps` also keeps xhat_0 and U_t of every step (2 steps x B
    events of memory), which `total_variance_by_step` needs.
    """

    def __init__(self, *, keep_steps: bool = False) -> None:
        self.keep_steps = keep_steps
        self._trajectories: list[_Trajectory] = []

    def __call__(self, scheduler: DistributionalScheduler, step: ReverseStep) -> None:
        law = scheduler.original_distribution(step.law, step.timestep, step.x_t)
        variance = law.variance
        if step.index == 0:
            _check_has_variance(step, variance)
            total = law.scaled(scheduler.config.tau).variance  # what the sampler draws from
            self._trajectories.append(_Trajectory.empty(law.mean, total))
        elif not self._trajectories or self._trajectories[-1].num_steps != step.index:
            raise ValueError(f"step {step.index} does not follow the last one seen: watch trajectories from the start")
        record = self._trajectories[-1]
        record.num_steps += 1
        record.sum_variance += variance
        record.sum_reverse += reverse_mean_variance(scheduler, step)
        if self.keep_steps:
            record.steps.append(OriginalMoments(step.timestep, law.mean, variance))

    @property
    def epistemic(self) -> Tensor:
        """The paper's epistemic estimate in the units of x_0, as a standard deviation, (B, *event).

        sqrt( mean over the used timesteps of U_t ), U_t = Var[x_0 | x_t] the head's marginal variance. The
        paper's V[mu_theta] = b^2 Sigma is U_t times a factor that only depends on the schedule and the stride; taking
        that factor out gives one unit to all steps. Note what it measures: U_t is the posterior variance of x_0, which
        is positive for a perfect model too, so this number does not vanish with infinite data. It is the head's own
        number, before tau.
        """
        return self._join(lambda record: (record.sum_variance / record.num_steps).sqrt())

    @property
    def reverse_variance(self) -> Tensor:
        """The paper's V[mu_theta] = b^2 Sigma at eta = 1, mean over the used timesteps, (B, *event).

        A variance in the units of x_{t-1}; it depends on how many steps are taken. For reference.
        """
        return self._join(lambda record: record.sum_reverse / record.num_steps)

    @property
    def initial_mean(self) -> Tensor:
        """The mean of x_0 at the first step, (B, *event)."""
        return self._join(lambda record: record.initial_mean)

    @property
    def initial_std(self) -> Tensor:
        """sqrt(tau U_t) at the first step, (B, *event): at zero SNR the predictive standard deviation.

        There x_t says nothing about x_0, so one network call gives the total uncertainty of a one-step sampler.
        """
        return self._join(lambda record: record.initial_variance.sqrt())

    @property
    def steps(self) -> list[OriginalMoments]:
        """Moments of x_0 given x_t at every step, first step first; tensors (B, *event)."""
        if not self.keep_steps:
            raise ValueError("the steps were not kept: build TrajectoryUncertainty(keep_steps=True)")
        timesteps = {tuple(step.timestep for step in record.steps) for record in self._trajectories}
        if len(timesteps) > 1:
            raise ValueError(f"trajectories with different timesteps cannot be joined: {sorted(timesteps)}")
        return [
            OriginalMoments(
                parts[0].timestep, torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])
            )
            for parts in zip(*(record.steps for record in self._trajectories), strict=True)
        ]

    def _join(self, quantity: Callable[[_Trajectory], Tensor]) -> Tensor:
        if not self._trajectories:
            raise ValueError("no trajectory was watched: pass this object to reverse_diffusion(..., observers=[...])")
        return torch.cat([quantity(record) for record in self._trajectories])


def _check_has_variance(step: ReverseStep, variance: Tensor) -> None:
    """Point predictions and single draws have variance 0 by construction, which must not pass for certainty."""
    if not bool((variance > 0).any()):
        raise ValueError(
            f"a {type(step.law).__name__} at t = {step.timestep} has no variance, so there is nothing of the head "
            "to collect: use a family with one (gaussian, mixture, low_rank, ...) or the spread of samples (total_std)"
        )


def reverse_mean_variance(scheduler: DistributionalScheduler, step: ReverseStep) -> Tensor:
    """V[mu_theta] = B^2 Sigma at eta = 1 with the head's own B and marginal Sigma, (B, *event), in units of x_{t-1}.

    B^2 is (1 - alpha_t)^2 over alpha_t (1 - abar_t) for epsilon, over (1 - abar_t)/abar_prev for v and over
    (1 - abar_t)^2/abar_prev for x_0: three forms of one number, Theorem 1's coefficient.
    """
    return scheduler.step_coefficients(step.timestep, eta=1.0).output ** 2 * step.law.variance


def split_members(batch: Tensor, num_members: int, layout: BatchLayout = "input_major") -> Tensor:
    """(inputs x members, *event) -> (M, inputs, *event), members first as in every metric."""
    if num_members < 1 or batch.shape[0] % num_members:
        raise ValueError(f"a batch of {batch.shape[0]} does not hold whole groups of num_members = {num_members}")
    if layout == "input_major":
        return batch.unflatten(0, (-1, num_members)).transpose(0, 1)
    if layout == "member_major":
        return batch.unflatten(0, (num_members, -1))
    raise ValueError(f"unknown layout {layout!r}; choose 'input_major' or 'member_major'")


def total_std(samples: Tensor) -> Tensor:
    """Total uncertainty from predictive samples (M, ...): their standard deviation, divisor M - 1, (...)."""
    if samples.ndim == 0 or samples.shape[0] < 2:
        raise ValueError(f"the spread of samples (M, ...) needs M >= 2 members; got shape {tuple(samples.shape)}")
    return at_least_float32(samples).std(0, correction=1)


def total_variance_by_step(
    steps: Sequence[OriginalMoments], num_members: int, layout: BatchLayout = "input_major"
) -> Tensor:
    """Law of total variance at every step: mean_m U_t + Var_m[xhat_0], (steps, inputs, *event).

    For a consistent head every row estimates one number, the predictive variance: near t = T it is all in U_t, near
    t = 0 all in the spread between members. A row that disagrees shows where the head is wrong.
    """
    if num_members < 2:
        raise ValueError(f"the spread between members needs num_members >= 2; got {num_members}")
    rows = []
    for step in steps:
        between = split_members(step.mean, num_members, layout).var(0, correction=1)
        rows.append(split_members(step.variance, num_members, layout).mean(0) + between)
    return torch.stack(rows)


@dataclass(frozen=True)
class VarianceDecomposition:
    """Total variance = within_variance + between_variance, each (...)."""

    within_variance: Tensor  # mean of the members' variances
    between_variance: Tensor  # variance of the members' means

    @property
    def total_variance(self) -> Tensor:
        """Variance of the equal mixture of all members."""
        return self.within_variance + self.between_variance

    @property
    def total(self) -> Tensor:
        """Standard deviation of the mixture."""
        return self.total_variance.sqrt()

    @property
    def aleatoric(self) -> Tensor:
        """Root of the mean member variance: what every model thinks is noise."""
        return self.within_variance.sqrt()

    @property
    def epistemic(self) -> Tensor:
        """Standard deviation between member means: where independently trained models disagree."""
        return self.between_variance.sqrt()


def decompose_members(means: Tensor, variances: Tensor) -> VarianceDecomposition:
    """Split the variance of S independently trained models, means and variances (S, ...).

    The predictive distribution is the equal mixture of the members, so the divisor is S and the identity exact.
    """
    if means.shape != variances.shape or means.ndim == 0 or means.shape[0] < 2:
        raise ValueError(
            f"expected means and variances of one shape (S, ...) with S >= 2 models; got {tuple(means.shape)} and "
            f"{tuple(variances.shape)}"
        )
    if bool((variances < 0).any()):
        raise ValueError("variances contain negative numbers; pass variances, not log-variances or differences")
    means, variances = at_least_float32(means), at_least_float32(variances)
    return VarianceDecomposition(variances.mean(0), means.var(0, correction=0))


def decompose_member_samples(samples: Tensor) -> VarianceDecomposition:
    """The same from draws (S, M, ...): M samples of each of S models.

    Means of M draws scatter by variance/M even if all models agree; that share (S - 1)/S within/M is taken off, and
    what would become negative is zero.
    """
    if samples.ndim < 2 or samples.shape[0] < 2 or samples.shape[1] < 2:
        raise ValueError(f"expected samples (S, M, ...) with S, M >= 2; got shape {tuple(samples.shape)}")
    num_models, num_draws = samples.shape[:2]
    samples = at_least_float32(samples)
    raw = decompose_members(samples.mean(1), samples.var(1, correction=1))
    noise = (num_models - 1) / num_models * raw.within_variance / num_draws
    return VarianceDecomposition(raw.within_variance, (raw.between_variance - noise).clamp(min=0))
