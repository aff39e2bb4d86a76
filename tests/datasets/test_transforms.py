import dataclasses
import itertools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.adapters import function_program
from jax_trainer.core import Program, compile_program, copy_state, stream, with_ema, with_finite_guard
from jax_trainer.datasets import ArrayLoader, Data, Position
from jax_trainer.datasets.batch import SupervisedBatch
from jax_trainer.datasets.transforms import (
    DeviceTransforms,
    ImageTransform,
    normalize,
    random_crop,
    random_flip,
    with_transforms,
)
from jax_trainer.engine import Every, Plan, evaluate, run
from jax_trainer.testing import (
    EventRecorder,
    assert_close,
    assert_finite,
    assert_no_implicit_transfers,
    assert_same_bits,
    linear_program,
    tiny_program,
)

KEY = jax.random.key(0)
RANDOM = (random_crop(1), random_flip(), random_crop(1, mode="constant"))
MODES = ("reflect", "constant", "edge", "symmetric", "wrap")
few = settings(max_examples=15, deadline=None)  # every new shape is compiled


def photos(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def flat(key: jax.Array, images: jax.Array) -> jax.Array:
    return images.reshape(len(images), -1)


def applied(transform: ImageTransform, images: Any, key: jax.Array = KEY) -> np.ndarray:
    return np.asarray(jax.jit(transform)(key, images))


# --- normalize


@few
@given(
    mean=st.floats(-2, 2),
    std=st.floats(1e-2, 10),
    channels=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([np.uint8, np.int32, np.float32]),
)
def test_normalized_images_are_those_of_float64_arithmetic(mean, std, channels, dtype):
    images = np.arange(256).reshape(2, 8, 16)
    images = images if channels is None else np.stack([images] * channels, -1)
    images = (images / 255 if dtype == np.float32 else images).astype(dtype)
    exact = images / 255.0 if dtype != np.float32 else images.astype(np.float64)
    got = applied(normalize(mean, std), images)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, (exact - mean) / std, rtol=3e-7, atol=3e-7 * (1 + abs(mean)) / std)


def test_channels_are_normalized_each_with_its_own_numbers():
    mean, std = np.array([0.49, 0.48, 0.45]), np.array([0.25, 0.24, 0.26])
    images = photos(4, 5, 6, 3)
    np.testing.assert_allclose(applied(normalize(mean, std), images), (images / 255.0 - mean) / std, atol=2e-6)
    np.testing.assert_allclose(applied(normalize(mean, 0.5), images), (images / 255.0 - mean) / 0.5, atol=2e-6)
    np.testing.assert_allclose(
        applied(normalize([0.1], [0.3]), images[..., 0]), (images[..., 0] / 255 - 0.1) / 0.3, atol=2e-6
    )


def test_half_precision_is_rounded_once_at_the_end():
    images = photos(4, 8, 8, 3)
    half = jax.jit(normalize(0.4914, 0.2470, dtype=jnp.bfloat16))(KEY, images)
    assert half.dtype == jnp.bfloat16
    assert_same_bits(half, jnp.asarray(applied(normalize(0.4914, 0.2470), images)).astype(jnp.bfloat16))


def test_normalizing_gives_the_same_bits_compiled_or_not():
    images, transform = photos(4, 8, 8, 3), normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    assert_same_bits(jax.jit(transform)(KEY, images), transform(KEY, jnp.asarray(images)))


def test_numbers_that_cannot_normalize_are_an_error_before_anything_runs(subtests):
    for mean, std, options, message in [
        (0.5, 0.0, {}, "`std` must be above 0, got 0.0"),
        (0.5, (0.2, -0.1, 0.2), {}, r"`std` must be above 0, got \(0.2, -0.1, 0.2\)"),
        (0.5, float("nan"), {}, "`std` must be.*got nan"),
        (float("inf"), 1.0, {}, "`mean` must be.*got inf"),
        ((), 1.0, {}, r"`mean` must be.*got \(\)"),
        ([[0.5]], 1.0, {}, "`mean` must be"),
        ((0.5, 0.5), (1.0, 1.0, 1.0), {}, "shape mismatch"),
    ]:
        with subtests.test(mean=mean, std=std, options=options), pytest.raises(ValueError, match=message):
            normalize(mean, std, **options)


