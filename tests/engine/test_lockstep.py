"""Real processes that train together see and learn what one process sees and learns."""

import json
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tests.sharding.processes import feeding_runs as runs
from tests.sharding.processes import pairs

pytestmark = pytest.mark.slow  # pairs of processes that compile all they run; `test_together.py` has a quick one
BOUND = 2e-6  # of losses: processes add up in another order than the devices of one do

CROSSING = """
import jax, numpy as np
from tests.sharding.processes import feeding_runs as runs
crossing = np.array(jax.devices()).reshape(2, 2).T.ravel()
"""
TWO_BY_TWO = (
    CROSSING
    + """
runs.report({
    "shared": dict(runs.shared_runs(runs.mesh(), "arrays", "records in chunks")),
    "evaluated": dict(runs.shared_evaluations(runs.mesh())),
    "odd": runs.odd_part(runs.mesh()),
    "interleaved": runs.outcome_of(
        lambda: runs.trained(runs.program(runs.mesh(devices=crossing)), runs.loaders()["arrays"])
    ),
})
"""
)
TWO_BY_TWO_RARELY = (
    CROSSING
    + """
runs.report({
    "shared": dict(runs.shared_runs(runs.mesh(), "resident in chunks", "overfit", "bad")),
    "tensor": runs.tensor_runs(runs.mesh(2, 2, devices=crossing)),
})
"""
)
TWO_BY_ONE = """
from tests.sharding.processes import feeding_runs as runs
runs.report({
    "evaluated": dict(runs.shared_evaluations(runs.mesh())),
    "tensor": runs.tensor_runs(runs.mesh(1, 2)),
    "own": dict(runs.own_runs(runs.mesh(), index, count)),
    "own evaluated": dict(runs.own_evaluations(runs.mesh(), index)),
    "alone": runs.without_layout(),
})
"""

WITH_TORCH = """
from tests.sharding.processes import feeding_runs as runs
from torch.utils.data import DataLoader, DistributedSampler, Subset
train, val = ([runs.rows(data, i) for i in range(data.size)] for data in (runs.examples(44), runs.examples(21, seed=1)))
sampler = DistributedSampler(train, num_replicas=count, rank=index, seed=3, drop_last=True)
compiled = runs.program(runs.mesh())
loader = DataLoader(train, 4, sampler=sampler, drop_last=True)
run = runs.trained(compiled, loader, example=runs.rows(runs.examples(4), [0]))
found = runs.evaluated(compiled, DataLoader(Subset(val, range(index, 21, count)), 4))
runs.report({"run": run, "evaluated": found})
"""


JOBS = {"usual": (TWO_BY_TWO, 2), "rare": (TWO_BY_TWO_RARELY, 2), "one device": (TWO_BY_ONE, 1)}


@cache
def pair(job: str) -> list[dict[str, Any]]:
    """What the two processes of a job found."""
    text, devices = JOBS[job]
    return [json.loads(pairs.lines(one)[-1]) for one in pairs.run(text, devices=devices)]


@cache
def alone(devices: int) -> dict[str, Any]:
    """What one process with so many devices finds; through the same text."""
    grid = runs.mesh(devices=jax.devices()[:devices])
    found: dict[str, Any] = {"evaluated": dict(runs.shared_evaluations(grid))}
    if devices == 4:
        found |= {"shared": dict(runs.shared_runs(grid, "arrays", "overfit"))}
    else:
        found |= {"own": dict(runs.own_runs(grid, 0, 1))}
    return json.loads(json.dumps(found))


def expected_losses() -> np.ndarray:
    """The loss of every evaluated example, by numpy."""
    state = runs.started(runs.program(runs.mesh(1)), runs.examples(runs.SIZE, seed=3))
    first, second = (np.asarray(state.params[name], np.float64) for name in ("in", "out"))
    x = runs.examples(runs.EVAL, seed=1).input.astype(np.float64)
    return ((np.tanh(x @ first) @ second)[:, 0] - x.sum(-1)) ** 2


