"""Data files by URL: read from a local copy that is complete, and of the version that is there now."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jax_trainer.datasets import ArrayLoader, load_arrays, local_copy
from jax_trainer.datasets.records import GrainLoader
from jax_trainer.datasets.storage import Store, data_cache
from jax_trainer.datasets.text import TextConfig, TextDataset


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"file://{tmp_path}/store"


def test_arrays_texts_and_records_are_read_by_url(url: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.arange(12.0).reshape(6, 2), y=np.arange(6))
    np.save(tmp_path / "x.npy", np.arange(5))
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    writer = ArrayRecordWriter(str(tmp_path / "some.array_record"), "group_size:1")
    for number in range(6):
        writer.write(np.int64(number).tobytes())
    writer.close()
    store = Store(url)
    for name in ("train.npz", "x.npy", "text.txt", "some.array_record"):
        store.write(name, tmp_path / name)

    batch = next(iter(ArrayLoader(load_arrays(f"{url}/train.npz"), 4)))
    assert (batch["y"].tolist(), batch["x"].shape) == ([0, 1, 2, 3], (4, 2))
    column = load_arrays(f"{url}/x.npy")
    assert isinstance(column, np.memmap) and column.tolist() == [0, 1, 2, 3, 4]
    configs = ({"path": f"{url}/text.txt"}, {"path": "text.txt", "data_dir": url}, {"path": str(tmp_path / "text.txt")})
    options: dict[str, Any] = {"context": 8, "global_batch_size": 4}
    by_url, in_folder, local = (TextDataset(TextConfig(**one, **options)) for one in configs)
    assert len(by_url.train_loader) == len(in_folder.train_loader) == len(local.train_loader) > 0
    assert by_url.metadata["vocabulary"] == local.metadata["vocabulary"]
    records = GrainLoader(f"{url}/some.array_record", 3, decode=lambda record: np.frombuffer(record, np.int64))
    assert next(iter(records)).ravel().tolist() == [0, 1, 2]


def test_a_copy_is_made_once_per_version(url: str, tmp_path: Path) -> None:
    store, file = Store(url), tmp_path / "store" / "a.txt"
    store.write("a.txt", b"one")
    os.utime(file, ns=(10**18, 10**18))
    first = local_copy(f"{url}/a.txt")
    stamp = first.stat()
    assert local_copy(f"{url}/a.txt") == first and first.stat() == stamp
    assert first.is_relative_to(data_cache()) and first.name == "a.txt"
    store.write("a.txt", b"two")
    assert local_copy(f"{url}/a.txt").read_bytes() == b"two"
    assert first.read_bytes() == b"one"


def test_a_url_of_no_file_or_no_arrays_is_an_error_that_names_it(url: str, tmp_path: Path) -> None:
    store = Store(url)
    store.write("bad.npz", b"no zip file")
    store.write("bad.npy", b"")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in (f"{url}/bad.npz", f"{url}/bad.npy", str(tmp_path / "objects.npy"), "table.csv"):
        with pytest.raises(ValueError, match=Path(name).name):
            load_arrays(name)
    with pytest.raises(FileNotFoundError, match=f"{url}/none.npz"):
        load_arrays(f"{url}/none.npz")
    with pytest.raises(ValueError, match="secret"):
        local_copy("s3://key:hunter22@bucket/x.npz")
