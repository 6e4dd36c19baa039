"""Data sets: the two built-in ones, the file formats, and an error with the file's name for every defect."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.files import idx
from trainers import datasets
from trainers.errors import DataError

IMAGES = np.arange(7 * 3 * 2, dtype=np.uint8).reshape(7, 3, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0], np.uint8)


def mnist(folder: Path, ending: str = "", **changes: bytes) -> Path:
    """Write a folder of MNIST-format files. changes: replace the content of files."""
    files = {
        "train-images-idx3-ubyte": idx(IMAGES),
        "train-labels-idx1-ubyte": idx(LABELS),
        "t10k-images-idx3-ubyte": idx(IMAGES[:2]),
        "t10k-labels-idx1-ubyte": idx(LABELS[:2]),
    }
    for key, content in changes.items():
        files[next(name for name in files if name.startswith(key.replace("_", "-")))] = content
    for name, content in files.items():
        (folder / (name + ending)).write_bytes(gzip.compress(content) if ending == ".gz" else content)
    return folder


@pytest.mark.parametrize(
    ("name", "train", "test", "features", "classes"),
    [("iris", 120, 30, 4, ("setosa", "versicolor", "virginica")), ("digits", 1437, 360, 64, tuple("0123456789"))],
)
def test_builtin(name: str, train: int, test: int, features: int, classes: tuple[str, ...]) -> None:
    data, again = datasets.load(name), datasets.load(name)
    assert data.x_train.shape == (train, features)
    assert data.x_test.shape == (test, features)
    assert data.classes == classes
    assert np.array_equal(data.x_test, again.x_test)
    for labels in (data.y_train, data.y_test):  # stratified: classes in proportion, to one sample
        counts = np.bincount(labels, minlength=len(classes))
        whole = np.bincount(np.concatenate([data.y_train, data.y_test]))
        assert np.abs(counts - whole * len(labels) / (train + test)).max() <= 1
    scaled = (data.x_train - data.shift) * data.scale
    assert np.abs(scaled.mean(axis=0)).max() < 1e-4


def test_iris_is_the_published_one() -> None:
    data = datasets.load("iris")
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    setosa = x[y == 0].mean(axis=0)
    np.testing.assert_allclose(setosa, [5.006, 3.428, 1.462, 0.246], atol=1e-4)  # Fisher's table


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_format(tmp_path: Path, ending: str) -> None:
    data = datasets.load(str(mnist(tmp_path, ending)))
    assert np.array_equal(data.x_train, IMAGES.reshape(7, 6))
    assert data.x_train.dtype == np.uint8
    assert np.array_equal(data.y_test, [0, 1])
    assert data.scale == 1 / 255
    assert data.classes == ("0", "1", "2")


def test_mnist_without_test_files_is_split(tmp_path: Path) -> None:
    mnist(tmp_path)
    for file in tmp_path.glob("t10k*"):
        file.unlink()
    data = datasets.load(str(tmp_path))
    assert (len(data.x_train), len(data.x_test)) == (5, 2)


def test_idx_numbers_are_big_endian(tmp_path: Path) -> None:
    values = (np.arange(14).reshape(7, 2) * 1000).astype(">i4")
    data = datasets.load(str(mnist(tmp_path, train_images=idx(values, 0x0C), t10k_images=idx(values[:2], 0x0C))))
    assert np.array_equal(data.x_train, values)


BAD_IDX: dict[str, tuple[dict[str, bytes], str]] = {
    "truncated": ({"train_images": idx(IMAGES)[:-5]}, r"train-images-idx3-ubyte is truncated: .* 58 bytes .* has 53"),
    "header": ({"train_images": idx(IMAGES)[:9]}, "train-images-idx3-ubyte is truncated: 9 bytes"),
    "tiny": ({"train_labels": b"\0\0"}, "train-labels-idx1-ubyte is truncated: 2 bytes"),
    "too long": ({"train_labels": idx(LABELS) + b"x"}, "train-labels-idx1-ubyte is too long"),
    "empty": ({"t10k_labels": b""}, "t10k-labels-idx1-ubyte is empty"),
    "no images": ({"train_images": idx(IMAGES[:0]), "train_labels": idx(LABELS[:0])}, "is empty"),
    "labels for images": ({"train_images": idx(LABELS)}, "magic number 0x00000801; images .* have 0x00000803"),
    "images for labels": ({"train_labels": idx(IMAGES)}, "magic number 0x00000803; labels .* have 0x00000801"),
    "no magic": ({"train_images": b"P5 28 28 255 ..."}, "magic number 0x50352032"),
    "count": ({"train_labels": idx(LABELS[:-1])}, "has 7 images and .*train-labels-idx1-ubyte has 6 labels"),
    "shape": ({"t10k_images": idx(np.zeros((2, 5, 5), np.uint8))}, "training has 6 features and test 25"),
}


@pytest.mark.parametrize("fault", BAD_IDX)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_bad_idx(tmp_path: Path, fault: str, ending: str) -> None:
    changes, text = BAD_IDX[fault]
    with pytest.raises(DataError, match=text.replace("-ubyte", f"-ubyte{ending}")):
        datasets.load(str(mnist(tmp_path, ending, **changes)))


def test_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no train-images-idx3-ubyte"):
        datasets.load(str(tmp_path))
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="train-images-idx3-ubyte but no train labels"):
        datasets.load(str(tmp_path))


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:3], y_test=LABELS[:3])
    data = datasets.load(str(path))
    assert (data.features, len(data.x_test), data.y_test.tolist()) == (6, 3, [0, 1, 2])
    np.savez(path, x=IMAGES.astype(float), y=LABELS)
    assert len(datasets.load(str(path)).x_test) == 2


BAD_NPZ: dict[str, tuple[Callable[[Path], object], str]] = {
    "names": (lambda path: np.savez(path, a=IMAGES), "holds a; expected x_train, y_train"),
    "count": (lambda path: np.savez(path, x=IMAGES, y=LABELS[:3]), "7 samples and labels of shape"),
    "one-hot": (lambda path: np.savez(path, x=IMAGES, y=np.eye(7)), "one-hot"),
    "nan": (lambda path: np.savez(path, x=np.full((7, 2), np.nan), y=LABELS), "sample 0, feature 0 is nan"),
    "text": (lambda path: np.savez(path, x=np.array(["a"] * 7), y=LABELS), "not numeric"),
    "empty": (lambda path: np.savez(path, x=IMAGES[:0], y=LABELS[:0]), "is empty"),
    "no bytes": (lambda path: path.write_bytes(b""), "is empty"),
    "no archive": (lambda path: path.write_text("x,y"), r"not an \.npz archive"),
    "objects": (lambda path: np.savez(path, x=np.array([{}] * 7), y=LABELS), "allow_pickle"),
    "labels": (lambda path: np.savez(path, x=IMAGES, y=LABELS - 1.0), r"label of sample 0 is -1\.0"),
    "fractions": (lambda path: np.savez(path, x=IMAGES, y=LABELS + 0.5), r"label of sample 0 is 0\.5"),
}


@pytest.mark.parametrize("fault", BAD_NPZ)
def test_bad_npz(tmp_path: Path, fault: str) -> None:
    make, text = BAD_NPZ[fault]
    make(tmp_path / "set.npz")
    with pytest.raises(DataError, match=text) as caught:
        datasets.load(str(tmp_path / "set.npz"))
    assert "set.npz" in str(caught.value)


def test_features_that_never_change_are_not_blown_up(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    x = np.random.default_rng(0).normal(size=(70, 3))
    x[:, 1] = 0.1
    x[:, 2] = 1e-9
    for dtype in (np.float32, np.float64):
        np.savez(path, x=x.astype(dtype), y=np.arange(70) % 3)
        scale = np.asarray(datasets.load(str(path)).scale)
        assert 0.5 < scale[0] < 2
        assert scale[1:].tolist() == [1, 1]


@pytest.mark.parametrize("header", ["", "a,b,label\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_csv(tmp_path: Path, header: str, packed: bool) -> None:
    text = header + "".join(f"{row},{row / 2},{row % 3}\n" for row in range(10))
    path = tmp_path / ("set.csv.gz" if packed else "set.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    data = datasets.load(str(path))
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    assert (len(data.x_train), len(data.x_test)) == (8, 2)
    assert np.array_equal(x[:, 0] % 3, y)
    assert np.array_equal(np.sort(x[:, 1]), np.arange(10) / 2)


def test_csv_with_names_for_labels(tmp_path: Path) -> None:
    path = tmp_path / "set.csv"
    path.write_text("\n".join(f"{row}, {'dog' if row % 2 else 'cat'}" for row in range(10)))
    data = datasets.load(str(path))
    assert data.classes == ("cat", "dog")
    assert np.array_equal(data.x_train[:, 0] % 2, data.y_train)


BAD_CSV = {
    "empty": ("", "is empty"),
    "blank": ("\n\n", "is empty"),
    "only a header": ("a,b,label\n", "has no samples"),
    "one sample": ("1,2,0\n", "one sample"),
    "one column": ("1\n2\n", "first line has one column"),
    "text": ("1,2,0\n1,x,0\n", "line 2, column 2: 'x' is not a number"),
    "underscore": ("1,2,0\n1,2_0,0\n", "line 2, column 2: '2_0' is not a number"),
    "quoted": ('1,2,0\n1,"2,5",0\n', "line 2, column 2: '2,5' is not a number"),
    "hole": ("a,b,c\n1,2,0\n1,,0\n", "line 3, column 2: '' is not a number"),
    "nan": ("1,2,0\n1,nan,0\n", "line 2, column 2 is nan"),
    "infinite": ("1,2,0\n1,inf,0\n", "line 2, column 2 is inf"),
    "truncated": ("1,2,0\n1,2,1\n1,2", "line 3 has 2 cells, and the first line has 3; is the file truncated"),
    "label": ("1,2,0\n1,2,0.5\n", r"label of sample 1 is 0\.5"),
    "no label": ("1,2,0\n1,2,\n1,2,1\n", "line 2 has no label"),
    "no name": ("1,2,cat\n\n1,2,dog\n1,2, \n", "line 4 has no label"),
    "garbled": ("1,2,0\n1,2,1\n1,2,l\n1,2,0\n", "the label '0' is a number and 'l' is not"),
    "odd number": ("1,2,cat\n1,2,dog\n1,2,7\n", "the label '7' is a number and 'cat' is not"),
    "negative": ("1,2,-1\n1,2,0\n", r"label of sample 0 is -1\.0"),
    "huge": ("1,2,5\n1,2,123456789\n", r"label of sample 1 is 123456789"),
}


@pytest.mark.parametrize("fault", BAD_CSV)
def test_bad_csv(tmp_path: Path, fault: str) -> None:
    content, text = BAD_CSV[fault]
    path = tmp_path / "set.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=text) as caught:
        datasets.load(str(path))
    assert str(path) in str(caught.value)


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'digits'"):
        datasets.load("digit")
    with pytest.raises(DataError, match=r"no data set and no file '/no/where\.csv'"):
        datasets.load("/no/where.csv")
    (tmp_path / "set.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="none of the known formats"):
        datasets.load(str(tmp_path / "set.parquet"))
