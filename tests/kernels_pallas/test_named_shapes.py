"""Named shapes lower for an H200 that is not there; their copies stay near the least."""

import jax.numpy as jnp
import pytest

from kernels_pallas.plan import cost
from kernels_pallas.shapes import CONTEXTS, NODES, SHAPES, Shape


@pytest.mark.parametrize(
    ("name", "nodes", "context"),
    [
        ("Kimi-K2.5, 8 of 64 heads", 63, 131072),
        ("Llama-3-8B", 15, 32768),
        ("gpt-oss-120b, window", 63, 4096),
    ],
)
def test_lowers_without_a_copy_of_the_cache_or_a_mask(name, nodes, context):
    """All of them: checks/kernel_lowering.py."""
    shape = SHAPES[name]
    text = shape.lower(nodes, context)
    assert "mosaic_gpu" in text
    assert f"tensor<1x1x{shape.kv_heads}x{context + 256}x{shape.key_width}xbf16>" in text
    sliced = [
        line for line in text.splitlines() if "stablehlo" in line and f"{context + 256}" in line
    ]
    assert [line for line in sliced if "custom_call" not in line] == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize(
    "shape", [Shape(8, 4, 64, 64), Shape(4, 1, 96, 64, latent=True)], ids=["grouped", "latent"]
)
def test_other_dtypes_lower(shape, dtype):
    assert "mosaic_gpu" in shape.lower(7, 1024, dtype)


def test_the_context_is_copied_at_most_once_and_a_tenth():
    for name, shape in SHAPES.items():
        for nodes in NODES:
            for context in CONTEXTS:
                assert shape.plan(nodes, context).groups == 1
                assert shape.cost(nodes, context).context_ratio <= 1.1, (name, nodes, context)


def test_counts_by_hand():
    """Llama, 15 nodes, 1,000 slots of 1,024: 16 blocks, 64 queries a head in one tile."""
    shape = SHAPES["Llama-3-8B"]
    plan = shape.plan(15, 1024)
    assert (plan.rows, plan.padded, plan.stored, plan.cluster, plan.tiles) == (64, 64, 64, 1, 1)
    assert plan.splits * 8 <= 132 and plan.stages >= 2
    found = cost(plan, 16, [(0, 1000)], 8)
    assert found.context == 16 * 64 * 8 * (128 + 128) * 2
    assert found.least_context == 1000 * 8 * (128 + 128) * 2
    assert found.output == 16 * 32 * 128 * 2
    assert found.flops == 2 * 8 * (16 + 1) * 64 * 64 * (128 + 128)
    # A row that ends in the first block leaves all splits but one without work.
    short = cost(plan, 16, [(0, 1)], 8)
    assert short.context == 64 * 8 * (128 + 128) * 2
    assert plan.splits == 10  # of the 20 blocks of the cache, two each; 8 of them have work here
    assert found.partials - short.partials == (8 - 1) * 8 * 64 * 128 * 4


def test_more_queries_than_a_cluster_holds_are_copied_for_again():
    """128 heads that share a latent, 64 slots: 128 tiles, 8 CTAs a cluster."""
    plan = Shape(128, 1, 576, 512, latent=True).plan(63, 4096)
    assert (plan.cluster, plan.groups, plan.padded) == (8, 16, 64 * 128)
