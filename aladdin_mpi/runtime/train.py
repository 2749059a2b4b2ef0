"""Our own training loop, over the session's public interface: what ``aladdin-mpi train`` runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from aladdin_mpi.algorithms import find
from aladdin_mpi.algorithms.base import Topology
from aladdin_mpi.config import RunConfig
from aladdin_mpi.core.encoding import Dgc
from aladdin_mpi.core.encoding import find as find_encoding
from aladdin_mpi.core.schedule import Schedule
from aladdin_mpi.errors import AladdinError, ConfigError, ModelError
from aladdin_mpi.optim import LAMB, LARS
from aladdin_mpi.runtime.compute import Compute, EmulatedCompute, Placement, evaluate
from aladdin_mpi.runtime.folder import save_model
from aladdin_mpi.runtime.loader import children_without_signals
from aladdin_mpi.runtime.summary import print_summary
from aladdin_mpi.workload.arrays import DataBundle, collate
from aladdin_mpi.workload.data import dataset_names, load_dataset
from aladdin_mpi.workload.models import build_model, model_names

__all__ = ["check", "derive_seed", "largest_norm", "schedule_of", "train"]

Loader = DataLoader[tuple[Tensor, Tensor]]


def check(config: RunConfig) -> None:
    """Raise a :class:`ConfigError` for the mistakes that are seen without data and MPI."""
    schedule_of(config, num_workers=1)
    if config.emulate_compute and config.algorithm_options.get("backend") == "ddp":
        raise ConfigError(
            f"--emulate-compute {config.emulate_compute:g}: --backend ddp averages in the backward "
            "pass, which is not made; use --backend mpi or horovod"
        )
    name = config.dataset
    if ":" not in name and name not in dataset_names():
        load_dataset(name, None, 0)  # says which ones there are
    # where there is torchvision, asking for its names takes seconds: build_model will tell
    quick = importlib.util.find_spec("torchvision") is None
    if quick and ":" not in config.model and config.model not in model_names():
        build_model(config.model, (), 1, 0)


def schedule_of(config: RunConfig, num_workers: int) -> Schedule:
    """The learning rate of a run by the epochs done."""
    return Schedule(
        base_lr=config.lr,
        num_workers=num_workers,
        scaling=config.lr_scaling,
        warmup_epochs=config.warmup_epochs,
        milestones=config.milestones,
        gamma=config.gamma,
    )


def largest_norm(config: RunConfig, num_workers: int) -> float | None:
    """The norm that a worker's gradient is clipped at: with deep gradient compression that of one
    of n independent gradients whose sum has ``--clip-norm`` (Lin et al., ICLR 2018, sec. 3.2).
    """
    if config.clip_norm is None or not isinstance(find_encoding(config.wire), Dgc):
        return config.clip_norm
    return config.clip_norm / math.sqrt(num_workers)


def derive_seed(seed: int, *path: int) -> int:
    """A seed for each ``path``, such as (worker,), from the run's one seed."""
    return int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0] >> 1)


def train(config: RunConfig, options: Any, one_host: bool = False) -> None:
    """Train as configured; called on every rank, of which a server does not come back from it.

    Parameters
    ----------
    config : RunConfig
    options : dataclass
        The algorithm's configuration.
    one_host : bool
        All ranks see the same files, and find the same mistake in the data before MPI is started.

    Raises
    ------
    AladdinError
        Data or model cannot be used, the same error on all workers.
    """
    from aladdin_mpi.runtime import session as am

    data, problem = _try_data(config)  # before, because the progress bar needs its length
    if one_host and isinstance(problem, AladdinError):
        raise problem
    chosen = dataclasses.asdict(options)
    am.init(
        config.algorithm,
        out=config.out,
        seed=config.seed,
        log=config.log,
        log_variance=config.log_variance,
        on_nonfinite=config.on_nonfinite,
        progress=config.progress,
        stall_s=config.stall_s,
        threads=config.threads,
        slow_worker=config.slow_worker,
        checkpoint_epochs=config.checkpoint_epochs,
        checkpoint_iterations=config.checkpoint_iterations,
        checkpoint_minutes=config.checkpoint_minutes,
        checkpoint_keep=config.checkpoint_keep,
        time_limit=config.time_limit,
        resume=config.resume,
        servers=config.servers,
        merge_on_node=config.merge_on_node,
        max_shard_bytes=config.max_shard_bytes,
        shard_by=config.shard_by,
        server_placement=config.server_placement,
        wire=config.wire,
        config_text=config.model_copy(update={"algorithm_options": chosen}).to_yaml(),
        samples_total=0 if data is None else round(config.epochs * len(data.train)),  # type: ignore[arg-type]
        **chosen,
    )
    if problem is not None and not isinstance(problem, AladdinError):
        raise problem
    model = None
    if data is not None:
        try:
            model = _build_model(config, data)
        except AladdinError as error:
            problem = error
    am.agree(problem)
    assert data is not None and model is not None
    _seed_all(derive_seed(config.seed, am.rank()))
    if am.rank() == 0 and config.emulate_compute:
        print(
            f"EMULATED COMPUTE: every batch sleeps {config.emulate_compute:g} ms in place of "
            "forward and backward; nothing is learned",
            flush=True,
        )
    _Training(config, data, model, am).run()


