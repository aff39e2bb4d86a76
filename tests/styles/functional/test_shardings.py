from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_trainer.runs.options import Options
from jax_trainer.sharding import init_ddp_mesh
from jax_trainer.styles.functional import layout_from
from jax_trainer.testing import assert_close
from tests.styles.functional.functional_runs import TX, arrays, data, straight, trained

DATA, NONE = PartitionSpec("data"), PartitionSpec()


def grid() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def layout(shardings: Any, mesh: Any, spec: Any) -> Any:
    return layout_from(Options(mesh=mesh), shardings, spec)


def placed(array: Any) -> PartitionSpec:
    return array[...].sharding.spec


@pytest.mark.slow
def test_data_split_over_eight_devices_train_the_same_weights():
    mesh = init_ddp_mesh()
    subject = trained(shardings=(NamedSharding(mesh, NONE), NamedSharding(mesh, DATA)))
    assert len(subject[0].out.kernel[...].sharding.device_set) == 8
    mine, other = (weights["out"] for weights, *_ in (arrays(subject), straight()))
    assert_close(mine, other, rtol=1e-3, atol=1e-5)  # elsewhere, BatchNorm makes noise of gradients


class Split(nnx.Module):
    """Two layers that are split over devices."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.a = nnx.Linear(8, 16, rngs=rngs, kernel_init=nnx.with_partitioning(init, (None, "model")))
        self.b = nnx.Linear(16, 4, rngs=rngs, kernel_init=nnx.with_partitioning(init, ("model", None)))

    def __call__(self, x: Any) -> Any:
        return self.b(nnx.relu(self.a(x)))


@pytest.mark.slow
def test_parameters_are_split_as_they_say_and_so_are_their_moments():
    mesh, ends = grid(), []
    for options in ({}, {"mesh": mesh}):
        with nnx.use_eager_sharding(False):  # it would want a mesh when the model is made
            model = Split(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        ends.append(arrays(trained((model, optimizer), n_steps=3, **options)))
    assert (placed(model.a.kernel), placed(model.b.kernel)) == (PartitionSpec(None, "model"), PartitionSpec("model"))
    assert placed(model.a.bias) == NONE
    assert placed(optimizer.opt_state[0].trace["a"]["kernel"]) == PartitionSpec(None, "model")
    assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


def test_one_sharding_for_the_model_is_used_where_it_fits():
    mesh = grid()
    found = layout((NamedSharding(mesh, PartitionSpec(None, "model")), NamedSharding(mesh, DATA)), None, None)
    assert found is not None
    assert callable(found.param_spec)
    assert found.batch_ways == 2
    assert [found.param_spec("", shape) for shape in ((3, 8), (3, 6), (8,))] == [
        PartitionSpec(None, "model"),
        NONE,
        NONE,
    ]


def test_a_batch_is_split_along_the_axes_that_are_named(subtests):
    for spec, axes in [(None, ("data",)), (PartitionSpec(("data", "model")), ("data", "model")), (NONE, ())]:
        with subtests.test(spec=spec, axes=axes):
            found = layout(None, grid(), spec)
            assert found is not None
            assert found.batch_axes == axes


def test_without_anything_named_there_is_one_device():
    assert layout(None, None, None) is None


def sharding(spec: PartitionSpec, mesh: Mesh | None = None) -> NamedSharding:
    return NamedSharding(mesh or grid(), spec)


def test_what_cannot_be_is_refused(subtests):
    for given, message in [
        (((sharding(NONE), sharding(DATA)), grid(), None), "not both"),
        ((None, None, DATA), "needs a `mesh`"),
        (((sharding(NONE), 3), None, None), "or two NamedShardings.*got"),
        (((sharding(NONE, init_ddp_mesh()), sharding(DATA)), None, None), "the same mesh"),
        (((sharding(NONE), sharding(PartitionSpec("data", "model"))), None, None), "more than the first dimension"),
        ((None, jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2), None), "batch axis.*'a', 'b'"),
        ((None, jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)), None), "Auto"),
        ((None, "mesh", None), "`mesh` must be .*got 'mesh'"),
    ]:
        with subtests.test(given=given, message=message), pytest.raises((TypeError, ValueError), match=message):
            layout(*given)


def test_a_batch_that_devices_cannot_share_is_refused():
    with pytest.raises(Exception, match="cannot share evenly"):
        trained(mesh=init_ddp_mesh(), source=[{name: array[:30] for name, array in next(iter(data())).items()}])
    assert np.size(jax.devices()) == 8
