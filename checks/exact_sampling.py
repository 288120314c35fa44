"""Drawn continuations have the verifier's processed distribution, for every way of drafting.

A tiny random verifier with a vocabulary of 8 makes the distribution of the next 3 tokens
enumerable: 512 outcomes, whose probabilities come from `verifier.score` on every prefix and from
processors written here in numpy float64. For {chain, tree} x {greedy-drafted, sampled candidates}
x {temperature, top-k, top-p, min-p, repetition penalty}, and for chains of sampled candidates with
block verification too, 200,000 continuations are drawn through the loop and compared by chi-square,
outcomes expected fewer than 5 times taken together; so are the draws of the prefill's own token.
Then known mistakes are planted one by one, each where it matters: p must be below 1e-6, or an
impossible outcome be drawn.

    exact_sampling.py [--draws N] [NAME ...]

NAME is part of a line's name, as `tree-sampled` or `top-p`. The last line is PASS or FAIL, and so
is the exit status.
"""

import argparse
import contextlib
import dataclasses
import itertools
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.stats import chi2

from eagle3_jax.batch import seat
from eagle3_jax.caches import text_scope
from eagle3_jax.configs import DrafterConfig, Sampling, Speculation, VerifierConfig
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.drafter import context_pass
from eagle3_jax.forest import drawing, topology, trees
from eagle3_jax.forest.processing import plan_of
from eagle3_jax.loop import decode, run
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from eagle3_jax.loop.learn import ahead
from eagle3_jax.loop.prefill import CHUNK, prefill_chunk
from eagle3_jax.verifier import Verifier

DRAWS, ROWS = 200_000, 8192
CAPACITY = 24  # slots: the prompt, the new tokens and what a cycle may write past them
V, NEW = 8, 3
PROMPT = [1, 5, 2, 5, 3]
BOUNDARIES = (1, 2)
SMALLEST, CAUGHT = 1e-3, 1e-6
"""The smallest p-value of all may be SMALLEST / their number; a planted fault's is below CAUGHT."""

SHAPES = {
    "prefill": Speculation(depth=0),
    "chain-greedy": Speculation(depth=3),
    "chain-sampled": Speculation(depth=3, sampled=True, block=False),
    "chain-block": Speculation(depth=3, sampled=True, block=True),
    "tree-greedy": Speculation(depth=3, topk=2, nodes=6),
    "tree-sampled": Speculation(depth=3, topk=2, nodes=6, sampled=True),
}
SETTINGS = {
    "temperature": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=0.8, top_k=4),
    "top-p": Sampling(temperature=0.8, top_p=0.8),
    "min-p": Sampling(temperature=0.8, min_p=0.1),
    "penalty": Sampling(temperature=0.8, repetition_penalty=1.7),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong snippet of a module, and whose function is exchanged for the wrong one's."""

    name: str
    case: str
    module: types.ModuleType
    right: str
    wrong: str
    function: str
    user: types.ModuleType = decode
    times: float = 0.5  # as many draws as elsewhere


