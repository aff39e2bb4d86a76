import gzip
import struct
from pathlib import Path
from typing import Any

import compoconf
import jax
import numpy as np
import pytest

from jax_trainer.datasets.examples import (
    CIFAR10Config,
    CIFAR10Dataset,
    DigitsConfig,
    DigitsDataset,
    FashionMNISTConfig,
    FashionMNISTDataset,
    MNISTConfig,
    MNISTDataset,
    TextConfig,
    TextDataset,
    Vocabulary,
    resize,
)
from jax_trainer.datasets.files import CIFAR10_FILES, FASHION_MNIST_FILES, MNIST_FILES, sha256_of
from jax_trainer.datasets.module import DatasetModule

DATA = Path(__file__).parents[2] / "data"
IDX_NAMES = MNIST_FILES.names
random = np.random.default_rng(0)
TRAIN = random.integers(0, 256, (20, 28, 28), np.uint8), np.arange(20, dtype=np.uint8) % 10
TEST = random.integers(0, 256, (6, 28, 28), np.uint8), np.arange(6, dtype=np.uint8)
TEXT = "".join(chr(97 + number) for number in random.integers(0, 26, 1000))


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx_set(folder: Path, *, train=TRAIN, test=TEST, dotted: bool = False, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX_NAMES, (*train, *test), strict=True):
        name = name.replace("-idx", ".idx") if dotted else name
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return folder


def cifar_images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)


def write_cifar(folder: Path, *, label: int = 3) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(CIFAR10_FILES.names):
        rows = cifar_images(4, number).transpose(0, 3, 1, 2).reshape(4, -1)
        (folder / name).write_bytes(b"".join(bytes([label]) + row.tobytes() for row in rows))


def mnist(folder: Path, **options) -> MNISTDataset:
    return MNISTDataset(MNISTConfig(data_dir=str(folder), **{"val_size": 5, "global_batch_size": 4, **options}))


def normalized(data: DatasetModule, images: np.ndarray) -> np.ndarray:
    (transform,) = data.transforms.train
    assert data.transforms.eval == data.transforms.train
    return np.asarray(transform(jax.random.key(0), jax.numpy.asarray(images)))


def test_mnist_is_found_wherever_people_have_it(tmp_path, subtests):
    for folder in ["MNIST/raw", "mnist", "."]:
        for dotted in [False, True]:
            for packed in [False, True]:
                with subtests.test(packed=packed, dotted=dotted, folder=folder):
                    write_idx_set(tmp_path / folder, dotted=dotted, packed=packed)
                    data = mnist(tmp_path)
                    np.testing.assert_array_equal(data.test.input[..., 0], TEST[0])
                    np.testing.assert_array_equal(data.test.target, TEST[1])
                    assert data.train.input.dtype == np.uint8 and data.train.target.dtype == np.int32
                    assert (len(data.train), len(data.val), len(data.test)) == (15, 5, 6)


