"""LARS, LAMB and AdaScale's gain, against the papers' pseudo-code written out in NumPy."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aladdin_mpi.config import RunConfig
from aladdin_mpi.core.flat import FlatParams
from aladdin_mpi.errors import ConfigError
from aladdin_mpi.optim import LAMB, LARS, Gain
from aladdin_mpi.runtime.train import _optimizer

pytestmark = pytest.mark.timeout(60)

BOTH = pytest.mark.parametrize("kind", [LARS, LAMB])
SHAPES = [(4, 3), (4,), (2, 3, 2, 2), (), (5, 1)]


class PlainLARS:
    """Algorithm 1 of arXiv:1708.03888 for one parameter."""

    def __init__(self, m: float, beta: float, eta: float, eps: float) -> None:
        self.m, self.beta, self.eta, self.eps = m, beta, eta, eps
        self.v: Any = 0.0

    def step(self, w: np.ndarray, g: np.ndarray, gamma: float, adapt: bool) -> np.ndarray:
        beta = self.beta if adapt else 0.0
        rate = 1.0
        if adapt and np.any(w):
            size = math.sqrt(np.sum(w * w))
            rate = self.eta * size / (math.sqrt(np.sum(g * g)) + beta * size + self.eps)
        self.v = self.m * self.v + gamma * rate * (g + beta * w)
        return w - self.v


class PlainLAMB:
    """Algorithm 2 of arXiv:1904.00962v5 for one parameter."""

    def __init__(self, beta1: float, beta2: float, eps: float, decay: float) -> None:
        self.beta1, self.beta2, self.eps, self.decay = beta1, beta2, eps, decay
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.t = 0

    def step(self, x: np.ndarray, g: np.ndarray, eta: float, adapt: bool) -> np.ndarray:
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m, v = self.m / (1 - self.beta1**self.t), self.v / (1 - self.beta2**self.t)
        r = m / (np.sqrt(v) + self.eps)
        if not adapt:
            return x - eta * r
        update = r + self.decay * x
        return x - eta * np.linalg.norm(x.ravel()) / np.linalg.norm(update.ravel()) * update


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def give_gradients(of: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in of:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def train(
    optimizer: torch.optim.Optimizer, of: list[torch.nn.Parameter], steps: range
) -> list[torch.Tensor]:
    for step in steps:
        give_gradients(of, step)
        optimizer.step()
    return [p.detach().clone() for p in of]


@BOTH
@pytest.mark.parametrize("adapt_1d", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_two_groups_and_a_changing_rate_as_in_the_paper(
    kind: type, adapt_1d: bool, dtype: torch.dtype, rtol: float
) -> None:
    of = parameters(dtype)
    values = [p.detach().double().numpy().copy() for p in of]
    decays = [0.1, 0.1, 0.1, 0.0, 0.0]
    groups = [{"params": of[:3], "weight_decay": 0.1}, {"params": of[3:], "lr": 0.02}]
    plain: list[PlainLARS] | list[PlainLAMB]
    if kind is LARS:
        optimizer = LARS(groups, 0.5, 0.9, trust_coefficient=0.01, eps=1e-4, adapt_1d=adapt_1d)
        plain = [PlainLARS(0.9, decay, 0.01, 1e-4) for decay in decays]
    else:
        optimizer = LAMB(groups, 0.5, (0.8, 0.95), 1e-3, adapt_1d=adapt_1d)
        plain = [PlainLAMB(0.8, 0.95, 1e-3, decay) for decay in decays]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(6):
        give_gradients(of, step)
        for index, p in enumerate(of):
            assert p.grad is not None
            rate = (0.5 if index < 3 else 0.02) * 0.5 ** (step // 2)
            values[index] = plain[index].step(
                values[index], p.grad.double().numpy(), rate, p.ndim > 1 or adapt_1d
            )
        optimizer.step()
        scheduler.step()
        for p, value in zip(of, values, strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), value, rtol=rtol, atol=rtol)


def test_lars_without_adaptation_is_sgd_and_lamb_is_adam() -> None:
    """Parameters of one dimension, at a constant rate."""
    for ours, theirs in [
        (LARS, lambda of: torch.optim.SGD(of, 0.1, momentum=0.9)),
        (LAMB, lambda of: torch.optim.Adam(of, 0.1, eps=1e-6)),
    ]:
        results = []
        for build in (lambda of, ours=ours: ours(of, 0.1, weight_decay=0.5), theirs):
            of = [torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))]
            results.append(train(build(of), of, range(5))[0])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_the_rate_of_lars_is_inside_the_momentum() -> None:
    w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    optimizer = LARS([w], lr=2.0, momentum=0.5, trust_coefficient=0.1, eps=0.0)
    w.grad = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    optimizer.step()  # λ = 0.1 · 5 / 1, v = 2 · 0.5 · g
    assert w.tolist() == [[3.0, 3.0]]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()  # v = 0.5 · (0, 1)
    assert w.tolist() == [[3.0, 2.5]]


@settings(deadline=None, max_examples=50)
@given(scale=st.floats(1e-3, 1e3), rate=st.floats(1e-3, 1.0), size=st.floats(0.1, 10.0))
def test_the_length_of_a_step_does_not_depend_on_the_gradient(
    scale: float, rate: float, size: float
) -> None:
    start = size * torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4)
    for kind, eta in [(LARS, 0.001), (LAMB, 1.0)]:
        w = torch.nn.Parameter(start.clone())
        optimizer = kind([w], lr=rate, eps=0.0)
        w.grad = scale * torch.linspace(1, 2, 12, dtype=torch.float64).view(3, 4)
        optimizer.step()
        moved = float((w.detach() - start).norm())
        assert moved == pytest.approx(rate * eta * float(start.norm()), rel=1e-9)


@BOTH
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_zeros_are_no_obstacle(kind: type, decay: float) -> None:
    zero, still = (torch.nn.Parameter(torch.full((2, 2), value)) for value in (0.0, 1.0))
    optimizer = kind([zero, still], lr=0.1, weight_decay=decay)
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    assert torch.isfinite(zero).all() and bool((zero < 0).all())
    assert torch.isfinite(still).all()
    assert bool((still < 1).all()) if decay else bool((still == 1).all())


@BOTH
def test_a_parameter_without_gradient_is_left_alone_and_joins_later(kind: type) -> None:
    of, alone = parameters(), parameters()
    optimizer = kind(of, lr=0.1)
    give_gradients(of, 0)
    of[0].grad = None
    optimizer.step()
    assert torch.equal(of[0], alone[0])
    assert of[0] not in optimizer.state
    reference = kind(alone[:1], lr=0.1)
    give_gradients(of, 1)
    alone[0].grad = of[0].grad
    optimizer.step()
    reference.step()
    torch.testing.assert_close(of[0], alone[0])


@BOTH
def test_gradients_are_not_changed(kind: type) -> None:
    of, other = parameters(), parameters()
    give_gradients(other, 0)
    train(kind(of, lr=0.1, weight_decay=0.1), of, range(1))
    for p, q in zip(of, other, strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad)


@BOTH
def test_the_state_goes_round(kind: type) -> None:
    of = parameters(torch.float32)
    optimizer = kind(of, lr=0.1, weight_decay=0.01, adapt_1d=True)
    train(optimizer, of, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [torch.nn.Parameter(p.detach().clone()) for p in of]
    again = kind(others)
    again.load_state_dict(torch.load(file))
    assert again.param_groups[0]["adapt_1d"] is True
    expected = train(optimizer, of, range(3, 6))
    for p, q in zip(expected, train(again, others, range(3, 6)), strict=True):
        assert torch.equal(p, q)


def test_without_momentum_lars_holds_no_state() -> None:
    of = parameters()
    optimizer = LARS(of, momentum=0.0)
    train(optimizer, of, range(2))
    assert not optimizer.state


@BOTH
def test_views_of_a_flat_vector_are_trained_alike(kind: type) -> None:
    results = []
    for is_flat in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Conv2d(5, 2, 1)
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        of = list(model.parameters())
        optimizer = kind(of, lr=0.1, weight_decay=0.01)
        flat = FlatParams(model.named_parameters(), [of]) if is_flat else None
        before = None if flat is None else flat.x.copy()
        results.append(train(optimizer, of, range(4)))
        if flat is not None and before is not None:
            flat.check_all()
            assert np.count_nonzero(flat.x != before) == sum(p.numel() for p in of)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_take_norms_in_float32(kind: type, dtype: torch.dtype) -> None:
    """The squares of these gradients' norm overflow in float16."""
    wide, narrow = (torch.nn.Parameter(torch.ones(64, 64, dtype=d)) for d in (torch.float32, dtype))
    for p in (wide, narrow):
        optimizer = kind([p], lr=10.0 if kind is LARS else 0.1)
        p.grad = torch.full_like(p, 100.0 if kind is LARS else 1.0)
        optimizer.step()
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.float(), wide, rtol=1e-2, atol=0)
    assert bool((narrow < 1).all())


