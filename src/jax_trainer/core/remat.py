"""`Remat`: which modules compute their activations again in the backward pass, instead of keeping them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jax_trainer.diagnostics.leaves import listed

POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable")


@dataclass(frozen=True)
class Remat:
    """Modules of a linen or nnx model whose activations are computed again in the backward pass: less memory.

    Args:
        match: regular expression that the full dotted path of a module must match, such as `encoder.layers.0`. Modules
            inside of a matching one are part of it.
        policy: what is kept nevertheless: the name of a policy of `jax.checkpoint_policies`, or such a function.

    >>> Remat(r".*block_\\d+", "dots_saveable").matches("encoder.block_3")
    True
    """

    match: str
    policy: str | Callable[..., Any] = "nothing_saveable"

    def __post_init__(self) -> None:
        if not callable(self.policy) and self.policy not in POLICIES:
            raise ValueError(
                f"`policy` must be one of {', '.join(POLICIES)}, or a function such as "
                f"`jax.checkpoint_policies.save_only_these_names('x')`, got {self.policy!r}."
            )

    @property
    def saveable(self) -> Callable[..., Any]:
        """The policy, as `jax.checkpoint` takes it."""
        return self.policy if callable(self.policy) else getattr(jax.checkpoint_policies, self.policy)

    def matches(self, path: str) -> bool:
        """Whether the module at `path` is computed again."""
        return re.fullmatch(self.match, path) is not None

    def no_match(self, paths: Iterable[str]) -> ValueError:
        """The error for a model with modules at these paths, of which none matches."""
        return ValueError(
            f"`remat` matches no module: `match` is {self.match!r}, and the modules that the model calls are "
            f"{listed(sorted({*paths} - {''}))}. The expression must match the full path: '.*block.*' matches "
            "everything with `block` in it."
        )
