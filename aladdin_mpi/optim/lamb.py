"""LAMB: Adam whose learning rate is adapted layer by layer.

See :mod:`aladdin_mpi.optim.lars` for why no library's is taken.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from aladdin_mpi.optim.lars import Layerwise, check_range, norms, trust_ratios

__all__ = ["LAMB"]


class LAMB(Layerwise):
    """LAMB with bias correction, Algorithm 2 of the paper, with φ(z) = z.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        Parameters or groups of them, as for any optimizer of torch.
    lr : float
        Learning rate η.
    betas : (float, float)
        β₁ and β₂, in [0, 1).
    eps : float
        ε, added to the root of the second moment.
    weight_decay : float
        λ, decoupled as in AdamW, but inside the ratio.
    adapt_1d : bool
        Adapt and decay biases and the weights of norms as well.

    Raises
    ------
    ValueError
        A value is out of its range.

    Notes
    -----
    For each parameter x with gradient g, in its t-th step, ‖·‖ being the Euclidean norm over all
    of it::

        m ← β₁ m + (1 − β₁) g          m̂ = m / (1 − β₁ᵗ)
        v ← β₂ v + (1 − β₂) g²         v̂ = v / (1 − β₂ᵗ)
        u = m̂ / (√v̂ + ε) + λ x
        x ← x − η ‖x‖ / ‖u‖ · u        ‖x‖ / ‖u‖ = 1 where one of them is 0

    Biases and norms get a ratio of 1 and λ = 0, that is, plain Adam.

    Sources differ in the bias correction, which version 3 of the paper and code after it leave out,
    and in φ, which some make a clamp of ‖x‖ at 10.  t counts the steps of each parameter, as in
    torch's Adam.

    References
    ----------
    Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes",
    arXiv:1904.00962v5, Algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapt_1d: bool = False,
    ) -> None:
        check_range("lr", lr)
        check_range("betas[0]", betas[0], below=1.0)
        check_range("betas[1]", betas[1], below=1.0)
        check_range("eps", eps)
        check_range("weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt_1d": adapt_1d,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], adapted: bool) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        first = self._state_of(parameters, "exp_avg")
        second = self._state_of(parameters, "exp_avg_sq")
        steps = [self._count(p) for p in parameters]

        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)

        change = torch._foreach_div(first, [1 - beta1**t for t in steps])
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**t) for t in steps])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(change, roots)
        if adapted:
            if decay:
                torch._foreach_add_(change, parameters, alpha=decay)
            ratios = trust_ratios(norms(parameters), norms(change))
            torch._foreach_mul_(change, ratios.unbind())
        torch._foreach_add_(parameters, change, alpha=-lr)

    def _count(self, parameter: Tensor) -> int:
        """The number of this step of a parameter, from 1."""
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        count: int = state["step"]
        return count
