"""What eight forced CPU devices compute, beside one of them; runs in a process of its own.

The tests start it with XLA_FLAGS set and read the JSON object it prints; `checks/eight_devices.py`
takes the functions for all families and meshes.
"""

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

if __name__ == "__main__":
    packages = ["eagle3_jax", "kernels_pallas", "sharding", "checkpoints"]
    jaxtyping.install_import_hook(packages, "beartype.beartype").__enter__()

import optax  # noqa: E402
from flax import nnx  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from checkpoints.families import config_from_hub, config_to_hub  # noqa: E402
from checkpoints.folders import write_folder  # noqa: E402
from checkpoints.hub import to_hub  # noqa: E402
from checkpoints.tensors import read_json, write_json  # noqa: E402
from eagle3_jax import testing  # noqa: E402
from eagle3_jax.configs import (  # noqa: E402
    DrafterConfig,
    ExpertsConfig,
    RopeConfig,
    VerifierConfig,
)
from eagle3_jax.drafter import Drafter  # noqa: E402
from eagle3_jax.generation import make_stages  # noqa: E402
from eagle3_jax.load import BUNDLED  # noqa: E402
from eagle3_jax.loop import run  # noqa: E402
from eagle3_jax.loop.learn import Batches, LearnStages, LearnState, empty_tally  # noqa: E402
from eagle3_jax.packed import PackedWeight  # noqa: E402
from eagle3_jax.states import arrays_of  # noqa: E402
from eagle3_jax.tokenizer import Tokenizer  # noqa: E402
from eagle3_jax.verifier import Verifier  # noqa: E402
from eagle3_jax.verifier.meshed import on_mesh  # noqa: E402
from sharding import make_mesh, to_host  # noqa: E402
from sharding.mapped import path_of  # noqa: E402

EIGHT = {"num_heads": 8, "num_kv_heads": 8}
LLAMA = dataclasses.replace(testing.LLAMA, num_heads=8, num_kv_heads=2, attention_bias=True)
DEEPSEEK = dataclasses.replace(
    testing.DEEPSEEK,
    **EIGHT,
    dense=(0, 1),
    experts=ExpertsConfig(
        **{**vars(testing.DEEPSEEK.experts), "width": 16},
    ),
)
MOE = ExpertsConfig(count=8, chosen=3, width=16)
BOUNDARIES = (1, 2, 3)
SMALL = ("norm.weight", "bias", "correction", "sinks")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}a "


def kimi() -> VerifierConfig:
    """tiny-kimi's own configuration, with eight heads."""
    folder = BUNDLED / "tiny-kimi" / "verifier"
    return dataclasses.replace(config_from_hub(read_json(folder / "config.json")), **EIGHT)


FAMILIES = {
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "qwen3_moe": dataclasses.replace(
        LLAMA,
        qk_norm=True,
        attention_bias=False,
        experts=dataclasses.replace(MOE, score="softmax"),
    ),
    "gpt_oss": dataclasses.replace(
        LLAMA,
        num_kv_heads=8,
        experts=dataclasses.replace(MOE, score="softmax of chosen", bias=True, limit=7.0),
        sinks=True,
        wide_norms=True,
        window=8,
        windowed=(0, 2),
    ),
}


def drawn(make: Callable[[], Any]) -> Any:
    """A module with every array drawn, biases and norms too, so that none is left out unseen."""
    rng = np.random.default_rng(1)

    def draw(keys, x):
        path = path_of(keys)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.arange(*x.shape, dtype=x.dtype)
        scale = 0.05 if x.ndim < 2 or path.endswith(SMALL) else x.shape[-2] ** -0.5
        value = rng.normal(0, 1 if path == "embedding" else scale, x.shape)
        return jnp.asarray(value + path.endswith("norm.weight"), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(make))


def random_verifier(config: VerifierConfig) -> Verifier:
    """Of a configuration."""
    return drawn(lambda: Verifier(config, jax.random.key(0), "random"))


