"""What the compiled loop may and may not do: transfers, copies, big arrays, recompilation."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax.training.trainer as trainer
from eagle3_jax import loop
from eagle3_jax.batch import seat
from eagle3_jax.configs import Sampling, Speculation, TrainConfig
from eagle3_jax.forest.processing import plan_of
from eagle3_jax.generation import generate
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.loop.prefill import prefill_chunk
from eagle3_jax.loop.run import run
from eagle3_jax.testing import tiny_drafter, tiny_verifier
from eagle3_jax.training.data import Document

CAPACITY = 2304  # 9 blocks: a length no other array has
ROWS = 3


@pytest.fixture(scope="module", params=["deepseek", "llama", "deepseek plain"])
def stages(request):
    family = request.param.split()[0]
    drafter = None if "plain" in request.param else tiny_drafter(family)
    return DecodeStages(
        verifier=tiny_verifier(family), drafter=drafter, speculation=Speculation(depth=3)
    )


@pytest.fixture(scope="module")
def compiled(stages):
    state = jax.eval_shape(lambda: stages.make_state(ROWS, CAPACITY))
    return run.lower(stages, state, jax.ShapeDtypeStruct((), jnp.int32)).compile()


def cache_arrays(stages):
    state = jax.eval_shape(lambda: stages.make_state(ROWS, CAPACITY))
    return jax.tree.leaves((state.cache, state.draft_cache))


def test_caches_are_aliased_and_never_copied(stages, compiled):
    caches = cache_arrays(stages)
    size = sum(np.prod(x.shape) * x.dtype.itemsize for x in caches)
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    text = compiled.as_text()
    for cache in caches:
        shape = ",".join(map(str, cache.shape))
        assert not re.search(rf"f32\[{shape}\][^=\n]* copy\(", text), shape
        assert f"f32[{shape}]" in text


def test_no_other_array_is_as_long_as_the_capacity(stages, compiled):
    allowed = {",".join(map(str, x.shape)) for x in cache_arrays(stages)}
    allowed.add(f"{ROWS},{CAPACITY}")
    found = set(re.findall(rf"\[((?:\d+,)*{CAPACITY}(?:,\d+)*)\]", compiled.as_text()))
    # A single row's or layer's slice may be named, never made: nothing but whole caches.
    assert found <= allowed, found - allowed
    largest = max(np.prod(x.shape) * x.dtype.itemsize for x in cache_arrays(stages))
    assert compiled.memory_analysis().temp_size_in_bytes < largest


def test_nothing_crosses_to_the_host_inside_the_loop(stages):
    state = seat(stages, stages.make_state(ROWS, CAPACITY), 1, [5, 6, 7], 30)
    n = jnp.asarray(4, jnp.int32)
    text = run.lower(stages, state, n).compile().as_text() or ""
    for forbidden in ("outfeed", "infeed", "xla_python", "callback", " send(", " recv("):
        assert forbidden not in text
    with jax.transfer_guard("disallow"):
        state = run(stages, state, n)
    assert int(state.cycles[1]) == 4


def test_nothing_crosses_with_sampling_either():
    """With every setting, drawn candidates and a tree: no host, no copy of a cache."""
    sampling = Sampling(
        **{"temperature": 0.9, "top_k": 200, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 9},
        **{"repetition_penalty": 1.2, "logit_bias": ((3, 1.0),), "stop_tokens": (9,)},
    )
    stages = DecodeStages(
        verifier=tiny_verifier("llama"),
        drafter=tiny_drafter("llama"),
        speculation=Speculation(depth=2, topk=3, nodes=6, sampled=True),
        plan=plan_of([sampling], logprobs=True, hook=lambda scores, text, length: scores),
    )
    state = seat(stages, stages.make_state(ROWS, CAPACITY), 1, [5, 6, 7], 30, sampling)
    n = jnp.asarray(4, jnp.int32)
    compiled = run.lower(stages, state, n).compile()
    text = compiled.as_text() or ""
    for forbidden in ("outfeed", "infeed", "xla_python", "callback", " send(", " recv("):
        assert forbidden not in text
    for cache in jax.tree.leaves((state.cache, state.draft_cache)):
        shape = ",".join(map(str, cache.shape))
        assert f"f32[{shape}]" in text
        assert not re.search(rf"f32\[{shape}\][^=\n]* copy\(", text), shape
    with jax.transfer_guard("disallow"):
        state = compiled(stages, state, n)
    assert int(state.cycles[1]) == 4


def compilations():
    """How many shapes loop and prefill have been compiled for."""
    functions: list[Any] = [run, prefill_chunk]
    return [function._cache_size() for function in functions]


def test_one_compilation_for_prompts_of_many_lengths(stages):
    drafter = stages.drafter
    prompts = [[5] * n for n in (1, 2, 127, 128, 129, 300, 700, 1500)]

    def go(prompts, new):
        generate(
            stages.verifier,
            drafter,
            prompts,
            rows=2,
            max_new_tokens=new,
            capacity=CAPACITY,
            speculation=stages.speculation,
        )

    go(prompts[:2], 3)
    before = compilations()
    go(prompts, 4)
    go(prompts[2:], 9)
    assert compilations() == before


def test_decoding_and_learning_both_run_through_the_one_loop(monkeypatch, tmp_path):
    assert loop.run is run
    calls = []

    def counted(stages, state, n):
        calls.append(type(stages).__name__)
        return run(stages, state, n)

    monkeypatch.setattr(sys.modules["eagle3_jax.batch"], "run", counted)
    monkeypatch.setattr(trainer, "run_loop", counted)
    verifier, drafter = tiny_verifier("llama"), tiny_drafter("llama")
    generate(verifier, drafter, [[5, 6]], max_new_tokens=4, speculation=Speculation(depth=3))
    assert set(calls) == {"DecodeStages"}
    calls.clear()
    rng = np.random.default_rng(0)
    document = Document("a", rng.integers(2, 64, 200).astype(np.int32), np.ones(200, bool))
    config = TrainConfig(steps=2, updates=2, batch=2, length=16, held_out=0.0)
    before = jnp.copy(drafter.fusion.kernel[...])
    one = trainer._Run(verifier, drafter, tmp_path / "run", config, [document], [])
    one.go(resume=False, progress=False)
    assert "LearnStages" in calls
    assert not np.array_equal(one.drafter.fusion.kernel[...], before)
