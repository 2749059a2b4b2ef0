"""AdaScale's gain ratio: how many steps of one worker a step of all workers is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["Gain"]

_SMALLEST_VARIANCE = 1e-6
"""Lower limit of an estimate of σ², so that the ratio never divides by 0 (the paper's)."""


class Gain:
    """Estimate of the gain ratio r, from norms of gradients only.

    Parameters
    ----------
    num_workers : int
        S, the workers whose gradients are averaged in a step; at 1, the gain is 1.
    smoothing : float, optional
        θ of the moving averages, in [0, 1); ``max(1 − S/1000, 0)`` when not given.

    Attributes
    ----------
    gain : float
        The last gain, in [1, S]; 1 before the first :meth:`update`.

    Raises
    ------
    ValueError
        A value is out of its range.

    Notes
    -----
    With the workers' gradients g₁ … g_S and their mean ḡ, the unbiased estimates of the variance
    σ² of one worker's gradient (the trace of its covariance) and of the squared norm μ² of the true
    gradient are::

        σ̂² = Σ ‖gᵢ‖² / (S − 1) − S ‖ḡ‖² / (S − 1)         at least 10⁻⁶
        μ̂² = ‖ḡ‖² − σ̂² / S                                at least 0

    the second with σ̂² as it was before it was limited.  Their moving averages σ̄² and μ̄² are the
    means of all samples so far in the first 1/(1 − θ) updates, and exponential ones with θ after
    them.  Then::

        r = (σ̄² + μ̄²) / (σ̄²/S + μ̄²)

    AdaScale multiplies the learning rate of one worker by r, and counts r steps of progress.

    The paper takes the averages over prior iterations, with r₀ = 1: that is :attr:`gain` read
    before the update.  What :meth:`update` returns includes this step, as in fairscale's AdaScale.
    The limit of σ̂² is absolute: where ‖gᵢ‖² comes near 10⁻⁶, r goes to S.

    References
    ----------
    T. Johnson, P. Agrawal, H. Gu, C. Guestrin, "AdaScale SGD: A User-Friendly Algorithm for
    Distributed Training", ICML 2020, arXiv:2007.05105, practical considerations and appendix B.3.
    """

    def __init__(self, num_workers: int, smoothing: float | None = None) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ValueError(f"num_workers = {num_workers!r}: must be a whole number, 1 or more")
        if smoothing is None:
            smoothing = max(1 - num_workers / 1000, 0.0)
        elif not 0 <= smoothing < 1:
            raise ValueError(f"smoothing = {smoothing!r}: must be at least 0 and below 1")
        self.num_workers = num_workers
        self.smoothing = smoothing
        self._updates = 0
        self._variance = 0.0  # σ̄²
        self._square_norm = 0.0  # μ̄²

    @property
    def gain(self) -> float:
        if self._updates == 0 or self.num_workers == 1:
            return 1.0
        variance, square_norm = self._variance, self._square_norm
        gain = (variance + square_norm) / (variance / self.num_workers + square_norm)
        return min(max(gain, 1.0), float(self.num_workers))  # rounding may leave the range

    def update(self, mean_square_norm: float, square_norm_of_mean: float) -> float:
        """Take in the gradients of one step and return the gain, this step included.

        Parameters
        ----------
        mean_square_norm : float
            Σ ‖gᵢ‖² / S.
        square_norm_of_mean : float
            ‖ḡ‖².

        Raises
        ------
        ValueError
            A number is negative or not finite; the averages stay as they were.
        """
        for name, value in (
            ("mean_square_norm", mean_square_norm),
            ("square_norm_of_mean", square_norm_of_mean),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value!r}: must be finite and at least 0")
        if self.num_workers == 1:  # one gradient says nothing about the variance
            return 1.0
        workers = self.num_workers
        variance = workers / (workers - 1) * (mean_square_norm - square_norm_of_mean)
        square_norm = square_norm_of_mean - variance / workers
        self._updates += 1
        new = max(1 / self._updates, 1 - self.smoothing)  # the weight of this sample
        variance = max(variance, _SMALLEST_VARIANCE)
        self._variance = (1 - new) * self._variance + new * variance
        self._square_norm = (1 - new) * self._square_norm + new * max(square_norm, 0.0)
        return self.gain

    def state_dict(self) -> dict[str, float]:
        """The averages and the number of updates; they hold for any number of workers."""
        return {
            "updates": self._updates,
            "variance": self._variance,
            "square_norm": self._square_norm,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a :meth:`state_dict`, perhaps with another number of workers.

        Raises
        ------
        ValueError
            It is no state of a gain.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"no state of a Gain: has {', '.join(map(str, state)) or 'nothing'}")
        self._updates = int(state["updates"])
        self._variance = float(state["variance"])
        self._square_norm = float(state["square_norm"])
