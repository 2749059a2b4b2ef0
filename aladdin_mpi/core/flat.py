"""A model as one contiguous vector.

The trainable parameters of an optimizer become views of one flat tensor per dtype and device, so
that pushing and mixing are single passes of a kernel over memory (:mod:`~aladdin_mpi.core.vector`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aladdin_mpi.core.buffers import BufferStaging, Placed
from aladdin_mpi.core.staging import STREAMS
from aladdin_mpi.core.vector import ELEMENTS, FlatVector, Segment, aligned_zeros
from aladdin_mpi.errors import ModelError

__all__ = ["Entry", "FlatBuffers", "FlatParams"]


@dataclass(frozen=True)
class Entry:
    """Where one parameter lies: ``size`` elements from ``start`` of the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int
    group: int


class FlatParams(FlatVector):
    """The trainable parameters of one optimizer as one vector.

    Parameters
    ----------
    named : iterable of (str, Parameter)
        Candidates; those that are frozen or belong to no group are left out, tied ones count once.
    groups : sequence of sequences of Parameter
        The optimizer's parameter groups.
    passes : int
        Backward passes whose gradients are accumulated into one step.

    Attributes
    ----------
    passes : int
    entries : tuple of Entry
        The layout, the same on all ranks.
    parameters : list of Parameter
        In the order of the layout.
    streams : bool
        Ranges of the gradient may be looked at while the backward pass still runs.

    Notes
    -----
    Construction changes the parameters in place: each becomes a view of the flat vector, with its
    values, shape and strides kept.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        groups: Sequence[Sequence[torch.nn.Parameter]],
        passes: int = 1,
    ) -> None:
        self.passes = passes
        group_of = {id(p): g for g, group in enumerate(groups) for p in group}
        chosen: dict[int, tuple[str, torch.nn.Parameter, int]] = {}
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) in group_of:
                chosen.setdefault(id(parameter), (name, parameter, group_of[id(parameter)]))
        missing = sum(p.requires_grad and id(p) not in chosen for group in groups for p in group)
        if missing:
            raise ModelError(
                f"the optimizer holds {missing} trainable parameter(s) that the model does not "
                "have: pass the model whose parameters it was made with"
            )
        if not chosen:
            raise ModelError(
                "the model has no trainable parameters: nothing to train (requires_grad is off "
                "everywhere, or it has no parameters at all)"
            )
        ordered = sorted(
            chosen.values(), key=lambda item: (str(item[1].dtype), str(item[1].device), item[2])
        )
        self.parameters = [parameter for _, parameter, _ in ordered]
        self._names = [name for name, _, _ in ordered]
        segments: list[Segment] = []
        entries: list[Entry] = []
        start, run = 0, 0
        for index in range(1, len(ordered) + 1):
            p = ordered[run][1]
            if index < len(ordered) and (ordered[index][1].dtype, ordered[index][1].device) == (
                p.dtype,
                p.device,
            ):
                continue
            segments.append(self._flatten(ordered[run:index], start, entries))
            start, run = segments[-1].stop, index
        super().__init__(segments)
        self.streams = self.direct
        self.entries = tuple(entries)
        self._probe = 0
        self._homes: dict[int, list[torch.Tensor]] = {}

    def _flatten(
        self,
        items: list[tuple[str, torch.nn.Parameter, int]],
        start: int,
        entries: list[Entry],
    ) -> Segment:
        """Move a run of parameters into one flat tensor."""
        first = items[0][1]
        if not first.dtype.is_floating_point:
            raise ModelError(
                f"parameter {items[0][0]} has dtype {first.dtype}: only floating-point parameters "
                "can be trained in parallel"
            )
        begin = start
        for name, p, group in items:
            entries.append(
                Entry(name, tuple(p.shape), str(p.dtype).split(".")[-1], start, p.numel(), group)
            )
            start += -(-p.numel() // ELEMENTS) * ELEMENTS
        length = start - begin
        if first.device.type == "cpu" and first.dtype == torch.float32:
            flat = torch.from_numpy(aligned_zeros(length))
        else:
            flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for entry, (_, p, _) in zip(entries[-len(items) :], items, strict=True):
                p.data = self._view(flat, entry.start - begin, p).copy_(p.data)
        return Segment(flat, begin, start)

    @staticmethod
    def _view(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
        """A view of ``flat`` with the shape of ``like`` and, where they are dense, its strides."""
        piece = flat[start : start + like.numel()]
        dense = torch.empty_like(like, memory_format=torch.preserve_format)
        return piece.as_strided(like.shape, dense.stride())

    def group_ranges(self) -> list[tuple[int, int, int]]:
        """``(start, stop, group)`` of the stretches with one learning rate."""
        ranges: list[tuple[int, int, int]] = []
        for entry in self.entries:
            stop = entry.start + -(-entry.size // ELEMENTS) * ELEMENTS
            if ranges and ranges[-1][2] == entry.group and ranges[-1][1] == entry.start:
                ranges[-1] = (ranges[-1][0], stop, entry.group)
            else:
                ranges.append((entry.start, stop, entry.group))
        return ranges

    # -- gradients, where those are pushed ---------------------------------------------------------

    def add_gradients(self, total: np.ndarray) -> None:
        """``total ← total + g``; a parameter without a gradient adds nothing."""
        pairs = self._gradient_pairs(total, 0, len(self.entries))
        if pairs:
            views, gradients = zip(*pairs, strict=True)
            torch._foreach_add_(list(views), [g.to("cpu", torch.float32) for g in gradients])

    def copy_gradients(self, out: np.ndarray, first: int, last: int) -> None:
        """``out ← g`` for the parameters ``first:last`` of :attr:`entries`; 0 where there is none.

        ``out`` has the vector's size, and is one of a few that come again.
        """
        views = self._views_of(out)[first:last]
        pairs = self._gradient_pairs(out, first, last)
        if len(pairs) < len(views):
            torch._foreach_zero_(views)
        if pairs:
            into, gradients = zip(*pairs, strict=True)
            torch._foreach_copy_(list(into), list(gradients))

    def set_gradients(self, values: np.ndarray) -> None:
        """``g ← values`` (float32, shape (size,)); a parameter without a gradient gets one."""
        gradients = []
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.empty_like(p, memory_format=torch.preserve_format)
            gradients.append(p.grad)
        torch._foreach_copy_(gradients, self._views_of(values))

    def gradients_finite(self) -> bool:
        """No gradient holds a NaN or an infinity."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return True
        norms = [n.to("cpu", torch.float64) for n in torch._foreach_norm(gradients, float("inf"))]
        return bool(torch.isfinite(torch.stack(norms)).all())

    def _gradient_pairs(
        self, home: np.ndarray, first: int, last: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (view, p.grad)
            for view, p in zip(
                self._views_of(home)[first:last], self.parameters[first:last], strict=True
            )
            if p.grad is not None
        ]

    def _views_of(self, home: np.ndarray) -> list[torch.Tensor]:
        """A view of ``home`` for each parameter, with its shape and strides."""
        key = home.ctypes.data
        if key not in self._homes:
            flat = torch.from_numpy(home)
            self._homes[key] = [
                self._view(flat, entry.start, p)
                for entry, p in zip(self.entries, self.parameters, strict=True)
            ]
        return self._homes[key]

    # -- checks ------------------------------------------------------------------------------------

    def check_sparse(self) -> None:
        """Raise a :class:`ModelError` where a gradient is sparse."""
        for name, p in zip(self._names, self.parameters, strict=True):
            if p.grad is not None and p.grad.is_sparse:
                raise ModelError(
                    f"parameter {name} has a sparse gradient: sparse gradients are not supported; "
                    "build the embedding with sparse=False"
                )

    def check_next(self) -> None:
        """Check that the next parameter, in turn, is still a view of the vector (constant time)."""
        self._probe = (self._probe + 1) % len(self.parameters)
        self._check(self._probe)

    def check_all(self) -> None:
        """Check that every parameter is still a view of the vector."""
        for index in range(len(self.parameters)):
            self._check(index)

    def _check(self, index: int) -> None:
        entry, p = self.entries[index], self.parameters[index]
        for segment in self.segments:
            if segment.start <= entry.start < segment.stop:
                home = segment.flat.data_ptr() + (
                    (entry.start - segment.start) * segment.flat.element_size()
                )
                if p.data_ptr() != home and p.numel():
                    raise ModelError(
                        f"parameter {entry.name} was taken out of the flat vector (by .to(), "
                        "load_state_dict(assign=True) or an assignment to .data): do that before "
                        "DistributedOptimizer is made"
                    )


