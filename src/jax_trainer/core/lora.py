"""LoRA: a frozen base, and trained low-rank adapters of the parameters that a pattern selects."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jax_trainer.core.lora_rewrite import Adapter, Kernel, KernelSpec, LoRAError, Rewriter, Use, dropout_error
from jax_trainer.core.precision import Precision, cast_floats
from jax_trainer.core.random import stream
from jax_trainer.core.state import AVERAGE, EVALUATED, TrainState, eval_params
from jax_trainer.core.tracing import gathered
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path, leaves_by_path, listed, parameter_paths
from jax_trainer.diagnostics.suggestions import checks_keywords

Trained = dict[str, Any]  # parameters that are trained themselves, by their dotted path
Adapters = dict[str, Any]  # by the dotted path of the parameter: an `Adapter`, or the parameter that is trained itself


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation: `W` of selected parameters is frozen, and `W + alpha / rank · A @ B` is used.

    `A` and `B` are the only trained arrays, besides the parameters of `train`. `B` is 0 before training, so the model
    starts as the base. With DoRA, each output of `W + alpha / rank · A @ B` has a trained norm, which starts as that of
    `W`. A BatchNorm none of whose parameters train keeps its running statistics.

    Args:
        match: regular expression that must match the full dotted path of a parameter, such as
            `.*(query|value).kernel`.
        rank: number of columns of `A`, and of rows of `B`.
        alpha: `A @ B` is scaled by `alpha / rank`.
        dropout: dropout rate of the inputs of adapters in training.
        rank_pattern: other ranks by regular expression; the first that matches a path counts.
        alpha_pattern: other values of `alpha`, in the same way.
        use_dora: train a magnitude for each output, too: weight-decomposed low-rank adaptation (DoRA).
        base_dtype: dtype of the frozen base in memory, such as "bfloat16"; None: that of the parameters.
        train: regular expression of parameters that are trained themselves, such as a new head: `.*classifier.*`.
        train_bn: update the running statistics of frozen BatchNorms.

    >>> LoRA(match=".*kernel", rank=8, rank_pattern={"head.*": 2}).rank_of("head.kernel")
    2
    """

    match: str
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    use_dora: bool = False
    base_dtype: str | None = None
    train: str = ""
    train_bn: bool = False

    def __post_init__(self) -> None:
        for pattern in (self.match, self.train, *self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`lora` has {pattern!r}, no regular expression: {error}.") from None
        for rank in (self.rank, *self.rank_pattern.values()):
            if rank < 1:
                raise ValueError(f"`lora.rank` must be at least 1, got {rank}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`lora.dropout` must be at least 0 and below 1, got {self.dropout}.")
        if self.base_dtype is not None and not jnp.issubdtype(jnp.dtype(self.base_dtype), jnp.floating):
            raise ValueError(f"`lora.base_dtype` must be a floating-point dtype, got {self.base_dtype!r}.")

    def rank_of(self, path: str) -> int:
        """The rank of the adapter of a parameter."""
        return _first_of(self.rank_pattern, path, self.rank)

    def scale_of(self, path: str) -> float:
        """What the product of the adapter of a parameter is multiplied by: `alpha / rank`, both of this parameter."""
        return _first_of(self.alpha_pattern, path, self.alpha) / self.rank_of(path)

    def trains(self, state: TrainState) -> dict[str, bool]:
        """Whether each parameter of the model is trained itself, by path."""
        return {path: bool(re.fullmatch(self.train, path)) for path in parameter_paths(unadapted(state).params)}

    def trained(self, params: PyTree) -> Trained:
        """The parameters that are trained themselves, by path; a `LoRAError` if `train` matches none, or adapted ones.

        Copies: the base keeps its own.
        """
        leaves = leaves_by_path(params)
        found = _matching(self.train, leaves)
        if self.train and not found:
            raise LoRAError(
                f"`lora.train` {self.train!r} matches no parameter. It must match the full path, such as '.*head.*'. "
                f"Parameters: {listed([path for path in leaves if self.train in path] or list(leaves))}."
            )
        if both := [path for path in found if re.fullmatch(self.match, path)]:
            raise LoRAError(f"`lora.train` and `lora.match` both match {listed(both)}: train it, or adapt it.")
        return {path: jnp.copy(leaf) for path, leaf in found.items()}

    def matched(self, params: PyTree) -> dict[str, Any]:
        """The parameters (arrays or shapes) that are adapted, by path; a `LoRAError` if there are none."""
        leaves = leaves_by_path(params)
        found = _matching(self.match, leaves)
        if not found:
            matrices = [path for path, leaf in leaves.items() if len(leaf.shape) > 1]
            word = re.sub(r"[^\w.]", "", self.match)
            close = [path for path in matrices if word and word in path]
            close = close or difflib.get_close_matches(word, matrices, n=6, cutoff=0.3)
            raise LoRAError(
                f"`lora.match` {self.match!r} matches no parameter. It must match the full path, such as '.*kernel'. "
                f"Parameters: {listed(close or matrices or list(leaves))}."
            )
        if flat := [f"{path} {list(leaf.shape)}" for path, leaf in found.items() if len(leaf.shape) < 2]:
            raise LoRAError(
                f"`lora.match` {self.match!r} matches {listed(flat)}: no matrix, so it has no low-rank adapter. Match "
                "kernels only."
            )
        return found


class FrozenBase(flax.struct.PyTreeNode):
    """The frozen base of a LoRA training: the parameters of the model, and how some of them are adapted."""

    params: PyTree
    lora: LoRA = flax.struct.field(pytree_node=False)
    kernels: tuple[KernelSpec, ...] = flax.struct.field(pytree_node=False)

    def merged(self, adapters: Adapters) -> PyTree:
        """The parameters of the model with `alpha / rank · A @ B` added, and the magnitudes of DoRA."""
        specs = {spec.path: spec for spec in self.kernels}

        def merge(path: tuple, leaf: jax.Array) -> jax.Array:
            if (spec := specs.get(leaf_path(path))) is None:
                return adapters.get(leaf_path(path), leaf)
            adapter = adapters[spec.path]
            delta = spec.delta(adapter)
            dtype = jnp.promote_types(leaf.dtype, delta.dtype)  # a base in bf16 is not rounded again
            full = leaf.astype(dtype) + delta.astype(dtype)
            if adapter.magnitude is None:
                return full
            return full * spec.spread(spec.gain(leaf, adapter), tuple(range(leaf.ndim))).astype(dtype)

        return jax.tree_util.tree_map_with_path(merge, self.params)

    def started(self, adapters: Adapters) -> Adapters:
        """`adapters` with the magnitudes of the base, if they have any: untrained ones, or those of another base."""
        return self._with_magnitudes(adapters, lambda spec, leaf, one: spec.norms(leaf))

    def gains(self, adapters: Adapters) -> Adapters:
        """`adapters` with the gains of their outputs instead of magnitudes, as kernels are evaluated with them."""
        return self._with_magnitudes(adapters, lambda spec, leaf, one: spec.gain(leaf, one))

    def _with_magnitudes(self, adapters: Adapters, make: Callable[[KernelSpec, Any, Adapter], jax.Array]) -> Adapters:
        if not self.lora.use_dora:
            return adapters
        leaves = leaves_by_path(self.params)

        def changed(spec: KernelSpec) -> Adapter:
            one = adapters[spec.path]
            return one._replace(magnitude=make(spec, leaves[spec.path], one).astype(one.a.dtype))

        return {**adapters, **{spec.path: changed(spec) for spec in self.kernels}}


class Adapted(NamedTuple):
    """The weights of a LoRA training, from which another one starts: instead of the parameters of the model."""

    adapters: Adapters
    params: PyTree


class Adapting:
    """Replaces the parameters of a loss by a frozen base and adapters.

    Args:
        lora: which parameters, and how.
        loss_fn: the loss of the model, a `LossFn`.
        precision: of the computation.
    """

    def __init__(self, lora: LoRA, loss_fn: Any, precision: Precision) -> None:
        self._lora, self._loss_fn, self._precision = lora, loss_fn, precision
        self._uses: dict[str, list[Use]] = {}  # as a trace of the loss showed them

    def trace(self, params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> None:
        """Finds how the loss uses the matched parameters, by tracing it once."""
        found = self._lora.matched(params)
        if self._uses:
            return
        uses: dict[str, list[Use]] = {path: [] for path in found}
        unknown = {path: KernelSpec(path, tuple(leaf.shape), (), (), (), 0, 0.0) for path, leaf in found.items()}
        step = {"step": jnp.zeros((), jnp.int32)} if "step" in inspect.signature(self._loss_fn).parameters else {}
        loss = lambda params: self._loss_fn(params, model_state, batch, key, train=True, **step)
        jax.eval_shape(lambda: _rewritten(Rewriter(uses=uses), loss, params, unknown, {})[0])
        self._uses = uses

    def split(self, key: jax.Array, params: PyTree) -> tuple[Adapters, FrozenBase]:
        """The adapters, new ones unless `params` has some, and the frozen base, of the parameters of a model."""
        given, params = (params.adapters, params.params) if isinstance(params, Adapted) else (None, params)
        found = self._lora.matched(params)
        if not self._uses:
            raise RuntimeError("Call `init` or `shapes` of the program first: how the loss uses parameters is unknown.")
        kernels = tuple(self._spec(path, tuple(leaf.shape)) for path, leaf in found.items())
        keys = {path: stream(stream(key, "lora"), path) for path in found}
        base = params if self._lora.base_dtype is None else cast_floats(params, jnp.dtype(self._lora.base_dtype))
        frozen = FrozenBase(base, self._lora, kernels)
        new: Adapters = {one.path: _new_adapter(one, keys[one.path], found[one.path].dtype) for one in kernels}
        new |= self._lora.trained(params)
        return frozen.started(new) if given is None else given, frozen

    def applied(self, function: Any, frozen: FrozenBase) -> Any:
        """A `LossFn` or `PredictFn` of adapters, from one of the parameters of the model."""

        @functools.wraps(function)
        def of_adapters(adapters: Adapters, model_state: PyTree, batch: Batch, rng: jax.Array, **options: Any) -> Any:
            base = gathered(cast_floats(frozen.params, self._precision.compute))
            trained = lambda path, leaf: leaf if leaf_path(path) in specs else adapters.get(leaf_path(path), leaf)
            key = stream(rng, "lora") if options.get("train") else None
            specs = {spec.path: spec for spec in frozen.kernels}
            rewriter = Rewriter(dropout=self._lora.dropout, key=key)
            base = jax.tree_util.tree_map_with_path(trained, base)
            call = lambda params: function(params, model_state, batch, rng, **options)
            return _rewritten(rewriter, call, base, specs, frozen.gains(adapters))

        return of_adapters

    def steps(self, make: Callable[..., tuple[Any, ...]], loss_fn: Any, predict_fn: Any) -> tuple[Any, ...]:
        """The training, evaluation and prediction steps that `make` makes of a loss and a prediction function.

        They are made while a step is traced: the base is an argument of the step, of which both functions know.
        """

        def step(index: int) -> Callable[[TrainState, Batch], Any]:
            def of_state(state: TrainState, batch: Batch) -> Any:
                is_adapted = isinstance(state.frozen, FrozenBase)  # not after `merged`
                functions = (loss_fn, predict_fn)
                applied = [one and self.applied(one, state.frozen) for one in functions] if is_adapted else functions
                return make(*applied)[index](state, batch)

            return of_state

        return step(0), step(1), step(2) if predict_fn is not None else None

    def _spec(self, path: str, shape: tuple[int, ...]) -> KernelSpec:
        uses = self._uses.get(path, [])
        product = next((use for use in uses if use.inputs), None)
        other = next((use for use in uses if not use.is_rewritten), None)
        if self._lora.dropout and other is not None:
            raise dropout_error(path, other.operation)
        # without a product, as for convolutions and embeddings: the last axis is that of the outputs
        stacked, inputs = ((), tuple(range(len(shape) - 1))) if product is None else (product.stacked, product.inputs)
        outputs = tuple(axis for axis in range(len(shape)) if axis not in (*stacked, *inputs))
        rank = self._lora.rank_of(path)
        spec = KernelSpec(path, shape, stacked, inputs, outputs, rank, self._lora.scale_of(path))
        if rank > (most := min(spec.size(inputs), spec.size(outputs))):
            raise LoRAError(
                f"`lora.rank` {rank} is larger than {most}, the smaller dimension of {path} {list(shape)}. Use a "
                "smaller rank, for this parameter alone with `rank_pattern`, or match others."
            )
        return spec


def model_params(state: TrainState, *, averaged: bool = True) -> PyTree:
    """The parameters of the model in a state: merged with their adapters, if it is one of LoRA.

    Args:
        state: any state.
        averaged: the averaged parameters that evaluation uses, if there are any.
    """
    params = eval_params(state.params, state.extra) if averaged else state.params
    return state.frozen.merged(params) if isinstance(state.frozen, FrozenBase) else params


def merged(state: TrainState) -> TrainState:
    """`state` with the parameters of the model, merged with their adapters; without LoRA, `state` itself.

    The optimizer state stays that of the adapters.
    """
    if not isinstance(state.frozen, FrozenBase):
        return state
    averaged = {name: state.frozen.merged(state.extra[name]) for name in EVALUATED if name in state.extra}
    params = model_params(state, averaged=False)
    return state.replace(params=params, extra={**state.extra, **averaged}, frozen={})


def weights_of(state: TrainState) -> PyTree:
    """What `init_from_params` makes a state with the same weights of."""
    params = state.extra.get(AVERAGE, state.params)
    return Adapted(params, state.frozen.params) if isinstance(state.frozen, FrozenBase) else params


def unadapted(state: TrainState) -> TrainState:
    """`state` with the frozen base as its parameters; without LoRA, `state` itself."""
    return state.replace(params=state.frozen.params, frozen={}) if isinstance(state.frozen, FrozenBase) else state


def with_base(state: TrainState, loaded: TrainState) -> TrainState:
    """`state` with the weights of `loaded`, a state as `unadapted` returns it, as its base."""
    if not isinstance(state.frozen, FrozenBase):
        return loaded
    frozen = state.frozen.replace(params=loaded.params)
    averaged = {name: frozen.started(state.extra[name]) for name in EVALUATED if name in state.extra}
    extra = {**state.extra, **averaged}
    params = {**frozen.started(state.params), **frozen.lora.trained(loaded.params)}
    return state.replace(params=params, extra=extra, frozen=frozen, model_state=loaded.model_state)


def _rewritten(
    rewriter: Rewriter,
    function: Callable[..., Any],
    params: PyTree,
    specs: Mapping[str, KernelSpec],
    adapters: Adapters,
) -> Any:
    """`function(params)`, with the parameters that have a spec as kernels."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [leaf_path(path) for path, _ in leaves]
    args = [
        Kernel(leaf, adapters.get(path), specs[path], tuple(range(len(leaf.shape)))) if path in specs else leaf
        for path, (_, leaf) in zip(paths, leaves, strict=True)
    ]
    return rewriter(lambda *values: function(jax.tree.unflatten(structure, values)), *args)


def _matching(regex: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters whose full path matches."""
    return {path: leaf for path, leaf in leaves.items() if re.fullmatch(regex, path)}


def _new_adapter(spec: KernelSpec, key: jax.Array, dtype: Any) -> Adapter:
    stack, inputs = [spec.shape[axis] for axis in spec.stacked], spec.size(spec.inputs)
    bound = inputs**-0.5
    a = jax.random.uniform(key, (*stack, inputs, spec.rank), dtype, -bound, bound)
    return Adapter(a, jnp.zeros((*stack, spec.rank, spec.size(spec.outputs)), dtype))


def _first_of(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of the first pattern that matches a path."""
    return next((value for one, value in patterns.items() if re.fullmatch(one, path)), default)
