"""The data sets that can be named: files made small, wrong and hostile."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from aladdin_mpi.errors import AladdinError, ConfigError, DataError
from aladdin_mpi.workload import arrays
from aladdin_mpi.workload.data import (
    ArrayDataset,
    DataBundle,
    RandomCropFlip,
    collate,
    dataset_names,
    load_dataset,
)
from aladdin_mpi.workload.idx import read_idx

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALADDIN_DATA", raising=False)
    torch.manual_seed(0)


def refusal(kind: type[AladdinError], name: str, data_dir: Path | None = None) -> str:
    """Return the message with which a data set is refused, which must be one line."""
    with pytest.raises(kind) as caught:
        load_dataset(name, data_dir, seed=0)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("--data")
    return message


def idx_bytes(values: np.ndarray, code: int = 8) -> bytes:
    header = struct.pack(">BBBB", 0, 0, code, values.ndim)
    return header + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(folder: Path, pack: bool, train: int = 12, test: int = 4) -> np.ndarray:
    """Write the four files and return the training images."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    first = None
    for half, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        first = images if first is None else first
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{half}-{kind}-ubyte{'.gz' if pack else ''}"
            path.write_bytes(gzip.compress(idx_bytes(values)) if pack else idx_bytes(values))
    assert first is not None
    return first


# --- the arrays -----------------------------------------------------------------------------------


def made(count: int = 10, **options: object) -> ArrayDataset:
    x = np.arange(count * 6, dtype=np.float32).reshape(count, 1, 2, 3)
    return ArrayDataset(x, np.arange(count) % 3, **options)  # type: ignore[arg-type]


def test_a_batch_is_its_samples() -> None:
    data = made()
    x, y = data.__getitems__([3, 7, 3])
    assert (x.shape, x.dtype, y.dtype) == ((3, 1, 2, 3), torch.float32, torch.int64)
    for position, index in enumerate((3, 7, 3)):
        sample, label = data[index]
        assert torch.equal(sample, x[position])
        assert label.shape == () and label == y[position]
    assert len(data) == 10


def test_the_loader_fetches_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrayDataset, "__getitem__", None)  # one by one would now fail
    batches = list(DataLoader(made(), batch_size=4, collate_fn=collate))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in batches]), made().x)
    part = DataLoader(Subset(made(), [1, 2, 5]), batch_size=3, collate_fn=collate)
    assert next(iter(part))[1].tolist() == [1, 2, 2]


def test_collate_serves_other_data_sets_too() -> None:
    plain = TensorDataset(torch.arange(6.0), torch.arange(6))
    x, y = next(iter(DataLoader(plain, batch_size=3, collate_fn=collate)))
    assert (x.tolist(), y.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples but 2 classes"):
        ArrayDataset(np.zeros((3, 1), np.float32), np.zeros(2, int))
    with pytest.raises(ValueError, match="both"):
        ArrayDataset(np.zeros((3, 1), np.float32), np.zeros(3, int), mean=(0.5,))


def test_large_images_stay_bytes_and_are_the_same_when_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 2, 4, 4), dtype=np.uint8)
    arguments = (images, np.zeros(9, int), (0.5, 0.25), (0.5, 0.2))
    small = arrays.image_dataset(*arguments)
    monkeypatch.setattr(arrays, "MAX_FLOAT_BYTES", images.size * 4 - 1)
    large = arrays.image_dataset(*arguments)
    assert (small.x.dtype, large.x.dtype) == (torch.float32, torch.uint8)
    x = small.__getitems__(range(9))[0]
    assert torch.equal(x, large.__getitems__(range(9))[0])
    expected = (images / 255 - np.array([0.5, 0.25])[:, None, None]) / np.array([0.5, 0.2])[
        :, None, None
    ]
    np.testing.assert_allclose(x, expected, atol=1e-6)  # rounding of float32 at values up to 4


