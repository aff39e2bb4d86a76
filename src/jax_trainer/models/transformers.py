"""Transformers on tokens or patches: `GPT` and `Decoder` are causal, `BERT` and `ViT` see every position.

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
from jax_trainer.models.attention import (
    ROTARY_BASE,
    Attention,
    Block,
    KVCache,
    RotaryScalingConfig,
    head_problems,
    real_positions,
)
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
    image_shape,
    linear,
    precise,
    through,
    unchanged,
    vectors,
)
from jax_trainer.models.token_loss import logits_of


@dataclass
class CausalConfig(BaseModelConfig):
    """Keys of causal transformers.

    Args:
        vocab_size: size of the vocabulary.
        context: maximum number of tokens; null: the length of the examples.
        layers: number of transformer blocks.
        heads: number of attention heads per block.
        width: embedding dimension.
        hidden: width of the hidden layers of the MLPs; null: four times `width`.
        dropout: dropout rate of the embeddings and of the residual branches.
        tied: tie the token embedding and the output head.
        remat: rematerialize blocks in the backward pass, for less memory; results differ by rounding only.
        norm_epsilon: epsilon of the normalization.
    """

    vocab_size: Annotated[int, AtLeast(2)]
    context: Size | None = None
    layers: Size = 4
    heads: Size = 4
    width: Size = 128
    hidden: Size | None = None
    dropout: Rate = 0.0
    tied: bool = True
    remat: bool = False
    norm_epsilon: Annotated[float, Above(0)] = 1e-6

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The number of heads of keys and values, and their dimension."""
        return self.heads, self.width // self.heads


