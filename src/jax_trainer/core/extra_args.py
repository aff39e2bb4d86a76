"""What optimizers may know of a step besides its gradients: passed on by the signature of their `update`."""

import inspect
from typing import Any

import optax

from jax_trainer.core.metrics import PyTree

OPTAX = ("value", "grad", "value_fn")  # which optax's own pass on to each other, and ignore
OFFERED = (*OPTAX, "grad_fn", "loss", "extra_args")


def by_signature(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` whose `update` gets of what is offered as much as it has parameters for.

    Offered are, where the step knows them, `value` (the loss, which is also `loss` and `extra_args={"loss": …}`),
    `grad` (the gradients), `value_fn` (of parameters: the loss on this batch) and `grad_fn` (the gradients there). One
    with `**extra_args` gets the first three and what else was given.
    """
    parameters = [*inspect.signature(tx.update).parameters.values()][3:]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(tx.update).parameters.values())
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if unknown := [one.name for one in named.values() if one.default is one.empty and one.name not in OFFERED]:
        raise TypeError(
            f"The optimizer's `update` asks for `{unknown[0]}`, which a step does not have. It has "
            f"{', '.join(OFFERED)}: give the parameter a default."
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        offered = (
            {"loss": extra["value"], "extra_args": {"loss": extra["value"]}, **extra} if "value" in extra else extra
        )
        passed = {name: offered[name] for name in named if name in offered}
        if takes_any:
            passed |= {name: value for name, value in extra.items() if name in OPTAX or name not in OFFERED}
        return tx.update(updates, state, params, **passed)

    return optax.GradientTransformationExtraArgs(tx.init, update)
