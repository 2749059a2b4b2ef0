"""The flat vector: views, layout, dtypes, differences and mixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aladdin_mpi.core.flat import FlatBuffers, FlatParams
from aladdin_mpi.core.wire import FrameLayout
from aladdin_mpi.errors import ModelError
from aladdin_mpi.messages import Push, Reply

pytestmark = pytest.mark.timeout(60)


def flat_of(model: torch.nn.Module, groups: list | None = None) -> FlatParams:
    return FlatParams(model.named_parameters(), groups or [list(model.parameters())])


def test_parameters_become_views_and_keep_values_shapes_and_strides():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Conv2d(5, 2, 1))
    model = model.to(memory_format=torch.channels_last)
    before = [(p.detach().clone(), p.stride()) for p in model.parameters()]
    flat = flat_of(model)
    for p, (value, stride) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.stride() == stride
        assert p.data_ptr() % 64 == 0
    flat.x.fill(3.0)
    assert all(bool((p == 3.0).all()) for p in model.parameters())


def test_frozen_parameters_are_left_out_and_tied_ones_count_once():
    embedding = torch.nn.Linear(4, 4, bias=False)
    head = torch.nn.Linear(4, 4, bias=False)
    head.weight = embedding.weight
    frozen = torch.nn.Linear(3, 3)
    for p in frozen.parameters():
        p.requires_grad = False
    model = torch.nn.ModuleDict({"a": embedding, "b": head, "c": frozen})
    flat = flat_of(model)
    assert [entry.name for entry in flat.entries] == ["a.weight"]
    assert head.weight is embedding.weight


def test_groups_are_stretches_of_the_vector():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    flat = FlatParams(
        model.named_parameters(), [list(model[1].parameters()), list(model[0].parameters())]
    )
    assert flat.group_ranges() == [(0, 32, 0), (32, 64, 1)]
    assert flat.entries[0].name == "1.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_difference_and_mix_in_every_dtype(dtype):
    model = torch.nn.Linear(5, 3).to(dtype)
    flat = flat_of(model)
    r, out, s = flat.new_vector(), flat.new_vector(), flat.new_vector()
    flat.read(r)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.ones_like(p))
    assert flat.difference(r, out)
    used = np.flatnonzero(out)
    assert used.size == 18
    assert np.allclose(out[used], 1.0, atol=2e-2)  # two decimals: the rounding of bfloat16
    assert flat.read_finite(s)
    assert np.array_equal(s, r)
    target = s + np.float32(0.5)
    before = flat.x.copy()
    flat.mix(0.5, target, s)
    assert np.allclose(flat.x[used], before[used] + 0.25, atol=2e-2)
    r += target
    assert flat.difference(r, out)
    assert np.count_nonzero(out) == 0, "a mix must not be pushed, not even its rounding"


def test_a_nan_goes_back_to_what_was_pushed():
    model = torch.nn.Linear(2, 1)
    flat = flat_of(model)
    r, out = flat.new_vector(), flat.new_vector()
    flat.read(r)
    good = r.copy()
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
        model.bias += 4.0
    assert not flat.read_finite(out)
    assert not flat.difference(r, out)
    assert np.allclose(flat.x, good, rtol=1e-6)  # undone by subtraction: a rounding may remain
    assert np.array_equal(r, flat.x)


def test_gradients_are_summed_and_missing_ones_add_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    flat = flat_of(model)
    total = flat.new_vector()
    for p in model[0].parameters():
        p.grad = torch.full_like(p, 2.0)
    flat.add_gradients(total)
    flat.add_gradients(total)
    assert total.sum() == 4.0 * 6


def test_a_parameter_that_leaves_the_vector_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    flat = flat_of(model)
    flat.check_all()
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(ModelError, match=r"1\.weight was taken out"):
        for _ in range(4):
            flat.check_next()


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ModelError, match="pass the model"):
        FlatParams(
            torch.nn.Linear(2, 2).named_parameters(), [list(torch.nn.Linear(2, 2).parameters())]
        )
    with pytest.raises(ModelError, match="no trainable parameters"):
        FlatParams([], [[]])


def test_buffers_are_views_and_those_of_other_dtypes_are_copied():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(2).double())
    buffers = FlatBuffers(model, set())
    assert buffers.floats.size == 10
    assert buffers.counts.size == 2
    model.train()
    model[0](torch.randn(8, 3))
    assert np.array_equal(buffers.floats[:3], model[0].running_mean.numpy())
    model[1].running_mean.fill_(5.0)
    buffers.gather()
    assert (buffers.floats[6:8] == 5.0).all()
    buffers.assign(np.full(10, 2.0, np.float32), np.full(2, 7))
    assert (model[1].running_var == 2.0).all()
    assert model[0].num_batches_tracked == 7
    assert FlatBuffers(model, {id(b) for b in model.buffers()}).floats.size == 0


def test_frame_parts_do_not_overlap_and_headers_come_back():
    layout = FrameLayout(size=37, floats=5, counts=3)
    frame = layout.new_frame()
    frame.params.fill(1.0)
    frame.floats.fill(2.0)
    frame.counts.fill(3)
    push = Push(2, 9, 4, 64, 3, True, 17, False, (0.5, 0.25), 0.125, 1.5, 2)
    frame.write_push(push)
    assert frame.read_push(2) == push
    assert frame.intact(9)
    assert not frame.intact(10)
    assert (frame.params == 1).all() and (frame.floats == 2).all() and (frame.counts == 3).all()
    reply = Reply(4, 18, 9, 0.75)
    frame.write_reply(reply)
    assert frame.read_reply() == reply
    frame.raw[layout.trailer_at] ^= 1
    assert not frame.intact(9)