@BOTH
def test_kinds_of_parameters_may_mix_in_a_group(kind: type) -> None:
    of = parameters()
    mixed = [torch.nn.Parameter(p.detach().clone()) for p in of]
    mixed[2] = torch.nn.Parameter(of[2].detach().float())
    expected = train(kind(of, lr=0.1), of, range(3))
    for p, q in zip(expected, train(kind(mixed, lr=0.1), mixed, range(3)), strict=True):
        torch.testing.assert_close(p.float(), q.float())


@BOTH
def test_closure_hooks_copies_and_late_groups(kind: type) -> None:
    w = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([w], lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    assert optimizer.step() is None
    assert optimizer.step(closure).item() == 4.0
    assert len(steps) == 2
    late = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(3)
    copy.deepcopy(optimizer).step()
    assert bool((late == 1).all())
    optimizer.step()
    assert bool((late < 1).all())


@BOTH
def test_gradients_that_cannot_be_used_are_refused(kind: type) -> None:
    w = torch.nn.Parameter(torch.ones(3, 2))
    w.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=f"{kind.__name__} takes no sparse"):
        kind([w]).step()
    w = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    w.grad = torch.ones_like(w)
    with pytest.raises(RuntimeError, match="complex"):
        kind([w]).step()


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (kind, name, values)
        for kind, own in [
            (LARS, [("momentum", [-0.1, 1.0]), ("trust_coefficient", [0.0, -1.0])]),
            (LAMB, [("betas", [(1.0, 0.9), (0.9, -0.1), (0.9, math.nan)])]),
        ]
        for name, values in [
            *[(name, [-1.0, math.nan, math.inf]) for name in ("lr", "eps", "weight_decay")],
            *own,
        ]
    ],
)
def test_wrong_values_are_named(kind: type, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name) as caught:
            kind([torch.nn.Parameter(torch.ones(2))], **{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "rate"), [(LARS, 20.0), (LAMB, 0.03)])