# --- augmentation ---------------------------------------------------------------------------------


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    images = torch.randint(1, 256, (40, 3, 8, 8), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    out = RandomCropFlip(seed=1, padding=2)(images, torch.arange(40), epoch=0)
    assert (out.shape, out.dtype) == (images.shape, images.dtype)
    found = set()
    for index in range(40):
        windows = {
            (down, right, flip): window.flip(-1) if flip else window
            for down in range(5)
            for right in range(5)
            for window in [padded[index, :, down : down + 8, right : right + 8]]
            for flip in (False, True)
        }
        match = [place for place, window in windows.items() if torch.equal(window, out[index])]
        assert len(match) == 1
        found.add(match[0])
    assert len(found) > 20  # of 50 places
    assert sum(flip for _, _, flip in found) > 10


def test_augmentation_depends_on_seed_epoch_and_index_only() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    before = images.clone()
    indices = torch.arange(64)
    out = RandomCropFlip(7)(images, indices, 3)
    assert torch.equal(images, before)
    order = torch.randperm(64)
    assert torch.equal(RandomCropFlip(7)(images[order], indices[order], 3), out[order])
    assert torch.equal(RandomCropFlip(7)(images[5:6], indices[5:6], 3)[0], out[5])
    for other in (RandomCropFlip(8)(images, indices, 3), RandomCropFlip(7)(images, indices, 4)):
        same = (other == out).flatten(1).all(dim=1)
        assert same.sum() <= 5  # one in 162 by chance


def test_all_crops_and_flips_are_about_as_frequent() -> None:
    """20,000 draws of 81 crops: about 247 each, standard deviation 16, six of them allowed."""
    bits = arrays._hash(0, 0, torch.arange(20_000))
    places = np.bincount((bits % 81).astype(int), minlength=81)
    assert abs(places - 20_000 / 81).max() < 6 * 16
    assert abs((bits >> np.uint64(63)).mean() - 0.5) < 6 * 0.0036


def test_negative_and_large_seeds_are_fine() -> None:
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    for seed in (-1, 2**70):
        assert RandomCropFlip(seed)(images, torch.arange(2), 2**40).shape == images.shape


def augmented() -> ArrayDataset:
    images = np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8), dtype=np.uint8)
    return arrays.image_dataset(images, np.arange(8), (0.5,), (0.5,), RandomCropFlip(0))


def test_an_epoch_changes_the_augmentation() -> None:
    data = augmented()
    first = data.__getitems__(range(8))[0]
    data.set_epoch(1)
    second = data.__getitems__(range(8))[0]
    data.set_epoch(0)
    assert torch.equal(data.__getitems__(range(8))[0], first)
    assert not torch.equal(first, second)


