"""The verifier: embedding, decoder layers, final norm, head; features at any boundaries."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int, Key

from eagle3_jax.caches import Cache, Rows, Scope, text_scope
from eagle3_jax.configs import VerifierConfig
from eagle3_jax.contracts import (
    FeatureSpec,
    RequestError,
    VerifierFeatures,
    check_boundaries,
    default_boundaries,
)
from eagle3_jax.layers import Linear, Mlp, RmsNorm, stacked
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verifier.attention import GroupedQueryAttention, LatentAttention, LayerRows
from eagle3_jax.verifier.experts import Experts, Router

FEW_TOKENS = 32
"""Up to this many embeddings are read one by one."""


@nnx.dataclass
class Scores(nnx.Pytree):
    """What the verifier says of a text.

    Attributes:
        logits: float32; position t over the token at t + 1.
        features: the residual stream at the boundaries asked for.
    """

    logits: Float[Array, "b t v"] = nnx.data()
    features: VerifierFeatures = nnx.data()


class Layer(nnx.Module):
    """One pre-norm decoder layer; a layer with experts holds router and shared expert only."""

    def __init__(self, key: Key[Array, ""], config: VerifierConfig, has_experts: bool):
        c = config
        keys = jax.random.split(key, 3)
        self.attention_norm = RmsNorm(c.width, c.norm_eps)
        self.attention = (LatentAttention if c.latent else GroupedQueryAttention)(keys[0], c)
        self.mlp_norm = RmsNorm(c.width, c.norm_eps)
        experts = c.experts if has_experts else None
        inner = experts.width * experts.shared if experts else c.mlp_width
        self.router = Router(keys[1], c.width, experts) if experts else None
        self.mlp = Mlp(keys[2], c.width, inner) if inner else None

    def __call__(
        self,
        x: Float[Array, "b r w d"],
        scope: Scope,
        cache: Cache | None,
        layer: Int[Array, ""],
        experts: Callable | None,
        differentiable: bool = False,
    ) -> tuple[Float[Array, "b r w d"], LayerRows]:
        """The residual stream after this layer, and its new cache rows.

        Args:
            experts: a function of (tokens [n d], chosen, weights) where the layer has experts.
        """
        with jax.named_scope("attention"):
            out, rows = self.attention(self.attention_norm(x), scope, cache, layer, differentiable)
        x = x + out
        y = self.mlp_norm(x)
        parts = []
        if self.router is not None and experts is not None:
            with jax.named_scope("experts"):
                flat = y.reshape(-1, y.shape[-1])
                chosen, weights, _ = self.router(flat)
                parts.append(experts(flat, chosen, weights).reshape(y.shape))
        if self.mlp is not None:
            parts.append(self.mlp(y))
        return x + sum(parts[1:], parts[0]), rows


class Verifier(nnx.Module):
    """A frozen decoder-only model whose distribution speculation reproduces exactly.

    Attributes:
        config: its configuration; static.
        name: its identity, written into drafters trained on it.
        tokenizer: None where unknown.
    """

    def __init__(
        self,
        config: VerifierConfig,
        key: Key[Array, ""],
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        c = config
        keys = jax.random.split(key, 5)
        self.config = c
        self.name = name
        self.tokenizer = tokenizer
        self.embedding = nnx.Param(jax.random.normal(keys[0], (c.vocab_size, c.width), jnp.float32))
        moe = c.num_layers - c.num_dense
        make = functools.partial(Layer, config=c)
        self.dense_layers = (
            stacked(functools.partial(make, has_experts=False), keys[1], c.num_dense)
            if c.num_dense
            else None
        )
        self.moe_layers = (
            stacked(functools.partial(make, has_experts=True), keys[2], moe) if moe else None
        )
        self.experts = Experts(keys[3], moe, c.width, c.experts) if moe and c.experts else None
        self.norm = RmsNorm(c.width, c.norm_eps)
        self.head = Linear(keys[4], c.width, c.vocab_size)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return self.embedding.dtype

    def spec(self, boundaries: tuple[int, ...] | None = None) -> FeatureSpec:
        """What this verifier's features at `boundaries` are (the default ones where None).

        Raises:
            ContractError: boundaries it does not have, or no default for so few layers.
        """
        if boundaries is None:
            boundaries = default_boundaries(self.config.num_layers)
        check_boundaries(tuple(boundaries), self.config.num_layers)
        return FeatureSpec(
            boundaries=tuple(boundaries),
            width=self.config.width,
            num_layers=self.config.num_layers,
            verifier=self.name,
            tokenizer=None if self.tokenizer is None else self.tokenizer.fingerprint,
        )

    def make_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache of `rows` rows of `capacity` slots, in the verifier's dtype."""
        c = self.config
        shape = (c.num_layers, rows, c.cache_heads, capacity)
        keys = jnp.zeros((*shape, c.cache_width), self.dtype)
        values = None if c.latent else jnp.zeros((*shape, c.head_width), self.dtype)
        return Cache(keys=keys, values=values)

    def embed(self, tokens: Int[Array, "*lead"]) -> Float[Array, "*lead d"]:
        """Embeddings of tokens; the drafter is passed these, never the table."""
        table = self.embedding[...]
        if tokens.size > FEW_TOKENS:
            return table[tokens]
        # XLA:CPU hands a gather from a big table to its thread pool, however small the gather.
        rows = [
            jax.lax.dynamic_slice_in_dim(table, token, 1) for token in tokens.reshape(tokens.size)
        ]
        return jnp.concatenate(rows).reshape(*tokens.shape, table.shape[1])

    def read_out(
        self, hidden: Float[Array, "*lead {self.config.width}"]
    ) -> Float[Array, "*lead {self.config.vocab_size}"]:
        """Float32 logits of the residual stream after the last layer (boundary L)."""
        return self.head(self.norm(hidden)).astype(jnp.float32)

    def forward(
        self,
        tokens: Int[Array, "b r w"],
        scope: Scope,
        cache: Cache | None,
        boundaries: tuple[int, ...] = (),
        differentiable: bool = False,
    ) -> tuple[Float[Array, "b r w d"], Float[Array, "b n f"] | None, Rows | None]:
        """One pass over a forest.

        Args:
            tokens: the queries of every root.
            scope: where they stand and what they see.
            cache: read only; None where every root is one position of a text (w = 1).
            boundaries: which residual streams to keep, in this order; n = r * w.
            differentiable: with gradients (slower; the library itself keeps the verifier frozen).

        Returns:
            The residual stream after the last layer, the features, and the new cache rows (None
            without a cache).
        """
        c = self.config
        x = self.embed(tokens)
        kept = tuple(x for _ in boundaries)
        parts = []
        first = 0
        for stack, has_experts in ((self.dense_layers, False), (self.moe_layers, True)):
            if stack is None:
                continue
            count = c.num_layers - first if has_experts else c.num_dense
            # With gradients each layer's experts are scan inputs; otherwise closed over.
            sliced = self.experts if has_experts and differentiable else None

            def body(carry, inputs, first=first, has_experts=has_experts):
                x, kept = carry
                layer, index, sliced = inputs

                def route(x, chosen, weights):
                    if sliced is None:
                        assert self.experts is not None
                        return self.experts(x, chosen, weights, index)
                    own = jax.tree.map(lambda w: w[None], sliced)
                    return own(x, chosen, weights, jnp.zeros((), jnp.int32), differentiable=True)

                x, rows = layer(
                    x, scope, cache, index + first, route if has_experts else None, differentiable
                )
                kept = tuple(
                    jnp.where(index + first + 1 == b, x, old)
                    for b, old in zip(boundaries, kept, strict=True)
                )
                return (x, kept), None if cache is None else rows

            index = jnp.arange(count, dtype=jnp.int32)
            (x, kept), rows = jax.lax.scan(body, (x, kept), (stack, index, sliced))
            parts.append(rows)
            first += count
        features = None
        if boundaries:
            b, r, w, d = x.shape
            features = jnp.concatenate(kept, axis=-1).reshape(b, r * w, len(boundaries) * d)
        rows = None
        if cache is not None:
            joined = jax.tree.map(lambda *p: jnp.concatenate(p, axis=0), *parts)
            rows = Rows(keys=joined[0], values=joined[1])
        return x, features, rows

    def score(self, tokens: Int[Array, "b t"], boundaries: tuple[int, ...] | None = None) -> Scores:
        """Logits and features of whole texts, in one compiled pass without a cache.

        Args:
            tokens: texts of equal length.
            boundaries: the default ones, (2, L // 2, L - 3), where None.

        Returns:
            `.logits` [b t v] in float32 and `.features` (`.array` [b t f], `.spec`).

        Raises:
            ContractError: boundaries the verifier does not have.
            RequestError: an empty text or a token outside the vocabulary.
        """
        spec = self.spec(boundaries)
        if not isinstance(tokens, Tracer):
            check_tokens(tokens, self.config.vocab_size)
        return _score(self, tokens, spec)


@functools.partial(jax.jit, static_argnames="spec")
def _score(verifier: Verifier, tokens: Int[Array, "b t"], spec: FeatureSpec) -> Scores:
    hidden, features, _ = verifier.forward(
        tokens[..., None], text_scope(jnp.zeros_like(tokens)), None, spec.boundaries
    )
    assert features is not None
    return Scores(
        logits=verifier.read_out(hidden[:, :, 0]),
        features=VerifierFeatures(array=features, spec=spec),
    )


def check_tokens(tokens, vocab_size: int) -> None:
    """Refuse an empty text and tokens outside the vocabulary.

    Raises:
        RequestError: says which token was found.
    """

    ids = np.asarray(tokens)
    if ids.size == 0:
        raise RequestError("the prompt is empty: there is no token to continue from")
    if ids.dtype.kind not in "iu":
        raise RequestError(f"a prompt's tokens must be whole numbers; found {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise RequestError(
            f"token {bad} is outside the verifier's vocabulary of {vocab_size}; the text was "
            "tokenized for another model"
        )