FAULTS = [
    Fault(
        "threshold-0.98",
        "chain-sampled:temperature",
        drawing,
        "(coin * q < p)",
        "(coin * q * 0.98 < p)",
        "walk_sampled",
        times=2,
    ),
    Fault(
        "block-threshold-0.98",
        "chain-block:temperature",
        drawing,
        "coin < chances[count]",
        "coin * 0.98 < chances[count]",
        "judge_block",
        times=4,
    ),
    Fault(
        "block-reuses-candidates",
        "chain-block:temperature",
        decode,
        "jnp.full_like(position, CANDIDATES) + depth",
        "jnp.full_like(position, CANDIDATES)",
        "drawn_chain",
    ),
    Fault(
        "block-reuses-coins",
        "chain-block:temperature",
        drawing,
        "jnp.full_like(position, count)",
        "jnp.ones_like(position)",
        "judge_block",
    ),
    Fault(
        "residual-not-renormalised",
        "tree-sampled:temperature",
        drawing,
        "left = _normalised(jnp.maximum(r.target - proposed, 0.0), r.target)",
        "left = jnp.maximum(r.target - proposed, 0.0)",
        "walk_sampled",
    ),
    Fault(
        "residual-not-subtracted",
        "tree-sampled:temperature",
        drawing,
        "left = _normalised(jnp.maximum(r.target - proposed, 0.0), r.target)",
        "left = r.target",
        "walk_sampled",
    ),
    Fault(
        "drafter-keeps-what-was-tried",
        "tree-sampled:temperature",
        drawing,
        "rest = jnp.where(lift_ids(vocabulary, token), 0.0, r.drafter)",
        "rest = r.drafter",
        "walk_sampled",
    ),
    # The drafter's own attention decides what is proposed, and cannot bias what is judged.
    Fault(
        "slot-attention-greedy",
        "tree-greedy:temperature",
        topology,
        "ancestors=ancestors,",
        "ancestors=jnp.broadcast_to(slot[:, None] >= slot[None], ancestors.shape),",
        "tree",
        trees,
    ),
    Fault(
        "slot-attention-sampled",
        "tree-sampled:temperature",
        topology,
        "ancestors=ancestors,",
        "ancestors=jnp.broadcast_to(slot[:, None] >= slot[None], ancestors.shape),",
        "tree",
        trees,
    ),
    Fault(
        "penalty-of-the-root-for-all",
        "tree-sampled:penalty",
        drawing,
        "length, walk.seen, text)",
        "length, a.seen, text)",
        "walk_sampled",
    ),
    Fault(
        "penalty-of-every-node-for-all",
        "tree-greedy:penalty",
        drawing,
        "token = choose(_scores(walk, here, asked),",
        "rows = jnp.arange(here.shape[0])[:, None]\n"
        "        shared = walk.seen.at[rows, forest.tokens].set(True)\n"
        "        token = choose(_scores(dataclasses.replace(walk, seen=shared), here, asked),",
        "walk",
    ),
    Fault(
        "ranked-by-log-probability",
        "tree-sampled:temperature",
        trees,
        "return ids, jnp.where(warm[:, None, None], bounded, chance), chance, logits",
        "return ids, chance, chance, logits",
        "grow_tree",
    ),
]


def models() -> tuple[Verifier, Drafter]:
    """A random verifier, and a random drafter whose head is fitted to it by least squares."""
    config = VerifierConfig(
        vocab_size=V,
        width=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        mlp_width=24,
    )
    verifier = Verifier(config, jax.random.key(0), "tiny")
    verifier.head.kernel = nnx.Param(1.4 * verifier.head.kernel[...])
    drafter_config = DrafterConfig(
        width=32,
        verifier_width=16,
        num_features=len(BOUNDARIES),
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        mlp_width=24,
        vocab_size=V,
        draft_vocab_size=6,
    )
    drafter = Drafter(drafter_config, verifier.spec(BOUNDARIES), jax.random.key(1))
    drafter.vocabulary[...] = jnp.asarray([0, 1, 2, 3, 5, 7], jnp.int32)
    texts = jax.random.randint(jax.random.key(2), (256, 12), 0, V, jnp.int32)
    scores = verifier.score(texts, BOUNDARIES)
    hidden, _ = context_pass(
        drafter,
        scores.features,
        verifier.embed(ahead(texts, 1)),
        text_scope(jnp.zeros_like(texts)),
        None,
    )
    # Row t predicts token t + 2, which the verifier's row t + 1 is about.
    inputs = np.asarray(drafter.norm(hidden.array))[:, :-1].reshape(-1, 32)
    wanted = np.asarray(scores.logits[:, 1:, drafter.vocabulary[...]]).reshape(-1, 6)
    fitted = np.linalg.lstsq(inputs, wanted, rcond=None)[0]
    drafter.head.kernel = nnx.Param(jnp.asarray(fitted, jnp.float32))
    return verifier, drafter