def test_persistent_loader_processes_see_the_epoch() -> None:
    """Started by spawn, so that the data set is pickled into the process."""
    data = augmented()
    loader = DataLoader(
        data,
        batch_size=8,
        collate_fn=collate,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        ((x, _),) = list(loader)
        assert torch.equal(x, data.__getitems__(range(8))[0])


@pytest.mark.parametrize("name", ["digits", "synthetic:3x4x4:2:10"])
def test_a_bundle_survives_pickling(name: str) -> None:
    bundle = load_dataset(name, None, seed=0)
    copy = pickle.loads(pickle.dumps(bundle))
    assert (copy.name, copy.input_shape, copy.num_classes) == (
        bundle.name,
        bundle.input_shape,
        bundle.num_classes,
    )
    assert torch.equal(copy.train[3][0], bundle.train[3][0])
    again = pickle.loads(pickle.dumps(augmented()))
    assert torch.equal(again[2][0], augmented()[2][0])


# --- digits and synthetic -------------------------------------------------------------------------


def test_digits_are_split_by_class_and_standardised() -> None:
    bundle = load_dataset("digits", None, seed=0)
    assert (bundle.input_shape, bundle.num_classes) == ((1, 8, 8), 10)
    assert len(bundle.train) + len(bundle.test) == 1797
    x, y = bundle.train.__getitems__(range(len(bundle.train)))
    assert abs(float(x.mean())) < 1e-5 and abs(float(x.std()) - 1) < 1e-3
    counts = y.bincount(), bundle.test.y.bincount()
    share = counts[1] / (counts[0] + counts[1])
    assert ((share - 0.2).abs() < 0.005).all()
    other = load_dataset("digits", None, seed=9)
    assert torch.equal(other.test.x, bundle.test.x)


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install scikit-learn" in refusal(ConfigError, "digits")


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    bundle = load_dataset("digits", None, 0)
    x = torch.cat([bundle.train.x, bundle.test.x]).flatten(1).double().numpy()
    x = (x - x.min()) / (x.max() - x.min()) * 16  # the standardisation undone
    rows = sorted(map(tuple, x.round().astype(int))), sorted(map(tuple, pixels.astype(int)))
    assert rows[0] == rows[1]
    y = torch.cat([bundle.train.y, bundle.test.y])
    assert y.bincount().tolist() == np.bincount(classes).tolist()


def test_synthetic_follows_its_specification() -> None:
    bundle = load_dataset("synthetic:3x8x6:5:120", None, seed=0)
    assert (bundle.input_shape, bundle.num_classes, len(bundle.train)) == ((3, 8, 6), 5, 120)
    assert len(bundle.test) == 20
    x, y = bundle.train.__getitems__(range(120))
    assert (x.shape, x.dtype) == ((120, 3, 8, 6), torch.float32)
    assert y.bincount().tolist() == [24] * 5
    assert load_dataset("synthetic:7:4:4", None, seed=0).input_shape == (7,)
    assert len(load_dataset("synthetic:7:4:4", None, seed=0).test) == 4
    assert load_dataset("synthetic", None, seed=0).name == "synthetic:1x28x28:10:10000"


def test_synthetic_is_decided_by_its_seed() -> None:
    one, same, other = (load_dataset("synthetic:1x6x6:3:60", None, s).train.x for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_synthetic_can_be_learnt() -> None:
    """The nearest class mean of the training set is right for most of the test set."""
    bundle = load_dataset("synthetic:1x12x12:10:3000", None, seed=0)
    x, y = bundle.train.__getitems__(range(3000))
    means = torch.stack([x[y == label].mean(dim=0).flatten() for label in range(10)])
    test, truth = bundle.test.__getitems__(range(len(bundle.test)))
    right = (torch.cdist(test.flatten(1), means).argmin(dim=1) == truth).float().mean()
    assert right > 0.9
    assert abs(float(x.std()) - 1) < 0.1


@pytest.mark.parametrize(
    "spec",
    [
        *("", ":", ":28", ":28:10", ":28:10:60000:1", ":0:10:100", ":28x:10:100", ":28:1:100"),
        *(":28:10:9", ":a:10:100", ":28:10:-5", ":28:10:1e4", ":1 x2:10:100", ":28:010:100"),
    ],
)
def test_a_wrong_synthetic_specification_is_said(spec: str) -> None:
    if spec == "":
        spec = "s"  # "synthetic" alone is right
    message = refusal(ConfigError, f"synthetic{spec}")
    assert f"synthetic{spec}" in message


def test_synthetic_has_a_limit() -> None:
    assert "GiB" in refusal(ConfigError, "synthetic:3x224x224:1000:1281167")


# --- IDX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("place", ["", "sub", "environment"])
def test_idx_files_are_found_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pack: bool, place: str
) -> None:
    images = write_mnist(tmp_path / name if place else tmp_path, pack)
    if place == "environment":
        monkeypatch.setenv("ALADDIN_DATA", str(tmp_path))
    bundle = load_dataset(name, None if place == "environment" else tmp_path, seed=0)
    assert (len(bundle.train), len(bundle.test)) == (12, 4)
    assert (bundle.input_shape, bundle.num_classes, bundle.name) == ((1, 28, 28), 10, name)
    x, y = bundle.train.__getitems__(range(12))
    assert y.tolist() == [*range(10), 0, 1]
    mean, std = (0.1307, 0.3081) if name == "mnist" else (0.2860, 0.3530)
    # rounding of float32 at values up to 2.8
    np.testing.assert_allclose(x[:, 0], (images / 255 - mean) / std, atol=1e-6)


def test_missing_idx_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(DataError, "fashion-mnist", tmp_path)
    assert message.startswith(f"--data-dir {tmp_path}: ")
    assert "train-images-idx3-ubyte, train-labels-idx1-ubyte" in message
    assert "apt-get install dataset-fashion-mnist" in message
    write_mnist(tmp_path, pack=True)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "t10k-labels-idx1-ubyte" in refusal(DataError, "fashion-mnist", tmp_path)
    message = refusal(DataError, "mnist")
    assert "--data-dir is not given and $ALADDIN_DATA is not set" in message
    monkeypatch.setenv("ALADDIN_DATA", str(tmp_path / "nowhere"))
    assert "nowhere" in refusal(DataError, "mnist")


def cut(content: bytes) -> bytes:
    return content[:-1]


def longer(content: bytes) -> bytes:
    return content + b"\0"


def other_type(content: bytes) -> bytes:
    return content[:2] + b"\x0d" + content[3:]


def huge(content: bytes) -> bytes:
    return content[:4] + b"\xff" * 12 + content[16:]


def only_header(content: bytes) -> bytes:
    return content[:9]


@pytest.mark.parametrize("damage", [cut, longer, other_type, huge, only_header])
@pytest.mark.parametrize("pack", [False, True])
def test_corrupt_idx_is_refused(
    tmp_path: Path, pack: bool, damage: Callable[[bytes], bytes]
) -> None:
    write_mnist(tmp_path, pack)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' if pack else ''}"
    content = path.read_bytes()
    path.write_bytes(gzip.compress(damage(gzip.decompress(content))) if pack else damage(content))
    message = refusal(DataError, "mnist", tmp_path)
    assert path.name in message and "fetch the file anew" in message


@pytest.mark.parametrize(
    "damage", [cut, lambda content: b"no gzip" + content, lambda _: b"\x1f\x8b"]
)
def test_corrupt_gzip_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_mnist(tmp_path, pack=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert path.name in refusal(DataError, "mnist", tmp_path)


def test_labels_must_fit_the_images(tmp_path: Path) -> None:
    write_mnist(tmp_path, pack=False)
    labels = tmp_path / "train-labels-idx1-ubyte"
    for wrong in (np.zeros(11, np.uint8), np.full(12, 10, np.uint8)):
        labels.write_bytes(idx_bytes(wrong))
        assert "12 images and" in refusal(DataError, "mnist", tmp_path)


def test_an_idx_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path, ndim=1)


def test_fashion_mnist_of_this_machine() -> None:
    try:
        bundle = load_dataset("fashion-mnist", None, seed=0)
    except DataError as error:
        if "not found" not in str(error):
            raise
        from require import left_out

        left_out(f"Fashion-MNIST is not here ({error})")
        return
    assert (len(bundle.train), len(bundle.test)) == (60_000, 10_000)
    assert bundle.input_shape == (1, 28, 28)
    x, y = bundle.train.__getitems__(range(60_000))
    assert y.bincount().tolist() == [6000] * 10
    assert abs(float(x.mean())) < 1e-3 and abs(float(x.std()) - 1) < 1e-3


# --- CIFAR-10 -------------------------------------------------------------------------------------

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def cifar_batch(seed: int, count: int = 4) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, 10, count).tolist()


