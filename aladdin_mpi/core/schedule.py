"""The learning rate as a function of the epochs done: linear scaling, gradual warm-up, step decay.

It knows no optimizer, so that workers, servers and the simulation share it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from numbers import Integral, Real

from aladdin_mpi.errors import ConfigError

__all__ = ["SCALINGS", "Schedule"]

SCALINGS = ("none", "linear")
"""How the learning rate grows with the number of workers."""

WARMUP_START = 0.1
"""Where the warm-up starts, as a part of the full rate, when the rate is not scaled."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate with linear scaling, gradual warm-up and step decay.

    Attributes
    ----------
    base_lr : float
        Learning rate of one worker, η.
    num_workers : int
        Number of workers, n.
    scaling : {"none", "linear"}
        ``"linear"`` trains at ``n · base_lr`` after the warm-up, ``"none"`` at ``base_lr``.
    warmup_epochs : float
        Length of the warm-up [epochs]; 0 for none.
    milestones : tuple of float
        Where the rate decays [epochs], increasing, none of them inside the warm-up.
    gamma : float
        Factor of each decay, in (0, 1].

    Raises
    ------
    ConfigError
        A value is not allowed.

    Notes
    -----
    With the warm-up's length ``w`` and ``m(e)`` milestones at or before ``e``::

        peak  = n · base_lr ("linear") or base_lr ("none")
        start = base_lr ("linear") or base_lr / 10 ("none")
        lr(e) = start + (peak − start) · e / w     for e < w
        lr(e) = peak · gamma ** m(e)               otherwise

    A single worker with linear scaling therefore trains at ``base_lr`` from the start.

    References
    ----------
    P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677,
    sec. 2.1 (linear scaling rule) and 2.2 (gradual warm-up).
    """

    base_lr: float
    num_workers: int = 1
    scaling: str = "linear"
    warmup_epochs: float = 0.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if not (_is_finite(self.base_lr) and self.base_lr > 0):
            raise _refused("base_lr", self.base_lr, "a learning rate above 0, such as 0.01")
        if not _is_count(self.num_workers):
            raise _refused("num_workers", self.num_workers, "the number of workers, 1 or more")
        if self.scaling not in SCALINGS:
            raise _refused("scaling", self.scaling, "one of " + ", ".join(SCALINGS))
        if not (_is_finite(self.warmup_epochs) and self.warmup_epochs >= 0):
            raise _refused("warmup_epochs", self.warmup_epochs, "a number of epochs, 0 for none")
        if not (_is_finite(self.gamma) and 0 < self.gamma <= 1):
            raise _refused("gamma", self.gamma, "a factor above 0 and at most 1, such as 0.1")
        if not isinstance(self.milestones, tuple | list) or not all(
            _is_finite(milestone) and milestone > 0 for milestone in self.milestones
        ):
            raise _refused(
                "milestones", self.milestones, "a list of epochs above 0, or an empty one"
            )
        milestones = tuple(float(milestone) for milestone in self.milestones)
        if any(later <= earlier for earlier, later in itertools.pairwise(milestones)):
            raise _refused("milestones", self.milestones, "epochs that increase, each once")
        if milestones and milestones[0] < self.warmup_epochs:
            allowed = f"epochs after the warm-up (warmup_epochs = {self.warmup_epochs})"
            raise _refused("milestones", self.milestones, allowed)
        object.__setattr__(self, "milestones", milestones)

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up and before the first decay."""
        return self.base_lr * (self.num_workers if self.scaling == "linear" else 1)

    @property
    def start_lr(self) -> float:
        """Learning rate that the warm-up starts from."""
        return self.base_lr * (1.0 if self.scaling == "linear" else WARMUP_START)

    def lr(self, epochs_done: float) -> float:
        """Return the learning rate after ``epochs_done`` [epochs], a fraction inside an epoch."""
        if epochs_done < self.warmup_epochs:
            part = max(epochs_done, 0.0) / self.warmup_epochs
            return self.start_lr + (self.peak_lr - self.start_lr) * part
        decays = sum(milestone <= epochs_done for milestone in self.milestones)
        return self.peak_lr * self.gamma**decays


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _refused(option: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"learning-rate schedule: {option} = {value!r} is not allowed; give {allowed}"
    )
