"""Optimizer updates: extra arguments by the signature of `update`, and transformations around the optimizer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jax_trainer.core.tracing import current, note
from jax_trainer.diagnostics.leaves import PyTree

OPTAX = ("value", "grad", "value_fn")  # optax's own transformations forward and ignore these
OFFERED = (*OPTAX, "grad_fn", "loss", "extra_args")
PARAMETER_ARGS = ("grad", "value_fn", "grad_fn")  # those that refer to all parameters
UPDATE = "optimizer"  # the `jax.named_scope` of an optimizer's update


class Freezes(NamedTuple):
    """Whether an optimizer freezes the parameter with a path, and the statistics of its module together with it."""

    parameters: Callable[[str], bool]
    statistics: Callable[[str], bool]


def freezing(update: Any, freezes: Freezes | None) -> Any:
    """`update` of an optimizer, marked with what it freezes."""
    update.freezes = freezes
    return update


def freezes_of(tx: optax.GradientTransformation) -> Freezes | None:
    """What an optimizer freezes; None: it does not tell."""
    return getattr(tx.update, "freezes", None)


def by_signature(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` whose `update` receives the extra arguments that it has parameters for.

    Available where the step computes them: `value` (the loss, also as `loss` and `extra_args={"loss": …}`), `grad` (the
    gradients), `value_fn` (parameters to the loss on this batch) and `grad_fn` (parameters to its gradients). An
    `update` with `**extra_args` receives the first three and all unknown ones.
    """
    parameters = [*inspect.signature(tx.update).parameters.values()][3:]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(tx.update).parameters.values())
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if unknown := [one.name for one in named.values() if one.default is one.empty and one.name not in OFFERED]:
        raise TypeError(
            f"The optimizer's `update` requires `{unknown[0]}`, which a step does not provide. Available: "
            f"{', '.join(OFFERED)}. Give the parameter a default."
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        offered = (
            {"loss": extra["value"], "extra_args": {"loss": extra["value"]}, **extra} if "value" in extra else extra
        )
        passed = {name: offered[name] for name in named if name in offered}
        if takes_any:
            passed |= {name: value for name, value in extra.items() if name in OPTAX or name not in OFFERED}
        return tx.update(updates, state, params, **passed)

    return optax.GradientTransformationExtraArgs(tx.init, freezing(update, freezes_of(tx)))


class Split:
    """The leaves of a tree by the name of what updates them; in a part of it, others are an `optax.MaskedNode`.

    Args:
        tree: all parameters, or a tree like them.
        labels: the name for each leaf; None: nothing updates it.
    """

    def __init__(self, tree: PyTree, labels: Sequence[str | None]) -> None:
        self.labels, self._structure = labels, jax.tree.structure(tree)

    def filled(self, leaf_of: Callable[..., Any], *trees: PyTree) -> PyTree:
        """The tree of `leaf_of(label, *leaves)`, with the leaves of such trees."""
        leaves = zip(self.labels, *map(self._structure.flatten_up_to, trees), strict=True)
        return self._structure.unflatten(leaf_of(*each) for each in leaves)

    def only(self, tree: PyTree, *names: str) -> PyTree:
        """`tree` with the leaves of these names; of all, without one."""
        keeps = lambda label: label in names if names else label is not None
        return (
            tree
            if tree is None
            else self.filled(lambda label, leaf: leaf if keeps(label) else optax.MaskedNode(), tree)
        )

    def joined(self, own: PyTree, others: PyTree, name: str) -> PyTree:
        """`others` with the leaves of `name` replaced by its `own`."""
        return self.filled(lambda label, mine, other: mine if label == name else other, own, others)

    def restricted(self, extra: Mapping[str, Any], params: PyTree, name: str) -> dict[str, Any]:
        """`extra` arguments of an update, restricted to the leaves of `name`; the others are constant."""
        only, completed = lambda tree: self.only(tree, name), lambda tree: self.joined(tree, params, name)
        kinds: dict[str, Callable[[Any], Any]] = {
            "grad": only,
            "value_fn": lambda value_fn: lambda tree: value_fn(completed(tree)),
            "grad_fn": lambda grad_fn: lambda tree, *more: only(grad_fn(completed(tree), *more)),
        }
        return {kind: kinds[kind](one) if kind in kinds else one for kind, one in extra.items()}


def clipped(
    tx: optax.GradientTransformationExtraArgs, norm: float | None, adaptive: float | None
) -> optax.GradientTransformationExtraArgs:
    """`tx` on clipped gradients; its state is that of `tx`.

    Args:
        tx: the optimizer.
        norm: maximum global norm of the gradients; None: any.
        adaptive: first, maximum norm of the gradient of each unit, relative to that of its weights; None: any.
    """
    for name, value in {"clip_norm": norm, "clip_adaptive": adaptive}.items():
        if value is not None and not value > 0:
            raise ValueError(f"`{name}` must be above 0, got {value}. Use None to disable clipping.")
    clips = [] if adaptive is None else [optax.adaptive_grad_clip(adaptive)]
    clips += [] if norm is None else [optax.clip_by_global_norm(norm)]
    if not clips:
        return tx

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        for clip in clips:
            updates, _ = clip.update(updates, optax.EmptyState(), params)
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, freezing(update, freezes_of(tx)))


