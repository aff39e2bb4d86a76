"""Predictions in a file: the same values as `predict`, with ids, and after a kill the same bytes."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet
import pytest

from jax_trainer.checkpoint.folder import RunInUseError, locked
from jax_trainer.core import compile_program
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import ArrayLoader, DataError, DatasetConfig, DatasetModule, SupervisedBatch
from jax_trainer.runs import predictions as writing
from jax_trainer.runs.predictions import FORMATS, Predictor, write_predictions
from jax_trainer.sharding import Layout
from jax_trainer.testing import assert_close, assert_same_bits, fault, numbered_data, tiny_program
from tests.rows import noted_row

DATA = numbered_data(203)
WITHOUT_IDS = {name: array for name, array in DATA.items() if name != "id"}


@cache
def predictor(layout: Layout | None = None) -> Predictor:
    program = compile_program(tiny_program("linen", optax.sgd(0.1)), layout=layout, on_recompile="ignore")
    return Predictor(program, program.init(jax.random.key(0), {name: array[:32] for name, array in DATA.items()}))


@cache
def expected() -> np.ndarray:
    return np.asarray(predictor().program.predict(predictor().state, DATA))


def loader(data: Any = None, batch_size: int = 32, **options: Any) -> ArrayLoader:
    return ArrayLoader(WITHOUT_IDS if data is None else data, batch_size, **options)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "GROUP_ROWS", 50)


def read(file: Path) -> dict[str, np.ndarray]:
    """The columns of a file, by what its format is read with."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as opened:
            return dict(opened)
    if file.suffix == ".parquet":
        table = pyarrow.parquet.read_table(file)
        return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def test_a_file_has_every_example_with_its_prediction_its_target_and_its_index(
    tmp_path_factory: pytest.TempPathFactory, small_groups
):
    for suffix in FORMATS:
        with noted_row(suffix):
            tmp_path = tmp_path_factory.mktemp("row")
            done = write_predictions(predictor(), loader(), tmp_path / f"out{suffix}", targets=True)
            found = read(done.path)
            assert (done.rows, done.resumed, done.columns) == (203, 0, ("id", "prediction", "target"))
            assert list(found) == ["id", "prediction", "target"]
            np.testing.assert_array_equal(found["id"], np.arange(203))
            np.testing.assert_array_equal(found["target"], DATA["y"])
            assert_close(found["prediction"].astype(np.float32), expected(), rtol=1e-5, atol=1e-5)
            assert [file.name for file in tmp_path.iterdir()] == [done.path.name]


def test_an_interrupted_call_continues_and_writes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, small_groups
):
    for point in ["prediction_group:raise:3", "prediction_index:raise:2", "prediction_join:raise"]:
        for suffix in FORMATS:
            with noted_row(point, suffix):
                tmp_path = tmp_path_factory.mktemp("row")
                whole = write_predictions(predictor(), loader(), tmp_path / f"whole{suffix}", targets=True).path
                output = tmp_path / f"out{suffix}"
                with fault(point), pytest.raises(FaultInjected):
                    write_predictions(predictor(), loader(), output, targets=True)
                assert not output.exists()
                done = write_predictions(predictor(), loader(), output, targets=True)
                assert (
                    done.resumed
                    == {"group": 128, "index": 64, "join": 203}[point.split(":")[0].removeprefix("prediction_")]
                )
                assert output.read_bytes() == whole.read_bytes()


def test_rows_of_other_weights_or_data_and_damaged_ones_are_not_continued(tmp_path, small_groups, caplog):
    output = tmp_path / "out.npz"

    def interrupt() -> None:
        with fault("prediction_group:raise:3"), pytest.raises(FaultInjected):
            write_predictions(predictor(), loader(), output)

    def resumed(predictor: Predictor, data: ArrayLoader) -> int:
        interrupt()
        done = write_predictions(predictor, data, output)
        output.unlink()
        return done.resumed

    program, state = predictor()
    others = state.replace(params=jax.tree.map(lambda leaf: leaf + 1, state.params))
    assert resumed(predictor(), loader()) == 128
    assert resumed(Predictor(program, others), loader()) == 0
    assert resumed(predictor(), loader(batch_size=16)) == 0
    assert resumed(predictor(), loader({**WITHOUT_IDS, "y": DATA["y"] + 1})) == 0
    interrupt()
    (tmp_path / "out.npz.partial" / "00000001").write_bytes(b"")
    assert write_predictions(predictor(), loader(), output).resumed == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4


