"""The verifier: embedding, decoder layers, final norm, head; features at any boundaries."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int, Key

from eagle3_jax.caches import Cache, Rows, Scope, text_scope, within
from eagle3_jax.configs import VerifierConfig
from eagle3_jax.contracts import (
    FeatureSpec,
    RequestError,
    UnsupportedError,
    VerifierFeatures,
    check_boundaries,
    default_boundaries,
)
from eagle3_jax.layers import Linear, Mlp, RmsNorm, stacked
from eagle3_jax.packed import PackedWeight
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.turned import Kernels, Turned, bind, take_apart
from eagle3_jax.verifier.attention import GroupedQueryAttention, LatentAttention
from eagle3_jax.verifier.experts import Experts, Router
from sharding.exchange import Exchange
from sharding.mapped import over_mesh, row_axis, specs_of
from sharding.mesh import MODEL
from sharding.rules import kv_heads

NewRows = tuple[Float[Array, "rows k n hd"], Float[Array, "rows k n hv"] | None]
"""One layer's new cache rows: all b, beside tokens that may be one device's share, with b = 1."""

ALONE = Exchange(None)
"""A single device's, which leaves everything as it is."""

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
        self.attention_norm = RmsNorm(c.width, c.norm_eps, c.wide_norms)
        self.attention = (LatentAttention if c.latent else GroupedQueryAttention)(keys[0], c)
        self.mlp_norm = RmsNorm(c.width, c.norm_eps, c.wide_norms)
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
        window: Int[Array, ""] | None = None,
        differentiable: bool = False,
        exchange: Exchange = ALONE,
    ) -> tuple[Float[Array, "b r w d"], NewRows]:
        """The residual stream after this layer, and its new cache rows.

        Args:
            experts: a function of (tokens [n d], chosen, weights) where the layer has experts.
            window: tokens it sees; None is all.
            exchange: with the devices that hold the rest of the layer.
        """
        if window is not None:
            scope = within(scope, window)
        with jax.named_scope("attention"):
            y = exchange.whole(self.attention_norm(x))
            out, rows = self.attention(y, scope, cache, layer, differentiable)
            x = x + exchange.total(out)
        y = exchange.whole(self.mlp_norm(x))
        parts = []
        if self.router is not None and experts is not None:
            with jax.named_scope("experts"):
                flat = y.reshape(-1, y.shape[-1])
                chosen, weights, _ = self.router(flat)
                parts.append(experts(flat, chosen, weights).reshape(y.shape))
        if self.mlp is not None:
            parts.append(self.mlp(y))
        return x + exchange.total(sum(parts[1:], parts[0])), rows


class Run(NamedTuple):
    """Consecutive layers of one kind, which one scan walks.

    Attributes:
        has_experts: the kind.
        first: number of the first layer.
        count: how many.
        start: place of the first in the stack of its kind.
        whole: whether that stack holds no others.
    """

    has_experts: bool
    first: int
    count: int
    start: int
    whole: bool


def runs_of(config: VerifierConfig) -> list[Run]:
    """The layers in order, as few runs as there can be."""
    dense = set(config.dense_layers)
    sizes = {False: len(dense), True: config.num_layers - len(dense)}
    out, first, start = [], 0, {False: 0, True: 0}
    for is_dense, layers in itertools.groupby(range(config.num_layers), dense.__contains__):
        count, kind = len(list(layers)), not is_dense
        out.append(Run(kind, first, count, start[kind], count == sizes[kind]))
        first += count
        start[kind] += count
    return out


