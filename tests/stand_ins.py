"""Arguments and objects that `test_shapes.py` cannot make from annotations alone, and what it lets
pass unshaped, with the reason."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax import testing
from eagle3_jax.configs import ExpertsConfig, RopeConfig, Sampling, Speculation, VerifierConfig
from eagle3_jax.contracts import DraftHidden, FeatureSpec
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.drafter import Roots
from eagle3_jax.forest.processing import Plan
from eagle3_jax.layers import Linear, Mlp, RmsNorm
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from eagle3_jax.packed import PackedWeight
from eagle3_jax.training.data import Document, Packed
from eagle3_jax.training.features import Readings
from eagle3_jax.turned import Apart, Turned
from eagle3_jax.verifier import Verifier
from eagle3_jax.verifier.attention import GroupedQueryAttention, LatentAttention
from eagle3_jax.verifier.decoder import Layer
from eagle3_jax.verifier.experts import Experts, Router
from kernels_pallas import Backend
from sharding.exchange import Exchange

# A size for each dimension. They differ, so that one name in another's place shows, except where
# the tiny models want it so: t = n = r * w, u = w, z = 2 * i, f = 3 * d.
SIZES = {
    **{"b": 2, "t": 15, "r": 3, "w": 5, "u": 5, "n": 15, "p": 6, "c": 9, "s": 16, "rows": 3},
    **{"d": 32, "f": 96, "m": 24, "h": 4, "k": 2, "hd": 8, "hv": 7, "l": 4, "v": 64, "dv": 40},
    **{"e": 8, "x": 3, "i": 12, "a": 34, "z": 24, "g": 11, "bytes": 34, "groups": 1},
}
FIELD_SIZES = {**SIZES, "hv": SIZES["hd"]}
"""Of caches and their like, which belong to models whose heads have one width."""

LEAD = (2, 3)
"""Axes of `*lead` and of `...`."""

# Models are made when a test asks for one, since every process of a run reads this file.


@functools.cache
def llama() -> Verifier:
    """A tiny one."""
    return testing.tiny_verifier("llama")


@functools.cache
def deepseek() -> Verifier:
    """A tiny one."""
    return testing.tiny_verifier("deepseek")


@functools.cache
def drafter() -> Drafter:
    """For the tiny Llama."""
    return testing.tiny_drafter("llama", head_width=SIZES["hd"])


@functools.cache
def stages() -> DecodeStages:
    """Decoding by the two."""
    return DecodeStages(verifier=llama(), drafter=drafter(), speculation=Speculation(depth=2))


KEY = jax.random.key(0)


def one_layer(stack):
    """A layer of a stack, as `jax.lax.scan` hands it out."""
    return jax.tree.map(lambda x: x[0], stack)


# What stands for an argument, or for `self`, of a type that is not made from its annotations.
OF_TYPE: dict[Any, Callable[[], Any]] = {
    bool: lambda: True,
    int: lambda: 2,
    float: lambda: 1.0,
    str: lambda: "text",
    tuple[int, ...]: lambda: (1, 2),
    list[int]: lambda: [1, 2],
    Sampling: lambda: Sampling(),
    Plan: lambda: Plan(drawn=True, most_kept=2, top_p=True, min_p=True, penalty=True),
    FeatureSpec: lambda: drafter().spec,
    RopeConfig: lambda: RopeConfig(),
    VerifierConfig: lambda: llama().config,
    ExpertsConfig: lambda: deepseek().config.experts,
    Verifier: lambda: llama(),
    Drafter: lambda: drafter(),
    DecodeStages: lambda: stages(),
    Any: lambda: (),
    Backend: lambda: "xla",
    DecodeState: lambda: stages().make_state(SIZES["b"], 128),
    PackedWeight: lambda: packed_weight(),
    Linear: lambda: Linear(KEY, SIZES["a"], SIZES["z"]),
    Turned: lambda: Turned(Linear(KEY, SIZES["a"], SIZES["z"])),
    Apart: lambda: apart_linear(),
    RmsNorm: lambda: RmsNorm(SIZES["a"], 1e-6),
    Mlp: lambda: Mlp(KEY, SIZES["a"], SIZES["i"]),
    GroupedQueryAttention: lambda: one_layer(llama().dense_layers).attention,
    LatentAttention: lambda: one_layer(deepseek().moe_layers).attention,
    Layer: lambda: one_layer(llama().dense_layers),
    Router: lambda: one_layer(deepseek().moe_layers).router,
    Experts: lambda: deepseek().experts,
    Exchange: lambda: Exchange(None, (SIZES["b"], SIZES["r"], SIZES["w"])),
    Readings: lambda: kept_readings(),
}


def kept_readings() -> Readings:
    """Of more rows than there are arguments, in a folder that is gone with this process."""
    document = Document("a", np.full(999, 2, np.int32), np.ones(999, bool))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return Readings(folder, llama(), Packed([document], 8, 0), (1, 2))


def packed_weight(*lead: int) -> PackedWeight:
    """A kernel in int8, or a stack of them."""
    codes = jnp.zeros((*lead, SIZES["z"], SIZES["a"]), jnp.int8)
    return PackedWeight(codes=codes, scales=jnp.ones((*lead, SIZES["z"], 1)))


def apart_linear() -> Apart:
    """Of the second of two layers."""
    apart = Apart(Linear(KEY, SIZES["a"], SIZES["z"]), 0)
    kernel = jnp.zeros((SIZES["z"], SIZES["a"]))
    apart.kernels, apart.layer = nnx.data([kernel, kernel]), jnp.ones((), jnp.int32)
    return apart


def one_root() -> Roots:
    """Of every row, as decoding has it."""
    b, zero = SIZES["b"], jnp.zeros((SIZES["b"], 1), jnp.int32)
    context = drafter().make_cache(b, SIZES["s"])
    return Roots(positions=zero, lo=zero, hi=zero, context=context)


# Arguments that only one function wants so.
ARGUMENTS: dict[str, dict[str, Callable[[], Any]]] = {
    "eagle3_jax.verifier.attention.attend_and_keep": {"cache": lambda: None},
    "eagle3_jax.packed.multiply_layer": {"stack": lambda: packed_weight(SIZES["l"])},
    "eagle3_jax.turned.bind": {"layer": lambda: llama(), "kernels": lambda: []},
    "eagle3_jax.layers.stacked": {"make": lambda: lambda key: Linear(key, 2, 2)},
    "eagle3_jax.forest.trees.grow_tree": {
        "embed": lambda: llama().embed,
        "hidden": lambda: DraftHidden(array=jnp.zeros((SIZES["b"], 1, SIZES["m"]))),
        "roots": one_root,
        "speculation": lambda: Speculation(depth=2, topk=2, nodes=3),
    },
    "eagle3_jax.loop.decode.write_tokens": {"live": lambda: jnp.ones((SIZES["b"],), bool)},
    "eagle3_jax.verifier.decoder.Layer.__call__": {"experts": lambda: None},
    "eagle3_jax.verifier.decoder.Verifier.score": {"boundaries": lambda: (1, 2)},
    "sharding.exchange.Exchange.mine": {"count": lambda: SIZES["e"]},
    "sharding.exchange.Exchange.columns": {
        "take": lambda: lambda ids: jnp.zeros((SIZES["d"], ids.size))
    },
    "eagle3_jax.loop.run.run": {"stages": lambda: stages(), "state": OF_TYPE[DecodeState]},
    "eagle3_jax.drafter.vocabulary.check_vocabulary": {"vocab_size": lambda: SIZES["v"]},
    "eagle3_jax.drafter.drafter.Drafter.__init__": {"config": lambda: drafter().config},
    "eagle3_jax.verifier.attention.LatentAttention.__init__": {"config": lambda: deepseek().config},
    "eagle3_jax.verifier.attention.LatentAttention.__call__": {
        "cache": lambda: deepseek().make_cache(SIZES["b"], SIZES["s"])
    },
}

BEHIND_THE_API = "called by its operation's api alone, which has checked the shapes"

IN_A_KERNEL = "traced inside a kernel: references and tiles, whose sizes are the kernel's plan"
BESIDE_A_KERNEL = "between an operation's api and its kernel, in the kernel's padded sizes"
HOPPER = (
    *("walk", "copy_tiles", "split_float32", "store_parts", "multiply_parts", "dots"),
    *("add_weighted", "masked", "weigh", "write_sums", "write_rows"),
)
OPERANDS = (
    "unsupported",
    "of_queries",
    "place",
    "limits",
    "by_query",
    "pack_ancestors",
    "arrange_queries",
    "arrange_own",
    "combine",
)

# Public signatures that take arrays of no declared shape, and why that is right.
UNSHAPED: dict[str, str] = {
    "kernels_pallas.forest_attention.reference.attend": BEHIND_THE_API,
    "kernels_pallas.forest_attention.xla.attend_blocked": BEHIND_THE_API,
    "kernels_pallas.forest_attention.xla.attend_differentiable": BEHIND_THE_API,
    **{f"kernels_pallas.hopper.{name}": IN_A_KERNEL for name in HOPPER},
    **{f"kernels_pallas.operands.{name}": BESIDE_A_KERNEL for name in OPERANDS},
    **{
        f"kernels_pallas.{op}.mosaic_gpu.{name}": BEHIND_THE_API
        for op in ("forest_attention", "latent_forest_attention")
        for name in ("unsupported", "plan_of", "attend")
    },
    "kernels_pallas.tree_walk.mosaic_gpu.walk": BEHIND_THE_API,
    "kernels_pallas.tree_walk.reference.walk": BEHIND_THE_API,
    "kernels_pallas.tree_walk.xla.walk": BEHIND_THE_API,
    "eagle3_jax.loop.decode.write_tokens": "`live` flags rows, and broadcasts",
    "eagle3_jax.loop.learn.ahead": "anything by row and position: ids, flags, distributions",
    "eagle3_jax.loop.learn.behind": "likewise",
    "eagle3_jax.states.to_device": "any array, by its path",
    "sharding.placement.gathered": "a device's part of any array",
    "eagle3_jax.training.start.new_drafter": "token counts, checked by choose_vocabulary",
    "eagle3_jax.training.trainer.export": "a dtype's name and a dictionary, no arrays",
    "eagle3_jax.verifier.decoder.check_tokens": "token lists of any kind and shape, read by numpy",
    "eagle3_jax.tokenizer.Tokenizer.decode": "any sequence of ids; an ordinary list as a rule",
    "eagle3_jax.tokenizer.Tokenizer.from_file": "`special` is a dictionary, no array",
    "checkpoints.tensors.finite": "a tensor of any shape and dtype, from a file",
}
