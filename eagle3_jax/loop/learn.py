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

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from eagle3_jax.caches import text_scope
from eagle3_jax.contracts import VerifierFeatures
from eagle3_jax.drafter.drafter import Drafter, Roots, context_pass, growth_step
from eagle3_jax.forest.judging import agree, likeliest
from eagle3_jax.verifier.decoder import Verifier


@nnx.dataclass
class Batches(nnx.Pytree):
    """Packed texts, a cycle's worth each.

    Attributes:
        tokens: verifier ids.
        starts: the position at which each position's document starts.
        learn: whether a token, as the one predicted, is learned from.
    """

    tokens: Int[Array, "n b t"] = nnx.data()
    starts: Int[Array, "n b t"] = nnx.data()
    learn: Bool[Array, "n b t"] = nnx.data()


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
    """

    tokens: Int[Array, "b t"] = nnx.data()
    starts: Int[Array, "b t"] = nnx.data()
    judged: Bool[Array, "n b t"] = nnx.data()


@nnx.dataclass
class TextScores(nnx.Pytree):
    """The verifier's verdict for every node of a text, from one teacher-forced pass.

    Attributes:
        features: at every position.
        target: its distribution restricted to the draft vocabulary and renormalised.
        best: its greedy choice.
    """

    features: VerifierFeatures = nnx.data()
    target: Float[Array, "b t dv"] = nnx.data()
    best: Int[Array, "b t"] = nnx.data()


@nnx.dataclass
class LearnVerdict(nnx.Pytree):
    """Gradients and what they were taken of."""

    gradients: Any = nnx.data()
    tally: Tally = nnx.data()


def ahead(x: Array, by: int) -> Array:
    """`x[:, t + by]` at t, zero (False) past the end."""
    pad = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad)[:, by:]


def chain_logits(
    drafter: Drafter,
    verifier: Verifier,
    features: VerifierFeatures,
    tokens: Int[Array, "b t"],
    starts: Int[Array, "b t"],
    steps: int,
    differentiable: bool = True,
) -> list[Float[Array, "b t dv"]]:
    """The drafter's logits at every step of every root's chain.

    Args:
        drafter: unrolled on its own hidden state.
        verifier: its embedding only.
        features: the verifier's, at every position.
        tokens: the text.
        starts: document starts; a chain that runs past its document is computed and never judged.
        steps: of the chain.
        differentiable: with gradients.

    Returns:
        One array a step; entry t of step i is over token t + 2 + i.
    """
    b, t = tokens.shape
    embed = verifier.embed
    scope = text_scope(starts)
    hidden, context = context_pass(
        drafter, features, embed(ahead(tokens, 1)), scope, None, differentiable
    )
    out = [drafter.read_out(hidden)]
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
            differentiable,
        )
        out.append(drafter.read_out(hidden))
    return out


@nnx.dataclass
class LearnStages(nnx.Pytree):
    """Learning's four stages.

    Attributes:
        verifier: frozen.
        optimiser: an optax transformation; static.
        steps: of training-time test; static.
        decay: weight of step i is `decay ** i`; static.
    """

    verifier: Verifier = nnx.data()
    optimiser: optax.GradientTransformation = nnx.static()
    steps: int = nnx.static()
    decay: float = nnx.static()

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
        return state, TextForest(tokens=tokens, starts=starts, judged=judged)

    def verify(self, state: LearnState, forest: TextForest) -> TextScores:
        """One teacher-forced pass holds the verdict for every node."""
        drafter = state.drafter
        hidden, features, _ = self.verifier.forward(
            forest.tokens[..., None], text_scope(forest.starts), None, drafter.spec.boundaries
        )
        assert features is not None
        logits = self.verifier.read_out(hidden[:, :, 0])
        return TextScores(
            features=VerifierFeatures(
                array=features, spec=self.verifier.spec(drafter.spec.boundaries)
            ),
            target=jax.nn.softmax(logits[..., drafter.vocabulary[...]], axis=-1),
            best=likeliest(logits),
        )

    def judge(self, state: LearnState, forest: TextForest, scores: TextScores) -> LearnVerdict:
        """Loss and agreement node by node, and the loss's gradient."""
        graph, parameters, rest = nnx.split(state.drafter, nnx.Param, ...)

        def loss_of(parameters):
            drafter = nnx.merge(graph, parameters, rest)
            logits = chain_logits(
                drafter, self.verifier, scores.features, forest.tokens, forest.starts, self.steps
            )
            loss = jnp.zeros((), jnp.float32)
            parts = []
            for step, one in enumerate(logits):
                judged = forest.judged[step]
                best = ahead(scores.best, 1 + step)
                sayable = jnp.any(best[..., None] == drafter.vocabulary[...][None, None], axis=-1)
                learned = (judged & sayable).astype(jnp.float32)
                crossed = optax.softmax_cross_entropy(one, ahead(scores.target, 1 + step))
                chosen = drafter.to_verifier(likeliest(one))
                parts.append(
                    (
                        jnp.sum(crossed * learned),
                        jnp.sum((agree(chosen, best) & judged).astype(jnp.float32)),
                        jnp.sum(judged.astype(jnp.float32)),
                        jnp.sum(learned),
                    )
                )
                mean = parts[-1][0] / jnp.maximum(parts[-1][3], 1.0)
                loss = loss + jnp.float32(self.decay**step) * mean
            return loss, [jnp.stack(part) for part in zip(*parts, strict=True)]

        (_, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        return LearnVerdict(gradients=gradients, tally=Tally(*sums, cycles=jnp.ones((), jnp.int32)))

    def commit(
        self, state: LearnState, forest: TextForest, scores: TextScores, verdict: LearnVerdict
    ) -> LearnState:
        """The optimiser's update."""
        graph, parameters, rest = nnx.split(state.drafter, nnx.Param, ...)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = self.optimiser.update(verdict.gradients, state.moments, parameters)
            parameters = optax.apply_updates(parameters, updates)
        return LearnState(
            drafter=nnx.merge(graph, parameters, rest),
            moments=moments,
            batches=state.batches,
            cycle=state.cycle + 1,
            tally=jax.tree.map(jnp.add, state.tally, verdict.tally),
        )