class _Training:
    """One worker's training, from the loaded data to the saved model."""

    def __init__(self, config: RunConfig, data: DataBundle, model: nn.Module, am: Any) -> None:
        self.config, self.am = config, am
        device = torch.device(am.device())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.place = Placement(device, config.amp == "bf16", config.channels_last)
        self.model = model.to(device)
        if config.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = _optimizer(config, self.model)
        averages = find(config.algorithm).topology is Topology.COLLECTIVE
        self.clips_before = config.clip_norm is not None and not averages
        if config.clip_norm is not None and averages:  # the mean gradient, when it is there
            optimizer.register_step_pre_hook(lambda *_: self._clip())
        self.optimizer = am.DistributedOptimizer(
            optimizer, self.model, backward_passes_per_step=config.accumulate
        )
        self.num_samples = len(data.train)  # type: ignore[arg-type]
        self.loader = am.partition(self._loader(data.train, config.batch_size, training=True))
        self.test = self._loader(data.test, config.eval_batch_size, training=False)
        self.schedule = schedule_of(config, am.size())
        self.compute: Compute | EmulatedCompute
        if config.emulate_compute:
            self.compute = EmulatedCompute(self.model, config.emulate_compute / 1e3)
        else:
            self.compute = Compute(self.model, self.place, config.accumulate)
        self.clip_norm = largest_norm(config, am.size())
        self.iterations = am.iteration()
        self.batches = 0

    def run(self) -> None:
        """Train, finish together, evaluate and save on worker 0."""
        num_epochs = math.ceil(self.config.epochs)
        for epoch in range(num_epochs):
            before = self.batches
            if not self._epoch():
                break
            if self.batches == before:  # made before the run was resumed
                continue
            due = self.config.eval_every and (epoch + 1) % self.config.eval_every == 0
            if due and epoch + 1 < num_epochs:
                self._evaluate(epoch + 1)
        self.am.finish(self.model)
        if self.am.rank() == 0:
            self._conclude()

    def _epoch(self) -> bool:
        """This worker's part of a pass over the data; False ends the training."""
        for x, y in self.loader:
            done = (self.am.samples() - len(y)) / self.num_samples  # before this batch
            if done >= self.config.epochs:
                return False
            if self.batches % self.config.accumulate == 0 and not self.config.emulate_compute:
                self.optimizer.zero_grad()
            self.compute(x, y)
            self.batches += 1
            if self.batches % self.config.accumulate == 0:
                self._step(done)
                if self.iterations == self.config.max_iterations:
                    return False
        return not self.am.should_stop()

    def _step(self, epochs_done: float) -> None:
        """One iteration's update with the gradients at hand."""
        emulated = isinstance(self.compute, EmulatedCompute)
        result = self.compute.take()
        self.am.split(result.forward_s, result.backward_s, emulated=emulated)
        self.am.log(loss=result.loss)
        if self.clips_before and not emulated:
            self._clip()
        rate = self.schedule.lr(epochs_done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.iterations += 1

    def _clip(self) -> None:
        assert self.clip_norm is not None
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)

    def _evaluate(self, epoch: int) -> None:
        """Worker 0 evaluates the global model, outside the timed step; the others go on."""
        if self.am.rank() == 0 and not self.config.emulate_compute:
            with self.am.global_parameters(self.model) as info, children_without_signals():
                result = evaluate(self.model, self.test, self.place)
            self.am.log_evaluation(epoch, *result, info)

    def _conclude(self) -> None:
        """Evaluate and save the final global model, say how the run went."""
        folder = self.am.run_folder()
        accuracy = None
        if not self.config.emulate_compute:
            result = evaluate(self.model, self.test, self.place)
            self.am.log_evaluation(self.am.samples() / self.num_samples, *result)
            accuracy = result.accuracy
        save_model(self.model, folder)
        print_summary(folder, accuracy)

    def _loader(
        self, dataset: Dataset[tuple[Tensor, Tensor]], batch_size: int, training: bool
    ) -> Loader:
        """A loader; its processes come from forkserver, for forking a user of MPI is unsafe."""
        processes = self.config.workers
        seed = derive_seed(self.config.seed, self.am.rank(), 1)
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=training,
            drop_last=training and len(dataset) >= batch_size,  # type: ignore[arg-type]
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
            num_workers=processes,
            multiprocessing_context="forkserver" if processes else None,
            persistent_workers=bool(processes) and training,
            pin_memory=self.place.device.type == "cuda",
        )


def _try_data(config: RunConfig) -> tuple[DataBundle | None, Exception | None]:
    """The data, or why there is none: on a server's host it may be missing, and is not needed."""
    try:
        return load_dataset(config.dataset, config.data_dir, config.seed), None
    except Exception as error:  # raised by the caller, on workers
        return None, error


def _build_model(config: RunConfig, data: DataBundle) -> nn.Module:
    model = build_model(config.model, data.input_shape, data.num_classes, config.seed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"--model {config.model}: has no trainable parameters; nothing to train")
    return model


def _optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The local optimizer, which works on all parameters at once (``foreach``)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "lars":
        return LARS(
            parameters,
            momentum=config.momentum,
            trust_coefficient=config.trust_coefficient,
            **shared,
        )
    if config.optimizer == "lamb":
        return LAMB(parameters, **shared)
    shared["foreach"] = True
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, **shared)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **shared)
    return torch.optim.SGD(
        parameters, momentum=config.momentum, nesterov=config.nesterov, **shared
    )  # fmt: skip


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - for users' data sets that draw from it
    torch.manual_seed(seed)
