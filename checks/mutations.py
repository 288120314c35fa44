"""Every fault planted in a verifier's mathematics or loading makes a named test fail.

A copy of the tree gets one wrong snippet at a time, and the test that should notice runs there. A
snippet must occur exactly once, and its test must pass before and fail by an assertion (or the
library's own refusal) after. ARGS="name ..." plants some of them. One line a fault: name, file, the
failing test, the largest error where the test compares numbers; the last line is PASS or FAIL, and
so is the exit status.
"""

import concurrent.futures
import dataclasses
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIDE_BY_SIDE = 2
PATIENCE = 600  # seconds; a fault may make a loop endless

ATTENTION = "eagle3_jax/verifier/attention.py"
DECODER = "eagle3_jax/verifier/decoder.py"
EXPERTS = "eagle3_jax/verifier/experts.py"
ROPE = "eagle3_jax/verifier/rope.py"
CACHES = "eagle3_jax/caches.py"
LAYERS = "eagle3_jax/layers.py"
FAMILIES = "checkpoints/families.py"
HUB = "checkpoints/hub.py"

PARITY = "tests/verifier/test_parity.py::"
LOGITS = PARITY + "test_logits_and_boundaries_equal_those_of_transformers"
CHUNKS = PARITY + "test_chunks_and_single_tokens_equal_the_whole_pass"
OF_EXPERTS = "tests/verifier/test_experts.py::"
ROUTER = OF_EXPERTS + "test_router_follows_its_definition[config0]"
CLAMPED = OF_EXPERTS + "test_every_dispatch_equals_the_dense_reference[clamped-1-random]"
OF_ROPE = "tests/verifier/test_rope.py::"
OF_FAMILIES = "tests/checkpoints/test_families.py::"
OF_HUB = "tests/checkpoints/test_hub.py::"

