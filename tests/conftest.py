"""Strict JAX settings and the hypothesis profile that every test runs under."""

import os

# EAGLE3_TEST_PLATFORM=cuda runs the tests on a GPU. Child processes of a test follow it too.
PLATFORM = os.environ.get("EAGLE3_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = PLATFORM
# Unoptimised code: the tests compile far longer than they compute. Child processes follow it too.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# XLA's threads. A warpgroup of an interpreted kernel that waits for another holds one: with as few
# as there are cores, now and then none is left for the other.
os.environ.setdefault("NPROC", "32")

import gc  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_platforms", PLATFORM)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# No test may depend on what an earlier run has compiled.
jax.config.update("jax_enable_compilation_cache", False)

# Tracing makes many objects and little garbage; each file's end collects all of it.
gc.set_threshold(50_000)

hypothesis.settings.register_profile(
    "eagle3",
    deadline=None,  # the first example compiles, the others do not
    max_examples=20,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("eagle3"), max_examples=500
)
hypothesis.settings.load_profile("eagle3")


@pytest.fixture(scope="module", autouse=True)
def release_compiled():
    """Let go of a file's compiled functions when it is through.

    Each holds some tens of memory maps, of which Linux allows a process 65,530 (vm.max_map_count):
    past that XLA crashes in the middle of a compilation. One test file leaves up to 9,000.
    """
    yield
    jax.clear_caches()
    gc.collect()