class Verifier(nnx.Module):
    """A frozen decoder-only model whose distribution speculation reproduces exactly.

    Attributes:
        config: its configuration; static.
        name: its identity, written into drafters trained on it.
        tokenizer: None where unknown.
        no_tokenizer: why there is none, where there is none.
        kernels: those of the layers that `apart` has taken out of their stack; else None.
        mesh: over which its arrays lie (`verifier/meshed.py`); static, None on a single device.
            With a mesh, `forward` and `read_out` are one device's part, for use in `shard_map`.
    """

    def __init__(
        self,
        config: VerifierConfig,
        key: Key[Array, ""],
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
        no_tokenizer: str | None = None,
    ):
        c = config
        keys = jax.random.split(key, 5)
        self.config = c
        self.name = name
        self.tokenizer = tokenizer
        self.no_tokenizer = no_tokenizer or "it has no tokenizer.json"
        self.embedding: nnx.Param | PackedWeight = nnx.Param(
            jax.random.normal(keys[0], (c.vocab_size, c.width), jnp.float32)
        )

        def layers(key, count, has_experts):
            make = functools.partial(Layer, config=c, has_experts=has_experts)
            return stacked(make, key, count) if count else None

        moe = len(c.moe_layers)
        self.dense_layers = layers(keys[1], len(c.dense_layers), False)
        self.moe_layers = layers(keys[2], moe, True)
        self.experts = Experts(keys[3], moe, c.width, c.experts) if moe and c.experts else None
        self.norm = RmsNorm(c.width, c.norm_eps, c.wide_norms)
        self.head = Linear(keys[4], c.width, c.vocab_size)
        self.kernels: list[Kernels] | None = nnx.data(None)
        self.mesh: Mesh | None = None

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
        parts = Exchange(self.mesh).parts
        heads = 1 if c.latent else parts * kv_heads(c, parts)
        shape = (c.num_layers, rows, heads, capacity)
        keys = jnp.zeros((*shape, c.cache_width), self.dtype)
        values = None if c.latent else jnp.zeros((*shape, c.head_width), self.dtype)
        return Cache(keys=keys, values=values)

    def embed(self, tokens: Int[Array, "*lead"]) -> Float[Array, "*lead d"]:
        """Embeddings of tokens; the drafter is passed these, never the table."""
        table = self.embedding
        if isinstance(table, PackedWeight):
            return jax.tree.map(lambda x: _rows(x, tokens), table)[...]
        return _rows(table[...], tokens)

    def read_out(
        self, hidden: Float[Array, "*lead {self.config.width}"]
    ) -> Float[Array, "*lead {self.config.vocab_size}"]:
        """Float32 logits of the residual stream after the last layer (boundary L)."""
        return Exchange(self.mesh).vocabulary(self.own_logits(hidden))

    def own_logits(self, hidden: Float[Array, "*lead {self.config.width}"]) -> Float[Array, "..."]:
        """Those of `read_out` over this device's part of the vocabulary."""
        return self.head(self.norm(hidden)).astype(jnp.float32)

    def head_of(self, vocabulary: Int[Array, " dv"]) -> Float[Array, "{self.config.width} dv"]:
        """The head's columns of some tokens; of a packed head no others are widened."""
        head = self.head
        return Exchange(self.mesh).columns(head.columns, head.kernel.shape[1], vocabulary)

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
        b, r, w = tokens.shape
        exchange = Exchange(self.mesh, (b, r, w))
        x = exchange.own(self.embed(tokens))
        kept = tuple(x for _ in boundaries)
        windows = None
        if c.windowed:
            windows = np.full((c.num_layers,), np.iinfo(np.int32).max // 2, np.int32)
            windows[list(c.windowed)] = c.window
        parts = []
        for run in runs_of(c):
            stack = self.moe_layers if run.has_experts else self.dense_layers
            experts = self.experts if run.has_experts else None
            # A run that is not its whole stack takes its layers by index, as a slice would copy
            # them. With gradients each layer's experts are scan inputs; otherwise closed over.
            sliced = experts if differentiable and run.whole else None
            own = slice(run.first, run.first + run.count)

            def body(carry, inputs, run=run, stack=stack, experts=experts):
                x, kept = carry
                layer, sliced, index, window = inputs
                if layer is None:
                    take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
                    layer = jax.tree.map(lambda w: take(w, index + run.start), stack)

                def route(x, chosen, weights):
                    assert experts is not None
                    chosen, weights = exchange.mine(chosen, weights, experts.kernels.count)
                    if sliced is None:
                        at = index + run.start
                        return experts(x, chosen, weights, at, differentiable)
                    alone = jax.tree.map(lambda w: w[None], sliced)
                    return alone(x, chosen, weights, jnp.zeros((), jnp.int32), differentiable)

                number = index + run.first
                if self.kernels is not None:
                    bind(layer, self.kernels, number)
                x, rows = layer(
                    x,
                    scope,
                    cache,
                    number,
                    route if run.has_experts else None,
                    window,
                    differentiable,
                    exchange,
                )
                kept = tuple(
                    jnp.where(number + 1 == b, x, old)
                    for b, old in zip(boundaries, kept, strict=True)
                )
                return (x, kept), None if cache is None else rows

            inputs = (
                stack if run.whole else None,
                sliced,
                jnp.arange(run.count, dtype=jnp.int32),
                None if windows is None else jnp.asarray(windows[own]),
            )
            (x, kept), rows = jax.lax.scan(body, (x, kept), inputs)
            parts.append(rows)
        x = exchange.whole(x)
        features = None
        if boundaries:
            features = exchange.whole(jnp.concatenate(kept, axis=-1)).reshape(b, r * w, -1)
        rows = None
        if cache is not None:
            joined = jax.tree.map(lambda *p: jnp.concatenate(p, axis=0), *parts)
            rows = Rows(keys=joined[0], values=joined[1])
        return x, features, rows

    def apart(self) -> "Verifier":
        """A copy whose passes over a few tokens are faster on CPU; forward only.

        Kernels lie [out, in] in arrays of their own, which no scan copies out of a stack; packed
        ones are read from their stack. All else is shared.

        Raises:
            UnsupportedError: latent attention or experts, which read their arrays by themselves, or
                a mesh.
        """
        c = self.config
        if c.latent or c.moe_layers or self.mesh is not None:
            found = "latent attention" if c.latent else "experts" if c.moe_layers else "a mesh"
            raise UnsupportedError(
                "layers apart: expected grouped-query attention and dense layers throughout on one "
                f"device, found {found}; decode with the verifier itself"
            )
        copy = jax.tree.map(lambda x: x, self)
        copy.kernels = nnx.data(take_apart(copy.dense_layers))
        if not isinstance(self.head.kernel, PackedWeight):
            copy.head = Turned(self.head)
        return copy

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
            UnsupportedError: a text that needs dynamic rope.
        """
        spec = self.spec(boundaries)
        rope, length = self.config.rope, tokens.shape[1]
        if rope.kind == "dynamic" and length > rope.original_length:
            raise UnsupportedError(
                f"a text of {length} tokens needs dynamic rope, whose frequencies depend on the "
                f"text's length; this verifier reads up to {rope.original_length} tokens"
            )
        if not isinstance(tokens, Tracer):
            check_tokens(tokens, self.config.vocab_size)
        return _score(self, tokens, spec)


@functools.partial(jax.jit, static_argnames="spec")
def _score(verifier: Verifier, tokens: Int[Array, "b t"], spec: FeatureSpec) -> Scores:
    def own(verifier, tokens):
        scope = text_scope(jnp.zeros_like(tokens))
        hidden, features, _ = verifier.forward(tokens[..., None], scope, None, spec.boundaries)
        return verifier.own_logits(hidden[:, :, 0]), features

    rows = row_axis(verifier.mesh, tokens.shape[0])
    read = over_mesh(
        verifier.mesh,
        own,
        (specs_of(verifier), PartitionSpec(rows)),
        (PartitionSpec(rows, None, MODEL), PartitionSpec(rows)),
    )
    logits, features = read(verifier, tokens)
    return Scores(logits=logits, features=VerifierFeatures(array=features, spec=spec))


def _rows(table: Array, tokens: Int[Array, "*lead"]) -> Array:
    """Rows of a table, [*lead width]."""
    if tokens.size > FEW_TOKENS:
        return table[tokens]
    # XLA:CPU hands a gather from a big table to its thread pool, however small the gather.
    rows = [jax.lax.dynamic_slice_in_dim(table, token, 1) for token in tokens.reshape(tokens.size)]
    return jnp.concatenate(rows).reshape(*tokens.shape, table.shape[1])


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
