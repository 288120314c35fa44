"""Learning: training-time test as four stages of the one loop.

Every position of a text is a root with one chain below it whose tokens are the text's own. Drafter
row t pairs the features at position t with the embedding of token t + 1 and predicts token t + 2;
step i of its chain pairs the row's own hidden state with token t + 1 + i, at rope position t + i,
and is judged by the verifier's distribution at position t + 1 + i.

    position          t      t+1      t+2      t+3
    text              x_t    x_t+1    x_t+2    x_t+3
    step 0 of root t         fed      judged
    step 1 of root t                  fed      judged

Source: EAGLE-3, arXiv 2503.01840, section 3.2; alignment as in `docs/alignment.md`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from eagle3_jax.caches import text_scope
from eagle3_jax.contracts import DraftHidden, VerifierFeatures
from eagle3_jax.drafter.drafter import Drafter, Roots, context_pass, growth_step
from eagle3_jax.forest.judging import agree, likeliest
from eagle3_jax.layers import matmul
from eagle3_jax.verifier.decoder import Verifier
from sharding.exchange import Exchange
from sharding.mapped import ROWS, WHOLE, over_mesh, specs_by, specs_of, stage_specs
from sharding.mesh import DATA, shape_of
from sharding.placement import gathered, put, shardings, spread


@nnx.dataclass
class Reading(nnx.Pytree):
    """The verifier's verdict for every node of a text, from one teacher-forced pass.

    Attributes:
        features: at every position.
        hidden: the residual stream after the last layer, from which its distribution follows.
        best: its greedy choice.
    """

    features: Float[Array, "*lead t f"] = nnx.data()
    hidden: Float[Array, "*lead t d"] = nnx.data()
    best: Int[Array, "*lead t"] = nnx.data()


@nnx.dataclass
class Batches(nnx.Pytree):
    """Packed texts, a cycle's worth each.

    Attributes:
        tokens: verifier ids.
        starts: the position at which each position's document starts.
        learn: whether a token, as the one predicted, is learned from.
        reading: the verifier's of these texts where it is kept; None: they are read as they come.
    """

    tokens: Int[Array, "n b t"] = nnx.data()
    starts: Int[Array, "n b t"] = nnx.data()
    learn: Bool[Array, "n b t"] = nnx.data()
    reading: Reading | None = nnx.data(default=None)


@nnx.dataclass
class Tally(nnx.Pytree):
    """Sums since the tally was last emptied, by step of training-time test.

    Attributes:
        loss: cross-entropy in nats, summed over learned rows.
        correct: rows where the drafter's choice is the verifier's.
        rows: rows judged, those whose best token the drafter cannot say among them.
        learned: rows the loss is taken over.
        cycles: updates.
    """

    loss: Float[Array, " n"] = nnx.data()
    correct: Float[Array, " n"] = nnx.data()
    rows: Float[Array, " n"] = nnx.data()
    learned: Float[Array, " n"] = nnx.data()
    cycles: Int[Array, ""] = nnx.data()


def empty_tally(steps: int) -> Tally:
    """A tally of nothing."""
    zeros = [jnp.zeros((steps,), jnp.float32) for _ in range(4)]
    return Tally(*zeros, cycles=jnp.zeros((), jnp.int32))


@nnx.dataclass
class LearnState(nnx.Pytree):
    """What learning changes.

    Attributes:
        drafter: its parameters are trained; its vocabulary is not.
        moments: the optimiser's.
        batches: the coming cycles' texts.
        cycle: which of them is next.
        tally: losses and agreement so far.
    """

    drafter: Drafter = nnx.data()
    moments: Any = nnx.data()
    batches: Batches = nnx.data()
    cycle: Int[Array, ""] = nnx.data()
    tally: Tally = nnx.data()


@nnx.dataclass
class TextForest(nnx.Pytree):
    """Chains of given tokens, one below every position.

    Attributes:
        tokens: the text itself; slot i of root t is token t + 1 + i.
        starts: document starts.
        judged: whether step i of root t is judged: the predicted token t + 2 + i lies in the root's
            document and is learned from.
        reading: as in `Batches`.
    """

    tokens: Int[Array, "b t"] = nnx.data()
    starts: Int[Array, "b t"] = nnx.data()
    judged: Bool[Array, "n b t"] = nnx.data()
    reading: Reading | None = nnx.data(default=None)


@nnx.dataclass
class LearnVerdict(nnx.Pytree):
    """Gradients and what they were taken of."""

    gradients: Any = nnx.data()
    tally: Tally = nnx.data()


def ahead(x: Array, by: int) -> Array:
    """`x[:, t + by]` at t, zero (False) past the end."""
    pad = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad)[:, by:]


def behind(x: Array, by: int) -> Array:
    """`x[:, t - by]` at t, zero (False) before the beginning."""
    pad = [(0, 0), (by, 0)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad)[:, : x.shape[1]]


def read_text(
    verifier: Verifier,
    tokens: Int[Array, "b t"],
    starts: Int[Array, "b t"],
    boundaries: tuple[int, ...],
) -> Reading:
    """One teacher-forced pass over packed texts.

    Args:
        verifier: frozen.
        tokens: the texts.
        starts: document starts.
        boundaries: of the features.
    """
    hidden, features, _ = verifier.forward(tokens[..., None], text_scope(starts), None, boundaries)
    assert features is not None
    hidden = hidden[:, :, 0]
    logits = verifier.own_logits(hidden)
    best = Exchange(verifier.mesh).likeliest(logits, likeliest(logits))
    return Reading(features=features, hidden=hidden, best=best)


def read_on_mesh(
    verifier: Verifier,
    tokens: Int[Array, "b t"],
    starts: Int[Array, "b t"],
    boundaries: tuple[int, ...],
) -> Reading:
    """`read_text` of whole arrays, by a verifier on one device or over a mesh."""
    read = functools.partial(read_text, boundaries=boundaries)
    specs = specs_of(verifier), ROWS, ROWS
    return over_mesh(verifier.mesh, read, specs, ROWS)(verifier, tokens, starts)


@jax.custom_vjp
def cross_entropy(
    logits: Float[Array, "b t dv"], target: Float[Array, "b t dv"]
) -> Float[Array, "b t"]:
    """In nats, of a target that sums to 1 and is not learned; one pass over the logits each way."""
    return _cross_entropy(logits, target)[0]


def _cross_entropy(logits, target):
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.sum(target * logits, axis=-1), (logits, target, total)


def _cross_entropy_backward(kept, g):
    logits, target, total = kept
    return g[..., None] * (jnp.exp(logits - total[..., None]) - target), None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_backward)


def chain_logits(
    drafter: Drafter,
    verifier: Verifier,
    features: VerifierFeatures,
    tokens: Int[Array, "b t"],
    starts: Int[Array, "b t"],
    steps: int,
) -> list[Float[Array, "b t dv"]]:
    """The drafter's logits at every step of every root's chain; arguments are `chain_hidden`'s.

    Returns:
        One array a step; entry t of step i is over token t + 2 + i.
    """
    chain = chain_hidden(drafter, verifier, features, tokens, starts, steps)
    return [drafter.read_out(hidden) for hidden in chain]


def chain_hidden(
    drafter: Drafter,
    verifier: Verifier,
    features: VerifierFeatures,
    tokens: Int[Array, "b t"],
    starts: Int[Array, "b t"],
    steps: int,
) -> list[DraftHidden]:
    """The drafter's hidden states at every step of every root's chain.

    Args:
        drafter: unrolled on its own hidden state.
        verifier: its embedding only.
        features: the verifier's, at every position.
        tokens: the text.
        starts: document starts; a chain that runs past its document is computed and never judged.
        steps: of the chain.

    Returns:
        One a step; `read_out` of entry t of step i is over token t + 2 + i.
    """
    b, t = tokens.shape
    embed = verifier.embed
    scope = text_scope(starts)
    hidden, context = context_pass(
        drafter, features, embed(ahead(tokens, 1)), scope, None, differentiable=True
    )
    out = [hidden]
    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    roots = Roots(positions=scope.positions[..., 0], lo=starts, hi=index + 1, context=context)
    slots = max(steps - 1, 1)
    block = drafter.make_block(b, t, slots)
    for step in range(1, steps):
        seen = jnp.broadcast_to((jnp.arange(slots) < step)[None, None], (b, 1, slots))
        hidden, block = growth_step(
            drafter,
            hidden,
            embed(ahead(tokens, 1 + step)),
            roots,
            step,
            block,
            step - 1,
            seen,
            differentiable=True,
        )
        out.append(hidden)
    return out


@nnx.dataclass
class LearnStages(nnx.Pytree):
    """Learning's four stages.

    Attributes:
        verifier: frozen.
        optimiser: an optax transformation; static.
        steps: of training-time test; static.
        decay: weight of step i is `decay ** i`; static.
        dtype: of the drafter's products; None is its weights' own, which stay as they are; static.
        spread: over a mesh, the drafter's matrices and moments lie over its data axis, each
            gathered for a cycle's products; else whole on every device, only rows are divided;
            static.
    """

    verifier: Verifier = nnx.data()
    optimiser: optax.GradientTransformation = nnx.static()
    steps: int = nnx.static()
    decay: float = nnx.static()
    dtype: Any = nnx.static(default=None)
    spread: bool = nnx.static(default=True)

    def specs(self, tree: Any) -> Any:
        """How a drafter, its moments or its gradients lie over the mesh; None without one."""
        mesh = self.verifier.mesh
        if mesh is None:
            return None
        data = shape_of(mesh).data if self.spread else 1
        return jax.tree.map(lambda x: spread(x.shape, data), tree)

    def mapped(self, state: LearnState) -> None:
        """A cycle is one program; its passes run device by device, its update on whole arrays."""
        return None

    def placed(self, state: LearnState) -> LearnState:
        """The state where the loop wants it; arrays that are there stay."""
        mesh = self.verifier.mesh
        if mesh is None:
            return state

        data = shape_of(mesh).data if self.spread else 1

        def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
            part = path.split(".")[0]
            if part == "batches":
                return PartitionSpec(None, DATA)
            return spread(shape, data) if part in ("drafter", "moments") else WHOLE

        return put(state, mesh, specs_by(state, spec))

    def _cast(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        """A weight as the products take it; norms' weights stay float32."""
        return weight if self.dtype is None or weight.ndim < 2 else weight.astype(self.dtype)

    def going(self, state: LearnState) -> Bool[Array, ""]:
        """While texts are left."""
        return state.cycle < state.batches.tokens.shape[0]

    def draft(self, state: LearnState) -> tuple[LearnState, TextForest]:
        """Every position a root, its chain the text itself."""

        def now(x):
            return jax.lax.dynamic_index_in_dim(x, state.cycle, keepdims=False)

        tokens, starts, learn = (
            now(x) for x in (state.batches.tokens, state.batches.starts, state.batches.learn)
        )
        judged = jnp.stack(
            [
                ahead(learn, 2 + step) & (ahead(starts + 1, 2 + step) == starts + 1)
                for step in range(self.steps)
            ]
        )
        reading = jax.tree.map(now, state.batches.reading)
        return state, TextForest(tokens=tokens, starts=starts, judged=judged, reading=reading)

    def verify(self, state: LearnState, forest: TextForest) -> Reading:
        """One teacher-forced pass, or the reading of it that was kept, holds every verdict."""
        if forest.reading is not None:
            return forest.reading
        boundaries = state.drafter.spec.boundaries
        return read_on_mesh(self.verifier, forest.tokens, forest.starts, boundaries)

    def judge(self, state: LearnState, forest: TextForest, scores: Reading) -> LearnVerdict:
        """Loss and agreement node by node, and the loss's gradient.

        The target is the verifier's distribution restricted to the draft vocabulary and
        renormalised; everything is judged where its target stands, at position t + 1 + i.
        """
        specs = self.specs(state.drafter)
        gradient_specs = self.specs(nnx.split(state.drafter, nnx.Param, ...)[1])
        nodes = PartitionSpec(None, DATA)
        by_row = specs_by(forest, lambda path, _: nodes if path == "judged" else ROWS)
        judge = over_mesh(
            self.verifier.mesh,
            functools.partial(_judge, specs=gradient_specs),
            (stage_specs(self), specs, by_row, ROWS),
            (gradient_specs, WHOLE),
        )
        gradients, tally = judge(self, state.drafter, forest, scores)
        return LearnVerdict(gradients=gradients, tally=tally)

    def commit(
        self, state: LearnState, forest: TextForest, scores: Reading, verdict: LearnVerdict
    ) -> LearnState:
        """The optimiser's update."""
        graph, parameters, rest = nnx.split(state.drafter, nnx.Param, ...)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = self.optimiser.update(verdict.gradients, state.moments, parameters)
            parameters = optax.apply_updates(parameters, updates)
        mesh = self.verifier.mesh
        if mesh is not None:
            parameters, moments = (
                jax.lax.with_sharding_constraint(x, shardings(mesh, self.specs(x)))
                for x in (parameters, moments)
            )
        return LearnState(
            drafter=nnx.merge(graph, parameters, rest),
            moments=moments,
            batches=state.batches,
            cycle=state.cycle + 1,
            tally=jax.tree.map(jnp.add, state.tally, verdict.tally),
        )


