"""LARS: SGD with momentum whose learning rate is adapted layer by layer.

torch (2.13) has neither LARS nor LAMB.  The libraries that have them build something else:

- pytorch-optimizer (4.1; needs only torch and numpy, well kept): its LAMB is that of the paper's
  version 3, without bias correction, clamps the norm of the weights at 10 and adapts and decays
  biases too; its LARS scales the gradients of the caller in place and has no eps.
- timm (1.0): needs torchvision and a client of a model hub; it leaves out the groups without weight
  decay, not parameters by their shape, and its LARS keeps the learning rate out of the momentum.
- torch-optimizer and torchlars were last released in 2021 and 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["LARS", "Layerwise", "check_range", "norms", "trust_ratios"]


class Layerwise(torch.optim.Optimizer):
    """The step that LARS and LAMB share: all layers of a kind at once (``torch._foreach_*``).

    Parameters without a gradient are left alone.  Those of at most one dimension, which are biases
    and the weights of norms, are neither adapted nor decayed, unless their group has ``adapt_1d``.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters; returns what ``closure`` does, if there is one.

        Raises
        ------
        RuntimeError
            A gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for adapted, parameters in self._alike(group):
                self._update(group, parameters, adapted)
        return loss

    def _alike(self, group: dict[str, Any]) -> Iterator[tuple[bool, list[Tensor]]]:
        """The parameters with a gradient, by whether they are adapted, by device and dtype."""
        kinds: dict[tuple[bool, torch.device, torch.dtype], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse or p.is_complex():
                raise RuntimeError(f"{type(self).__name__} takes no sparse or complex gradients")
            kinds.setdefault((p.ndim > 1 or group["adapt_1d"], p.device, p.dtype), []).append(p)
        for (adapted, _, _), parameters in kinds.items():
            yield adapted, parameters

    def _update(self, group: dict[str, Any], parameters: list[Tensor], adapted: bool) -> None:
        """Update parameters of one group, device and dtype, which all have a gradient."""
        raise NotImplementedError

    def _state_of(self, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
        """One tensor of the state for each parameter, zeros where there is none yet."""
        tensors = []
        for p in parameters:
            state = self.state[p]
            if name not in state:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            tensors.append(state[name])
        return tensors


class LARS(Layerwise):
    """LARS with the learning rate inside the momentum, Algorithm 1 of the paper.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        Parameters or groups of them, as for any optimizer of torch.
    lr : float
        Learning rate γ; with trust coefficient 0.001, values of 1 to 30 are usual.
    momentum : float
        m, in [0, 1).
    weight_decay : float
        β, added to the gradient (L2).
    trust_coefficient : float
        η, the trust in the layer-wise rate, above 0.
    eps : float
        Keeps the denominator away from 0; the paper has none.
    adapt_1d : bool
        Adapt and decay biases and the weights of norms as well.

    Raises
    ------
    ValueError
        A value is out of its range.

    Notes
    -----
    For each parameter w with gradient g, ‖·‖ being the Euclidean norm over all of it::

        λ = η ‖w‖ / (‖g‖ + β ‖w‖ + eps)        λ = 1 where w = 0
        v ← m v + γ λ (g + β w)
        w ← w − v

    Biases and norms get λ = 1 and β = 0, that is, plain SGD at the full learning rate.

    Sources differ in the second line.  NVIDIA's LARC, timm and others do as torch's SGD, whose
    momentum collects λ (g + β w) and is multiplied by γ afterwards.  That is the same for a
    constant γ only: here a change of γ leaves alone what the momentum has collected.

    References
    ----------
    Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks",
    arXiv:1708.03888, eq. 6 and Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        *,
        adapt_1d: bool = False,
    ) -> None:
        check_range("lr", lr)
        check_range("momentum", momentum, below=1.0)
        check_range("weight_decay", weight_decay)
        check_range("trust_coefficient", trust_coefficient)
        check_range("eps", eps)
        if trust_coefficient == 0:
            raise ValueError("trust_coefficient = 0: must be above 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "adapt_1d": adapt_1d,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], adapted: bool) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        lr, decay = float(group["lr"]), group["weight_decay"]
        if adapted:
            w, g = norms(parameters), norms(gradients)
            ratios = trust_ratios(group["trust_coefficient"] * w, g + decay * w + group["eps"])
            change = torch._foreach_add(gradients, parameters, alpha=decay)
            torch._foreach_mul_(change, (lr * ratios).unbind())
        else:
            change = torch._foreach_mul(gradients, lr)
        if group["momentum"]:
            collected = self._state_of(parameters, "momentum_buffer")
            torch._foreach_mul_(collected, group["momentum"])
            torch._foreach_add_(collected, change)
            change = tuple(collected)
        torch._foreach_sub_(parameters, change)


def norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Euclidean norms of tensors of one dtype and device, shape (n,), in at least float32."""
    if tensors[0].dtype.itemsize < 4:
        tensors = [tensor.float() for tensor in tensors]
    return torch.stack(list(torch._foreach_norm(tensors)))


def trust_ratios(above: Tensor, below: Tensor) -> Tensor:
    """``above / below``, shape (n,), and 1 where one of them is 0."""
    return torch.where((above > 0) & (below > 0), above / below, 1.0)


def check_range(name: str, value: float, below: float = math.inf) -> None:
    """Raise a :class:`ValueError` unless ``0 <= value < below``; NaN is not."""
    if not 0.0 <= value < below:
        limit = "and finite" if below == math.inf else f"and below {below:g}"
        raise ValueError(f"{name} = {value}: must be at least 0 {limit}")
