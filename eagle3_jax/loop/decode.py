"""Decoding: the state of the rows, and the four stages over it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int, Num

from eagle3_jax.caches import (
    UNROLLED_ROWS,
    Cache,
    Rows,
    block_scope,
    causal,
    take_path,
    write_rows,
)
from eagle3_jax.configs import Speculation
from eagle3_jax.contracts import DraftHidden, FeatureSpec, RequestError, VerifierFeatures
from eagle3_jax.drafter.drafter import Drafter, Roots, context_pass
from eagle3_jax.forest.drawing import (
    Asked,
    Drawn,
    draft_weights,
    judge_block,
    walk,
    walk_sampled,
)
from eagle3_jax.forest.growth import Choose, greedy, grow_chain
from eagle3_jax.forest.judging import judge_greedily, likeliest
from eagle3_jax.forest.processing import (
    CANDIDATES,
    Plan,
    RowSettings,
    draw,
    empty_settings,
    ends,
    uniforms,
)
from eagle3_jax.forest.topology import Forest, chain
from eagle3_jax.forest.trees import grow_tree
from eagle3_jax.verifier.decoder import Verifier
from kernels_pallas import Backend
from sharding.exchange import Exchange
from sharding.mapped import ROWS, WHOLE, specs_by, stage_specs
from sharding.mesh import DATA, MODEL, shape_of
from sharding.placement import made, put


@nnx.dataclass
class DecodeState(nnx.Pytree):
    """All rows of a decoding batch; slot = position.

    tokens   p p p p a a b .    p prompt, a accepted, b bonus (the next root)
    verifier x x x x x x        rows below `length`
    drafter  x x x x            rows below `draft_length`; `pending` has the features between

    Attributes:
        tokens: every row's text so far.
        drafted: 1 where a new token is an accepted draft, 0 where it is the verifier's own; int8.
        length: verifier rows committed; `tokens[length]` is known, its row not yet.
        draft_length: drafter context rows committed.
        pending: features of the rows between `draft_length` and `length`; None without a drafter.
        cache: the verifier's.
        draft_cache: the drafter's; None without a drafter.
        end: tokens of the text that count, the end token among them.
        limit: `end` at which the row stops.
        done: nothing more happens to the row.
        waiting: prompts wait for a row, so the loop stops as soon as one is done.
        settings: how each row's tokens are chosen.
        seen: tokens of each row's text; None where no row has a repetition penalty.
        logprobs: of new tokens under the verifier's own distribution; None unasked.
        cycles: cycles the row was live in.
        accepted: cycles in which the node of each depth was accepted; of plain decoding a zero.
    """

    tokens: Int[Array, "b s"] = nnx.data()
    drafted: Int[Array, "b s"] = nnx.data()
    length: Int[Array, " b"] = nnx.data()
    draft_length: Int[Array, " b"] = nnx.data()
    pending: Float[Array, "b p f"] | None = nnx.data()
    cache: Cache = nnx.data()
    draft_cache: Cache | None = nnx.data()
    end: Int[Array, " b"] = nnx.data()
    limit: Int[Array, " b"] = nnx.data()
    done: Bool[Array, " b"] = nnx.data()
    waiting: Bool[Array, ""] = nnx.data()
    settings: RowSettings = nnx.data()
    seen: Bool[Array, "b v"] | None = nnx.data()
    logprobs: Float[Array, "b s"] | None = nnx.data()
    cycles: Int[Array, " b"] = nnx.data()
    accepted: Int[Array, "b n"] = nnx.data()


@nnx.dataclass
class NodeScores(nnx.Pytree):
    """The verifier's pass over a forest.

    Attributes:
        logits: at every slot.
        features: at every slot; None without a drafter.
        rows: cache rows of every slot.
    """

    logits: Float[Array, "b w v"] = nnx.data()
    features: Float[Array, "b w f"] | None = nnx.data()
    rows: Rows = nnx.data()


@nnx.dataclass
class DecodeStages(nnx.Pytree):
    """Decoding's four stages.

    Attributes:
        verifier: frozen.
        drafter: None for plain decoding, which runs the same code with nothing drafted.
        speculation: static.
        plan: what the rows ask for in all; static.
        choose: how a drafted token is chosen; static. None is by the speculation: the likeliest, or
            drawn.
        reader: the verifier in the form that passes over nodes are fastest in (`loop/forms.py`);
            None is `verifier`, which reads the prompts.
        kernels: which form of attention and of the tree walk a cycle's passes take; static.
    """

    verifier: Verifier = nnx.data()
    drafter: Drafter | None = nnx.data()
    speculation: Speculation = nnx.static()
    plan: Plan = nnx.static(default=Plan())
    choose: Choose | None = nnx.static(default=None)
    reader: Verifier | None = nnx.data(default=None)
    kernels: Backend = nnx.static(default="xla")

    @property
    def depth(self) -> int:
        """Drafted nodes along a path; 0 without a drafter."""
        return 0 if self.drafter is None else self.speculation.depth

    @property
    def sampled(self) -> bool:
        """Whether candidates are drawn; where no row draws, the likeliest are what they are."""
        return self.speculation.sampled and self.plan.drawn

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Residual streams that the verifier's pass keeps for the drafter."""
        return () if self.drafter is None or self.depth == 0 else self.drafter.spec.boundaries

    @property
    def spec(self) -> FeatureSpec:
        """What the verifier's features are, for the drafter's contract."""
        return self.verifier.spec(self.boundaries)

    def slack(self) -> int:
        """Slots past a row's limit that a cycle may write to."""
        return 2 * (self.depth + 2)

    def make_state(self, rows: int, capacity: int) -> DecodeState:
        """A state of empty rows, all done.

        Raises:
            RequestError: rows that do not divide over a mesh.
        """
        mesh = self.verifier.mesh
        if mesh is None:
            return self._empty(rows, capacity)
        if rows % (data := shape_of(mesh).data):
            raise RequestError(f"{rows} rows do not divide over data {data}; name a multiple of it")
        make = functools.partial(self._empty, rows, capacity)
        return made(make, mesh, self._specs(jax.eval_shape(make)))

    def mapped(self, state: DecodeState) -> tuple[Mesh, Any, Any] | None:
        """Decoding runs device by device, each group of them with its own rows."""
        mesh = self.verifier.mesh
        if mesh is None:
            return None
        return mesh, stage_specs(self), self._specs(state)

    def _specs(self, state: DecodeState) -> Any:
        """The state with a partition spec in place of every array."""
        heads = None if self.verifier.config.latent else MODEL
        own = {
            "cache": PartitionSpec(None, DATA, heads),
            "draft_cache": PartitionSpec(None, DATA),
            "waiting": WHOLE,
        }
        return specs_by(state, lambda path, _: own.get(path.split(".")[0], ROWS))

    def placed(self, state: DecodeState) -> DecodeState:
        """The state where the loop wants it; arrays that are there stay."""
        mesh = self.verifier.mesh
        return state if mesh is None else put(state, mesh, self._specs(state))

    def _empty(self, rows: int, capacity: int) -> DecodeState:
        drafting = self.depth > 0
        path = self.depth + 1
        v = self.verifier.config.vocab_size

        def zeros():
            return jnp.zeros((rows,), jnp.int32)

        pending = draft_cache = None
        if drafting:
            assert self.drafter is not None
            width = self.drafter.spec.fused_width
            pending = jnp.zeros((rows, path, width), self.verifier.dtype)
            draft_cache = self.drafter.make_cache(rows, capacity)
        return DecodeState(
            tokens=jnp.zeros((rows, capacity), jnp.int32),
            drafted=jnp.zeros((rows, capacity), jnp.int8),
            length=zeros(),
            draft_length=zeros(),
            pending=pending,
            cache=self.verifier.make_cache(rows, capacity),
            draft_cache=draft_cache,
            end=zeros(),
            limit=zeros(),
            done=jnp.ones((rows,), bool),
            waiting=jnp.zeros((), bool),
            settings=empty_settings(rows, v, self.plan),
            seen=jnp.zeros((rows, v), bool) if self.plan.penalty else None,
            logprobs=jnp.zeros((rows, capacity)) if self.plan.logprobs else None,
            cycles=zeros(),
            # Not empty in plain decoding either: jaxlib 0.11.2 crashes where it compiles a mapped
            # loop that carries an empty array.
            accepted=jnp.zeros((rows, max(self.depth, 1)), jnp.int32),
        )

    def going(self, state: DecodeState) -> Bool[Array, ""]:
        """While a row is live, and, where prompts wait, while all are."""
        anywhere = Exchange(self.verifier.mesh).anywhere
        any_done, any_live = anywhere(jnp.any(state.done)), anywhere(jnp.any(~state.done))
        return jnp.where(state.waiting, ~any_done, any_live)

    def draft(self, state: DecodeState) -> tuple[DecodeState, Forest]:
        """Refresh the drafter's context with true features, then grow nodes from its last row."""
        b, s = state.tokens.shape
        root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
        if self.drafter is None or self.depth == 0:
            return state, chain(root, jnp.zeros((b, 0), jnp.int32), None)
        assert state.draft_cache is not None and state.pending is not None
        path = self.depth + 1
        offset = jnp.broadcast_to(jnp.arange(path, dtype=jnp.int32)[None], (b, path))
        following = jnp.minimum(state.draft_length[:, None] + offset + 1, s - 1)
        hidden, rows = context_pass(
            self.drafter,
            VerifierFeatures(array=state.pending, spec=self.spec),
            self.verifier.embed(jnp.take_along_axis(state.tokens, following, axis=1)),
            block_scope(state.draft_length, offset, causal(b, path), backend=self.kernels),
            state.draft_cache,
        )
        cache = write_rows(
            state.draft_cache,
            Rows(keys=rows.keys, values=rows.values),
            state.draft_length,
            after=hidden.array,
        )
        last = jnp.maximum(state.length - state.draft_length - 1, 0)
        hidden = DraftHidden(array=jnp.take_along_axis(hidden.array, last[:, None, None], axis=1))
        roots = Roots(
            positions=state.length[:, None] - 1,
            lo=jnp.zeros((b, 1), jnp.int32),
            hi=state.length[:, None],
            context=cache,
            backend=self.kernels,
        )
        state = dataclasses.replace(state, draft_cache=cache)
        embed = self.verifier.embed
        settings = state.settings if self.sampled else None
        if self.speculation.topk > 1:
            forest = grow_tree(self.drafter, embed, hidden, root, roots, self.speculation, settings)
            return state, forest
        choose = self.choose or greedy
        if settings is not None:
            choose = drawn_chain(settings, state.length)
        drafted, logits = grow_chain(self.drafter, embed, hidden, roots, self.depth, choose)
        return state, chain(root, drafted, logits)

    def verify(self, state: DecodeState, forest: Forest) -> NodeScores:
        """One verifier pass over root and nodes."""
        verifier = self.verifier if self.reader is None else self.reader
        hidden, features, rows = verifier.forward(
            forest.tokens[:, None],
            block_scope(state.length, forest.depth, forest.ancestors, backend=self.kernels),
            state.cache,
            self.boundaries,
        )
        assert rows is not None
        return NodeScores(logits=verifier.read_out(hidden[:, 0]), features=features, rows=rows)

    def judge(self, state: DecodeState, forest: Forest, scores: NodeScores) -> Drawn:
        """The accepted path and the token after it, by the rows' processed distributions."""
        logits = scores.logits
        if self.plan.plainly_greedy:
            verdict = judge_greedily(forest, logits, self.depth, self.kernels)
            return Drawn(verdict=verdict, seen=None, logprobs=None)
        asked = Asked(
            settings=state.settings,
            plan=self.plan,
            eos=self.verifier.config.eos_tokens,
            length=state.length + 1,
            seen=state.seen,
            live=jnp.logical_not(state.done),
            text=None if self.plan.hook is None else state.tokens,
        )
        if self.depth == 0 or not self.sampled:
            return walk(forest, logits, asked, self.depth)
        assert self.drafter is not None
        vocabulary = self.drafter.vocabulary[...]
        if self.speculation.topk == 1 and self.speculation.block:
            return judge_block(forest, logits, vocabulary, asked)
        return walk_sampled(forest, logits, vocabulary, asked, self.depth)

    def commit(
        self, state: DecodeState, forest: Forest, scores: NodeScores, drawn: Drawn
    ) -> DecodeState:
        """Write the accepted rows and tokens; end the rows that are through."""
        verdict = drawn.verdict
        live = jnp.logical_not(state.done)
        path, count = verdict.path, verdict.count
        b, p = path.shape
        accepted_rows = take_path(scores.rows, path)
        cache = write_rows(state.cache, accepted_rows, state.length, after=scores.logits)

        # New tokens: the accepted nodes, then the bonus token.
        slot = jnp.arange(p, dtype=jnp.int32)[None]
        after = jnp.take_along_axis(forest.tokens, jnp.roll(path, -1, axis=1), axis=1)
        new = jnp.where(slot == count[:, None] - 1, verdict.bonus[:, None], after)
        drafted = (slot < count[:, None] - 1).astype(jnp.int8)
        inside = slot < count[:, None]
        last = ends(new, self.verifier.config.eos_tokens, state.settings) & inside
        until_end = jnp.where(jnp.any(last, axis=1), jnp.argmax(last, axis=1).astype(jnp.int32), p)
        emitted = jnp.minimum(jnp.minimum(count, until_end + 1), state.limit - state.end)
        end = jnp.where(live, state.end + emitted, state.end)
        ended = jnp.any(last & (slot < emitted[:, None]), axis=1)
        depths = jnp.arange(1, 1 + state.accepted.shape[1], dtype=jnp.int32)
        accepted = depths[None] < count[:, None]
        pending = None
        if scores.features is not None and state.pending is not None:
            pending = jnp.take_along_axis(scores.features, path[..., None], axis=1)
            pending = jnp.where(live[:, None, None], pending, state.pending)
        logprobs = state.logprobs
        if logprobs is not None:
            assert drawn.logprobs is not None
            logprobs = write_tokens(logprobs, drawn.logprobs, state.length + 1, live)
        return dataclasses.replace(
            state,
            tokens=write_tokens(state.tokens, new, state.length + 1, live),
            seen=drawn.seen,
            logprobs=logprobs,
            drafted=write_tokens(state.drafted, drafted, state.length + 1, live),
            length=jnp.where(live, state.length + count, state.length),
            draft_length=jnp.where(live, state.length, state.draft_length),
            pending=pending,
            cache=cache,
            end=end,
            done=state.done | ended | (end >= state.limit),
            cycles=state.cycles + live.astype(jnp.int32),
            accepted=state.accepted + (accepted & live[:, None]).astype(jnp.int32),
        )