def test_mnist_and_fashion_mnist_in_one_folder_are_not_mixed_up(tmp_path):
    write_idx_set(tmp_path / "MNIST/raw")
    write_idx_set(tmp_path / "FashionMNIST/raw", test=(TEST[0] // 2, TEST[1]))
    fashion = FashionMNISTDataset(FashionMNISTConfig(data_dir=str(tmp_path), val_size=0, global_batch_size=4))
    np.testing.assert_array_equal(fashion.test.input[..., 0], TEST[0] // 2)
    np.testing.assert_array_equal(mnist(tmp_path).test.input[..., 0], TEST[0])
    assert fashion.class_names[9] == "Ankle boot" and mnist(tmp_path).class_names[9] == "9"


def test_all_missing_files_are_named_at_once(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        mnist(tmp_path)
    message = str(caught.value)
    assert all(name in message for name in IDX_NAMES) and str(tmp_path / "MNIST" / "raw") in message
    assert "4 of the 4 files of MNIST" in message and "`download: true`" in message
    write_idx_set(tmp_path)
    (tmp_path / IDX_NAMES[2]).unlink()
    (tmp_path / IDX_NAMES[3]).unlink()
    with pytest.raises(FileNotFoundError, match=f"2 of .*missing in {tmp_path}: {IDX_NAMES[2]}, {IDX_NAMES[3]}"):
        mnist(tmp_path)


def test_the_validation_set_is_cut_from_the_training_files_by_the_split_seed(tmp_path):
    write_idx_set(tmp_path)
    data = mnist(tmp_path, split_seed=7)
    order = np.random.default_rng(7).permutation(20)
    np.testing.assert_array_equal(data.val.input[..., 0], TRAIN[0][order[:5]])
    np.testing.assert_array_equal(data.val.target, TRAIN[1][order[:5]])
    np.testing.assert_array_equal(data.train.input[..., 0], TRAIN[0][order[5:]])
    np.testing.assert_array_equal(data.train.target, TRAIN[1][order[5:]])
    np.testing.assert_array_equal(data.test.target, TEST[1])
    assert not np.array_equal(mnist(tmp_path, split_seed=8).val.target, data.val.target)


def test_the_limit_takes_the_first_training_examples_after_the_split(tmp_path):
    write_idx_set(tmp_path)
    whole, part = mnist(tmp_path), mnist(tmp_path, limit_train_size=6)
    np.testing.assert_array_equal(part.train.input, whole.train.input[:6])
    np.testing.assert_array_equal(part.val.input, whole.val.input)
    assert len(part.train) == part.train.size == 6


def test_without_a_validation_size_there_is_no_validation_set(tmp_path):
    write_idx_set(tmp_path)
    data = mnist(tmp_path, val_size=0)
    assert data.val is None and list(data.eval_loaders) == ["test"] and len(data.train) == 20


def test_a_validation_size_that_leaves_nothing_is_an_error_with_the_numbers(tmp_path, subtests):
    for size in [20, 5000]:
        with subtests.test(size=size):
            write_idx_set(tmp_path)
            with pytest.raises(ValueError, match=f"`val_size` is {size}, .*MNIST .* 20 .*most 19"):
                mnist(tmp_path, val_size=size)


def test_an_empty_set_is_an_error(tmp_path):
    write_idx_set(tmp_path, train=(TRAIN[0][:0], TRAIN[1][:0]))
    with pytest.raises(ValueError, match="The set is empty"):
        mnist(tmp_path, val_size=0)


def test_a_set_smaller_than_a_batch_is_an_error_with_both_sizes(tmp_path):
    write_idx_set(tmp_path)
    with pytest.raises(ValueError, match="15 examples.* batch of 16"):
        mnist(tmp_path, global_batch_size=16)


def test_wrong_files_are_errors_that_name_the_file(tmp_path, subtests):
    for parts, message in [
        ({"train": (TRAIN[0], TRAIN[1] + 1)}, "train-labels-idx1-ubyte has the label 10 at .*9, .* from 0 to 9"),
        ({"test": (TEST[0], TEST[1][:5])}, "has 6 images, .*t10k-labels-idx1-ubyte has 5 labels"),
        ({"test": (TEST[0][:, :27], TEST[1])}, r"has images of \(27, 28\), .*MNIST has \(28, 28\)"),
        ({"train": TRAIN[::-1]}, "with 00 00 08 01"),
    ]:
        with subtests.test(parts=parts):
            write_idx_set(tmp_path, **parts)
            with pytest.raises(ValueError, match=message):
                mnist(tmp_path)


def test_values_that_a_set_cannot_have_are_errors_with_the_right_one(subtests):
    for config, options, message in [
        (MNISTConfig, {"num_classes": 11}, "`num_classes` of MNIST is 10, got 11"),
        (MNISTConfig, {"num_channels": 3}, "`num_channels` of MNIST is 1, got 3"),
        (CIFAR10Config, {"num_channels": 1}, "`num_channels` of CIFAR-10 is 3, got 1"),
        (DigitsConfig, {"resolution": (8,)}, r"`resolution` must be.*got \(8,\)"),
        (DigitsConfig, {"resolution": (8, 0)}, r"`resolution` must be .* got \(8, 0\)"),
        (DigitsConfig, {"resolution": 8}, "`resolution` must be .* got 8"),
        (TextConfig, {"level": "word"}, "`level` must be.*got 'word'"),
        (TextConfig, {"context": 0}, "`context` must be .*at least 1, got 0"),
        (TextConfig, {"val_share": 0.6, "test_share": 0.4}, "0.6 and `test_share` 0.4 "),
        (TextConfig, {"val_share": -0.1}, "must be a number of at least 0 and below 1"),
        (TextConfig, {"val_size": 5}, "use `val_share`, not `val_size: 5`"),
    ]:
        with subtests.test(config=config, options=options), pytest.raises(ValueError, match=message):
            config(**options)


def test_normalizing_gives_the_device_the_sets_own_mean_and_deviation(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    data = CIFAR10Dataset(CIFAR10Config(data_dir=str(tmp_path), val_size=4, global_batch_size=4))
    mean, std = np.array(data.metadata["mean"]), np.array(data.metadata["std"])
    assert mean.tolist() == [0.4914, 0.4822, 0.4465] and std.tolist() == [0.2470, 0.2435, 0.2616]
    expected = (data.test.input / 255 - mean) / std
    np.testing.assert_allclose(normalized(data, data.test.input), expected, atol=1e-5)


def test_without_normalizing_nothing_happens_on_the_device(tmp_path):
    write_idx_set(tmp_path)
    transforms = mnist(tmp_path, normalize=False).transforms
    assert transforms.train == transforms.eval == ()


def test_channels_first_moves_the_channels_and_nothing_else(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    last, first = (
        CIFAR10Dataset(
            CIFAR10Config(data_dir=str(tmp_path), val_size=4, global_batch_size=4, channels_first=channels_first)
        )
        for channels_first in (False, True)
    )
    assert first.test.input.shape == (4, 3, 32, 32) and first.test.input.flags.c_contiguous
    np.testing.assert_array_equal(np.moveaxis(first.train.input, 1, -1), last.train.input)
    np.testing.assert_array_equal(
        np.moveaxis(normalized(first, first.test.input), 1, -1), normalized(last, last.test.input)
    )


def test_cifar10_is_read_from_its_binary_files(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    data = CIFAR10Dataset(CIFAR10Config(data_dir=str(tmp_path), val_size=4, global_batch_size=4))
    np.testing.assert_array_equal(data.test.input, cifar_images(4, 5))
    assert data.class_names[3] == "cat" and len(data.train) == 16


def test_the_python_version_of_cifar10_is_an_error_that_names_the_binary_archive(tmp_path, subtests):
    for file in ["cifar-10-batches-py/data_batch_1", "data_batch_1"]:
        with subtests.test(file=file):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(b"\x80\x02}q\x01.")
            with pytest.raises(FileNotFoundError, match=rf"{Path(file).parts[0]}.*cifar-10-binary.tar.gz"):
                CIFAR10Dataset(CIFAR10Config(data_dir=str(tmp_path), val_size=4, global_batch_size=4))


def test_a_cifar10_label_out_of_range_is_an_error_that_names_the_file(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin", label=10)
    with pytest.raises(ValueError, match=r"data_batch_1.bin has the label 10 at .*0"):
        CIFAR10Dataset(CIFAR10Config(data_dir=str(tmp_path), val_size=4, global_batch_size=4))


def test_another_resolution_is_resized_once_as_jax_would(tmp_path, subtests):
    for resolution in [(14, 14), (32, 32), (28, 40), (9, 28)]:
        with subtests.test(resolution=resolution):
            write_idx_set(tmp_path)
            data = mnist(tmp_path, resolution=resolution)
            expected = jax.image.resize(TEST[0].astype(np.float32), (6, *resolution), "linear")
            assert data.test.input.shape == (6, *resolution, 1) and data.test.input.dtype == np.uint8
            np.testing.assert_allclose(data.test.input[..., 0], expected, atol=0.51)
            assert data.metadata["resolution"] == resolution


def test_what_the_device_has_made_of_images_can_be_shown_to_people(subtests):
    for options in [{}, {"normalize": False}, {"channels_first": True}]:
        with subtests.test(options=options):
            data: Any = DigitsDataset(DigitsConfig(global_batch_size=32, **options))
            seen = data.transforms.apply(jax.random.key(0), data.train[:5], train=False).input
            stored = data.train[:5].input
            stored = np.moveaxis(stored, 1, -1) if options.get("channels_first") else stored
            np.testing.assert_allclose(data.pixels(seen), stored / 16, atol=1e-6)  # the brightest has a value of 16
            assert data.pixels(np.asarray(seen, np.float32) + 1000).max() == 1


def test_resizing_keeps_a_flat_image_flat():
    assert (resize(np.full((1, 7, 5, 3), 200, np.uint8), (13, 2)) == 200).all()


def test_digits_ship_with_the_package_and_split_as_always():
    data = DigitsDataset(DigitsConfig(global_batch_size=32))
    assert data.train.input.shape == (1437, 8, 8, 1) and len(data.val) == len(data.test) == 180
    smaller = DigitsDataset(DigitsConfig(global_batch_size=32, val_size=10))
    np.testing.assert_array_equal(smaller.test.input, data.test.input)
    assert len(smaller.val) == 10 and len(smaller.train) == 1607
    pixels = normalized(data, np.concatenate([data.train.input, data.val.input, data.test.input]))
    assert abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


def parsed(content: dict[str, Any]) -> Any:
    return compoconf.parse_config(DatasetModule.cfgtype, content)


def test_a_set_can_be_named_in_a_configuration_file(subtests):
    for dataset in [DigitsDataset, MNISTDataset, FashionMNISTDataset, CIFAR10Dataset, TextDataset]:
        with subtests.test(dataset=dataset):
            config = parsed({"class_name": dataset.__name__, "aux": {"note": 1}})
            assert type(config) is dataset.__annotations__["config"] and config.aux == {"note": 1}


def test_the_keys_of_a_file_reach_the_set_and_its_metadata():
    content = {"class_name": "DigitsDataset", "resolution": [16, 12], "aux": {"note": "mine"}, "global_batch_size": 8}
    data = parsed(content).instantiate(DatasetModule)
    assert data.train.input.shape[1:] == (16, 12, 1)
    assert data.metadata["aux"] == {"note": "mine"} and data.metadata["num_classes"] == len(data.class_names) == 10


def text(folder: Path, content: str | bytes = TEXT, **options) -> TextDataset:
    (folder / "a.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    options = {"path": "a.txt", "context": 8, "global_batch_size": 2, **options}
    return TextDataset(TextConfig(data_dir=str(folder), **options))


def test_the_target_is_the_text_shifted_by_one(tmp_path, subtests):
    for level in ["char", "byte"]:
        with subtests.test(level=level):
            data = text(tmp_path, level=level)
            for part in (data.train, data.val, data.test):
                np.testing.assert_array_equal(part.input[:, 1:], part.target[:, :-1])
                assert part.input.dtype == part.target.dtype == np.int32 and part.input.shape[1] == 8
            read = data.decode(data.train.input.ravel())
            assert TEXT.startswith(read) and data.decode(data.train.target.ravel()) == TEXT[1 : len(read) + 1]


def test_validation_and_test_are_shares_at_the_end_of_the_text(tmp_path):
    data = text(tmp_path, val_share=0.2, test_share=0.1)
    starts = {"train": (0, 700), "val": (700, 900), "test": (900, 1000)}
    for name, (start, end) in starts.items():
        part = getattr(data, name)
        assert data.decode(part.input[0]) == TEXT[start : start + 8]
        assert len(part) == (end - start - 1) // 8
    alone = text(tmp_path, val_share=0.0, test_share=0.0)
    assert alone.val is None and alone.test is None and len(alone.train) == 124


def test_the_limit_takes_the_first_pieces_of_a_text(tmp_path):
    assert text(tmp_path, limit_train_size=3).train.input.shape == (3, 8)


def test_the_metadata_of_a_text_holds_its_vocabulary(tmp_path):
    metadata = text(tmp_path, "häßlich & schön 😀\r\n" * 50, aux={"note": 1}).metadata
    assert "".join(metadata["vocabulary"]) == "".join(sorted(set("häßlich & schön 😀\r\n")))
    assert metadata["vocab_size"] == len(metadata["vocabulary"]) and metadata["aux"] == {"note": 1}
    assert text(tmp_path, level="byte").metadata["vocab_size"] == 256


def test_decoding_gives_back_what_was_encoded(subtests):
    for content in ["häßlich & schön 😀\r\n", "a", ""]:
        level: Any
        for level in ["char", "byte"]:
            with subtests.test(level=level, content=content):
                vocabulary = Vocabulary("häßlich & schön 😀\r\na", level)
                encoded = vocabulary.encode(content)
                assert encoded.dtype == np.int32 and vocabulary.decode(encoded) == content


def test_a_character_that_is_not_in_the_text_is_an_error_with_its_index():
    with pytest.raises(ValueError, match=r"The character '\?' at .*2 .*3 characters"):
        Vocabulary("abc").encode("ab?")


def test_a_text_that_cannot_be_used_is_an_error_with_the_reason(tmp_path, subtests):
    for content, options, message in [
        ("abc" * 10, {}, "a.txt .*1 chars .*'val' part.* 9"),
        ("a" * 8, {"val_share": 0.0, "test_share": 0.0}, "a.txt leaves 8 chars for the 'train' part"),
        ("abc", {"val_share": 0.0, "test_share": 0.0}, "a.txt leaves 3 chars for the 'train' part"),
        ("", {"val_share": 0.0, "test_share": 0.0, "level": "byte"}, "a.txt leaves 0 bytes for the 'train' part"),
        (b"ab\xff", {}, "a.txt is not UTF-8 text: invalid start byte at byte 2"),
        (TEXT, {"path": "b.txt"}, ".*b.txt"),
        (TEXT, {"global_batch_size": 200}, "112 examples.* batch of 200"),
    ]:
        with (
            subtests.test(content=content, options=options),
            pytest.raises((ValueError, FileNotFoundError), match=message),
        ):
            text(tmp_path, content, **options)


def real(folder: str) -> str:
    if not (DATA / folder).exists():
        pytest.skip(f"data/{folder} is not there; scripts/fetch_data.py gets it")
    return str(DATA)


REAL = [
    (MNISTDataset, MNISTConfig, MNIST_FILES, 60_000, False),
    (FashionMNISTDataset, FashionMNISTConfig, FASHION_MNIST_FILES, 60_000, True),
    (CIFAR10Dataset, CIFAR10Config, CIFAR10_FILES, 50_000, True),
]


def test_the_real_set_has_its_published_counts_checksums_and_statistics(subtests):
    for dataset, config, files, examples, balanced in REAL:
        with subtests.test(dataset=dataset, config=config, files=files, examples=examples, balanced=balanced):
            root = real(files.folders[0])
            found = files.find(DATA / files.folders[0])
            assert {name: sha256_of(path) for name, path in found.items()} == files.sha256
            data = dataset(config(data_dir=root, val_size=0))
            assert len(data.train) == examples and len(data.test) == 10_000
            if balanced:
                assert set(np.bincount(data.train.target)) == {examples // 10} and set(
                    np.bincount(data.test.target)
                ) == {1000}
            images = data.train.input.reshape(-1, data.train.input.shape[-1])
            histograms = [
                np.bincount(images[:, channel], minlength=256) / len(images) for channel in range(images.shape[1])
            ]
            values = np.arange(256) / 255
            mean = np.array([histogram @ values for histogram in histograms])
            std = np.sqrt([histogram @ values**2 for histogram in histograms] - mean**2)
            np.testing.assert_allclose(mean, data.metadata["mean"], atol=6e-5)
            np.testing.assert_allclose(std, data.metadata["std"], atol=6e-5)


def test_the_real_text_is_read_completely():
    data = TextDataset(TextConfig(data_dir=real("moby-dick.txt"), global_batch_size=8))
    assert data.decode(data.train.input[0]).startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert data.metadata["vocab_size"] == 81 and len(data.train) == 8376