def test_ids_are_those_of_the_batches_of_the_dataset_or_the_indices(tmp_path):
    data = DatasetModule(
        DatasetConfig(global_batch_size=32),
        train=WITHOUT_IDS,
        test=WITHOUT_IDS,
        ids={"train": DATA["id"] + 7, "test": [f"image {number}" for number in range(203)]},
    )

    def ids(source: Any, name: str) -> list[Any]:
        return read(write_predictions(predictor(), source, tmp_path / name).path)["id"].tolist()

    names = [f"image {number}" for number in range(203)]
    assert ids(data.test_loader, "text.npz") == ids(data.test_loader, "text.parquet") == names
    shuffled = ids(data.train_loader, "shuffled.jsonl")
    assert len(shuffled) == 192 and sorted(shuffled) != shuffled and set(shuffled) <= set((DATA["id"] + 7).tolist())
    assert ids(data.train_loader.in_order(), "train.jsonl") == (DATA["id"] + 7).tolist()
    own = {**WITHOUT_IDS, "id": DATA["id"] + 1000}
    assert ids(loader(own, shuffle=True).in_order(), "own.jsonl") == (DATA["id"] + 1000).tolist()
    assert ids(iter(list(loader())), "stream.jsonl") == list(range(203))
    with pytest.raises(ValueError, match="'test'.*203"):
        DatasetModule(DatasetConfig(), train=WITHOUT_IDS, test=WITHOUT_IDS, ids={"test": [1, 2]})
    with pytest.raises(TypeError, match="'tset'"):
        DatasetModule(DatasetConfig(), train=WITHOUT_IDS, ids={"tset": [1, 2]})


def test_eight_devices_write_the_same_values(tmp_path):
    layout = Layout(mesh=jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,)))
    one, eight = (
        read(write_predictions(predictor(used), loader(), tmp_path / f"{number}.npz", targets=True).path)
        for number, used in enumerate((None, layout))
    )
    assert_close(eight["prediction"], one["prediction"], rtol=1e-5, atol=1e-5)
    assert_same_bits(eight["target"], one["target"])
    assert_same_bits(eight["id"], one["id"])


def predicting(outputs: Any) -> Predictor:
    """A predictor whose outputs are a function of the batch."""
    plain = tiny_program("linen", optax.sgd(0.1))._replace(predict_step=lambda state, batch: outputs(batch))
    return Predictor(compile_program(plain, on_recompile="ignore"), predictor().state)


def test_outputs_may_be_several_arrays_of_any_shape_and_dtype_and_not_finite(tmp_path_factory: pytest.TempPathFactory):
    for suffix in FORMATS:
        with noted_row(suffix):
            tmp_path = tmp_path_factory.mktemp("row")

            def outputs(batch: Any) -> Any:
                x = batch["x"]
                grid = jnp.broadcast_to(x[:, :1, None], (x.shape[0], 2, 3))
                return {"low": x.astype(jnp.bfloat16), "nan": jnp.log(grid * 0 - 1), "pair": (x[:, 0] > 0, grid)}

            done = write_predictions(predicting(outputs), loader(), tmp_path / f"out{suffix}")
            assert done.columns == ("id", *(f"prediction.{name}" for name in ("low", "nan", "pair.0", "pair.1")))
            found = read(done.path)
            low = found["prediction.low"].astype(np.float32)
            assert_close(low, jax.device_get(jnp.asarray(DATA["x"]).astype(jnp.bfloat16).astype(np.float32)))
            assert np.isnan(found["prediction.nan"].astype(np.float32)).all()
            assert found["prediction.nan"].shape == found["prediction.pair.1"].shape == (203, 2, 3)
            np.testing.assert_array_equal(found["prediction.pair.0"], DATA["x"][:, 0] > 0)


def test_predictions_that_cannot_be_written_are_an_error_that_names_them(tmp_path):
    def refused(error: type[Exception], match: str, made: Predictor, source: Any, name: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            write_predictions(made, source, tmp_path / name, **options)
        shutil.rmtree(tmp_path / f"{name}.partial", ignore_errors=True)

    ragged = [SupervisedBatch.of(np.ones((4, size), np.float32), np.zeros(4)) for size in (2, 3)]
    inputs = predicting(lambda batch: batch.input)
    refused(ValueError, "out.csv", predictor(), loader(), "out.csv")
    refused(FileNotFoundError, "nowhere", predictor(), loader(), "nowhere/out.npz")
    refused(DataError, r"the output \[\]", predicting(lambda batch: batch["x"].sum()), loader(), "a.npz")
    refused(DataError, "x.*target", predictor(), loader({"x": DATA["x"]}), "b.npz", targets=True)
    for suffix in (".npz", ".parquet"):
        refused(DataError, "prediction.*3", inputs, ragged, f"c{suffix}")
    assert write_predictions(inputs, ragged, tmp_path / "c.jsonl").rows == 8
    (tmp_path / "there.npz").touch()
    refused(FileExistsError, "there.npz", predictor(), loader(), "there.npz")
    assert write_predictions(predictor(), loader(), tmp_path / "there.npz", overwrite=True).rows == 203
    (tmp_path / "used.npz.partial").mkdir()
    with locked(tmp_path / "used.npz.partial"), pytest.raises(RunInUseError):
        write_predictions(predictor(), loader(), tmp_path / "used.npz")


def test_only_the_first_batches_are_predicted(tmp_path):
    assert write_predictions(predictor(), loader(), tmp_path / "out.jsonl", max_batches=2).rows == 64