def processed(logits: np.ndarray, text: list[int], sampling: Sampling) -> np.ndarray:
    """The distribution after a text, as transformers' processors in their order make it."""
    scores = logits.astype(np.float64)
    for token in set(text):
        by = sampling.repetition_penalty
        scores[token] = scores[token] * by if scores[token] < 0 else scores[token] / by
    scores = scores / sampling.temperature
    if sampling.top_k:
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    if sampling.top_p < 1:
        order = np.argsort(chances)
        chances[order[np.cumsum(chances[order]) <= 1 - sampling.top_p]] = 0.0
        chances /= chances.sum()
    chances[chances < sampling.min_p * chances.max()] = 0.0
    return chances / chances.sum()


def exact(verifier: Verifier, text: list[int], sampling: Sampling, new: int) -> np.ndarray:
    """Probability of every continuation of `new` tokens: [8] * new, prefix by prefix."""
    whole = np.ones(())
    for length in range(new):
        paths = list(itertools.product(range(V), repeat=length))
        prefixes = [[*text, *path] for path in paths]
        logits = np.asarray(verifier.score(jnp.asarray(prefixes), BOUNDARIES).logits[:, -1])
        rows = zip(logits, prefixes, strict=True)
        following = np.stack([processed(row, prefix, sampling) for row, prefix in rows])
        whole = whole[..., None] * following.reshape(*whole.shape, V)
    return whole


