import gzip
import pickle
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.datasets.files import check_labels, read_cifar10_binary, read_cifar10_python, read_idx

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 4, 5), np.uint8)
PHOTOS = np.random.default_rng(1).integers(0, 256, (3, 32, 32, 3), np.uint8)
LABELS = np.array([7, 0, 9], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def planes(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def binary_version(images: np.ndarray, labels: np.ndarray) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, planes(images), strict=True))


def python_version(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Instruction by instruction what Python 2 wrote into the original files."""
    data = planes(images).tobytes()
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(",
            *(b"K" + bytes([label]) for label in labels),
            b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\tU\x01bq\n",
            b"\x87q\x0bRq\x0c(K\x01M" + struct.pack("<H", len(images)) + b"M\x00\x0c\x86q\rcnumpy\ndtype\nq\x0e",
            b"U\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b",
            b"\x89T" + struct.pack("<i", len(data)) + data + b"tq\x14bU\tfilenamesr\x15\x00\x00\x00]q\x16(",
            b"U\x05a.pngq\x17U\x05b.pngq\x18eu.",
        ]
    )


def write(folder: Path, data: bytes, name: str = "file") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


@pytest.mark.parametrize("array", [IMAGES, LABELS], ids=["images", "labels"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_an_idx_file_gives_the_array_that_was_written(tmp_path, array, packed):
    data = gzip.compress(idx(array)) if packed else idx(array)
    path = write(tmp_path, data, "file.gz" if packed else "file")
    read = read_idx(path, dimensions=array.ndim)
    np.testing.assert_array_equal(read, array)
    assert read.dtype == np.uint8


def test_a_wrong_magic_number_is_an_error_that_shows_both(tmp_path):
    with pytest.raises(ValueError, match="with 00 00 08 01, .* 3 dimensions .*with 00 00 08 03"):
        read_idx(write(tmp_path, idx(LABELS)), dimensions=3)
    with pytest.raises(ValueError, match="with nothing, .* 1 dimension .*with 00 00 08 01"):
        read_idx(write(tmp_path, b""), dimensions=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (idx(IMAGES)[:-1], r"\(3, 4, 5\) .*76 bytes, but has 75"),
        (idx(IMAGES) + b"x", "must have 76 bytes, but has 77"),
        (idx(IMAGES)[:9], "header, after 9 of 16 bytes"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "must have 79228162458924105385300197391 bytes, but has 16"),
    ],
    ids=["short", "long", "header", "huge"],
)
def test_a_truncated_idx_file_is_an_error_with_both_sizes(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        read_idx(write(tmp_path, data), dimensions=3)


@pytest.mark.parametrize("data", [gzip.compress(idx(IMAGES))[:-20], b"no gzip at all"], ids=["short", "other"])
def test_a_damaged_gz_file_is_an_error_with_its_name(tmp_path, data):
    with pytest.raises(ValueError, match=r"images\.gz is not"):
        read_idx(write(tmp_path, data, "images.gz"), dimensions=3)


@pytest.mark.parametrize(
    ("read", "written"), [(read_cifar10_binary, binary_version), (read_cifar10_python, python_version)]
)
def test_both_versions_of_cifar10_give_the_images_and_labels_that_were_written(tmp_path, read, written):
    images, labels = read(write(tmp_path, written(PHOTOS, LABELS)))
    np.testing.assert_array_equal(images, PHOTOS)
    np.testing.assert_array_equal(labels, LABELS)
    assert images.dtype == np.uint8 and images.flags.c_contiguous


def test_the_python_version_in_these_tests_is_one_that_python_reads_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy finds the old way of writing a dtype out of date
        content = pickle.loads(python_version(PHOTOS, LABELS), encoding="bytes")
    np.testing.assert_array_equal(content[b"data"], planes(PHOTOS))
    assert content[b"labels"] == LABELS.tolist() and content[b"filenames"] == [b"a.png", b"b.png"]


@pytest.mark.parametrize("data", [planes(PHOTOS), np.asfortranarray(planes(PHOTOS))], ids=["rows", "columns"])
def test_a_python_version_that_python_3_wrote_is_read_too(tmp_path, data):
    content = {"labels": LABELS.tolist(), "data": data, "more": (None, True, 70_000, ["a"], "ä", {}, ())}
    images, labels = read_cifar10_python(write(tmp_path, pickle.dumps(content, protocol=3)))
    np.testing.assert_array_equal(images, PHOTOS)
    np.testing.assert_array_equal(labels, LABELS)


class Runs:
    """What an attacker would put into a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_name_that_is_not_numpys_is_refused_and_not_run(tmp_path, protocol):
    target = tmp_path / "was-run"
    data = pickle.dumps({"labels": [], "data": Runs(target)}, protocol=protocol)
    with pytest.raises(ValueError, match=r"contains the name \S+, which the python version of CIFAR-10 does not"):
        read_cifar10_python(write(tmp_path, data))
    assert not target.exists()
    pickle.loads(data)
    assert target.exists()  # so it would have run


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02cos\nsystem\n(U\x04truetR.", "the name os.system"),
        (b"\x80\x02cnumpy\nload\n.", "the name numpy.load"),
        (b"\x80\x02cbuiltins\neval\n.", "the name builtins.eval"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "the format version 4"),
        (b"\x80\x02ios\nsystem\n.", "b'i' at byte 2"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "a call of .*ndarray"),
        (b"\x80\x02U\x01aU\x01bb.", "a state for b'a'"),
        (b"\x80\x02U\x01aU\x01ba.", "bytes"),
        (b"\x80\x02}]U\x01as.", "a dictionary with keys that are not text"),
        (b"\x80\x02h\x07.", "a reference to value 7"),
        (b"\x80\x02.", "before byte"),
        (b"\x80\x02e.", "before byte"),
        (b"\x80\x02U\xffabc", "at byte 7"),
        (b"\x80\x02cnumpy", "at byte 8"),
        (b"", "at byte 0"),
        (b"\x80\x02}.", r"`data` of shape \[n, 3072\]"),
        (b"\x80\x02].", r"`data` of shape \[n, 3072\]"),
    ],
)
def test_anything_else_in_a_python_version_is_an_error_that_names_it(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        read_cifar10_python(write(tmp_path, data))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"U\x02u1q", b"U\x02O8q", "uint8"),
        (b"M\x03\x00M", b"M\x04\x00M", "uint8"),
        (b"labels", b"Labels", "`labels` of 3 "),
        (b"K\x07K\x00K\x09e", b"K\x07K\x00Ne", "`labels` of 3 "),
        (b"K\x07K\x00K\x09e", b"K\x07K\x00e", "`labels` of 3 "),
    ],
    ids=["objects", "size", "labels", "kind", "fewer"],
)
def test_a_python_version_with_other_content_is_an_error(tmp_path, old, new, message):
    data = python_version(PHOTOS, LABELS)
    assert data.count(old) == 1
    with pytest.raises(ValueError, match=message):
        read_cifar10_python(write(tmp_path, data.replace(old, new)))


def test_a_truncated_cifar10_file_is_an_error_with_its_size(tmp_path):
    data = binary_version(PHOTOS, LABELS)
    with pytest.raises(ValueError, match="has 9218 bytes.*3073"):
        read_cifar10_binary(write(tmp_path, data[:-1]))
    with pytest.raises(ValueError, match="has 0 bytes"):
        read_cifar10_binary(write(tmp_path, b""))
    data = python_version(PHOTOS, LABELS)
    for size in range(0, len(data), 97):
        with pytest.raises(ValueError, match="truncated"):
            read_cifar10_python(write(tmp_path, data[:size]))


@pytest.mark.parametrize("label", [10, 255, -1])
def test_a_label_out_of_range_is_an_error_with_its_value_and_index(label):
    with pytest.raises(ValueError, match=rf"train-labels has the label {label} at .*2, .*from 0 to 9"):
        check_labels(np.array([0, 9, label]), 10, "train-labels")


def test_labels_become_int32():
    assert check_labels(LABELS, 10, "train-labels").dtype == np.int32