def _judge(stages: LearnStages, drafter: Drafter, forest: TextForest, scores: Reading, specs: Any):
    """Gradients and tally of `LearnStages.judge`, by one device with its rows and its parameters.

    Args:
        specs: how the parameters lie over a mesh; None without one.
    """
    verifier, exchange = stages.verifier, Exchange(stages.verifier.mesh)
    graph, parameters, rest = nnx.split(drafter, nnx.Param, ...)
    vocabulary = drafter.vocabulary[...]
    said = jnp.zeros((verifier.config.vocab_size,), bool).at[vocabulary].set(True)
    sayable = said[scores.best]
    hidden = verifier.norm(scores.hidden.astype(verifier.dtype))
    logits = matmul(hidden, verifier.head_of(vocabulary)).astype(jnp.float32)
    target = jax.nn.softmax(logits, axis=-1)
    features = VerifierFeatures(
        array=scores.features.astype(stages.dtype or drafter.dtype),
        spec=verifier.spec(drafter.spec.boundaries),
    )

    def loss_of(parameters):
        parameters = jax.tree.map(stages._cast, parameters)
        if specs is not None:
            parameters = jax.tree.map(gathered, parameters, specs)
        drafter = nnx.merge(graph, parameters, rest)
        chain = chain_hidden(
            drafter, verifier, features, forest.tokens, forest.starts, stages.steps
        )
        loss = jnp.zeros((), jnp.float32)
        parts = []
        for step, own in enumerate(chain):
            logits = drafter.read_out(DraftHidden(array=behind(own.array, 1 + step)))
            judged = behind(forest.judged[step], 1 + step)
            learned = (judged & sayable).astype(jnp.float32)
            crossed = cross_entropy(logits, target)
            chosen = drafter.to_verifier(likeliest(logits))
            parts.append(
                (
                    jnp.sum(crossed * learned),
                    jnp.sum((agree(chosen, scores.best) & judged).astype(jnp.float32)),
                    jnp.sum(judged.astype(jnp.float32)),
                    jnp.sum(learned),
                )
            )
            # Over all rows: a device's loss is its rows' part of the whole, and so are gradients.
            rows = jnp.maximum(exchange.over_rows(parts[-1][3]), 1.0)
            loss = loss + jnp.float32(stages.decay**step) * parts[-1][0] / rows
        return loss, [jnp.stack(part) for part in zip(*parts, strict=True)]

    (_, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
    if specs is not None:
        gradients = jax.tree.map(
            lambda g, spec: exchange.over_rows(g) if spec == WHOLE else g, gradients, specs
        )
    sums = [exchange.over_rows(part) for part in sums]
    return gradients, Tally(*sums, cycles=jnp.ones((), jnp.int32))