def test_all_processes_find_the_same_bit_for_bit(subtests):
    for job, names in [
        ("usual", ["evaluated", "shared"]),
        ("rare", ["tensor", "shared"]),
        ("one device", ["evaluated", "tensor", "own evaluated"]),
    ]:
        with subtests.test(job=job, names=names):
            first, second = pair(job)
            for name in names:
                assert first[name] == second[name]


def test_two_processes_see_together_exactly_the_order_of_one_however_batches_come():
    loader, shared = runs.loaders()["arrays"], pair("usual")[1]["shared"]
    assert shared["arrays"]["ids"] == [loader.order(epoch).tolist() for epoch in (1, 2)]
    assert shared["arrays"] == shared["records in chunks"]


def test_batches_of_resident_data_give_the_same_run_bit_for_bit():
    assert pair("rare")[1]["shared"]["resident in chunks"] == pair("usual")[1]["shared"]["arrays"]


def test_two_processes_learn_what_one_with_as_many_devices_learns(subtests):
    for run, job in [("arrays", "usual"), ("overfit", "rare")]:
        with subtests.test(run=run, job=job):
            found, expected = pair(job)[0]["shared"][run], alone(4)["shared"][run]
            np.testing.assert_allclose(found["losses"], expected["losses"], rtol=BOUND)
            assert len(found["losses"]) == (12 if run == "arrays" else 4)
            for mine, other in zip(
                found["weights"], expected["weights"], strict=True
            ):  # in which the example's values are
                np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_21_examples_are_evaluated_exactly(subtests):
    for devices in [1, 2]:
        for size in ["evaluated by 8", "evaluated by 6", "replicated"]:
            with subtests.test(size=size, devices=devices):
                found, each = pair("usual" if devices == 2 else "one device")[0]["evaluated"][size], expected_losses()
                assert (found["size"], found["ids"]) == (21, list(range(21)))
                np.testing.assert_allclose([found["loss"], found["worst"]], [each.mean(), each.max()], rtol=1e-6)
                expected = alone(2 * devices)["evaluated"][size]  # whose mean may be added up in another order
                assert {**found, "loss": 0.0} == {**expected, "loss": 0.0}
                assert found["loss"] == pytest.approx(expected["loss"], rel=BOUND)


def test_predictions_give_every_process_all_rows_in_the_order_of_the_data(subtests):
    for devices in [1, 2]:
        with subtests.test(devices=devices):
            for process in pair("usual" if devices == 2 else "one device"):
                assert process["evaluated"]["predicted"][0] == list(range(21))
                np.testing.assert_allclose(
                    process["evaluated"]["predicted"][1], alone(2 * devices)["evaluated"]["predicted"][1], rtol=1e-6
                )


def test_processes_that_need_the_same_rows_share_them(subtests):
    for devices in [1, 2]:
        with subtests.test(devices=devices):
            found, expected = pair("rare" if devices == 2 else "one device")[0]["tensor"], alone(4)["shared"]["arrays"]
            assert found["ids"] == expected["ids"]
            np.testing.assert_allclose(found["losses"], expected["losses"], rtol=BOUND)
            assert (found["evaluated"]["size"], found["evaluated"]["ids"]) == (21, list(range(21)))
            np.testing.assert_allclose(found["evaluated"]["loss"], expected_losses().mean(), rtol=1e-6)


def test_a_batch_that_is_not_finite_is_found_completely_in_every_process():
    bad = runs.loaders()["arrays"].order(1)[24:32].tolist()
    for process in pair("rare"):
        assert process["shared"]["bad"] == [4, [1, 3], bad, 8]


def test_lists_of_which_each_process_has_its_own_train_like_those_of_one():
    found, expected = pair("one device")[0]["own"]["equal in chunks"], alone(2)["own"]["equal in chunks"]
    assert found["ids"] == expected["ids"] == [list(range(40))] * 2
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=BOUND)


