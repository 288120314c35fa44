"""Train the tiny-kimi verifier on the standard library's source (an example, not the library).

    python examples/tiny_kimi/corpus.py --out runs/tiny-kimi/corpus
    python examples/tiny_kimi/train_verifier.py --corpus runs/tiny-kimi/corpus --out runs/tiny-kimi

Resumes from the last checkpoint. Two stages: short windows first, then longer ones, because
attention over short windows is cheaper and most of what there is to learn is near.
"""

import dataclasses
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from checkpoints.store import Store
from checkpoints.tensors import write_json
from eagle3_jax.caches import text_scope
from eagle3_jax.configs import ExpertsConfig, LatentConfig, RopeConfig, VerifierConfig
from eagle3_jax.verifier import Verifier, experts

CONFIG = VerifierConfig(
    vocab_size=1024,
    width=128,
    num_layers=12,
    num_heads=4,
    num_kv_heads=4,
    head_width=32,
    mlp_width=256,
    rope=RopeConfig(theta=10000.0, interleaved=True),
    norm_eps=1e-6,
    latent=LatentConfig(kv_rank=32, q_rank=64, nope_width=16, rope_width=16, value_width=24),
    experts=ExpertsConfig(count=16, chosen=2, width=32, shared=1, scaling=1.0, correction=True),
    dense=(0,),
    eos_tokens=(1,),
    max_length=4096,
    family="deepseek_v3",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained on what, for how long.

    Attributes:
        corpus: folder that corpus.py made.
        out: folder of checkpoints and the log.
        updates: optimiser updates in all.
        long_updates: of these, the last ones on long windows.
        batch_tokens: tokens of an update.
        short: length of a short window.
        long: length of a long window.
        learning_rate: peak.
    """

    corpus: Path
    out: Path
    updates: int = 4000
    long_updates: int = 500
    batch_tokens: int = 4096
    short: int = 128
    long: int = 512
    learning_rate: float = 3e-3
    save_every: int = 100


def loss_of(verifier: Verifier, tokens):
    """Mean cross-entropy in nats a token."""
    texts = tokens[:, :-1]
    hidden, _, _ = verifier.forward(
        texts[..., None], text_scope(jnp.zeros_like(texts)), None, (), differentiable=True
    )
    logits = verifier.read_out(hidden[:, :, 0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def optimiser(recipe: Recipe):
    """AdamW; the routers' balancing biases follow the sign of their load, not a loss."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, 150, recipe.updates, recipe.learning_rate * 0.05
    )

    def kind(path, _):
        return "bias" if "router" in jax.tree_util.keystr(path) and "bias" in str(path) else "rest"

    return optax.multi_transform(
        {
            "rest": optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.05),
            ),
            "bias": optax.chain(optax.scale_by_sign(), optax.scale(-1e-3)),
        },
        functools.partial(jax.tree_util.tree_map_with_path, kind),
    )


def main(recipe: Recipe) -> None:
    """Train, logging held-out loss at every checkpoint."""
    experts.TILE = 64
    stream = np.load(recipe.corpus / "train.npy", mmap_mode="r")
    heldout = np.load(recipe.corpus / "heldout.npy")
    verifier = Verifier(CONFIG, jax.random.key(0))
    print(f"{sum(x.size for x in jax.tree.leaves(verifier)):,} parameters")
    # Embeddings start small: a tied-scale start for a model without embedding scaling.
    verifier.embedding = nnx.Param(verifier.embedding[...] * 0.02)
    verifier.head.kernel = nnx.Param(verifier.head.kernel[...] * 0.5)
    graph, params = nnx.split(verifier)
    params = nnx.to_pure_dict(params)
    tx = optimiser(recipe)
    state = (params, tx.init(params))

    def rebuild(params):
        _, abstract = nnx.split(verifier)
        nnx.replace_by_pure_dict(abstract, params)
        return nnx.merge(graph, abstract)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, tokens):
        params, moments = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(rebuild(p), tokens))(params)
        with jax.numpy_dtype_promotion("standard"):
            change, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, change), moments), loss

    held = jax.jit(lambda params, tokens: loss_of(rebuild(params), tokens))
    windows = heldout[: len(heldout) // 257 * 257].reshape(-1, 257)[::12][:64].astype(np.int32)

    store = Store(recipe.out / "checkpoints")
    done = store.latest() or 0
    if done:
        state, _ = store.restore(done, state)
        print(f"resumed at update {done}")
    log = recipe.out / "log.jsonl"
    clock, losses = time.time(), []
    for step in range(done, recipe.updates):
        length = recipe.long if step >= recipe.updates - recipe.long_updates else recipe.short
        rng = np.random.default_rng((7, step))
        rows = recipe.batch_tokens // length
        at = rng.integers(0, len(stream) - length - 1, rows)
        tokens = np.stack([stream[i : i + length + 1] for i in at]).astype(np.int32)
        state, loss = update(state, tokens)
        losses.append(loss)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.updates:
            store.save(step + 1, state, {})
            row = {
                "update": step + 1,
                "loss": float(np.mean([float(x) for x in losses])),
                "heldout": float(held(state[0], windows)),
                "tokens_per_second": len(losses) * recipe.batch_tokens / (time.time() - clock),
            }
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
            clock, losses = time.time(), []
    write_json(recipe.out / "recipe.json", {k: str(v) for k, v in vars(recipe).items()})
    store.close()


if __name__ == "__main__":
    main(tyro.cli(Recipe))
