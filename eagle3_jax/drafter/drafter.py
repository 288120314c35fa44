"""The EAGLE-3 drafter: fusion, one [embedding, hidden] layer, its own head.

`fuse` is the only road from the verifier's features to the drafter's hidden state, and `layer`, the
one layer that every kind of pass runs, takes nothing but that hidden state.

Source: EAGLE-3, arXiv 2503.01840, as SafeAILab/EAGLE `eagle/model/cnets.py` implements it; the
variants that the configuration's flags name, as vllm-project/speculators `models/eagle3` does.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from eagle3_jax.caches import Cache, Scope
from eagle3_jax.configs import DrafterConfig
from eagle3_jax.contracts import ContractError, DraftHidden, FeatureSpec, VerifierFeatures
from eagle3_jax.layers import Linear, Mlp, RmsNorm, stacked
from eagle3_jax.verifier.rope import rotate
from kernels_pallas import Backend, forest_attention


class Fixed(nnx.Variable):
    """An array that belongs to a module and is never trained."""


@nnx.dataclass
class Block(nnx.Pytree):
    """The drafter's keys and values of every node grown so far, by root; u slots, filled in order.

    Attributes:
        keys: slots not filled yet are seen by nobody.
        values: likewise.
    """

    keys: Float[Array, "b r u k hd"] = nnx.data()
    values: Float[Array, "b r u k hv"] = nnx.data()


class Drafter(nnx.Module):
    """A one-layer EAGLE-3 drafter.

    Attributes:
        config: static.
        spec: which features of which verifier it is fed; static.
        recommended: what its manifest recommends (speculation, dtype), or None; static.
    """

    def __init__(
        self,
        config: DrafterConfig,
        spec: FeatureSpec,
        key: Key[Array, ""],
        recommended: tuple[tuple[str, object], ...] = (),
    ):
        c = config
        if (spec.width, len(spec.boundaries)) != (c.verifier_width, c.num_features):
            raise ContractError(
                f"a drafter for {c.num_features} features of width {c.verifier_width} was given "
                f"the spec of {len(spec.boundaries)} features of width {spec.width}"
            )
        keys = jax.random.split(key, 5)
        self.config = c
        self.spec = spec
        self.recommended = recommended
        # Before fusion: one weight a feature, [n d], or one over all of them, [f].
        self.fc_norm = (
            stacked(lambda _: RmsNorm(c.verifier_width, c.norm_eps), key, c.num_features)
            if c.fc_norm
            else None
        )
        self.input_norm = RmsNorm(spec.fused_width, c.norm_eps) if c.norm_before_fc else None
        self.fusion = Linear(keys[0], spec.fused_width, c.width)
        self.embedding_norm = RmsNorm(c.verifier_width, c.norm_eps)
        self.hidden_norm = RmsNorm(c.width, c.norm_eps)
        heads = c.num_heads + 2 * c.num_kv_heads
        self.qkv = Linear(keys[1], c.verifier_width + c.width, heads * c.head_width)
        self.q_norm = RmsNorm(c.head_width, c.norm_eps) if c.qk_norm else None
        self.k_norm = RmsNorm(c.head_width, c.norm_eps) if c.qk_norm else None
        self.o = Linear(keys[2], c.num_heads * c.head_width, c.width)
        self.mlp_norm = RmsNorm(c.width, c.norm_eps)
        self.mlp = Mlp(keys[3], c.width, c.mlp_width)
        self.norm = RmsNorm(c.width, c.norm_eps)
        self.head = Linear(keys[4], c.width, c.draft_vocab_size)
        # Verifier ids of the draft vocabulary, ascending.
        self.vocabulary = Fixed(jnp.arange(c.draft_vocab_size, dtype=jnp.int32))

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return self.fusion.kernel.dtype

    def make_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache of context rows."""
        c = self.config
        shape = (1, rows, c.num_kv_heads, capacity, c.head_width)
        return Cache(keys=jnp.zeros(shape, self.dtype), values=jnp.zeros(shape, self.dtype))

    def make_block(self, rows: int, roots: int, slots: int) -> Block:
        """An empty block of `slots` own keys a root."""
        c = self.config
        shape = (rows, roots, slots, c.num_kv_heads, c.head_width)
        return Block(keys=jnp.zeros(shape, self.dtype), values=jnp.zeros(shape, self.dtype))

    def fuse(self, features: VerifierFeatures) -> DraftHidden:
        """The drafter's first hidden state: the verifier's features, projected to its width.

        With `fc_norm` each feature is normed before that, with `norm_before_fc` all together.

        Raises:
            ContractError: features of other boundaries or of another verifier's width.
        """
        self.spec.require(features.spec, of="the features passed", identity=False)
        x = features.array
        if self.fc_norm is not None:
            parts = x.reshape(*x.shape[:-1], self.config.num_features, self.config.verifier_width)
            each = jax.vmap(lambda norm, part: norm(part), in_axes=(0, -2), out_axes=-2)
            x = each(self.fc_norm, parts).reshape(x.shape)
        if self.input_norm is not None:
            x = self.input_norm(x)
        return DraftHidden(array=self.fusion(x))

    def layer(
        self,
        hidden: DraftHidden,
        embeddings: Float[Array, "b t {self.config.verifier_width}"],
        scope: Scope,
        context: Cache | None,
        block: Block | None = None,
        slot: Int[Array, ""] | int = 0,
        differentiable: bool = False,
    ) -> tuple[DraftHidden, Block]:
        """One pass of the layer over a forest, t = r * w.

        Args:
            hidden: fused features (context pass) or the drafter's own (growth step).
            embeddings: of the token that follows each position; the verifier's, passed in.
            scope: where the queries stand and what they see.
            context: cached context rows; None where the pass's own rows are the context (a whole
                text, one root a position).
            block: nodes grown so far; None for a context pass, whose block is the pass itself.
            slot: first block slot that this pass fills.
            differentiable: the form with gradients.

        Returns:
            The hidden state to feed back (before the final norm; with `norm_output` after it), and
            the block with this pass's keys and values (for a context pass: just those).
        """
        c = self.config
        b, r, w = scope.positions.shape
        h, k, hd = c.num_heads, c.num_kv_heads, c.head_width
        g = hidden.array.astype(self.dtype)
        normed = self.hidden_norm(g)
        u = jnp.concatenate([self.embedding_norm(embeddings.astype(self.dtype)), normed], axis=-1)
        q, key, value = jnp.split(self.qkv(u), [h * hd, (h + k) * hd], axis=-1)
        q, key = q.reshape(b, r, w, h, hd), key.reshape(b, r, w, k, hd)
        if self.q_norm is not None and self.k_norm is not None:
            q, key = self.q_norm(q), self.k_norm(key)
        q, key = rotate(q, scope.positions, c.rope), rotate(key, scope.positions, c.rope)
        value = value.reshape(b, r, w, k, hd)
        if block is None:
            block = Block(keys=key, values=value)
        else:
            at = (0, 0, slot, 0, 0)
            block = Block(
                keys=jax.lax.dynamic_update_slice(block.keys, key, at),
                values=jax.lax.dynamic_update_slice(block.values, value, at),
            )
        if context is None:
            context = rows_of(block)
        assert context.values is not None
        out = forest_attention(
            q,
            context.keys,
            context.values,
            0,
            scope.lo,
            scope.hi,
            block.keys,
            block.values,
            scope.ancestors,
            scale=hd**-0.5,
            row=scope.row,
            differentiable=differentiable,
            backend=scope.backend,
        )
        g = (normed if c.norm_before_residual else g) + self.o(out.reshape(b, r * w, h * hd))
        g = g + self.mlp(self.mlp_norm(g))
        return DraftHidden(array=self.norm(g) if c.norm_output else g), block

    def read_out(self, hidden: DraftHidden) -> Float[Array, "b t dv"]:
        """Float32 logits over the draft vocabulary."""
        g = hidden.array if self.config.norm_output else self.norm(hidden.array)
        return self.head(g).astype(jnp.float32)

    def to_verifier(self, draft_ids: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
        """Verifier ids of draft ids."""
        return self.vocabulary[...][draft_ids]


def rows_of(block: Block) -> Cache:
    """A context pass's keys and values as cache rows: [b r u k hd] -> [1 b k n hd], n = r * u."""

    def flat(x):
        b, r, u, k, width = x.shape
        return x.reshape(b, r * u, k, width).swapaxes(1, 2)[None]

    return Cache(keys=flat(block.keys), values=flat(block.values))


def context_pass(
    drafter: Drafter,
    features: VerifierFeatures,
    embeddings: Float[Array, "b t d"],
    scope: Scope,
    context: Cache | None,
    differentiable: bool = False,
) -> tuple[DraftHidden, Cache]:
    """Rows from true features: prefill and refresh when decoding, step 0 when learning.

    Row t pairs the features at position t with the embedding of token t + 1, at rope position t.

    Returns:
        The rows' hidden states and their keys and values, as cache rows.
    """
    hidden, block = drafter.layer(
        drafter.fuse(features), embeddings, scope, context, differentiable=differentiable
    )
    return hidden, rows_of(block)


@nnx.dataclass
class Roots(nnx.Pytree):
    """Context rows that nodes grow from.

    Attributes:
        positions: rope position of each root's row.
        lo: first context slot its nodes see.
        hi: one past the last; the root's own row is the last.
        context: the context rows.
        backend: which form of attention their nodes take; static.
    """

    positions: Int[Array, "b r"] = nnx.data()
    lo: Int[Array, "b r"] = nnx.data()
    hi: Int[Array, "b r"] = nnx.data()
    context: Cache = nnx.data()
    backend: Backend = nnx.static(default="xla")


def node_positions(roots: Roots, depth: Int[Array, ""] | int) -> Int[Array, "b r"]:
    """Rope positions of the nodes of one depth: that many past the root's row."""
    return roots.positions + depth


def growth_step(
    drafter: Drafter,
    hidden: DraftHidden,
    embeddings: Float[Array, "b t d"],
    roots: Roots,
    depth: Int[Array, ""] | int,
    block: Block,
    slot: Int[Array, ""] | int,
    ancestors: Bool[Array, "b w u"],
    differentiable: bool = False,
) -> tuple[DraftHidden, Block]:
    """Nodes of one depth from their parents' hidden states; learning and decoding both run this.

    Args:
        hidden: of each node's parent, t = r * w.
        embeddings: of each node's own token.
        roots: where they grow from.
        depth: of these nodes; the root's children have 1.
        block: nodes grown so far.
        slot: block slot of the first of these nodes.
        ancestors: block slots each of the w nodes sees, its own among them.
    """
    b, r = roots.positions.shape
    w = ancestors.shape[1]
    scope = Scope(
        positions=jnp.broadcast_to(node_positions(roots, depth)[..., None], (b, r, w)),
        lo=jnp.broadcast_to(roots.lo[..., None], (b, r, w)),
        hi=roots.hi,
        ancestors=ancestors,
        row=jnp.zeros((), jnp.int32),
        backend=roots.backend,
    )
    return drafter.layer(hidden, embeddings, scope, roots.context, block, slot, differentiable)
