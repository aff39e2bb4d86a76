"""Transformers in which every position attends to all others: BERT on tokens, ViT on the patches of an image.

"BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (Devlin et al., 2019); "An Image is
Worth 16x16 Words: Transformers for Image Recognition at Scale" (Dosovitskiy et al., 2021).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import Above, AtLeast, Problem
from jax_trainer.models.attention import Attention, Block, head_problems
from jax_trainer.models.layers import (
    ACTIVATIONS,
    INIT_STD,
    ActFn,
    Images,
    Mask,
    Perceptron,
    Rate,
    Size,
    Tokens,
    Vectors,
    check_length,
    image_shape,
    linear,
    precise,
    through,
    vectors,
)
from jax_trainer.models.token_loss import logits_of


@dataclass
class EncoderConfig(BaseModelConfig):
    """Keys of transformers in which every position attends to all others.

    Args:
        layers: number of transformer blocks.
        heads: number of attention heads per block.
        width: embedding dimension.
        hidden: width of the hidden layers of the MLPs; null: four times `width`.
        act_fn: activation of the MLPs.
        dropout: dropout rate of the embeddings and of the residual branches.
        remat: rematerialize blocks in the backward pass, for less memory; results differ by rounding only.
        norm_epsilon: epsilon of LayerNorm.
    """

    layers: Size = 12
    heads: Size = 12
    width: Size = 768
    hidden: Size | None = None
    act_fn: ActFn = "gelu_exact"
    dropout: Rate = 0.0
    remat: bool = False
    norm_epsilon: Annotated[float, Above(0)] = 1e-12

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self.heads, self.width)


def encoder_block(config: EncoderConfig, *, post_norm: bool = False, rngs: nnx.Rngs) -> Block:
    """A transformer block of `config`."""
    width, hidden, layer = config.width, config.hidden or 4 * config.width, partial(linear, bias=True, rngs=rngs)
    layers = [layer(width, width) for _ in ("query", "key", "value")]
    return Block(  # random numbers are drawn in this order
        attention=Attention(layers, size=width // config.heads, out=layer(width, width), is_causal=False),
        attention_norm=encoder_norm(config, rngs=rngs),
        perceptron=Perceptron(config.act_fn, hidden=layer(width, hidden), out=layer(hidden, width)),
        perceptron_norm=encoder_norm(config, rngs=rngs),
        dropout=nnx.Dropout(config.dropout, rngs=rngs),
        post_norm=post_norm,
    )


def encoder_norm(config: EncoderConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm with the settings of `config`."""
    # E[x²] - E[x]² has no digits left for an epsilon of 1e-12
    return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)


@dataclass
class BERTConfig(EncoderConfig):
    """Configuration of `BERT`.

    Args:
        vocab_size: size of the vocabulary.
        head: masked_lm: logits of the token at each position; classifier: logits of the classes of a text; none: the
            last hidden vectors.
        num_classes: number of classes, for `head: classifier`.
        context: maximum number of tokens.
        segments: number of segment embeddings (token types).
        act_fn: activation of the MLPs, and of the masked-token head.
        dropout: dropout rate of the embeddings, of the residual branches, and before the classifier.
    """

    vocab_size: Annotated[int, AtLeast(2)] = field(kw_only=True)
    head: Literal["masked_lm", "classifier", "none"] = "masked_lm"
    num_classes: Size = 2
    context: Size = 512
    segments: Size = 2
    dropout: Rate = 0.1