def as_by_python_2(data: np.ndarray, labels: list[int]) -> bytes:
    """The pickle of the published files: protocol 2 of Python 2, whose strings are bytes."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR("
    dtype += number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t"
    array += text(b"b") + b"tR(" + number(1) + b"(" + b"".join(map(number, data.shape)) + b"t"
    array += dtype + b"\x89" + text(data.tobytes()) + b"tb"
    content = b"\x80\x02}(" + text(b"data") + array
    return content + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"eu."


def write_cifar(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(BATCHES):
        data, labels = cifar_batch(seed)
        if kind == "binary":
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], data], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        elif kind == "python 2":
            (folder / name).write_bytes(as_by_python_2(data, labels))
        else:
            order = "F" if kind == "fortran" else "C"
            batch = {"data": np.asarray(data, order=order), "labels": labels}  # type: ignore[call-overload]
            (folder / name).write_bytes(pickle.dumps(batch, protocol=4))


@pytest.mark.parametrize("kind", ["python 2", "python 3", "fortran", "binary"])
@pytest.mark.parametrize("place", ["", "own name", "environment"])
def test_cifar_of_both_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str
) -> None:
    own = "cifar-10-batches-bin" if kind == "binary" else "cifar-10-batches-py"
    write_cifar(tmp_path / own if place else tmp_path, kind)
    if place == "environment":
        monkeypatch.setenv("ALADDIN_DATA", str(tmp_path))
    bundle = load_dataset("cifar10", None if place == "environment" else tmp_path, seed=0)
    assert (len(bundle.train), len(bundle.test)) == (20, 4)
    assert (bundle.input_shape, bundle.num_classes) == ((3, 32, 32), 10)
    data, labels = cifar_batch(5)
    x, y = bundle.test.__getitems__(range(4))
    assert y.tolist() == labels
    images = data.reshape(4, 3, 32, 32)
    np.testing.assert_allclose(x[:, 1], (images[:, 1] / 255 - 0.4822) / 0.2435, atol=1e-6)
    assert bundle.train.x.dtype == torch.uint8
    raw = np.concatenate([cifar_batch(seed)[0] for seed in range(5)])
    assert np.array_equal(bundle.train.x.numpy().reshape(20, 3072), raw)


def test_the_byte_layout_of_python_2_is_right() -> None:
    """What the helper writes is what pickle itself understands."""
    data, labels = cifar_batch(0)
    batch = pickle.loads(as_by_python_2(data, labels), encoding="bytes")
    assert np.array_equal(batch[b"data"], data)
    assert batch[b"labels"] == labels


def test_training_images_of_cifar_are_augmented(tmp_path: Path) -> None:
    write_cifar(tmp_path, "binary")
    one, same, other = (load_dataset("cifar10", tmp_path, seed).train for seed in (0, 0, 1))
    indices = range(20)
    x = one.__getitems__(indices)[0]
    assert x.shape == (20, 3, 32, 32)
    assert torch.equal(x, same.__getitems__(indices)[0])
    assert not torch.equal(x, other.__getitems__(indices)[0])
    one.set_epoch(1)
    assert not torch.equal(x, one.__getitems__(indices)[0])
    assert torch.equal(pickle.loads(pickle.dumps(same)).__getitems__(indices)[0], x)


class Attack:
    """Pickles into a call that makes a folder."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("function", ["mkdir", "system", "eval"])