def compared(counts: np.ndarray, chances: np.ndarray) -> tuple[float, int]:
    """The p-value of some counts, and how many of them are of impossible outcomes."""
    counts, expected = counts.reshape(-1), counts.sum() * chances.reshape(-1)
    impossible = int(counts[expected == 0].sum())
    together = expected < 5
    if 0 < expected[together].sum() < 5:
        together |= expected == expected[~together].min()
    found = np.append(counts[~together], counts[together].sum() - impossible)
    wanted = np.append(expected[~together], expected[together].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    return float(chi2.sf(statistic, len(found) - 1)), impossible


def seated(stages: DecodeStages, sampling: Sampling) -> DecodeState:
    """One row that has read the prompt and drawn its first token, in a small cache."""
    state = seat(stages, stages.make_state(1, CHUNK), 0, PROMPT, 1 + NEW, sampling)

    def few(x, axis):
        return jax.lax.slice_in_dim(x, 0, CAPACITY, axis=axis)

    caches = (state.cache, state.draft_cache)
    cache, draft_cache = jax.tree.map(lambda x: few(x, 3), caches)
    return dataclasses.replace(
        state,
        tokens=few(state.tokens, 1),
        drafted=few(state.drafted, 1),
        cache=cache,
        draft_cache=draft_cache,
    )


def copied(state: DecodeState, keys) -> DecodeState:
    """A row as many times as there are keys, each with its own."""

    def times(x, axis):
        return jnp.repeat(x, len(keys), axis=axis)

    caches = (state.cache, state.draft_cache)
    cache, draft_cache = jax.tree.map(lambda x: times(x, 1), caches)
    rest = dataclasses.replace(state, cache=None, draft_cache=None, waiting=None)
    rest = jax.tree.map(lambda x: times(x, 0), rest)
    return dataclasses.replace(
        rest,
        cache=cache,
        draft_cache=draft_cache,
        waiting=state.waiting,
        settings=dataclasses.replace(rest.settings, key=keys),
    )


def drawn(stages: DecodeStages, sampling: Sampling, draws: int):
    """Counts of continuations [8, 8, 8], the token they follow, and what is accepted by depth."""
    state = seated(stages, sampling)
    at = len(PROMPT) + 1

    @jax.jit
    def some(keys):
        out = run(stages, copied(state, keys), jnp.asarray(NEW, jnp.int32))
        return out.tokens[:, at : at + NEW], jnp.sum(out.cycles), jnp.sum(out.accepted, axis=0)

    counts, cycles, accepted = np.zeros((V,) * NEW, np.int64), 0, np.zeros(stages.depth)
    for turn in range(-(-draws // ROWS)):
        tokens, more, also = some(jax.random.split(jax.random.key(turn), ROWS))
        np.add.at(counts, tuple(np.asarray(tokens).T), 1)
        cycles, accepted = cycles + int(more), accepted + np.asarray(also)
    return counts, int(state.tokens[0, at - 1]), accepted / cycles


def firsts(stages: DecodeStages, sampling: Sampling, draws: int) -> np.ndarray:
    """Counts of the prefill's own token over many keys."""
    state = seat(stages, stages.make_state(1, CHUNK), 0, PROMPT, 1, sampling)
    zero, count = jnp.zeros((), jnp.int32), jnp.asarray(len(PROMPT), jnp.int32)
    text = jnp.asarray(PROMPT + [0] * (CHUNK + 1 - len(PROMPT)), jnp.int32)

    def first(key):
        settings = dataclasses.replace(state.settings, key=key[None])
        one = dataclasses.replace(state, settings=settings)
        last = jnp.ones((), bool)
        out = prefill_chunk(stages, one, zero, text, zero, count, count + 1, last)
        return out.tokens[0, len(PROMPT)]

    return np.bincount(
        jax.jit(jax.vmap(first))(jax.random.split(jax.random.key(5), draws)), minlength=V
    )


def planted(fault: Fault) -> contextlib.AbstractContextManager:
    """The fault's function in the place of the right one."""
    text = Path(str(fault.module.__file__)).read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: {text.count(fault.right)} of {fault.right!r}; expected 1")
    wrong = types.ModuleType(fault.module.__name__)
    exec(compile(text.replace(fault.right, fault.wrong), fault.name, "exec"), wrong.__dict__)
    return mock.patch.object(fault.user, fault.function, getattr(wrong, fault.function))


def line(models: tuple[Verifier, Drafter], case: str, draws: int, name: str) -> tuple[float, int]:
    """Draw, compare and print: the p-value, and how many outcomes are impossible."""
    jax.clear_caches()  # a planted function has the shapes of the right one
    verifier, drafter = models
    shape, _, setting = case.partition(":")
    sampling = SETTINGS[setting]
    stages = DecodeStages(
        verifier=verifier,
        drafter=drafter,
        speculation=SHAPES[shape],
        plan=plan_of([sampling]),
    )
    if shape == "prefill":
        counts, text, accepted = firsts(stages, sampling, draws), PROMPT, ()
    else:
        counts, first, accepted = drawn(stages, sampling, draws)
        text = [*PROMPT, first]
    chances = exact(verifier, text, sampling, counts.ndim)
    p, impossible = compared(counts, chances)
    shares = " ".join(f"{share:.2f}" for share in accepted)
    cells = int((chances > 0).sum())
    print(f"{name:34}{counts.sum():9d}{cells:10d}{p:10.2g}{impossible:12d}  {shares}", flush=True)
    return p, impossible


def main() -> int:
    """Print the tables; 0 where the core passes and every planted fault is caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--draws", type=int, default=DRAWS)
    arguments = parser.parse_args()

    def wanted(name: str) -> bool:
        return not arguments.names or any(part in name for part in arguments.names)

    cases = [
        "prefill:penalty",
        *(f"{a}:{b}" for a, b in itertools.product(list(SHAPES)[1:], SETTINGS)),
    ]
    cases = [case for case in cases if wanted(case)]
    faults = [fault for fault in FAULTS if wanted(fault.name)]
    if not cases and not faults:
        names = ", ".join([*SHAPES, *SETTINGS, *(fault.name for fault in FAULTS)])
        parser.error(f"no such line: {' '.join(arguments.names)}; names are part of {names}")
    jax.config.update("jax_default_matmul_precision", "highest")
    pair = models()
    print(f"{'line':34}{'draws':>9}{'outcomes':>10}{'p':>10}{'impossible':>12}  accepted by depth")
    found = [line(pair, case, arguments.draws, case) for case in cases]
    bound = SMALLEST / max(len(cases), 1)
    right = all(p > bound and not impossible for p, impossible in found)
    if cases:
        smallest = min(p for p, _ in found)
        print(f"{len(cases)} lines; smallest p {smallest:.2g}, above {bound:.1g} wanted")
    caught = 0
    for fault in faults:
        with planted(fault):
            p, impossible = line(pair, fault.case, round(fault.times * arguments.draws), fault.name)
        caught += p < CAUGHT or impossible > 0
    if faults:
        print(
            f"{caught} of {len(faults)} planted faults caught (p below {CAUGHT:g}, or impossible)"
        )
    passed = right and caught == len(faults)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