def random_drafter(verifier: Verifier) -> Drafter:
    """A small one."""
    c = verifier.config
    config = DrafterConfig(
        width=24,
        verifier_width=c.width,
        num_features=len(BOUNDARIES),
        num_heads=4,
        num_kv_heads=2,
        head_width=6,
        mlp_width=40,
        vocab_size=c.vocab_size,
        draft_vocab_size=40,
    )
    return drawn(lambda: Drafter(config, verifier.spec(BOUNDARIES), jax.random.key(0)))


def ids(rows: int, length: int) -> jax.Array:
    """Texts of tokens that end nothing."""
    return jnp.asarray(np.random.default_rng(length).integers(2, 64, (rows, length)), jnp.int32)


def apart(a: Any, b: Any) -> float:
    """The largest difference between two trees, of values above 1 in units of themselves."""
    pairs = zip(jax.tree.leaves(to_host(a)), jax.tree.leaves(to_host(b)), strict=True)
    return max(float(np.max(np.abs(x - y) / np.maximum(np.abs(x), 1))) for x, y in pairs)


def scores(verifier: Verifier, rows: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Logits and features of random texts."""
    found = verifier.score(ids(rows, length), BOUNDARIES)
    return found.logits, found.features.array


def texts(verifier: Verifier, drafter: Drafter | None, **how: Any) -> list[list[int]]:
    """New tokens of three prompts over two rows, one of them longer than a chunk."""
    prompts = [ids(1, n)[0].tolist() for n in (3, 140, 9)]
    how = {"max_new_tokens": 12, "rows": 2, "speculation": e3.Speculation(depth=2), **how}
    return e3.generate(verifier, drafter, prompts, **how).tokens


def turns(verifier: Verifier) -> list[str]:
    """Answers of a conversation, whose second turn continues the first one's caches."""
    verifier.tokenizer = Tokenizer(testing.tiny_tokenizer()._backend.to_str(), TEMPLATE)
    chat = e3.Chat(verifier, None, capacity=512, max_new_tokens=6)
    return [chat.send(text) for text in ("abc", "ba")]


def learned(verifier: Verifier, drafter: Drafter, spread: bool = True) -> tuple[Any, Any, float]:
    """One step of learning: gradients and tally, the drafter it makes, a device's share of it."""
    steps = 2
    # The first step's momentum is the gradient itself, clipped by the norm of all of it.
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    stages = LearnStages(
        verifier=verifier, optimiser=optimiser, steps=steps, decay=0.8, spread=spread
    )
    tokens = ids(8, 16)[None]
    starts = jnp.broadcast_to(jnp.where(jnp.arange(16) < 9, 0, 9).astype(jnp.int32), tokens.shape)
    state = LearnState(
        drafter=jax.tree.map(jnp.copy, drafter),
        moments=jax.jit(optimiser.init)(nnx.state(drafter, nnx.Param)),
        batches=Batches(tokens=tokens, starts=starts, learn=tokens % 3 > 0),
        cycle=jnp.zeros((), jnp.int32),
        tally=empty_tally(steps),
    )
    state = run(stages, stages.placed(state), jnp.asarray(1, jnp.int32))
    fusion = state.drafter.fusion.kernel[...]
    share = fusion.addressable_shards[0].data.size / fusion.size
    return to_host((state.moments, state.tally)), to_host(state.drafter), share


COLLECTIVE = re.compile(
    r"= (\S+)\[([\d,]*)\]\S* "
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


def collectives(verifier: Verifier, drafter: Drafter) -> list[list[tuple[str, str]]]:
    """Collectives of the compiled decoding loop, those of a computation together: (kind, shape)."""
    stages = make_stages(verifier, drafter, e3.Speculation(depth=2), [e3.Sampling()])
    one = jnp.asarray(1, jnp.int32)
    text = run.lower(stages, stages.make_state(2, 256), one).compile().as_text()
    assert text is not None
    found: dict[str, list[tuple[str, str]]] = {}
    computation = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = head[1]
        if here := COLLECTIVE.search(line):
            found.setdefault(computation, []).append((here[3], here[2]))
    return list(found.values())


def as_folder(folder: Path) -> None:
    """A random DeepSeek as a folder of the hub."""
    config = dataclasses.replace(DEEPSEEK, rope=RopeConfig(interleaved=True))
    write_folder(folder, to_hub(config, to_host(arrays_of(random_verifier(config)))))
    write_json(folder / "config.json", config_to_hub(config))


def placed_from_folder(folder: Path) -> tuple[float, float]:
    """How far loading onto a mesh is from placing what is loaded; a device's share of gate_up."""
    mesh = make_mesh(tensor=2, expert=4)
    loaded = e3.load_verifier(folder, "float32", mesh=mesh)
    alone = e3.load_verifier(folder, "float32")
    assert loaded.experts is not None and alone.experts is not None
    own = loaded.experts.gate_up[...].addressable_shards[0].data
    return apart(loaded, on_mesh(alone, mesh)), own.size / alone.experts.gate_up[...].size


def int8_from_folder(folder: Path) -> list[float]:
    """How far a verifier in int8 over a mesh is from one on a device, of few tokens and of many."""
    mesh = make_mesh(tensor=2, expert=4)
    alone, over = (
        e3.load_verifier(folder, "float32", quantization="int8", mesh=m) for m in (None, mesh)
    )
    return [apart(scores(alone, 2, n), scores(over, 2, n)) for n in (7, 70)]


def with_int4_experts() -> Verifier:
    """A random DeepSeek whose experts are codes of 4 bits, in groups of 32 inputs."""
    assert DEEPSEEK.experts is not None
    wide = dataclasses.replace(DEEPSEEK.experts, width=64)
    verifier = random_verifier(dataclasses.replace(DEEPSEEK, experts=wide))
    experts, rng = verifier.experts, np.random.default_rng(2)
    assert experts is not None
    for name in ("gate_up", "down"):
        *lead, inputs, outputs = getattr(experts, name).shape
        codes = rng.integers(0, 256, (*lead, outputs, inputs // 2)).astype(np.uint8)
        scales = jnp.asarray(rng.uniform(0.01, 0.05, (*lead, outputs, inputs // 32)), jnp.bfloat16)
        setattr(experts, name, PackedWeight(codes=jnp.asarray(codes), scales=scales))
    return verifier


def main() -> None:
    """Print everything the tests look at."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.simplefilter("error")
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    deepseek, oss = random_verifier(DEEPSEEK), random_verifier(FAMILIES["gpt_oss"])
    drafter = random_drafter(deepseek)
    wide = on_mesh(deepseek, make_mesh(tensor=2, expert=4))
    found["few"] = apart(scores(deepseek, 2, 7), scores(wide, 2, 7))
    found["many"] = apart(scores(deepseek, 2, 70), scores(wide, 2, 70))
    found["biases"] = apart(
        scores(oss, 2, 7), scores(on_mesh(oss, make_mesh(data=2, tensor=2, expert=2)), 2, 7)
    )
    rows = on_mesh(deepseek, make_mesh(data=2, expert=4))
    found["same tokens"] = texts(deepseek, drafter) == texts(rows, drafter)
    one, two = learned(deepseek, drafter), learned(rows, drafter)
    found["learned"], found["share"] = apart(one[:2], two[:2]), two[2]
    llama = random_verifier(LLAMA)
    eight = on_mesh(llama, make_mesh(expert=8))
    found["replicated heads"] = apart(scores(llama, 1, 7), scores(eight, 1, 7))
    found["same turns"] = turns(llama) == turns(eight)
    found["cache"] = list(eight.make_cache(2, 256).keys.shape)
    layers = on_mesh(deepseek, make_mesh(expert=8))
    found["collectives"] = collectives(layers, drafter)
    as_folder(folder)
    found["from folder"] = placed_from_folder(folder)
    found["int8"] = int8_from_folder(folder)
    int4 = with_int4_experts()
    over = on_mesh(int4, make_mesh(tensor=2, expert=4))
    found["int4"] = [apart(scores(int4, 2, n), scores(over, 2, n)) for n in (7, 70)]
    found["int4 tokens"] = texts(int4, drafter) == texts(over, drafter)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