def test_parts_that_do_not_fit_are_an_error_in_every_process(subtests):
    for run, text in [
        ("fewer", "process 0 has (id int32[4], x float32[4, 4]); process 1 has none"),
        ("smaller", "x float32[4, 4]); process 1 has (id int32[3], x float32[3, 4]). With several processes"),
        ("number", "process 0 has (heat float32[] = 0.0, id"),
        ("lengths", "batch 0 of epoch 1 of the 'train' data"),
    ]:
        with subtests.test(run=run):
            for process in pair("one device"):
                assert process["own"][run].startswith("DataError: ")
                assert text in process["own"][run]


def test_a_smaller_last_part_is_an_error_that_says_what_to_do():
    for index, process in enumerate(pair("one device")):
        assert "The batch 5 of epoch 1 of the 'train' data has 2 examples in process" in process["own"]["ragged"]
        assert f"has 2 examples in process {index}" in process["own"]["ragged"]
        assert "`drop_last=True`" in process["own"]["ragged"]


def test_all_processes_fail_with_the_loader_of_one():
    first, second = (process["own"]["failing"] for process in pair("one device"))
    assert second.startswith("OSError: ")
    assert first.startswith("ProcessGroupError: Process 1 ") and first.endswith(second)


def test_a_part_that_the_devices_of_a_process_cannot_share_is_an_error():
    for process in pair("usual"):
        assert "has 6 examples, 3 of" in process["odd"]
        assert process["odd"].startswith("DataError: The batch 0 of epoch 1 of the 'train' data")


def test_devices_in_no_order_of_processes_are_an_error():
    for process in pair("usual"):
        assert process["interleaved"].startswith("DataError: ")
        assert "{'data': 4}" in process["interleaved"]


def test_a_program_for_one_device_is_an_error_in_several_processes():
    assert all("2 processes" in one["alone"] and "`layout=" in one["alone"] for one in pair("one device"))


def test_evaluation_is_exact_whatever_each_process_has(subtests):
    for name in [*runs.OWN_VAL, "classes"]:
        with subtests.test(name=name):
            parts = runs.OWN_VAL.get(name, runs.OWN_VAL["uneven"])
            rows = [example for part in parts for batch in part for example in batch]
            each = expected_losses()[rows]
            for process in pair("one device"):
                found = process["own evaluated"][name]
                assert (found["size"], sorted(found["ids"])) == (len(rows), sorted(rows))
                np.testing.assert_allclose([found["loss"], found["worst"]], [each.mean(), each.max()], rtol=1e-6)


def test_predictions_on_parts_come_round_by_round():
    for process in pair("one device"):
        assert process["own evaluated"]["predicted"][0] == [0, 1, 2, 8, 9, 10, 11, 12, 3, 4, 5, 6, 7]


def test_parts_that_cannot_be_evaluated_together_are_an_error_in_every_process(subtests):
    for name, text in [
        ("unknown class", "Process 0 has no batch of the 'val' data"),
        ("kinds", "process 0 has id int32[], x float32[4]; process 1 has id int32[], x float64[4]. Give all of them"),
    ]:
        with subtests.test(name=name):
            for process in pair("one device"):
                assert process["own evaluated"][name].startswith("DataError: ")
                assert text in process["own evaluated"][name]


def test_loaders_of_torch_with_a_distributed_sampler_share_an_epoch():
    pytest.importorskip("torch")
    first, second = (json.loads(pairs.lines(one)[-1]) for one in pairs.run(WITH_TORCH))
    assert first == second
    epochs = first["run"]["ids"]
    assert [len(set(ids)) for ids in epochs] == [40, 40]
    assert epochs[0] != epochs[1]
    assert (first["evaluated"]["size"], sorted(first["evaluated"]["ids"])) == (21, list(range(21)))
    np.testing.assert_allclose(first["evaluated"]["loss"], expected_losses().mean(), rtol=1e-6)
