"""The models that can be named, and callables of the user's."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.workload.models import build_model, model_names
from aladdin_mpi.workload.user import call_offering, load_callable

pytestmark = pytest.mark.timeout(60)

BUILT_IN = ["mlp", "cnn", "resnet20", "vgg-small"]
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # its import now fails


@pytest.fixture
def fake_torchvision(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object, int]]:
    """A torchvision with two classification models, that records what is asked of it."""
    asked: list[tuple[str, object, int]] = []

    def get_model(name: str, weights: object, num_classes: int) -> nn.Module:
        asked.append((name, weights, num_classes))
        return nn.Linear(3, num_classes)

    models = types.SimpleNamespace(
        get_model=get_model,
        list_models=lambda module: (
            ["vgg16", "resnet50", "inception_v3"] if module is models else []
        ),
    )
    module = types.ModuleType("torchvision")
    module.models = models  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", module)
    return asked


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "users_own_models"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "def both(input_shape, num_classes):\n"
        "    return nn.Linear(input_shape[0], num_classes)\n"
        "def classes(num_classes=3, width=2):\n"
        "    return nn.Linear(width, num_classes)\n"
        "def nothing():\n"
        "    return nn.Linear(2, 2)\n"
        "def anything(**options):\n"
        "    return nn.Linear(len(options), options['num_classes'])\n"
        "def too_much(depth):\n"
        "    return nn.Linear(1, 1)\n"
        "def text():\n"
        "    return 'a model'\n"
        "def broken():\n"
        "    raise ZeroDivisionError('inside')\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__(5, num_classes)\n"
        "    @classmethod\n"
        "    def small(cls):\n"
        "        return cls(1)\n"
        "NUMBER = 3\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (name, "needs_more"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BUILT_IN)
def test_scores_have_one_column_per_class(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(name, shape, 7, seed=0)
    scores = model(torch.randn(2, *shape))
    assert scores.shape == (2, 7)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("mlp", (1, 28, 28), 784 * 128 + 128 + 128 * 10 + 10),
        ("mlp", (64,), 64 * 128 + 128 + 128 * 10 + 10),
        ("cnn", (1, 28, 28), (9 * 16 + 16) + (9 * 16 * 32 + 32) + (32 * 49 * 10 + 10)),
        # convolutions 3·9·16 + 6·9·16² + 9·16·32 + 5·9·32² + 9·32·64 + 5·9·64², two values per
        # normalised channel (7·16 + 6·32 + 6·64), and the linear layer
        ("resnet20", (3, 32, 32), 267_696 + 2 * 688 + 650),
    ],
)
def test_number_of_parameters(name: str, shape: tuple[int, ...], expected: int) -> None:
    assert num_parameters(build_model(name, shape, 10, seed=0)) == expected


def test_resnet20_is_as_large_as_in_its_paper() -> None:
    """He et al., table 6: 0.27 million parameters, 19 convolutions and one linear layer."""
    model = build_model("resnet20", (3, 32, 32), 10, seed=0)
    assert round(num_parameters(model) / 1e6, 2) == 0.27
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(nn.Conv2d) == kinds.count(nn.BatchNorm2d) == 19
    assert kinds.count(nn.Linear) == 1


def test_resnet20_keeps_small_scores_at_the_start() -> None:
    model = build_model("resnet20", (3, 32, 32), 10, seed=0)
    scores = model(torch.randn(8, 3, 32, 32))
    assert scores.isfinite().all()
    assert scores.abs().max() < 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_layer_dominates_vgg_small(shape: tuple[int, ...]) -> None:
    model = build_model("vgg-small", shape, 10, seed=0)
    largest = max(parameter.numel() for parameter in model.parameters())
    assert largest > 0.75 * num_parameters(model)


def test_vgg_small_does_not_grow_with_large_images() -> None:
    small, large = (build_model("vgg-small", (3, size, size), 10, seed=0) for size in (32, 64))
    assert num_parameters(small) == num_parameters(large)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_seed_decides_and_torch_is_left_alone(name: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (
        nn.utils.parameters_to_vector(build_model(name, (1, 8, 8), 4, seed).parameters())
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["cnn", "resnet20", "vgg-small"])
@pytest.mark.parametrize("shape", [(64,), (1, 2, 2), (1, 3, 28)], ids=str)
def test_convolutions_need_images(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"--model {name}: takes images") as caught:
        build_model(name, shape, 10, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_torchvision")
def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        build_model("resnet21", (3, 32, 32), 10, seed=0)
    message = str(caught.value)
    assert message.startswith("--model resnet21: no such model (did you mean resnet20?)")
    assert all(name in message for name in BUILT_IN)
    assert "install torchvision for its models" in message
    assert "\n" not in message
    assert model_names() == BUILT_IN


def test_models_of_torchvision(fake_torchvision: list[tuple[str, object, int]]) -> None:
    assert model_names() == [*BUILT_IN, "resnet50", "vgg16"]  # not those with several outputs
    assert isinstance(build_model("vgg16", (3, 32, 32), 6, seed=0), nn.Linear)
    assert fake_torchvision == [("vgg16", None, 6)]
    with pytest.raises(ConfigError, match=r"3 channels, .* \(1, 28, 28\)"):
        build_model("vgg16", (1, 28, 28), 10, seed=0)
    with pytest.raises(ConfigError, match="2 classification models") as caught:
        build_model("nothing-like-it", (3, 32, 32), 10, seed=0)
    assert "install torchvision" not in str(caught.value)


def test_a_torchvision_of_another_torch_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator does not\\nexist')\n")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert model_names() == BUILT_IN
    assert num_parameters(build_model("mlp", (4,), 2, seed=0)) > 0
    with pytest.raises(ConfigError, match="torchvision does not fit this torch") as caught:
        build_model("vgg16", (3, 32, 32), 10, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        ("both", (5, 9)),
        ("classes", (5, 2)),
        ("nothing", (2, 2)),
        ("anything", (5, 2)),
        ("Net", (5, 5)),
        ("Net.small", (1, 5)),
    ],
)
def test_models_of_the_user(user_module: str, function: str, shape: tuple[int, int]) -> None:
    model = build_model(f"{user_module}:{function}", (9, 4), 5, seed=0)
    assert tuple(model.weight.shape) == shape


def test_a_users_model_is_seeded(user_module: str) -> None:
    path = f"{user_module}:nothing"
    one, same, other = (build_model(path, (2,), 2, seed).weight for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{}:missing", "has no missing"),
        ("{}:Net.missing", "Net has no missing"),
        ("{}:NUMBER", "of type int, which cannot be called"),
        ("{}:text", "returned str, expected a torch.nn.Module"),
        ("{}:too_much", "missing a required argument: 'depth'"),
        ("no_such_module:f", "there is no module no_such_module"),
        ("no_such_package.part:f", "there is no module no_such_package"),
        ("{}.part:f", "there is no module {}.part"),
        ("needs_more:f", "imports a_library_that_is_not_there"),
        ("{}:", "not of the form"),
        (":f", "not of the form"),
        ("a b:f", "not of the form"),
        ("a:b:c", "not of the form"),
    ],
)
def test_what_is_wrong_with_a_path_is_said(user_module: str, path: str, said: str) -> None:
    path, said = path.format(user_module), said.format(user_module)
    with pytest.raises(ConfigError) as caught:
        build_model(path, (2,), 2, seed=0)
    message = str(caught.value)
    assert message.startswith(f"--model {path}: ")
    assert said in message
    assert "\n" not in message


def test_an_error_inside_the_users_function_passes_through(user_module: str) -> None:
    with pytest.raises(ZeroDivisionError, match="inside"):
        build_model(f"{user_module}:broken", (2,), 2, seed=0)


def test_load_callable_names_the_option() -> None:
    assert load_callable("os.path:join", "--anything")("a", "b") == "a/b"
    with pytest.raises(ConfigError, match=r"^--anything nothing: not of the form"):
        load_callable("nothing", "--anything")


def test_a_function_without_a_signature_gets_nothing() -> None:
    assert call_offering(dict, "--anything", seed=1) == {}