def test_a_small_classifier_is_learned(kind: type, rate: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    optimizer = kind(
        [{"params": weights}, {"params": biases, "lr": 0.02}], lr=rate, weight_decay=1e-4
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.95


# -- from the configuration ------------------------------------------------------------------------


def test_the_configuration_builds_them() -> None:
    model = torch.nn.Linear(3, 2)
    flags = {"lr": 2, "momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 0.02}
    lars = _optimizer(RunConfig.build({"optimizer": "lars", **flags}), model)
    lamb = _optimizer(RunConfig.build({"optimizer": "lamb", **flags}), model)
    assert isinstance(lars, LARS) and isinstance(lamb, LAMB)
    (group,) = lars.param_groups
    assert {name: group[name] for name in flags} == flags
    assert (lamb.param_groups[0]["lr"], lamb.param_groups[0]["weight_decay"]) == (2, 0.1)
    for name, kind in [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ]:
        optimizer = _optimizer(RunConfig.build({"optimizer": name}), model)
        assert type(optimizer) is kind
        assert optimizer.param_groups[0]["foreach"] is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"optimizer": "larc"}, "choose from sgd, adam, adamw, lars, lamb"),
        ({"trust_coefficient": "0"}, "--trust-coefficient 0: must be above 0"),
        ({"optimizer": "lars", "nesterov": True}, "--nesterov: needs --optimizer sgd"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.build(flags)


# -- AdaScale --------------------------------------------------------------------------------------


def norms_of(gradients: np.ndarray) -> tuple[float, float]:
    """The two arguments of :meth:`Gain.update`; gradients of shape (workers, elements)."""
    mean = gradients.mean(axis=0)
    return float((gradients**2).sum(axis=1).mean()), float(mean @ mean)


@pytest.mark.parametrize("workers", [2, 3, 8, 400, 2000])
def test_gain_is_that_of_the_paper(workers: int) -> None:
    random = np.random.default_rng(workers)
    theta = max(1 - workers / 1000, 0)
    gain = Gain(workers)
    assert gain.gain == 1.0
    variances, squares = [], []
    variance = square = math.nan
    for step in range(1, 8):
        gradients = random.normal(0.5, 1.0, (workers, 6)) * step
        mean = gradients.mean(axis=0)
        sigma2 = sum((g - mean) @ (g - mean) for g in gradients) / (workers - 1)
        mu2 = mean @ mean - sigma2 / workers
        variances.append(max(sigma2, 1e-6))
        squares.append(max(mu2, 0.0))
        if theta == 0:
            variance, square = variances[-1], squares[-1]
        elif step < 1 / (1 - theta):
            variance, square = np.mean(variances), np.mean(squares)
        else:
            variance = theta * variance + (1 - theta) * variances[-1]
            square = theta * square + (1 - theta) * squares[-1]
        expected = (variance + square) / (variance / workers + square)
        assert gain.update(*norms_of(gradients)) == pytest.approx(expected, rel=1e-9)
        assert gain.gain == pytest.approx(expected, rel=1e-9)


def test_gain_nears_the_true_one() -> None:
    """μ² = 4 · 0.25, σ² = 4 · 1: (4 + 1) / (4/8 + 1)."""
    random = np.random.default_rng(0)
    gain = Gain(8)
    for _ in range(4000):
        gain.update(*norms_of(random.normal(0.5, 1.0, (8, 4))))
    assert gain.gain == pytest.approx(5 / 1.5, rel=0.05)


def test_gain_at_the_limits() -> None:
    assert Gain(1).update(3.0, 3.0) == 1.0
    assert Gain(4).update(100.0, 100.0) == pytest.approx(1.0)  # all workers agree
    assert Gain(4).update(100.0, 25.0) == pytest.approx(4.0)  # nothing but noise
    assert Gain(4).update(0.0, 0.0) == pytest.approx(4.0)
    assert Gain(4).update(100.0, 100.0 + 1e-9) == pytest.approx(1.0)  # rounding


@settings(deadline=None, max_examples=200)
@given(
    workers=st.integers(1, 3000),
    smoothing=st.none() | st.floats(0, 0.999),
    pairs=st.lists(st.tuples(st.floats(0, 1e30), st.floats(0, 1e30)), min_size=1, max_size=20),
)
def test_gain_stays_in_its_range(
    workers: int, smoothing: float | None, pairs: list[tuple[float, float]]
) -> None:
    gain = Gain(workers, smoothing)
    for first, second in pairs:
        assert 1 <= gain.update(first, second) <= workers


def test_gain_state_goes_round_and_fits_any_number_of_workers() -> None:
    random = np.random.default_rng(0)
    numbers = [norms_of(random.normal(0.5, 1.0, (400, 4))) for _ in range(8)]
    gain, again, fewer = Gain(400), Gain(400), Gain(2)
    for pair in numbers[:5]:
        gain.update(*pair)
    again.load_state_dict(gain.state_dict())
    fewer.load_state_dict(gain.state_dict())
    assert [gain.update(*pair) for pair in numbers[5:]] == [
        again.update(*pair) for pair in numbers[5:]
    ]
    assert fewer.gain == pytest.approx(5 / 3, rel=0.05)  # (4 + 1) / (4/2 + 1)
    with pytest.raises(ValueError, match="no state of a Gain"):
        gain.load_state_dict({"updates": 1})


def test_wrong_values_of_a_gain_are_named() -> None:
    for workers in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="num_workers"):
            Gain(workers)  # type: ignore[arg-type]
    for smoothing in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="smoothing"):
            Gain(2, smoothing)
    gain = Gain(2)
    gain.update(2.0, 1.5)
    before = gain.state_dict()
    for bad, first in itertools.product((-1.0, math.nan, math.inf), (True, False)):
        with pytest.raises(ValueError, match="must be finite and at least 0"):
            gain.update(*((bad, 1.0) if first else (1.0, bad)))
    assert gain.state_dict() == before
