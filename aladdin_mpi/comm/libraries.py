"""Horovod and torch's DistributedDataParallel as what averages gradients.

Both average while the backward pass runs, into the gradients themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aladdin_mpi.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["DDPReducer", "HorovodReducer", "horovod_problem"]


def horovod_problem() -> str | None:
    """Why Horovod cannot be used here; None where it can."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it lacks
            module = importlib.import_module("horovod.torch")
    except ModuleNotFoundError:
        return "Horovod is not installed: make horovod builds it"
    except ImportError as error:
        return f"Horovod cannot be loaded ({error}): was it built for another MPI or torch?"
    if not hasattr(module, "init"):
        return "Horovod was built without its extension for torch"
    return None


class HorovodReducer:
    """Horovod's DistributedOptimizer, of which only the averaging is used: the user's own optimizer
    steps.

    Parameters
    ----------
    comm : MPI.Intracomm
        The workers.
    bucket_bytes : int
        Gradients that are ready at the same time are reduced together up to this; 0: Horovod's own.

    Raises
    ------
    ConfigError
        Horovod cannot be used here.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        passes: int,
        bucket_bytes: int = 0,
    ) -> None:
        problem = horovod_problem()
        if problem is not None:
            raise ConfigError(f"--backend horovod: {problem}; or use --backend mpi")
        import horovod
        import horovod.torch as hvd

        self._hvd = hvd
        if not hvd.is_initialized():
            if bucket_bytes:
                os.environ["HOROVOD_FUSION_THRESHOLD"] = str(bucket_bytes)
            hvd.init(comm=comm)
        self.name = f"Horovod {horovod.__version__}"
        self._optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, backward_passes_per_step=passes
        )

    def mean(self, contribute: bool, port: Any) -> int:
        """See ``runtime.reducers.GradientReducer``; who has ended joins until all have."""
        with port.waits():
            if not contribute:
                self._hvd.join()
                return 0
            self._optimizer.synchronize()
        return int(self._hvd.size())

    def close(self) -> None:
        """Before MPI ends; a later backward pass, on the model alone, must not reduce."""
        delays = self._optimizer._allreduce_delay  # passes to go: its hooks cannot be removed
        self._optimizer._allreduce_delay = dict.fromkeys(delays, math.inf)
        self._hvd.shutdown()


class DDPReducer:
    """DistributedDataParallel around the user's model, entered by the model's own call.

    Parameters
    ----------
    worker, num_workers : int
    exchange : callable
        ``exchange(bytes) -> list of bytes``, everybody's.
    bucket_bytes : int
        So many bytes of gradients are reduced together; 0: torch's own.

    Raises
    ------
    ConfigError
        There is no model to wrap.
    """

    name = f"torch {torch.__version__} DistributedDataParallel (gloo)"

    def __init__(
        self,
        worker: int,
        num_workers: int,
        exchange: Callable[[bytes], list[bytes]],
        model: torch.nn.Module | None,
        bucket_bytes: int = 0,
    ) -> None:
        if model is None:
            raise ConfigError("--backend ddp: give DistributedOptimizer the model")
        if not torch.distributed.is_initialized():
            mine = _free_address() if worker == 0 else ""
            host, _, port = exchange(mine.encode())[0].decode().rpartition(":")
            store = torch.distributed.TCPStore(host, int(port), num_workers, worker == 0)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=worker, world_size=num_workers
            )
        self._ddp = torch.nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, bucket_cap_mb=bucket_bytes / 2**20 or None
        )
        self._uneven = self._ddp.join(divide_by_initial_world_size=False)
        self._uneven.__enter__()
        self._inside = False
        self._model, self._before = model, vars(model).get("forward")
        self._enter_by(model)

    def _enter_by(self, model: torch.nn.Module) -> None:
        own = model.forward

        def forward(*args: Any, **options: Any) -> Any:
            if self._inside or not (model.training and torch.is_grad_enabled()):
                return own(*args, **options)
            self._inside = True
            try:
                return self._ddp(*args, **options)
            finally:
                self._inside = False

        model.forward = forward

    def mean(self, contribute: bool, port: Any) -> int:
        """See ``runtime.reducers.GradientReducer``: the backward pass has waited already."""
        if not contribute:
            with port.waits():
                self._uneven.__exit__(None, None, None)
            return 0
        return torch.distributed.get_world_size()

    def close(self) -> None:
        """Give the model its own call back, and leave the group."""
        if self._before is None:
            del self._model.forward
        else:
            self._model.forward = self._before
        with contextlib.suppress(RuntimeError):
            torch.distributed.destroy_process_group()


def _free_address() -> str:
    """This host's name and a port that is free at present, ``host:port``."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        host = "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"
