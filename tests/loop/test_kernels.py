"""The loop on the GPU kernels, interpreted: the same tokens as without."""

import dataclasses

import jax
import pytest

from eagle3_jax.configs import LatentConfig, Speculation
from eagle3_jax.contracts import RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import generate
from eagle3_jax.testing import tiny_drafter, tiny_verifier

# What the kernels multiply: widths of 16 and, of latent values, 32.
LATENT = LatentConfig(kv_rank=32, q_rank=20, nope_width=8, rope_width=16, value_width=10)
PROMPT = list(range(2, 30))
NEW = 3
BOUNDARIES = (0, 1)


def test_kernels_change_no_token():
    """A tree, whose nodes see ancestors alone; verifier and drafter run on one kernel each.

    One layer and one cycle or two, as an interpreted kernel takes seconds a call;
    `checks/kernel_loop.py` takes the bundled pair and many cycles.
    """
    verifier = tiny_verifier(num_layers=1, dense=(), latent=LATENT)
    config = dataclasses.replace(tiny_drafter().config, head_width=16, num_features=len(BOUNDARIES))
    drafter = Drafter(config, verifier.spec(BOUNDARIES), jax.random.key(1))
    tree = Speculation(depth=2, topk=4, nodes=6)
    plain = generate(verifier, None, [PROMPT], max_new_tokens=NEW, rows=1)
    out = generate(
        verifier,
        drafter,
        [PROMPT],
        max_new_tokens=NEW,
        rows=1,
        speculation=tree,
        kernels="mosaic_gpu_interpret",
    )
    assert out.tokens == plain.tokens


def test_what_the_kernels_cannot_do_is_refused_at_once():
    """One line that says what to do, before anything compiles."""
    verifier, drafter = tiny_verifier("llama"), tiny_drafter("llama")
    wide = Speculation(depth=8, topk=8, nodes=64)
    with pytest.raises(RequestError, match="take blocks of up to 64 slots; .* needs 65; draft few"):
        generate(
            verifier, drafter, [PROMPT], speculation=wide, kernels="mosaic_gpu_interpret"
        )  # fmt: skip
    with pytest.raises(RequestError, match="need a GPU of compute capability 9.0, found cpu"):
        generate(verifier, drafter, [PROMPT], kernels="mosaic_gpu")
