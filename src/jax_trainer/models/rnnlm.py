"""A recurrent language model, for linen."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
from compoconf import register
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jax_trainer.interfaces import BaseModelConfig, BaseModelLinen
from jax_trainer.settings import AtLeast, Below

RnnType = Literal["lstm", "gru", "simple"]
_CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.OptimizedLSTMCell,
    "gru": nn.GRUCell,
    "simple": nn.SimpleCell,
}


@dataclass
class RNNLMConfig(BaseModelConfig):
    """The sizes of a recurrent language model.

    Args:
        vocab_size: how many different tokens there are.
        d_model: how many numbers stand for a token, and for what a layer remembers.
        n_layers: how many recurrent layers follow each other.
        dropout_rate: the share of numbers that a training step leaves out, of what the layers give.
        rnn_type: the kind of cell.
        shifted: predict each token from those before it, rather than the next one: for data whose target is its input.
    """

    vocab_size: Annotated[int, AtLeast(2)]
    d_model: Annotated[int, AtLeast(1)] = 512
    n_layers: Annotated[int, AtLeast(1)] = 2
    dropout_rate: Annotated[float, AtLeast(0), Below(1)] = 0.1
    rnn_type: RnnType = "lstm"
    shifted: bool = False


@register
class RNNLM(BaseModelLinen):
    """A recurrent language model on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    Made with a configuration, it predicts at each place the token after it. Made with keywords, it is `shifted`: it
    predicts the token of that place, and sees only those before it. Train it with a text as its own target.

    >>> model = RNNLM(vocab_size=256, d_model=128)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))
    328960

    Args:
        config: all of the following but `deterministic`, in place of keywords.
        vocab_size: how many different tokens there are.
        d_model: how many numbers stand for a token, and for what a layer remembers.
        n_layers: how many recurrent layers follow each other.
        dropout_rate: the share of numbers that a training step leaves out, of what the layers give.
        rnn_type: the kind of cell: "lstm", "gru" or "simple"; or the class of a linen cell.
        shifted: predict each token from those before it, rather than the next one.
        deterministic: leave nothing out, unless it is called with `train=True`. False is for training without that.
            What leaves out needs the random stream "dropout".
    """

    config: RNNLMConfig = None  # type: ignore[assignment]  # with keywords there is none
    vocab_size: int | None = None
    d_model: int = 512
    n_layers: int = 2
    dropout_rate: float = 0.1
    rnn_type: RnnType | Callable[..., Any] = "lstm"
    shifted: bool = True
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.config is not None:
            self._take_config()
        elif self.vocab_size is None:
            raise TypeError("RNNLM was made without sizes. Write `RNNLM(config)`, or `RNNLM(vocab_size=…)`.")
        nn.Module.__post_init__(self)  # not that of models which always have a configuration

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch time"], train: bool = False) -> Float[Array, "batch time vocab_size"]:
        """int32 [batch, time] → [batch, time, vocab_size]."""
        vocab_size: Any = self.vocab_size
        x: Any = nn.Embed(vocab_size, self.d_model, name="tokens")(_shifted(tokens) if self.shifted else tokens)
        for layer in range(self.n_layers):
            x = nn.RNN(_cell(self.rnn_type)(features=self.d_model, parent=None), name=f"layer_{layer}")(x)
        x = nn.Dropout(self.dropout_rate, deterministic=self.deterministic and not train)(x)
        return nn.Dense(vocab_size, name="out")(x)

    def _take_config(self) -> None:
        """The configuration's values become the module's own, as if they had been given as keywords."""
        if not isinstance(self.config, RNNLMConfig):
            raise TypeError(f"RNNLM takes an RNNLMConfig, or keywords (`vocab_size=…`) only, got {self.config!r}.")
        usual = {field.name: field.default for field in fields(self)}
        for name, value in self.config.stored().items():
            given = getattr(self, name)
            if given not in (usual[name], value):  # a copy that Flax makes of a module gets all of its values again
                raise TypeError(f"`{name}` is {given!r}, and {value!r} in the configuration. Give it once.")
            object.__setattr__(self, name, value)


def _shifted(tokens: jax.Array) -> jax.Array:
    """Each token's place taken by the one before it; 0 comes first."""
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


def _cell(rnn_type: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(rnn_type):
        return rnn_type
    if rnn_type not in _CELLS:
        known = ", ".join(map(repr, get_args(RnnType)))
        raise ValueError(f"`rnn_type` must be one of {known}, or the class of a linen cell, got {rnn_type!r}.")
    return _CELLS[rnn_type]