def drawn_chain(settings: RowSettings, length: Int[Array, " b"]) -> Choose:
    """Candidates of a chain drawn from the drafter at each row's temperature.

    Args:
        settings: of the rows; a greedy row's candidate is the likeliest.
        length: of each row's committed text, so that a node of depth 1 has the position after it.
    """

    def choose(logits, depth):
        likeliest_ids = likeliest(logits)
        weights = draft_weights(logits, settings)[:, 0]
        position = length + depth
        # By depth too: block verification looks at nodes past the accepted path, and a position's
        # draw in the next cycle must not be the one that was looked at in this.
        coin = uniforms(settings.key, position, jnp.full_like(position, CANDIDATES) + depth)
        warm = settings.temperature > 0
        return jnp.where(warm[:, None], draw(weights, coin)[:, None], likeliest_ids)

    return choose


def write_tokens(
    tokens: Num[Array, "b s"], new: Num[Array, "b p"], start: Int[Array, " b"], live
) -> Num[Array, "b s"]:
    """Write a few tokens (or what belongs to tokens) at each live row's own place."""

    def put(i, tokens):
        p = new.shape[1]
        old = jax.lax.dynamic_slice(tokens, (i, start[i]), (1, p))
        row = jnp.where(live[i], jax.lax.dynamic_slice(new, (i, 0), (1, p)), old)
        return jax.lax.dynamic_update_slice(tokens, row, (i, start[i]))

    if new.shape[0] <= UNROLLED_ROWS:
        for i in range(new.shape[0]):
            tokens = put(i, tokens)
        return tokens
    return jax.lax.fori_loop(0, new.shape[0], put, tokens)
