"""The user's optimizer, made distributed in place.

The object stays what it was: same class by ``isinstance``, same state, groups, hooks and
schedulers; only its ``step()`` now also lets the algorithm push and mix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aladdin_mpi.core.encoding import Dgc, find
from aladdin_mpi.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from aladdin_mpi.runtime.worker import Driver

__all__ = ["check_sgd", "check_supported", "distribute", "scale_rates"]


class _Distributed:
    """Mixed in before the optimizer's own class."""

    _aladdin_driver: Driver

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        """One local update, and what the algorithm makes of it."""
        if closure is not None:
            raise ModelError(
                "optimizer.step(closure) is not supported, because a closure runs forward and "
                "backward at will: compute the gradients first and call step() without one"
            )
        update = super().step  # type: ignore[misc]
        self._aladdin_driver.step(partial(update, **options))


def check_supported(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Refuse what cannot work.

    Raises
    ------
    ModelError
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(optimizer, _Distributed):
        raise ModelError("this optimizer is distributed already: wrap each one once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("LBFGS needs a closure, which is not supported: use SGD, Adam or another")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError("SparseAdam needs sparse gradients, which are not supported: use Adam")
    for name, module in model.named_modules() if model is not None else ():
        if getattr(module, "sparse", False) is True:
            raise ModelError(
                f"module {name} ({type(module).__name__}) makes sparse gradients, which are not "
                "supported: build it with sparse=False"
            )


def check_sgd(optimizer: torch.optim.Optimizer, algorithm: str, wire: str = "float32") -> None:
    """Refuse an optimizer other than the one that servers step with.

    Raises
    ------
    ConfigError
    """
    group = optimizer.param_groups[0]
    plain = type(optimizer) is torch.optim.SGD and not (
        group["nesterov"] or group["dampening"] or group["maximize"]
    )
    alike = all(
        other.get(name) == group.get(name)
        for other in optimizer.param_groups
        for name in ("momentum", "weight_decay")
    )
    if not plain or not alike:
        raise ConfigError(
            f"--algorithm {algorithm}: the server applies the gradients, with SGD of one momentum "
            "and weight decay: use torch.optim.SGD without Nesterov, dampening and maximize, or "
            "an algorithm whose workers step themselves (aladdin, easgd, arsgd, localsgd, …)"
        )
    if isinstance(find(wire), Dgc) and group["momentum"] >= 1:
        raise ConfigError(f"--momentum {group['momentum']}: must be below 1 with --wire {wire}")


def scale_rates(
    optimizer: torch.optim.Optimizer, factor: Callable[[], float], log: Callable[[float], None]
) -> None:
    """Multiply the learning rates by ``factor()`` while the optimizer makes its own step."""
    rates: list[Any] = []

    def before(*_: Any) -> None:
        gain = factor()
        log(gain)
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * gain

    def after(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def distribute(optimizer: torch.optim.Optimizer, driver: Driver) -> None:
    """Change the class of ``optimizer`` in place."""
    own = type(optimizer)
    patched = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(own.__name__, (_Distributed, own), {"__module__": own.__module__})
    optimizer._aladdin_driver = driver  # type: ignore[attr-defined]
    if patched is not None:  # by a scheduler made before, which wants to see steps happen
        inner = optimizer.step

        def step(*args: Any, **options: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return inner(*args, **options)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]