class FlatBuffers:
    """The persistent buffers of a model (batch-norm statistics): floats and integers, a vector
    each.

    Attributes
    ----------
    floats : ndarray of float32
        All floating-point buffers, one after the other.
    counts : ndarray of int64
        All integer and boolean ones.
    names : tuple of (str, str)
        Name and dtype, in order.

    Notes
    -----
    Buffers on the CPU that are float32 or int64 become views of these vectors; the others are
    copied by :meth:`gather`, which waits for a GPU, and by :meth:`write`, which does not.
    """

    def __init__(self, model: torch.nn.Module | None, taken: set[int]) -> None:
        persistent = set(model.state_dict()) if model is not None else set()
        named = [] if model is None else list(model.named_buffers())
        self._buffers = []
        for name, buffer in named:
            if name in persistent and id(buffer) not in taken and not buffer.is_complex():
                taken.add(id(buffer))
                self._buffers.append((name, buffer))
        self.names = tuple(
            (name, f"{str(b.dtype).split('.')[-1]}{list(b.shape)}") for name, b in self._buffers
        )
        sizes = {True: 0, False: 0}
        for _, buffer in self._buffers:
            sizes[buffer.is_floating_point()] += buffer.numel()
        self.floats = aligned_zeros(sizes[True])
        self.counts = aligned_zeros(sizes[False], np.int64)
        self._views: list[torch.Tensor] = []
        at = {True: 0, False: 0}
        homes = {True: torch.from_numpy(self.floats), False: torch.from_numpy(self.counts)}
        on_gpu = []
        for _, buffer in self._buffers:
            kind = buffer.is_floating_point()
            later = buffer.device.type in STREAMS
            if later:
                on_gpu.append(Placed(buffer, kind, at[kind]))
            view = homes[kind][at[kind] : at[kind] + buffer.numel()].view(buffer.shape)
            at[kind] += buffer.numel()
            view.copy_(buffer)
            if buffer.device.type == "cpu" and buffer.dtype == view.dtype and not later:
                buffer.data = view
            self._views.append(view)
        self._staging = BufferStaging(on_gpu) if on_gpu else None

    def gather(self, on_gpu: bool = True) -> None:
        """Bring ``floats`` and ``counts`` up to date; without ``on_gpu`` those elsewhere only."""
        for (_, buffer), view in zip(self._buffers, self._views, strict=True):
            away = buffer.data_ptr() != view.data_ptr()
            if away and (on_gpu or buffer.device.type not in STREAMS):
                view.copy_(buffer)

    def write(self, floats: np.ndarray, counts: np.ndarray, post: Callable[..., None]) -> None:
        """Fill in all buffers as they are now, those on a GPU through a call that is posted (see
        :meth:`Port.post <aladdin_mpi.core.port.Port.post>`).
        """
        self.gather(on_gpu=False)
        np.copyto(floats, self.floats)
        np.copyto(counts, self.counts)
        if self._staging is not None:
            post(self._staging.read().take, floats, counts)

    def assign(self, floats: np.ndarray, counts: np.ndarray) -> None:
        """Set all buffers, in place."""
        np.copyto(self.floats, floats)
        np.copyto(self.counts, counts)
        for (_, buffer), view in zip(self._buffers, self._views, strict=True):
            if buffer.data_ptr() != view.data_ptr():
                buffer.copy_(view)