BY_ASSERTION = ("assert", "AssertionError", "Failed: DID NOT RAISE", "eagle3_jax.contracts.")
"""How a failure begins that is no broken code."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong snippet, and the test that should notice."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


DEEPSEEK = [
    Fault(
        "latent-eps",
        ATTENTION,
        "LATENT_NORM_EPS = 1e-6",
        "LATENT_NORM_EPS = 1e-5",
        f"{LOGITS}[deepseek_a]",
    ),
    Fault("group-mask-0", EXPERTS, "grouped, -jnp.inf)", "grouped, 0.0)", ROUTER),
    Fault("no-group-mask", EXPERTS, "if c.chosen_groups < c.groups:", "if False:", ROUTER),
    Fault(
        "group-max",
        EXPERTS,
        "jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)",
        "jnp.max(grouped, axis=-1)",
        ROUTER,
    ),
    Fault(
        "biased-weights",
        EXPERTS,
        "jnp.take_along_axis(scores, chosen, axis=-1)",
        "jnp.take_along_axis(ranked, chosen, axis=-1)",
        ROUTER,
    ),
    Fault(
        "no-correction-bias",
        EXPERTS,
        "ranked = scores + self.correction[...].astype(f32)[None]",
        "ranked = scores",
        ROUTER,
    ),
    Fault("softmax-for-sigmoid", EXPERTS, 'if c.score == "sigmoid" else', "if False else", ROUTER),
    Fault(
        "no-routed-scale",
        EXPERTS,
        "return chosen, weights * f32(c.scaling), scores",
        "return chosen, weights, scores",
        ROUTER,
    ),
    Fault("router-not-renormalised", EXPERTS, "if c.normalise:", "if False:", ROUTER),
    Fault(
        "router-in-bfloat16",
        EXPERTS,
        "matmul(x.astype(f32), self.kernel[...].astype(f32))",
        "matmul(x, self.kernel[...].astype(x.dtype)).astype(f32)",
        OF_EXPERTS + "test_router_is_float32_for_bfloat16_tokens",
    ),
    Fault(
        "no-mscale",
        ATTENTION,
        "scale = softmax_scale(self.rope, a.nope_width + a.rope_width)",
        "scale = (a.nope_width + a.rope_width) ** -0.5",
        f"{LOGITS}[deepseek_a]",
    ),
    Fault(
        "mscale-not-squared",
        ROPE,
        "_mscale(rope.factor, rope.mscale_all_dim) ** 2",
        "_mscale(rope.factor, rope.mscale_all_dim)",
        OF_ROPE + "test_yarn_factors",
    ),
    Fault(
        "absorbed-scale",
        ATTENTION,
        "scale=scale,\n                value_width=a.kv_rank,",
        "scale=(a.kv_rank + a.rope_width) ** -0.5,\n                value_width=a.kv_rank,",
        f"{CHUNKS}[deepseek_a_no_q_lora]",
    ),
    Fault(
        "no-attention-factor",
        ROPE,
        "inverse * (1 - ramp), attention_factor(rope)",
        "inverse * (1 - ramp), 1.0",
        OF_ROPE + "test_yarn_ramp",
    ),
    Fault(
        "half-rope-for-interleaved",
        ROPE,
        "if rope.interleaved:",
        "if False:",
        OF_ROPE + "test_rotation_by_its_definition[True]",
    ),
    Fault(
        "no-yarn",
        ROPE,
        'if rope.kind in ("default", "dynamic"):',
        'if rope.kind in ("default", "dynamic", "yarn"):',
        OF_ROPE + "test_yarn_ramp",
    ),
    Fault(
        "linear-for-yarn",
        ROPE,
        "return inverse / rope.factor * ramp + inverse * (1 - ramp)",
        "return inverse / rope.factor",
        OF_ROPE + "test_yarn_ramp",
    ),
    Fault(
        "one-beta-for-all",
        ROPE,
        "rotations(rope.beta_fast)",
        "rotations(32.0)",
        OF_ROPE + "test_yarn_of_the_real_models[Kimi-K2]",
    ),
    Fault(
        "no-shared-experts",
        DECODER,
        "if self.mlp is not None:",
        "if self.mlp is not None and self.router is None:",
        f"{LOGITS}[deepseek_a]",
    ),
    Fault(
        "gate-up-swapped",
        HUB,
        '("gate_proj", "up_proj")',
        '("up_proj", "gate_proj")',
        OF_HUB + "test_fused_experts_are_the_same_model",
    ),
    Fault(
        "kv-b-values-first",
        ATTENTION,
        "up_key, up_value = jnp.split(up, [a.nope_width], axis=-1)",
        "up_value, up_key = jnp.split(up, [a.value_width], axis=-1)",
        f"{LOGITS}[deepseek_a]",
    ),
    Fault(
        "q-rope-first",
        ATTENTION,
        "q_nope, q_rope = jnp.split(q, [a.nope_width], axis=-1)",
        "q_rope, q_nope = jnp.split(q, [a.rope_width], axis=-1)",
        f"{LOGITS}[deepseek_a]",
    ),
    Fault(
        "mtp-layer-unexpected",
        HUB,
        "if beyond.isdigit() and len(beyond) < 9 and int(beyond) in extra:",
        "if False:",
        OF_HUB + "test_known_leftovers_are_skipped",
    ),
]

GPT_OSS = [
    Fault(
        "no-sink",
        ATTENTION,
        "sinks=None if self.sinks is None else self.sinks[...],",
        "sinks=None,",
        f"{LOGITS}[gpt_oss]",
    ),
    Fault("no-window", DECODER, "if window is not None:", "if False:", f"{LOGITS}[gpt_oss]"),
    Fault("window-off-by-one", CACHES, "own - window + 1)", "own - window)", f"{LOGITS}[gpt_oss]"),
    Fault(
        "no-window-in-own-block",
        CACHES,
        "ancestors=scope.ancestors & (apart < window),",
        "ancestors=scope.ancestors,",
        f"{CHUNKS}[qwen3_window]",
    ),
    Fault(
        "window-from-row-start",
        CACHES,
        "own = scope.lo + scope.positions",
        "own = scope.positions",
        PARITY + "test_windows_stay_within_their_document",
    ),
    Fault(
        "windows-on-odd-layers",
        FAMILIES,
        'turns = ("sliding_attention", "full_attention")',
        'turns = ("full_attention", "sliding_attention")',
        PARITY + "test_keys_left_out_mean_what_transformers_takes_them_for[gpt_oss]",
    ),
    Fault(
        "no-clamp",
        EXPERTS,
        "gated, up = jnp.minimum(gated, limit), jnp.clip(up, -limit, limit)",
        "pass",
        CLAMPED,
    ),
    Fault("no-plus-one", EXPERTS, "return (up + 1) * gated", "return up * gated", CLAMPED),
    Fault(
        "joined-for-alternate",
        HUB,
        'alternate=in_out and name == "gate_up",',
        "alternate=False,",
        OF_HUB + "test_gates_of_gpt_oss_are_told_from_ups",
    ),
    Fault(
        "yarn-truncated",
        FAMILIES,
        'truncate=switch(scaling, "truncate", True),',
        "truncate=True,",
        f"{LOGITS}[gpt_oss]",
    ),
    Fault(
        "no-default-attention-factor",
        ROPE,
        "return _mscale(rope.factor, 1.0)",
        "return 1.0",
        f"{LOGITS}[gpt_oss]",
    ),
    Fault(
        "softmax-before-choice",
        EXPERTS,
        "jax.nn.softmax(best, axis=-1) * f32(c.scaling)",
        "jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))",
        OF_EXPERTS + "test_softmax_routers_follow_their_definition[True-softmax of chosen]",
    ),
    Fault(
        "norms-round-early",
        LAYERS,
        "if self.wide:",
        "if False:",
        PARITY + "test_bfloat16_norms_round_where_transformers_does[gpt_oss]",
    ),
]

QWEN3_AND_LLAMA = [
    Fault(
        "no-qk-norm",
        ATTENTION,
        "q, key = self.q_norm(q), self.k_norm(key)",
        "pass",
        f"{LOGITS}[qwen3]",
    ),
    Fault(
        "qk-norm-after-rope",
        ATTENTION,
        """\
            q, key = self.q_norm(q), self.k_norm(key)
        out, rows = attend_and_keep(
            rotate(q, scope.positions, self.rope),
            rotate(key, scope.positions, self.rope),
""",
        """\
            q = self.q_norm(rotate(q, scope.positions, self.rope))
            key = self.k_norm(rotate(key, scope.positions, self.rope))
        out, rows = attend_and_keep(
            q,
            key,
""",
        f"{LOGITS}[qwen3]",
    ),
    Fault(
        "head-width-by-division",
        FAMILIES,
        'whole(config, "head_dim", fields["width"] // max(heads, 1))',
        'fields["width"] // max(heads, 1)',
        OF_FAMILIES + "test_what_each_family_is",
    ),
    Fault(
        "no-norm-topk",
        FAMILIES,
        'normalise=switch(config, "norm_topk_prob"),',
        "normalise=False,",
        f"{LOGITS}[qwen3_moe]",
    ),
    Fault(
        "norm-topk-by-default",
        FAMILIES,
        'normalise=switch(config, "norm_topk_prob"),',
        'normalise=switch(config, "norm_topk_prob", True),',
        PARITY + "test_keys_left_out_mean_what_transformers_takes_them_for[qwen3_moe_no_norm]",
    ),
    Fault(
        "no-llama3-scaling",
        ROPE,
        'if rope.kind in ("default", "dynamic"):',
        'if rope.kind in ("default", "dynamic", "llama3"):',
        OF_ROPE + "test_llama3_keeps_short_waves_and_stretches_long_ones",
    ),
    Fault(
        "dynamic-rope-past-its-length",
        DECODER,
        'if rope.kind == "dynamic" and length > rope.original_length:',
        "if False:",
        PARITY + "test_dynamic_rope_is_plain_up_to_its_length_and_refused_past_it",
    ),
    Fault(
        "no-bias",
        LAYERS,
        "return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)",
        "return y",
        f"{LOGITS}[llama_bias]",
    ),
    Fault(
        "tied-head-ignored",
        FAMILIES,
        '"tied_head": switch(config, "tie_word_embeddings"),',
        '"tied_head": False,',
        f"{LOGITS}[llama_tied]",
    ),
    Fault(
        "gguf-rows-left-permuted",
        "checkpoints/gguf.py",
        "value = pairs.swapaxes(1, 2).reshape(value.shape)",
        "value = pairs.reshape(value.shape)",
        "tests/checkpoints/test_gguf.py::test_logits_are_those_of_transformers",
    ),
]

ANY_FAMILY = [
    Fault(
        "final-norm-eps",
        DECODER,
        "self.norm = RmsNorm(c.width, c.norm_eps, c.wide_norms)",
        "self.norm = RmsNorm(c.width, 1e-6, c.wide_norms)",
        PARITY + "test_every_norm_has_the_epsilon_it_should[llama_plain]",
    ),
    Fault(
        "last-boundary-normed",
        DECODER,
        "jnp.concatenate(kept, axis=-1)",
        "jnp.concatenate((*kept[:-1], self.norm(kept[-1])), axis=-1)",
        f"{LOGITS}[llama_plain]",
    ),
    Fault(
        "boundary-off-by-one",
        DECODER,
        "jnp.where(number + 1 == b, x, old)",
        "jnp.where(number == b, x, old)",
        f"{LOGITS}[llama_plain]",
    ),
    Fault(
        "layer-outputs-as-boundaries",
        "eagle3_jax/contracts.py",
        'tuple(ids) if convention == "boundary" else tuple(k + 1 for k in ids)',
        "tuple(ids)",
        "tests/test_contracts.py::test_layer_ids_by_convention",
    ),
]

FAULTS = DEEPSEEK + GPT_OSS + QWEN3_AND_LLAMA + ANY_FAMILY


def copy_tree(folder: Path) -> Path:
    """The tree as git would have it, tracked or not yet, in a new folder."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def pytest(folder: Path, tests: Iterable[str]) -> tuple[int, dict[str, str], str]:
    """Run tests of a copy: the exit status, what each failure says, the last lines."""
    # A restored file may be as old and as long as the wrong one was: no bytecode is kept.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    xml = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={xml}", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return -1, {}, f"still running after {PATIENCE} s"
    failures = {}
    for case in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():
        failure = case.find("failure")
        if failure is not None:
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            # The message alone may be cut short.
            failures[test] = f"{failure.get('message')}\n{failure.text}"
    xml.unlink(missing_ok=True)
    return done.returncode, failures, (done.stdout + done.stderr)[-2000:]


def plant(folder: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the fault's test notices it, and what is to be said of that."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        status, failures, output = pytest(folder, [fault.test])
    finally:
        path.write_text(text, encoding="utf-8")
    said = failures.get(fault.test, "")
    if status == 0:
        return False, f"NOT CAUGHT by {fault.test}"
    if status != 1 or not said.startswith(BY_ASSERTION):
        return False, f"BROKEN, exit status {status}: {said.partition('\n')[0] or output}"
    error = re.search(r"Max absolute difference[^:]*: (\S+)", said)
    return True, fault.test + (f", error {float(error[1]):.1e}" if error else "")


def main() -> int:
    """Plant them all, or those named; 0 where every one is caught."""
    wanted = sys.argv[1:]
    unknown = set(wanted) - {fault.name for fault in FAULTS}
    if unknown:
        names = ", ".join(fault.name for fault in FAULTS)
        print(f"no such fault: {', '.join(sorted(unknown))}; there are {names}")
        return 2
    faults = [fault for fault in FAULTS if not wanted or fault.name in wanted]

    with tempfile.TemporaryDirectory() as temporary:
        first = copy_tree(Path(temporary, "0"))
        folders: queue.Queue[Path] = queue.Queue()
        folders.put(first)
        for i in range(1, SIDE_BY_SIDE):
            folders.put(Path(shutil.copytree(first, Path(temporary, str(i)))))
        for fault in faults:
            count = (first / fault.file).read_text(encoding="utf-8").count(fault.right)
            if count != 1:
                print(f"{fault.name}: {fault.file} has {count} of {fault.right!r}; expected 1")
                print("FAIL: the list of faults is out of date")
                return 1
        # In turn, so that each half has its share of the slow ones.
        tests = sorted({fault.test for fault in faults})
        halves = [half for i in range(SIDE_BY_SIDE) if (half := tests[i::SIDE_BY_SIDE])]

        def in_a_copy(task, argument):
            folder = folders.get()
            try:
                return task(folder, argument)
            finally:
                folders.put(folder)

        with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            for status, _, output in pool.map(lambda half: in_a_copy(pytest, half), halves):
                if status:
                    print(f"{output}\nFAIL: the tests do not pass before anything is planted")
                    return 1
            print(f"{len(tests)} tests pass before anything is planted", flush=True)
            caught = 0
            planted = pool.map(lambda fault: in_a_copy(plant, fault), faults)
            for fault, (noticed, said) in zip(faults, planted, strict=True):
                caught += noticed
                print(f"{fault.name:28} {fault.file:32} {said}", flush=True)
    passed = caught == len(faults)
    print(f"{caught} of {len(faults)} caught: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
