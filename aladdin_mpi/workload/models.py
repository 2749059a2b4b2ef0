"""The models that can be trained by name: four built-in ones, torchvision's, and the user's own."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from aladdin_mpi.errors import ConfigError
from aladdin_mpi.workload.user import call_offering, load_callable
from aladdin_mpi.workload.vision import classifier, classifier_names

__all__ = ["build_model", "model_names"]

Builder = Callable[[tuple[int, ...], int], nn.Module]


def build_model(name: str, input_shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
    """Build a model with fresh parameters.

    Parameters
    ----------
    name : str
        One of :func:`model_names`, or ``package.module:callable``.  The callable gets
        ``input_shape`` and ``num_classes`` as far as its signature accepts them, and returns a
        module.
    input_shape : tuple of int
        Shape of one sample, (channels, height, width) for images.
    num_classes : int
    seed : int
        Of the initial parameters.  torch's own generator on the CPU is seeded with it while the
        model is built, and left as it was found.

    Returns
    -------
    torch.nn.Module
        On the CPU, in training mode.

    Raises
    ------
    ConfigError
        No such model, or it cannot take samples of this shape.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if name in _BUILT_IN:
            return _BUILT_IN[name](input_shape, num_classes)
        if ":" in name:
            return _from_user(name, input_shape, num_classes)
        from_torchvision = classifier_names()
        if name in from_torchvision:
            return classifier(name, input_shape, num_classes)
    raise _unknown(name, from_torchvision)


def model_names() -> list[str]:
    """Names of the built-in models, then of torchvision's classification models, if installed.

    It imports torchvision, which takes seconds.
    """
    return [*_BUILT_IN, *(name for name in classifier_names() if name not in _BUILT_IN)]


def _unknown(name: str, from_torchvision: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, [*_BUILT_IN, *from_torchvision], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    if from_torchvision:
        count = len(from_torchvision)
        more = f"so are torchvision's {count} classification models (resnet50, vgg16, …)"
    elif importlib.util.find_spec("torchvision"):
        more = "the installed torchvision does not fit this torch: install the two together"
    else:
        more = "install torchvision for its models"
    return ConfigError(
        f"--model {name}: no such model{hint}; available are {', '.join(_BUILT_IN)} and "
        f"package.module:callable; {more}"
    )


def _from_user(path: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    function = load_callable(path, "--model")
    where = f"--model {path}"
    model = call_offering(function, where, input_shape=input_shape, num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{where}: returned {type(model).__name__}, expected a torch.nn.Module; return one"
        )
    return model


def _image_shape(name: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ConfigError(
            f"--model {name}: takes images (channels, height, width) of at least {smallest} × "
            f"{smallest} pixels, the data has samples of shape {input_shape}; use --model mlp or "
            "other data"
        )
    channels, height, width = input_shape
    return channels, height, width


def _mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One hidden layer of 128: 784-128-10 on MNIST's kin."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), 128), nn.ReLU(), nn.Linear(128, num_classes)
    )


def _cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two convolutions of 16 and 32 channels, each pooled by 2, and one linear layer."""
    channels, height, width = _image_shape("cnn", input_shape, smallest=4)
    return nn.Sequential(
        *_convolution(channels, 16),
        nn.MaxPool2d(2),
        *_convolution(16, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), num_classes),
    )


def _vgg_small(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Four convolutions, and one fully connected layer with nearly all parameters, as in VGG-16.

    References
    ----------
    K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015.
    """
    channels, height, width = _image_shape("vgg-small", input_shape, smallest=8)
    rows, columns = min(height // 4, 8), min(width // 4, 8)
    hidden = 1024
    return nn.Sequential(
        *_convolution(channels, 32),
        *_convolution(32, 32),
        nn.MaxPool2d(2),
        *_convolution(32, 64),
        *_convolution(64, 64),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d((rows, columns)),  # changes images larger than 32 × 32 only
        nn.Flatten(),
        nn.Linear(64 * rows * columns, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()


class ResNet20(nn.Module):
    """The 20-layer residual network for CIFAR-10: three blocks each of 16, 32 and 64 channels.

    Shortcuts between stages take every second pixel and fill the new channels with zeros (option
    A), so that they have no parameters.

    References
    ----------
    K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, sec. 4.2; initial
    values: K. He et al., "Delving Deep into Rectifiers", ICCV 2015, eq. 14.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [16] * 3 + [32] * 3 + [64] * 3
        self.blocks = nn.Sequential(
            *(Block(*pair) for pair in zip([16, *widths[:-1]], widths, strict=True))
        )
        self.head = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (n, num_classes) of images (n, channels, height, width)."""
        x = self.blocks(relu(self.norm(self.stem(x))))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


class Block(nn.Module):
    """Two convolutions with batch normalisation, around which the input is carried."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.new_channels = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(F(x) + shortcut(x))``."""
        residual = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        if self.new_channels:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return relu(residual + x)


def _resnet20(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    channels, _, _ = _image_shape("resnet20", input_shape, smallest=4)
    return ResNet20(channels, num_classes)


_BUILT_IN: dict[str, Builder] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet20": _resnet20,
    "vgg-small": _vgg_small,
}
