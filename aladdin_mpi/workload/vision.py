"""What comes from torchvision, where it is installed: classification models, folders of images."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from torch import nn

from aladdin_mpi.errors import ConfigError, DataError
from aladdin_mpi.workload.arrays import DataBundle
from aladdin_mpi.workload.folders import find_folder

__all__ = ["classifier", "classifier_names", "image_folder", "import_torchvision"]

CROP = 224
RESIZE = 256
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Per-channel mean and standard deviation of ImageNet's training images, in [0, 1]."""

SEVERAL_OUTPUTS = frozenset({"googlenet", "inception_v3"})
"""Models that return auxiliary outputs while training, which a plain loss cannot take."""


def import_torchvision(needed_by: str) -> ModuleType:
    """Import torchvision, or say in one line why ``needed_by`` (option and value) cannot be used.

    Raises
    ------
    ConfigError
        It is not installed, or does not fit the installed torch.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise ConfigError(
            f"{needed_by}: needs torchvision, which is not installed; pip install torchvision"
        ) from error
    except RuntimeError as error:  # its operators are missing: built for another torch
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{needed_by}: the installed torchvision does not fit this torch ({reason}); "
            "install the two together, from the same index"
        ) from error


def classifier_names() -> list[str]:
    """Names of torchvision's classification models, sorted; empty where it cannot be imported."""
    try:
        models = import_torchvision("models").models
    except ConfigError:
        return []
    return sorted(set(models.list_models(module=models)) - SEVERAL_OUTPUTS)


def classifier(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build torchvision's classification model ``name`` with fresh weights.

    Raises
    ------
    ConfigError
        The samples are not images of three channels.
    """
    if len(input_shape) != 3 or input_shape[0] != 3:
        raise ConfigError(
            f"--model {name}: torchvision's models take images of 3 channels, the data has samples "
            f"of shape {input_shape}; choose another model or data set"
        )
    models = import_torchvision(f"--model {name}").models
    built = models.get_model(name, weights=None, num_classes=num_classes)
    assert isinstance(built, nn.Module)
    return built


def image_folder(data_dir: Path | None) -> DataBundle:
    """Open an ImageNet-style folder: ``train/CLASS/*`` and ``val/CLASS/*``.

    Training images get a random resized crop to 224 × 224 and a random flip, from torch's generator
    in the process that loads them; validation images are resized to 256 and cropped at the centre.

    Raises
    ------
    ConfigError
        torchvision is not installed.
    DataError
        A folder or its images are missing, or the two halves have different classes.
    """
    import_torchvision("--dataset imagefolder")
    datasets = importlib.import_module("torchvision.datasets")
    transforms = importlib.import_module("torchvision.transforms")
    root = find_folder(
        "imagefolder",
        data_dir,
        subfolders=("imagefolder",),
        wanted=(("train",), ("val",)),
        advice="put the images into train/CLASS/ and val/CLASS/, one folder for each class",
    )
    to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    steps = {
        "train": [transforms.RandomResizedCrop(CROP), transforms.RandomHorizontalFlip()],
        "val": [transforms.Resize(RESIZE), transforms.CenterCrop(CROP)],
    }
    halves = {}
    for half, augmentation in steps.items():
        try:
            halves[half] = datasets.ImageFolder(
                str(root / half), transform=transforms.Compose([*augmentation, *to_tensor])
            )
        except FileNotFoundError as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"--data-dir {root}: {half}/ holds no classes of images ({reason}); put the images "
                f"into {half}/CLASS/, one folder for each class"
            ) from error
    if halves["train"].classes != halves["val"].classes:
        odd = sorted(set(halves["train"].classes) ^ set(halves["val"].classes))
        raise DataError(
            f"--data-dir {root}: train/ and val/ have different class folders ({', '.join(odd[:3])}"
            f"{', …' if len(odd) > 3 else ''}); give both the same ones"
        )
    classes = len(halves["train"].classes)
    return DataBundle(halves["train"], halves["val"], (3, CROP, CROP), classes, "imagefolder")
