"""A recurrent language model, for linen."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
from compoconf import register
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen
from jax_trainer.config.settings import AtLeast, Below

RnnType = Literal["lstm", "gru", "simple"]
_CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.OptimizedLSTMCell,
    "gru": nn.GRUCell,
    "simple": nn.SimpleCell,
}


@dataclass
class RNNLMConfig(BaseModelConfig):
    """Configuration of `RNNLM`.

    Args:
        vocab_size: size of the vocabulary.
        d_model: dimension of the embeddings and of the hidden states.
        n_layers: number of recurrent layers.
        dropout_rate: dropout rate after the last recurrent layer.
        rnn_type: type of the recurrent cell.
        shifted: shift the inputs by one token, for data whose target is its input.
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

    Built from a configuration, it predicts at each position the next token. Built from keywords, it is `shifted`: it
    predicts the token at each position from the tokens before it. Train it with the inputs as targets.

    >>> model = RNNLM(vocab_size=256, d_model=128)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))
    328960

    Args:
        config: configuration with the following arguments but `deterministic`, instead of keywords.
        vocab_size: size of the vocabulary.
        d_model: dimension of the embeddings and of the hidden states.
        n_layers: number of recurrent layers.
        dropout_rate: dropout rate after the last recurrent layer.
        rnn_type: type of the recurrent cell: "lstm", "gru" or "simple"; or a linen cell class.
        shifted: shift the inputs by one token, for data whose target is its input.
        deterministic: disable dropout, unless it is called with `train=True`. Dropout needs the random stream
            "dropout".
    """

    config: RNNLMConfig = None  # type: ignore[assignment]  # None with keywords
    vocab_size: int | None = None
    d_model: int = 512
    n_layers: int = 2
    dropout_rate: float = 0.1
    rnn_type: RnnType | Callable[..., Any] = "lstm"
    shifted: bool = True
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.config is not None:
            self._apply_config()
        elif self.vocab_size is None:
            raise TypeError("RNNLM needs `vocab_size`. Write `RNNLM(config)`, or `RNNLM(vocab_size=…)`.")
        nn.Module.__post_init__(self)  # not that of `BaseModelLinen`, which requires a configuration

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch time"], train: bool = False) -> Float[Array, "batch time vocab_size"]:
        """int32 [batch, time] → [batch, time, vocab_size]."""
        vocab_size: Any = self.vocab_size
        x: Any = nn.Embed(vocab_size, self.d_model, name="tokens")(_shifted(tokens) if self.shifted else tokens)
        for layer in range(self.n_layers):
            x = nn.RNN(_cell(self.rnn_type)(features=self.d_model, parent=None), name=f"layer_{layer}")(x)
        x = nn.Dropout(self.dropout_rate, deterministic=self.deterministic and not train)(x)
        return nn.Dense(vocab_size, name="out")(x)

    def _apply_config(self) -> None:
        """Copies the values of the configuration to the attributes of the module."""
        if not isinstance(self.config, RNNLMConfig):
            raise TypeError(f"RNNLM takes an RNNLMConfig, or keywords (`vocab_size=…`) only, got {self.config!r}.")
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in self.config.stored().items():
            own = getattr(self, name)
            if own not in (defaults[name], value):  # Flax copies a module with all of its values
                raise TypeError(f"`{name}` is {own!r}, but {value!r} in the configuration. Set it once.")
            object.__setattr__(self, name, value)


def _shifted(tokens: jax.Array) -> jax.Array:
    """The tokens shifted right by one position, with 0 first."""
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


def _cell(rnn_type: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(rnn_type):
        return rnn_type
    if rnn_type not in _CELLS:
        known = ", ".join(map(repr, get_args(RnnType)))
        raise ValueError(f"`rnn_type` must be one of {known}, or a linen cell class, got {rnn_type!r}.")
    return _CELLS[rnn_type]
