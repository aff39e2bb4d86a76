"""A recurrent language model, for linen."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

RnnType = Literal["lstm", "gru", "simple"]
_CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.OptimizedLSTMCell,
    "gru": nn.GRUCell,
    "simple": nn.SimpleCell,
}


class RNNLM(nn.Module):
    """A recurrent language model on tokens: int32 [batch, time] → logits of each token [batch, time, vocab_size].

    It sees the tokens before the one that it predicts, and not that one: train it with a text as its own target.

    >>> model = RNNLM(vocab_size=256, d_model=128)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))
    328960

    Args:
        vocab_size: how many different tokens there are.
        d_model: how many numbers stand for a token, and for what a layer remembers.
        n_layers: how many recurrent layers follow each other.
        dropout_rate: the share of numbers that a training step leaves out, of what the layers give.
        rnn_type: the kind of cell: "lstm", "gru" or "simple"; or the class of a linen cell.
        deterministic: leave nothing out; False is for training, and needs the random stream "dropout".
    """

    vocab_size: int
    d_model: int = 512
    n_layers: int = 2
    dropout_rate: float = 0.1
    rnn_type: RnnType | Callable[..., Any] = "lstm"
    deterministic: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [batch, time] → [batch, time, vocab_size]."""
        x: Any = nn.Embed(self.vocab_size, self.d_model, name="tokens")(_shifted(tokens))
        for layer in range(self.n_layers):
            x = nn.RNN(_cell(self.rnn_type)(features=self.d_model, parent=None), name=f"layer_{layer}")(x)
        x = nn.Dropout(self.dropout_rate, deterministic=self.deterministic)(x)
        return nn.Dense(self.vocab_size, name="out")(x)


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