def test_channels_that_the_images_do_not_have_are_an_error(subtests):
    for shape in [(2, 4, 4, 1), (2, 4, 3), (2, 3)]:
        with (
            subtests.test(shape=shape),
            pytest.raises(ValueError, match=rf"3 channels.*\[{', '.join(map(str, shape))}\]"),
        ):
            normalize((0.1, 0.2, 0.3), 1.0)(KEY, jnp.zeros(shape))


# --- random_crop


def windows(image: np.ndarray, padding: int, mode: str) -> list[np.ndarray]:
    """All that a crop of `image` may be, by offset."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((padding, padding), (padding, padding), *[(0, 0)] * (image.ndim - 2)), mode=mode)  # type: ignore[call-overload]
    offsets = itertools.product(range(2 * padding + 1), repeat=2)
    return [padded[down : down + height, right : right + width] for down, right in offsets]


@few
@given(
    size=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    channels=st.sampled_from([(), (1,), (3,)]),
    padding=st.integers(0, 6),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from([np.uint8, np.float32]),
    seed=st.integers(0, 2**31),
)
@pytest.mark.slow
def test_a_crop_is_a_window_of_the_padded_image(size, channels, padding, mode, dtype, seed):
    images = photos(8, *size, *channels, seed=seed).astype(dtype)
    cropped = applied(random_crop(padding, mode=mode), images, jax.random.key(seed))
    assert cropped.dtype == dtype
    for crop, image in zip(cropped, images, strict=True):
        assert any(np.array_equal(crop, window) for window in windows(image, padding, mode))


@pytest.mark.parametrize("mode", ["reflect", pytest.param("constant", marks=pytest.mark.slow)])
def test_every_offset_occurs_about_equally_often(mode):
    image = photos(5, 7, 3)
    cropped = applied(random_crop(2, mode=mode), np.stack([image] * 2500))
    hits = np.array([(cropped == window).all((1, 2, 3)).sum() for window in windows(image, 2, mode)])
    assert hits.sum() == 2500
    assert hits.min() > 60 and hits.max() < 140  # 100 each; the deviation is 10


def test_no_padding_crops_nothing():
    assert_same_bits(applied(random_crop(0), photos(8, 5, 5, 3)), photos(8, 5, 5, 3))


def test_padding_that_is_no_integer_is_an_error(subtests):
    for padding in [-1, 1.5, True, "4"]:
        with subtests.test(padding=padding), pytest.raises(ValueError, match="`padding` must be"):
            random_crop(padding)


# --- random_flip


@pytest.mark.parametrize(
    ("probability", "shape"),
    [
        *((0.0, (3, 5)), (0.2, (3, 4, 3)), (1.0, (3, 5))),
        *(pytest.param(share, (3, 4, 3), marks=pytest.mark.slow) for share in (0.0, 0.5, 1.0)),
    ],
)
def test_flips_mirror_their_share_of_the_images_and_leave_the_others(probability, shape):
    images = photos(2000, *shape)
    flipped = applied(random_flip(probability), images)
    axes = tuple(range(1, images.ndim))
    mirrored, same = (flipped == images[:, :, ::-1]).all(axes), (flipped == images).all(axes)
    assert (mirrored ^ same).all()
    assert abs(mirrored.mean() - probability) <= 4 * np.sqrt(probability * (1 - probability) / 2000)


def test_a_probability_outside_0_to_1_is_an_error(subtests):
    for probability in [-0.1, 1.1, float("nan")]:
        with (
            subtests.test(probability=probability),
            pytest.raises(ValueError, match=f"`probability` must be.*got {probability}"),
        ):
            random_flip(probability)


# --- all that are random

ALL_RANDOM = {"random_crop": random_crop(2), "random_flip": random_flip()}
each_random = pytest.mark.parametrize("name", ALL_RANDOM)


@each_random
def test_the_key_alone_decides(name):
    images = photos(64, 6, 6, 3)
    first = applied(ALL_RANDOM[name], images)
    assert_same_bits(applied(ALL_RANDOM[name], images), first)
    assert (applied(ALL_RANDOM[name], images, jax.random.key(1)) != first).any()


@each_random
def test_images_of_one_batch_differ_from_each_other(name):
    same = np.stack([photos(6, 6, 3)] * 64)
    assert len(np.unique(applied(ALL_RANDOM[name], same).reshape(64, -1), axis=0)) > 1


@each_random
def test_what_is_no_batch_of_images_is_an_error_that_shows_its_shape(name, subtests):
    for shape in [(8, 16), (2, 2, 4, 4, 3)]:
        with (
            subtests.test(shape=shape),
            pytest.raises(ValueError, match=rf"`{name}` works on images .* got \[{', '.join(map(str, shape))}\]"),
        ):
            ALL_RANDOM[name](KEY, jnp.zeros(shape))


def test_images_stay_uint8_until_they_are_normalized():
    images: Any = photos(4, 6, 6, 3)
    for transform in RANDOM:
        images = jax.eval_shape(transform, KEY, images)
        assert images.dtype == jnp.uint8
    assert jax.eval_shape(normalize(0.5, 0.5), KEY, images).dtype == jnp.float32


@pytest.mark.slow
def test_a_batch_spread_over_devices_is_transformed_where_it_is():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    images, spread = photos(32, 6, 6, 3), NamedSharding(mesh, PartitionSpec("data"))
    transforms = DeviceTransforms(train=(*RANDOM, random_crop(1, mode="constant"), normalize(0.5, 0.5)))
    step = jax.jit(lambda batch: transforms.apply(KEY, batch, train=True))
    compiled = step.lower({"input": jax.device_put(images, spread)}).compile()
    code = str(compiled.as_text())
    assert "gather" in code  # it is the code, and picks pixels on each device
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "permute") if word in code]
    out = compiled({"input": jax.device_put(images, spread)})["input"]
    assert out.sharding.is_equivalent_to(spread, out.ndim)
    assert_same_bits(out, step({"input": jnp.asarray(images)})["input"])


# --- DeviceTransforms


class Pair(NamedTuple):
    image: Any
    label: Any


@flax.struct.dataclass
class Sample:
    image: Any
    label: Any


IMAGES, LABELS = photos(4, 3, 3), np.arange(4)


def test_one_entry_of_any_kind_of_batch_is_transformed(subtests):
    for batch, field in [
        ({"image": IMAGES, "label": LABELS}, "image"),
        (FrozenDict({"image": IMAGES, "label": LABELS}), "image"),
        ((LABELS, IMAGES), 1),
        ([IMAGES, LABELS], 0),
        (Pair(IMAGES, LABELS), "image"),
        (Sample(IMAGES, LABELS), "image"),
        (SupervisedBatch.of(IMAGES, LABELS), "input"),
    ]:
        with subtests.test(batch=batch, field=field):
            transforms = DeviceTransforms(train=(lambda key, images: 255 - images,), field=field)
            out = transforms.apply(KEY, batch, train=True)
            assert jax.tree.structure(out) == jax.tree.structure(batch)
            expected = [255 - leaf if leaf is IMAGES else leaf for leaf in jax.tree.leaves(batch)]
            for leaf, want in zip(jax.tree.leaves(out), expected, strict=True):
                np.testing.assert_array_equal(leaf, want)
            assert transforms.apply(KEY, batch, train=False) is batch


def test_a_field_that_is_absent_is_an_error_that_names_those_there_are(subtests):
    for batch, field, message in [
        ({"image": IMAGES, "label": LABELS}, "input", "a dict, has no field 'input' .* It has 'image', 'label'"),
        ((IMAGES, LABELS), "input", "a tuple, has no field 'input' .* It has 0, 1"),
        ((IMAGES, LABELS), 2, "a tuple, has no field 2 .* It has 0, 1"),
        (Pair(IMAGES, LABELS), "x", "a Pair, has no field 'x' .* It has 'image', 'label'"),
        (SupervisedBatch.of(IMAGES, LABELS), "x", "has no field 'x' .* It has 'size', 'input', 'target', 'mask'"),
        (IMAGES, "input", "a ndarray, has no field 'input' .* It has no fields"),
    ]:
        with subtests.test(batch=batch, field=field), pytest.raises(KeyError, match=message):
            DeviceTransforms(train=(flat,), field=field).apply(KEY, batch, train=True)


def test_functions_run_in_order_each_with_its_own_key():
    images = photos(64, 4, 4)
    transforms = DeviceTransforms(train=[random_flip(), random_flip(), normalize(0.5, 0.25)])

    @jax.jit
    def all_of_them(key: jax.Array, images: jax.Array) -> tuple[jax.Array, ...]:
        by_hand = images
        for position, function in enumerate(transforms.train):
            by_hand = function(jax.random.fold_in(key, position), by_hand)
        flips = DeviceTransforms(train=transforms.train[:2])
        batch = {"input": images}
        return by_hand, transforms.apply(key, batch, train=True)["input"], flips.apply(key, batch, train=True)["input"]

    expected, found, twice = all_of_them(KEY, images)
    assert_same_bits(found, expected)
    assert (np.asarray(twice) != images).any()  # with one key for both, the second flip would undo the first


def test_transforms_are_true_when_there_are_any():
    assert not DeviceTransforms()
    assert not DeviceTransforms(train=[], eval=[], field="x")
    assert DeviceTransforms(train=(flat,))
    assert DeviceTransforms(eval=(flat,))


def test_what_is_no_sequence_of_functions_is_an_error(subtests):
    for wrong in [flat, ("crop",), 3]:
        with subtests.test(wrong=wrong), pytest.raises(TypeError, match=r"`eval`.*`eval=\(function,\)`"):
            DeviceTransforms(eval=wrong)


def test_transforms_are_values_that_can_be_compared_and_hashed():
    assert DeviceTransforms(train=[flat]) == DeviceTransforms(train=(flat,))
    assert hash(DeviceTransforms(train=[flat])) == hash(DeviceTransforms(train=(flat,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        DeviceTransforms().field = "x"  # type: ignore[misc]


# --- with_transforms


def adding_program(transforms: DeviceTransforms, **options: Any) -> Program:
    """Parameters that add up the images of all steps: integers, so every order of summation is exact."""

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
        images = batch["input"].astype(jnp.float32)
        place = jnp.arange(1, images.size + 1, dtype=jnp.float32).reshape(images.shape)
        return -(params * images).sum(), {"code": {"value": (place * images).sum(), "mode": "concat"}}

    def init(key: jax.Array, batch: Any) -> Any:
        return jnp.zeros(batch["input"].shape, jnp.float32)

    return with_transforms(function_program(init, loss, optax.sgd(1.0), **options), transforms)


def adding_data() -> Data:
    images = photos(72, 4, 4) // 8
    return Data(ArrayLoader({"input": images}, 8, shuffle=True), {"val": ArrayLoader({"input": images}, 8)})


def added(transforms: DeviceTransforms, plan: Plan) -> tuple[Any, dict[int, Any]]:
    compiled, seen = compile_program(adding_program(transforms)), EventRecorder()
    state = compiled.init(KEY, next(iter(adding_data().train)))
    state = run(compiled, state, adding_data(), plan, [seen])
    return state, {step: np.asarray(metrics["code"]) for step, metrics in seen.steps.items()}


@pytest.mark.slow
def test_the_size_of_chunks_and_who_looks_on_change_no_bit():
    transforms = DeviceTransforms(train=RANDOM)
    one, codes = added(transforms, Plan(max_epochs=2))
    assert sorted(codes) == list(range(1, 19))
    for plan in (
        Plan(max_epochs=2, steps_per_call=4),
        Plan(max_epochs=2, steps_per_call="epoch"),
        Plan(max_epochs=2, steps_per_call=4, eval_every=Every(steps=3), metrics_every=5),
    ):
        many, same_codes = added(transforms, plan)
        assert_same_bits(many, one)
        assert_same_bits(same_codes, codes)
    assert (np.asarray(added(DeviceTransforms(), Plan(max_epochs=2))[0].params) != one.params).any()


def small(field: str = "x") -> DeviceTransforms:
    """Transforms that make of uint8 [n, 2, 4] what the tiny models want, at random in training."""
    finish = (normalize(0.5, 0.25), flat)
    return DeviceTransforms(train=(*RANDOM, *finish), eval=finish, field=field)


def small_data() -> Data:
    arrays = {"x": photos(96, 2, 4), "y": np.arange(96, dtype=np.int32) % 4}
    return Data(ArrayLoader(arrays, 16, shuffle=True), {"val": ArrayLoader(arrays, 32)})


SMALL = next(iter(small_data().train))


PROGRAMS = {
    "functions": linear_program,
    "linen": lambda: tiny_program("linen"),
    "nnx": lambda: tiny_program("nnx"),
}
each_kind = pytest.mark.parametrize(
    "kind", ["functions", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("linen", "nnx"))]
)


@each_kind
def test_training_resumed_in_the_middle_gives_the_same_bits(kind):
    program = compile_program(with_transforms(PROGRAMS[kind](), small()), on_recompile="ignore")
    fresh = program.init(KEY, SMALL)
    whole = run(program, copy_state(fresh), small_data(), Plan(max_epochs=2))
    for stop in (2, 7):
        half = run(program, copy_state(fresh), small_data(), Plan(max_steps=stop))
        epoch, epoch_step = divmod(stop, 6)
        rest = run(program, half, small_data(), Plan(max_epochs=2), (), Position(epoch + 1, epoch_step))
        assert_same_bits(rest, whole)


@pytest.mark.slow
def test_averages_guards_and_accumulation_work_with_transforms(subtests):
    for flavour, outermost in [("linen", True), ("nnx", False)]:
        with subtests.test(flavour=flavour, outermost=outermost):
            program = tiny_program(flavour, micro_batches=2)
            if outermost:
                program = with_transforms(with_finite_guard(with_ema(program, 0.9)), small())
            else:
                program = with_finite_guard(with_ema(with_transforms(program, small()), 0.9))
            compiled, seen = compile_program(program, on_recompile="ignore"), EventRecorder()
            plan = Plan(max_epochs=3, steps_per_call=4, eval_every=Every(epochs=1))
            state = run(compiled, compiled.init(KEY, SMALL), small_data(), plan, [seen])
            assert_finite(state)
            assert int(state.step) == 18
            assert len(seen.evals) == 3
            assert len(program.info.checks) == 2  # of gradients that are zero, and of the guard


@pytest.mark.slow
def test_micro_batches_see_the_images_of_the_complete_batch():
    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
        return ((params - batch["input"]) ** 2).mean()

    def grads(micro_batches: int) -> Any:
        program = function_program(
            lambda key, batch: jnp.zeros(batch["input"].shape[1:]), loss, optax.sgd(0.1), micro_batches=micro_batches
        )
        finish = normalize(0.5, 0.25)
        program = with_transforms(program, DeviceTransforms(train=(*RANDOM, finish), eval=(finish,)))
        batch = {"input": photos(10, 4, 4)}
        return jax.jit(program.train_step)(program.init(KEY, batch), batch)[1].grads

    assert_close(grads(3), grads(1), atol=1e-6)


def test_a_model_is_initialised_from_the_images_it_will_see():
    plain, wrapped = tiny_program("nnx"), with_transforms(tiny_program("nnx"), small())
    features = {"x": np.zeros((16, 8), np.float32), "y": SMALL["y"]}
    assert_same_bits(compile_program(wrapped).init(KEY, SMALL), compile_program(plain).init(KEY, features))


def test_predictions_are_made_of_the_images_that_evaluations_see():
    plain, wrapped = (compile_program(p) for p in (tiny_program("nnx"), with_transforms(tiny_program("nnx"), small())))
    state = wrapped.init(KEY, SMALL)
    plain.init(KEY, {**SMALL, "x": np.zeros((16, 8), np.float32)})
    scaled = {**SMALL, "x": ((SMALL["x"] / 255 - 0.5) / 0.25).astype(np.float32).reshape(16, 8)}
    assert_close(wrapped.predict(state, SMALL), plain.predict(state, scaled), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_transforms_of_a_prediction_draw_what_those_of_an_evaluation_draw():
    noisy = DeviceTransforms(eval=(lambda key, images: images + jax.random.normal(key, images.shape),))

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
        return params, {"sum": batch["input"].sum()}

    predicting = function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1))
    predicting = predicting._replace(predict_step=lambda state, batch: batch["input"].sum())
    compiled = compile_program(with_transforms(predicting, noisy))
    batch = {"input": np.zeros((2, 4, 4), np.float32)}
    state = compiled.init(KEY, batch)
    evaluated = evaluate(compiled, state, {"val": [batch] * 3})["val"]["sum"]
    predicted = [float(compiled.predict(state, batch, number)) for number in range(3)]
    assert len(set(predicted)) == 3
    assert evaluated == pytest.approx(np.mean(predicted), rel=1e-6)


def test_transforms_leave_a_program_its_way_to_begin_and_none_where_there_is_none():
    program = with_transforms(tiny_program("linen"), small())
    assert program.info.init_from_params is not None
    assert program.predict_step is not None
    plain = function_program(lambda key, batch: jnp.zeros(()), lambda *args, **kwargs: 0.0, optax.sgd(0.1))
    assert with_transforms(plain, small()).predict_step is None


def test_the_example_goes_through_the_transforms_of_evaluation():
    program = function_program(lambda key, batch: batch["input"], lambda *_, **__: jnp.zeros(()), optax.sgd(0.1))
    transforms = DeviceTransforms(train=(lambda key, images: images * 0.0,), eval=(lambda key, images: images + 1.0,))
    state = with_transforms(program, transforms).init(KEY, {"input": np.arange(6.0, dtype=np.float32)})
    np.testing.assert_array_equal(state.params, np.arange(1.0, 7.0))


def codes_of(transforms: DeviceTransforms, *addresses: tuple[int, int]) -> list[float]:
    """What the images of one training step add up to, by (seed, step)."""
    program, batch = adding_program(transforms), {"input": photos(8, 4, 4) // 8}
    step = jax.jit(program.train_step)
    states = [program.init(jax.random.key(seed), batch).replace(step=jnp.int32(number)) for seed, number in addresses]
    return [float(step(state, batch)[1].metrics.by_name["code"].value) for state in states]


def test_every_step_and_every_root_key_has_its_own_images():
    transforms = DeviceTransforms(train=RANDOM)
    codes = codes_of(transforms, (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))
    assert len(set(codes)) == 6
    assert codes_of(transforms, (1, 1), (0, 2)) == [codes[5], codes[2]]


def test_the_key_of_a_step_is_found_by_name_and_number():
    transforms = DeviceTransforms(train=RANDOM)
    key = stream(jax.random.fold_in(KEY, 7), "transforms")
    batch = jax.jit(lambda batch: transforms.apply(key, batch, train=True))({"input": photos(8, 4, 4) // 8})
    by_hand = np.asarray(batch["input"], np.int64).ravel() @ np.arange(1, 8 * 4 * 4 + 1)
    assert codes_of(transforms, (0, 7)) == [by_hand]


def test_no_transforms_leave_the_program_itself():
    program = linear_program()
    assert with_transforms(program, DeviceTransforms()) is program


def test_evaluation_knows_nothing_of_the_transforms_of_training():
    evaluated = []
    for transforms in (DeviceTransforms(train=RANDOM), DeviceTransforms()):
        program = compile_program(adding_program(transforms), on_recompile="ignore")
        state = program.init(KEY, next(iter(adding_data().train)))
        evaluated.append(evaluate(program, state, adding_data().evals)["val"])
    assert_same_bits(evaluated[0], evaluated[1])


def test_random_transforms_in_evaluation_differ_by_batch_and_repeat_in_every_evaluation():
    program = compile_program(adding_program(DeviceTransforms(eval=RANDOM)), on_recompile="ignore")
    batch = {"input": photos(8, 4, 4) // 8}
    state, data = program.init(KEY, batch), {"val": [batch] * 4}
    first, again = (np.asarray(evaluate(program, state, data)["val"]["code"]) for _ in range(2))
    later = evaluate(program, state.replace(step=jnp.int32(9)), data)["val"]["code"]
    assert len(np.unique(first)) == 4
    assert_same_bits((again, np.asarray(later)), (first, first))


@each_kind
def test_a_step_with_transforms_moves_nothing_between_host_and_device(kind):
    program = compile_program(with_transforms(PROGRAMS[kind](), small()))
    batch = jax.device_put(SMALL)
    state = program.init(KEY, batch)
    buffer = program.train_buffer(state, batch, 4)
    eval_buffer = program.eval_buffer(state, batch, 4)
    state, buffer, _ = program.train_step(state, buffer, batch)
    program.eval_step(state, eval_buffer, batch)
    with assert_no_implicit_transfers():
        state, buffer, _ = program.train_step(state, buffer, batch)
        program.eval_step(state, eval_buffer, batch)
    assert batch["x"].dtype == jnp.uint8


@pytest.mark.slow
def test_debug_mode_runs_transforms_on_values_and_gives_the_same_images():
    batch, flip, values = {"input": photos(8, 4, 4)}, random_flip(), []

    def note(key: jax.Array, images: jax.Array) -> jax.Array:
        values.append(np.asarray(images))  # a tracer has no values
        return images

    program = compile_program(adding_program(DeviceTransforms(train=(flip, note))), debug=True)
    run(program, program.init(KEY, batch), Data([batch]), Plan(max_steps=1))
    key = jax.random.fold_in(stream(jax.random.fold_in(KEY, 0), "transforms"), 0)
    assert_same_bits(values[-1], applied(flip, batch["input"], key))