AROUND = "wrapped_optimizer"  # in `extra` of a state: that of all transformations around its optimizer
UPDATED = "updated"  # what a step notes


class Inner(NamedTuple):
    """The place of the state of an optimizer in that of a transformation around it."""

    opt_state: PyTree


class Around(NamedTuple):
    """A transformation around the optimizer of a program.

    Args:
        name: for messages.
        wrap: returns the transformation, from the optimizer.
        of_each: whether it may be around each of several optimizers, because its state does not change.
        hyperparameter: the one in its state; there is only one such transformation around an optimizer.
    """

    name: str
    wrap: Callable[[Any], optax.GradientTransformation]
    of_each: bool = False
    hyperparameter: str = ""

    def added_to(self, extra: Mapping[str, PyTree], opt_state: PyTree, params: PyTree) -> dict[str, PyTree]:
        """`extra` of a state with that of the transformation before the first update."""
        inner = Inner(_filled(extra.get(AROUND, ()), opt_state))
        tx: Any = optax.GradientTransformationExtraArgs(lambda params: inner, optax.identity().update)
        return {**extra, AROUND: _filled(self.wrap(tx).init(params), ())}

    def of(self, tx: Any, weights: PyTree, offered: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
        """The transformation around `tx`, which gets these parameters and extra arguments."""

        def update(updates: PyTree, state: Any, params: PyTree = None, **_: Any) -> tuple[PyTree, Inner]:
            if jax.tree.structure(updates) != jax.tree.structure(weights):
                raise TypeError(f"`{self.name}` must pass the gradients of all parameters on to `tx`.")
            updates, opt_state = tx.update(updates, state.opt_state, weights, **offered)
            return updates, Inner(opt_state)

        return optax.with_extra_args_support(self.wrap(optax.GradientTransformationExtraArgs(tx.init, update)))


def updated(
    tx: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: Any,
    offered: Mapping[str, Any],
    *,
    is_one_of_several: bool = False,
) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
    """The parameters, the optimizer state and `extra` of a state after an update, with what the step has around it."""
    params, opt_state, extra = state.params, state.opt_state, state.extra
    arounds = current().wraps
    for around in arounds:  # the innermost first
        if is_one_of_several and not around.of_each:
            raise TypeError(f"`{around.name}` cannot be around several optimizers. Leave it out.")
        tx = around.of(tx, params, offered)
    note(UPDATED)
    with jax.named_scope(UPDATE):
        updates, opt_state = tx.update(
            grads, _filled(extra[AROUND], opt_state) if arounds else opt_state, params, **offered
        )
        params = optax.apply_updates(params, updates)
    if not arounds:
        return params, opt_state, extra
    return params, _own(opt_state), {**extra, AROUND: _filled(opt_state, ())}


def _own(opt_state: PyTree) -> PyTree:
    """The state of the optimizer itself, in that of what is around it."""
    inner = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_inner) if _is_inner(node)]
    return _own(inner[0].opt_state) if inner else opt_state


def _filled(around: PyTree, own: PyTree) -> PyTree:
    """The state of transformations around an optimizer, with another one of the optimizer itself."""
    if _own(around) is around:
        return own
    change = lambda node: Inner(_filled(node.opt_state, own)) if _is_inner(node) else node
    return jax.tree.map(change, around, is_leaf=_is_inner)


def _is_inner(node: Any) -> bool:
    return isinstance(node, Inner)