class CausalLM(BaseModelNNX):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    A subclass has `make_norm` and `make_block`.

    Attributes:
        context: maximum number of tokens.
        tokens: the token embedding.
        positions: the position embedding; None without any.
        own_head: the output head; None: the token embedding.
    """

    config: Any  # a `CausalConfig`

    def __init__(self, config: Any, *, exmp_input: Any = None, rngs: nnx.Rngs) -> None:
        self.config, width, has_positions = config, config.width, getattr(config, "positions", None) == "learned"
        shape, name = getattr(exmp_input, "shape", (0, config.context)), config.class_name
        if len(shape) != 2:
            raise ValueError(f"{name} takes tokens [batch, time], got an input of shape {shape}.")
        self.context = config.context or shape[1]
        if self.context is None:
            raise ValueError(f"{name} needs `context`, or an `exmp_input` that determines it.")
        check_length(shape[1] or 0, self.context, name)
        self.tokens = vectors(config.vocab_size, width, rngs=rngs)
        self.positions = vectors(self.context, width, rngs=rngs) if has_positions else None
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(self.make_block(rngs) for _ in range(config.layers))
        self.norm = self.make_norm(width, rngs)
        self.own_head = None if config.tied else vectors(config.vocab_size, width, rngs=rngs)

    def make_norm(self, width: int, rngs: nnx.Rngs) -> Any:
        """A normalization of vectors of this width."""
        raise NotImplementedError

    def make_block(self, rngs: nnx.Rngs) -> Block:
        """A transformer block."""
        raise NotImplementedError

    def __call__(self, tokens: Tokens, mask: Mask = None) -> Float[Array, "batch time vocab"]:
        """int32 [batch, time] → [batch, time, vocab_size]; `mask` is False for padding, on either side of a text."""
        return logits_of(self.last_hidden(tokens, mask), self.head)

    def last_hidden(self, tokens: Tokens, mask: Mask = None) -> Vectors:
        """The input of the head: its product with `head` gives the logits."""
        _, time = tokens.shape
        check_length(time, self.context, type(self).__name__)
        seen = () if mask is None else (jnp.asarray(mask, bool),)
        x = self._embedded(tokens, real_positions(*seen) if seen else slice(time))
        return self.norm(through(self.blocks, x, *seen, remat=self.config.remat))

    @property
    def head(self) -> Float[Array, "vocab width"]:
        """The weights of the output head."""
        return (self.tokens if self.own_head is None else self.own_head)[...]

    def empty_cache(self, batch: int, dtype: Any = None) -> KVCache:
        """An empty cache for `extend`; `dtype` is that of keys and values, by default that of the weights."""
        (heads, dim), dtype = self.config.kv_shape, self.tokens[...].dtype if dtype is None else dtype
        return KVCache.empty(self.config.layers, batch, self.context, heads, dim, dtype)

    def extend(
        self, tokens: Tokens, cache: KVCache, mask: Mask = None
    ) -> tuple[Float[Array, "batch time vocab"], KVCache]:
        """The logits of tokens that follow those in `cache`, and the extended cache; `mask` is False for padding.

        Logits are NaN if the text gets longer than the context, which is not known during tracing.
        """
        _, time = tokens.shape
        check_length(time, self.context, type(self).__name__)
        cache = cache.masked(mask, time)
        x = self._embedded(tokens, cache.positions(time))
        for layer, block in enumerate(self.blocks):
            x, cache = block.extend(x, cache, layer)
        cache = cache.advanced(time)
        x = jnp.where(cache.position <= self.context, self.norm(x), jnp.nan)
        return logits_of(x, self.head), cache

    def _embedded(self, tokens: jax.Array, positions: Any) -> jax.Array:
        table = self.tokens[...]
        # not `[tokens]`, which clamps invalid tokens; and the gradient of a frequent token is a long sum, which needs
        # float32
        wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
        x = jnp.take(wide, tokens, axis=0).astype(table.dtype)
        return self.dropout(x if self.positions is None else x + self.positions[positions])


def branch_std(layers: int) -> float:
    """Scaled so that the sum of 2 × layers residual branches has the same variance for any depth."""
    return INIT_STD / (2 * layers) ** 0.5


def check_length(time: int, context: int, name: str) -> None:
    """Refuses a text that is longer than the context."""
    if time > context:
        raise ValueError(
            f"The text has {time} tokens, but the context of this {name} is {context}. "
            "Truncate the text, or use a larger `context`."
        )


# GPT-2 also has `vocab_size` 50257, `context` 1024, `bias: true` and `norm_epsilon: 1e-5`
GPT2_SIZES: dict[str, dict[str, Any]] = {
    "124M": {"layers": 12, "heads": 12, "width": 768},
    "355M": {"layers": 24, "heads": 16, "width": 1024},
    "774M": {"layers": 36, "heads": 20, "width": 1280},
    "1.5B": {"layers": 48, "heads": 25, "width": 1600},
}


@dataclass
class GPTConfig(CausalConfig):
    """Configuration of `GPT`.

    Args:
        positions: learned: learned position embeddings; rotary: rotary position embeddings (RoPE).
        bias: use biases in linear layers and LayerNorm, as GPT-2 does.
        norm_epsilon: epsilon of LayerNorm; GPT-2 has 1e-5.
    """

    positions: Literal["learned", "rotary"] = "learned"
    bias: bool = False

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self.heads, self.width)
        if self.positions == "rotary" and not self.width % self.heads and self.kv_shape[1] % 2:
            text = f"`width` / `heads` must be even for `positions: rotary`, got {self.kv_shape[1]}."
            yield "heads", f"{text} Use other sizes, or `positions: learned`."


@register
class GPT(CausalLM):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    A pre-norm transformer. `GPT2_SIZES` has the sizes of GPT-2.
    """

    config: GPTConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def make_norm(self, width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
        return nnx.LayerNorm(width, epsilon=self.config.norm_epsilon, use_bias=self.config.bias, rngs=rngs)

    def make_block(self, rngs: nnx.Rngs) -> Block:
        config, width, hidden = self.config, self.config.width, self.config.hidden or 4 * self.config.width
        layer = partial(linear, bias=config.bias, rngs=rngs)
        branch = partial(layer, std=branch_std(config.layers))
        return Block(  # random numbers are drawn in this order
            attention_norm=self.make_norm(width, rngs),
            attention=Attention(
                [layer(width, 3 * width)],
                size=width // config.heads,
                out=branch(width, width),
                is_causal=True,
                rotary=() if config.positions == "rotary" else None,
            ),
            perceptron_norm=self.make_norm(width, rngs),
            perceptron=Perceptron("gelu", hidden=layer(width, hidden), out=branch(hidden, width)),
            dropout=nnx.Dropout(config.dropout, rngs=rngs),
        )


@dataclass
class DecoderConfig(CausalConfig):
    """Configuration of `Decoder`.

    Args:
        heads: number of query heads per block.
        kv_heads: number of heads of keys and values, which divides `heads`; null: `heads`.
        head_size: dimension of a head; null: `width` / `heads`.
        hidden: width of the hidden layers of the MLPs; null: 8/3 of `width`, rounded up to a multiple of 8.
        rotary_base: base of the rotary position embeddings, the theta of Llama.
        rotary_scaling: slower rotations, for a longer context than that of the pretraining; null: none.
        window: number of positions that one attends to, itself included, as in Mistral; null: all.
        qkv_bias: use biases for queries, keys and values, as Qwen2 does.
        qk_norm: normalize queries and keys, as Qwen3 does.
        norm_epsilon: epsilon of RMSNorm.
    """

    kv_heads: Size | None = None
    head_size: Size | None = None
    rotary_base: Annotated[float, Above(0)] = ROTARY_BASE
    rotary_scaling: RotaryScalingConfig | None = None
    window: Size | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def problems(self) -> Iterator[Problem]:
        """Reports heads that do not divide evenly, or an odd head size."""
        if self.heads % self.kv_shape[0]:
            yield "kv_heads", f"`kv_heads` must divide `heads` {self.heads} evenly, got {self.kv_heads}."
        if self.head_size is None and self.width % self.heads:
            yield from head_problems(self.heads, self.width, " Or set `head_size`.")
        elif self.kv_shape[1] % 2:
            name = "heads" if self.head_size is None else "head_size"
            yield name, f"The head size must be even for rotary positions, got {self.kv_shape[1]}. Use other sizes."

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The number of heads of keys and values, and their dimension."""
        return self.kv_heads or self.heads, self.head_size or self.width // self.heads


@register
class Decoder(CausalLM):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    With RMSNorm, gated MLPs, grouped-query attention and rotary positions, as Llama, Mistral and Qwen have them.
    """

    config: DecoderConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def make_norm(self, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        return nnx.RMSNorm(width, epsilon=self.config.norm_epsilon, rngs=rngs)

    def make_block(self, rngs: nnx.Rngs) -> Block:
        config, width, (kv_heads, size) = self.config, self.config.width, self.config.kv_shape
        hidden = config.hidden or -(-width // 3) * 8
        layer = partial(linear, rngs=rngs)
        branch = partial(layer, std=branch_std(config.layers))
        qk_norm = (lambda: self.make_norm(size, rngs)) if config.qk_norm else (lambda: unchanged)
        return Block(  # random numbers are drawn in this order
            attention_norm=self.make_norm(width, rngs),
            attention=Attention(
                [layer(width, heads * size, bias=config.qkv_bias) for heads in (config.heads, kv_heads, kv_heads)],
                size=size,
                norms=(qk_norm(), qk_norm()),
                out=branch(config.heads * size, width),
                is_causal=True,
                window=config.window,
                rotary=(config.rotary_base, config.rotary_scaling),
            ),
            perceptron_norm=self.make_norm(width, rngs),
            perceptron=Perceptron(
                "silu", gate=layer(width, hidden), hidden=layer(width, hidden), out=branch(hidden, width)
            ),
            dropout=nnx.Dropout(config.dropout, rngs=rngs),
        )


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
