"""Kimi-K2.5's decode cycle holds its int4 weights packed: device memory within 2 % of their size.

The real configuration, nothing allocated: verifier, drafter and state are shapes, the cycle is
compiled for them, and the compiler's own account is read. Routed experts lie as the checkpoint has
them (int4 in groups of 32, bfloat16 scales), all else in bfloat16. What counts is everything that
the compiled module has on one device but the rows' state with its caches: arguments, temporaries,
outputs that are not written over arguments. It is held against the weights' bytes as stored.

Two shapes of speculation, as experts are sent few and many tokens in different ways. XLA's CPU
compiler is asked (no accelerator is needed); it widens bfloat16 sums of several devices to float32.

    packed_memory.py [--devices 1 8] [--rows 8] [--capacity 32768]

The last line is PASS or FAIL.
"""

import argparse
import functools
import math
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import eagle3_jax as e3
from checkpoints.families import config_from_hub
from eagle3_jax.configs import DrafterConfig, VerifierConfig
from eagle3_jax.drafter import Drafter
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.packed import PackedWeight
from eagle3_jax.verifier import Verifier
from eagle3_jax.verifier.meshed import settled
from sharding.mapped import path_of
from sharding.mesh import shape_of
from sharding.placement import part_shape
from sharding.rules import RULES

MOST = 1.02

CONFIG = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 262144,
    "eos_token_id": 163586,
}
"""The language model's, as in its config.json."""


def abstract_verifier(config: VerifierConfig, mesh: Mesh | None) -> Any:
    """The verifier as shapes: experts in int4, norms and router in float32, else bfloat16."""
    verifier = jax.eval_shape(functools.partial(Verifier, config, jax.random.key(0), "kimi-k2.5"))

    def packed(kernel):
        *lead, inputs, outputs = kernel.shape
        return jax.eval_shape(
            lambda: PackedWeight(
                codes=jnp.zeros((*lead, outputs, inputs // 2), jnp.uint8),
                scales=jnp.zeros((*lead, outputs, inputs // 32), jnp.bfloat16),
                dtype=jnp.dtype(jnp.bfloat16),
            )
        )

    for name in ("gate_up", "down"):
        setattr(verifier.experts, name, packed(getattr(verifier.experts, name)))

    def stored(keys, x):
        path = path_of(keys)
        wide = "norm" in path or "router" in path
        kind = x.dtype if wide or x.dtype != jnp.float32 else jnp.bfloat16
        if mesh is None:
            return jax.ShapeDtypeStruct(x.shape, kind)
        shape = list(part_shape(path, x.shape, shape_of(mesh), config))
        for cut in RULES.cuts(path, x.shape):
            shape[cut.axis] *= cut.parts(shape_of(mesh))
        sharding = NamedSharding(mesh, RULES.spec(path, x.shape))
        return jax.ShapeDtypeStruct(tuple(shape), kind, sharding=sharding)

    verifier = jax.tree_util.tree_map_with_path(stored, verifier)
    return verifier if mesh is None else settled(verifier, mesh)


def measure(devices: int, rows: int, capacity: int) -> bool:
    """Print a line for each shape of speculation; whether all stay within the bound."""

    def size(tree):
        """Bytes on one device."""

        def one(x):
            shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
            return math.prod(shape) * x.dtype.itemsize

        return sum(map(one, jax.tree.leaves(tree)))

    def on_mesh(tree, specs):
        def place(x, spec):
            assert mesh is not None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, tree, specs)

    config = config_from_hub(CONFIG)
    mesh = None if devices == 1 else e3.sharding.make_mesh(expert=devices)
    verifier = abstract_verifier(config, mesh)
    settings = DrafterConfig(
        width=7168,
        verifier_width=7168,
        num_features=3,
        num_heads=64,
        num_kv_heads=64,
        head_width=128,
        mlp_width=12288,
        vocab_size=163840,
        draft_vocab_size=32000,
    )
    make = functools.partial(Drafter, settings, verifier.spec((2, 30, 58)), jax.random.key(0))
    drafter = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.ndim > 1 else x.dtype),
        jax.eval_shape(make),
    )
    good = True
    for speculation in (
        e3.Speculation(depth=3),
        e3.Speculation(depth=4, topk=4, nodes=15),
    ):
        stages = DecodeStages(verifier=verifier, drafter=drafter, speculation=speculation)
        state = jax.eval_shape(functools.partial(stages._empty, rows, capacity))
        mapped = stages.mapped(state)
        if mapped is not None:
            _, specs, state_specs = mapped
            whole = on_mesh(stages.drafter, specs.drafter)
            stages = DecodeStages(verifier=verifier, drafter=whole, speculation=speculation)
            state = on_mesh(state, state_specs)
        clock = time.perf_counter()
        compiled = run.lower(stages, state, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        clock = time.perf_counter() - clock
        account: Any = compiled.memory_analysis()
        weights, rest = size(stages), size(state)
        held = account.argument_size_in_bytes + account.temp_size_in_bytes
        held += account.output_size_in_bytes - account.alias_size_in_bytes - rest
        tokens = rows * (speculation.nodes + 1 if speculation.nodes else speculation.depth + 1)
        good &= held / weights <= MOST
        print(
            f"{devices} device{'s' if devices > 1 else ''}, {tokens} tokens a cycle: weights "
            f"{weights / 1e9:.2f} GB a device, experts "
            f"{size(verifier.experts) / 1e9:.2f} of it; state {rest / 1e9:.2f} GB; temporaries "
            f"{account.temp_size_in_bytes / 1e9:.3f} GB; without the state {held / weights:.4f} "
            f"of the weights; compiled in {clock:.0f} s",
            flush=True,
        )
    return good


def main() -> int:
    """Measure for each number of devices in a process of its own; 0 where all are within 2 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=32768)
    parser.add_argument("--here", action="store_true", help="in this process, which has them")
    arguments = parser.parse_args()
    if arguments.here:
        return 0 if measure(arguments.devices[0], arguments.rows, arguments.capacity) else 1
    good = True
    for devices in arguments.devices:
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        )
        command = [sys.executable, __file__, "--here", "--devices", str(devices)]
        command += ["--rows", str(arguments.rows), "--capacity", str(arguments.capacity)]
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        good &= subprocess.run(command, env=env).returncode == 0
    print(f"at most {MOST} of the packed weights' size wanted: {'PASS' if good else 'FAIL'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
