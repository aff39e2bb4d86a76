import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.datasets.files import check_labels, read_cifar10, read_idx

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 4, 5), np.uint8)
PHOTOS = np.random.default_rng(1).integers(0, 256, (3, 32, 32, 3), np.uint8)
LABELS = np.array([7, 0, 9], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def planes(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def binary_version(images: np.ndarray, labels: np.ndarray) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, planes(images), strict=True))


def write(folder: Path, data: bytes, name: str = "file") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def test_an_idx_file_gives_the_array_that_was_written(tmp_path, subtests):
    for packed in [False, True]:
        for array in [IMAGES, LABELS]:
            with subtests.test(array=array, packed=packed):
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


def test_a_truncated_idx_file_is_an_error_with_both_sizes(tmp_path, subtests):
    for data, message in [
        (idx(IMAGES)[:-1], r"\(3, 4, 5\) .*76 bytes, but has 75"),
        (idx(IMAGES) + b"x", "must have 76 bytes, but has 77"),
        (idx(IMAGES)[:9], "must have .* bytes, but has 9"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "must have 79228162458924105385300197391 bytes, but has 16"),
    ]:
        with subtests.test(data=data), pytest.raises(ValueError, match=message):
            read_idx(write(tmp_path, data), dimensions=3)


def test_a_damaged_gz_file_is_an_error_with_its_name(tmp_path, subtests):
    for data in [gzip.compress(idx(IMAGES))[:-20], b"no gzip at all"]:
        with subtests.test(data=data), pytest.raises(ValueError, match=r"images\.gz is not"):
            read_idx(write(tmp_path, data, "images.gz"), dimensions=3)


def test_a_cifar10_file_gives_the_images_and_labels_that_were_written(tmp_path):
    images, labels = read_cifar10(write(tmp_path, binary_version(PHOTOS, LABELS)))
    np.testing.assert_array_equal(images, PHOTOS)
    np.testing.assert_array_equal(labels, LABELS)
    assert images.dtype == np.uint8 and images.flags.c_contiguous


def test_a_truncated_cifar10_file_is_an_error_with_its_size(tmp_path):
    data = binary_version(PHOTOS, LABELS)
    with pytest.raises(ValueError, match="has 9218 bytes.*3073"):
        read_cifar10(write(tmp_path, data[:-1]))
    with pytest.raises(ValueError, match="has 0 bytes"):
        read_cifar10(write(tmp_path, b""))


def test_a_label_out_of_range_is_an_error_with_its_value_and_index(subtests):
    for label in [10, 255, -1]:
        with (
            subtests.test(label=label),
            pytest.raises(ValueError, match=rf"train-labels has the label {label} at .*2, .*from 0 to 9"),
        ):
            check_labels(np.array([0, 9, label]), 10, "train-labels")


def test_labels_become_int32():
    assert check_labels(LABELS, 10, "train-labels").dtype == np.int32