@register
class BERT(BaseModelNNX):
    """A bidirectional transformer on tokens: int32 [batch, time] → the output of its `head`.

    `masked_lm`: [batch, time, vocab_size]; `classifier`: [batch, num_classes]; `none`: [batch, time, width].
    """

    config: BERTConfig

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tokens = vectors(config.vocab_size, config.width, rngs=rngs)
        self.positions = vectors(config.context, config.width, rngs=rngs)
        self.segments = vectors(config.segments, config.width, rngs=rngs)
        self.norm = encoder_norm(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(encoder_block(config, post_norm=True, rngs=rngs) for _ in range(config.layers))
        is_lm, is_classifier = config.head == "masked_lm", config.head == "classifier"
        dense = linear(config.width, config.width, bias=True, rngs=rngs)
        bias = nnx.Param(jnp.zeros(config.vocab_size)) if is_lm else None  # of the logits
        self.masked_lm = nnx.Dict(dense=dense, norm=encoder_norm(config, rngs=rngs), bias=bias) if is_lm else None
        self.pooler = None if is_lm else dense
        self.classifier = linear(config.width, config.num_classes, bias=True, rngs=rngs) if is_classifier else None

    def __call__(
        self, tokens: Tokens, mask: Mask = None, segments: Tokens | None = None
    ) -> Float[Array, "batch *outputs"]:
        """int32 [batch, time] → the output of the head, in float32 at least; `mask` is False for padding."""
        x = self.last_hidden(tokens, mask, segments)
        if self.masked_lm is not None:
            head: Any = self.masked_lm
            x = head.norm(ACTIVATIONS[self.config.act_fn](head.dense(x)))
            return logits_of(x, self.tokens[...]) + head.bias[...]
        return x if self.classifier is None else precise(self.classifier, self.dropout(self.pooled(x)))

    def last_hidden(self, tokens: Tokens, mask: Mask = None, segments: Tokens | None = None) -> Vectors:
        """The output of the last block; the first segment is the default."""
        check_length(tokens.shape[1], self.config.context, "BERT")
        segments = jnp.zeros_like(tokens) if segments is None else segments
        x = _rows(self.tokens, tokens) + self.positions[: tokens.shape[1]] + _rows(self.segments, segments)
        seen = () if mask is None else (jnp.asarray(mask, bool),)
        return through(self.blocks, self.dropout(self.norm(x)), *seen, remat=self.config.remat)

    def pooled(self, x: Vectors) -> Float[Array, "batch width"]:
        """The vector of each text, from the last hidden vector of its first token."""
        if self.pooler is None:
            raise ValueError("BERT with `head: masked_lm` has no pooler. Use `head: classifier` or `head: none`.")
        return jnp.tanh(self.pooler(x[:, 0]))


def _rows(table: nnx.Param, numbers: jax.Array) -> jax.Array:
    return jnp.take(table[...], numbers, axis=0)  # not `[numbers]`, which clamps invalid ones


@dataclass
class ViTConfig(EncoderConfig):
    """Configuration of `ViT`.

    Args:
        num_classes: number of classes.
        image_size: pixels per side of the images, which are square; null: the sides of the examples.
        patch: pixels per side of a patch; divides the sides of the images.
    """

    num_classes: Size = 10
    image_size: Size | None = None
    patch: Size = 16


@register
class ViT(BaseModelNNX):
    """A transformer on the patches of images: [batch, h, w, c] → [batch, num_classes].

    Its position embeddings fix the size of the images: that of the example.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        self.image = height, breadth, channels = image_shape("ViT", exmp_input.shape, config.patch)
        if config.image_size is not None and (height, breadth) != 2 * (config.image_size,):
            raise ValueError(f"`image_size` is {config.image_size}, but the images are {self.image}. Resize them.")
        patch, width = (config.patch, config.patch), config.width
        normal = nnx.initializers.normal(INIT_STD)
        self.patches = nnx.Conv(channels, width, patch, patch, padding="VALID", kernel_init=normal, rngs=rngs)
        self.class_token = vectors(1, width, rngs=rngs)
        self.positions = vectors(1 + height // config.patch * (breadth // config.patch), width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(encoder_block(config, rngs=rngs) for _ in range(config.layers))
        self.norm = encoder_norm(config, rngs=rngs)
        self.classifier = linear(width, config.num_classes, bias=True, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch num_classes"]:
        """[batch, h, w, c] → [batch, num_classes], in float32 at least."""
        return precise(self.classifier, self.last_hidden(images)[:, 0])

    def last_hidden(self, images: Images) -> Float[Array, "batch tokens width"]:
        """The normalized output of the last block: the vector of the class token, then those of the patches."""
        if images.shape[1:] != self.image:
            raise ValueError(f"This ViT takes images of shape {self.image}, got {images.shape[1:]}.")
        patches = self.patches(images.astype(self.patches.kernel[...].dtype))
        patches = patches.reshape(images.shape[0], -1, patches.shape[-1])
        first = jnp.broadcast_to(self.class_token[...], (images.shape[0], 1, patches.shape[-1]))
        x = self.dropout(jnp.concatenate([first, patches], axis=1) + self.positions[...])
        return self.norm(through(self.blocks, x, remat=self.config.remat))