def test_a_pickle_runs_no_code(tmp_path: Path, function: str, protocol: int) -> None:
    write_cifar(tmp_path, "python 3")
    trace = tmp_path / "it-ran"
    attack = {
        "mkdir": Attack(os.mkdir, str(trace)),
        "system": Attack(os.system, f"mkdir {trace}"),
        "eval": Attack(eval, f"__import__('os').mkdir({str(trace)!r})"),
    }[function]
    batch = {"data": attack, "labels": [0]}
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(batch, protocol=protocol))
    message = refusal(DataError, "cifar10", tmp_path)
    assert "data_batch_2" in message and "which is refused" in message
    assert not trace.exists()
    pickle.loads(pickle.dumps(attack))  # the attack is a real one
    assert trace.exists()


@pytest.mark.parametrize(
    "batch",
    [
        *(
            [],
            3,
            None,
            {},
            {"data": [1], "labels": [0]},
            {"data": np.zeros((1, 3072)), "labels": [0]},
        ),
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [0, -1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": None},
        {"data": np.zeros((0, 3072), np.uint8), "labels": []},
        {"data": np.zeros((4, 1536), np.uint8), "labels": [0, 1]},
        {"data": np.zeros((3072,), np.uint8), "labels": [0]},
        {"labels": [0]},
    ],
    ids=lambda batch: str(batch)[:40].replace("\n", ""),
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, batch: object) -> None:
    write_cifar(tmp_path, "python 3")
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=4))
    assert "data_batch_1" in refusal(DataError, "cifar10", tmp_path)


def test_corrupt_cifar_is_refused(tmp_path: Path) -> None:
    for kind, name in (("python 3", "data_batch_3"), ("binary", "data_batch_3.bin")):
        folder = tmp_path / kind
        write_cifar(folder, kind)
        content = (folder / name).read_bytes()
        for wrong in (content[:-1], content[: len(content) // 2 + 1], b"", content[7:]):
            (folder / name).write_bytes(wrong)
            message = refusal(DataError, "cifar10", folder)
            assert name in message and "unpack the archive anew" in message
    assert "data_batch_1, data_batch_2" in refusal(DataError, "cifar10", tmp_path)


# --- folders of images ----------------------------------------------------------------------------


def test_imagefolder_needs_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    message = refusal(ConfigError, "imagefolder", tmp_path)
    assert "needs torchvision, which is not installed; pip install torchvision" in message


def test_imagefolder_opens_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torchvision that lists the classes only."""

    class ImageFolder(Dataset[object]):
        def __init__(self, root: str, transform: list[str]) -> None:
            self.classes = sorted(path.name for path in Path(root).iterdir())
            self.transform = transform
            if not self.classes:
                raise FileNotFoundError("no class\nfolder")

    def step(name: str) -> Callable[..., str]:
        return lambda *arguments: f"{name}{arguments}"

    names = ["ToTensor", "Normalize", "RandomResizedCrop", "RandomHorizontalFlip"]
    transforms = types.SimpleNamespace(
        **{name: step(name) for name in [*names, "Resize", "CenterCrop"]}, Compose=list
    )
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    datasets = types.SimpleNamespace(ImageFolder=ImageFolder)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchvision.transforms", transforms)  # type: ignore[arg-type]

    assert "expected train, val" in refusal(DataError, "imagefolder", tmp_path)
    for half in ("train", "val"):
        (tmp_path / half).mkdir()
    assert "holds no classes of images" in refusal(DataError, "imagefolder", tmp_path)
    for path in ("train/cat", "train/dog", "val/cat"):
        (tmp_path / path).mkdir()
    assert "different class folders (dog)" in refusal(DataError, "imagefolder", tmp_path)
    (tmp_path / "val/dog").mkdir()
    bundle = load_dataset("imagefolder", tmp_path, seed=0)
    assert (bundle.input_shape, bundle.num_classes) == ((3, 224, 224), 2)
    assert bundle.train.transform[:2] == ["RandomResizedCrop(224,)", "RandomHorizontalFlip()"]
    assert bundle.test.transform[:2] == ["Resize(256,)", "CenterCrop(224,)"]


# --- the user's own -------------------------------------------------------------------------------


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "users_own_data"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "from aladdin_mpi.workload.data import ArrayDataset, DataBundle\n"
        "def made(count=4, labels=(0, 1, 2, 1)):\n"
        "    return TensorDataset(torch.zeros(count, 2, 3), torch.tensor(labels[:count]))\n"
        "def bundle(data_dir, seed):\n"
        "    return DataBundle(made(), made(), (2, 3), seed, str(data_dir))\n"
        "def pair():\n"
        "    return made(), made(2)\n"
        "def arrays(seed):\n"
        "    x = ArrayDataset(torch.zeros(3, 5), torch.tensor([0, seed, 1]))\n"
        "    return [x, x]\n"
        "def known():\n"
        "    train = made()\n"
        "    train.classes = ['a', 'b', 'c', 'd', 'e']\n"
        "    return train, made()\n"
        "def regression():\n"
        "    return made(labels=(0.5, 1.5, 2.5, 3.5)), made()\n"
        "def empty():\n"
        "    return made(0), made()\n"
        "def three():\n"
        "    return made(), made(), made()\n"
        "def numbers():\n"
        "    return [1, 2, 3], [4]\n"
        "def text():\n"
        "    return 'data'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("function", "shape", "classes"),
    [("pair", (2, 3), 3), ("arrays", (5,), 8), ("known", (2, 3), 5)],
)
def test_a_users_pair(
    user_module: str, function: str, shape: tuple[int, ...], classes: int
) -> None:
    path = f"{user_module}:{function}"
    bundle = load_dataset(path, None, seed=7)
    assert (bundle.input_shape, bundle.num_classes, bundle.name) == (shape, classes, path)


def test_a_users_bundle_is_taken_as_it_is(user_module: str) -> None:
    bundle = load_dataset(f"{user_module}:bundle", Path("there"), seed=6)
    assert isinstance(bundle, DataBundle)
    assert (bundle.name, bundle.num_classes) == ("there", 6)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("regression", "number of classes is unknown"),
        ("empty", "0 training and 4 test samples"),
        ("three", "returned tuple, expected a DataBundle"),
        ("numbers", "first sample is no pair"),
        ("text", "returned str, expected a DataBundle"),
        ("missing", "has no missing"),
    ],
)
def test_what_is_wrong_with_a_users_data_is_said(
    user_module: str, function: str, said: str
) -> None:
    assert said in refusal(ConfigError, f"{user_module}:{function}")


def test_an_unknown_name_lists_what_there_is() -> None:
    message = refusal(ConfigError, "mnits")
    assert all(name in message for name in dataset_names())
    assert message.startswith("--dataset mnits: ")
