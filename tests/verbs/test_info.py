"""`eagle3 info`: what it knows of the library, a verifier and a drafter."""

import json

import jax

from tests import command_line

pair, run = command_line.pair, command_line.run


def test_packed_weights_are_counted(run):
    """The same parameters, in a little more than a quarter of the bytes."""
    plain, packed = (
        json.loads(run("info", "--verifier", "tiny-kimi", "--json", *flags)[1])["verifier"]
        for flags in ([], ["--quantization", "int8"])
    )
    assert plain["parameters"] == packed["parameters"]
    small = packed["weights_bytes"]
    assert set(small) == {"int8", "float32", "total"} and set(plain["weights_bytes"]) < set(small)
    assert small["total"] < 0.5 * plain["weights_bytes"]["total"]


def test_info(run):
    status, out, err = run("info", "--verifier", "tiny-kimi", "--drafter", "tiny-kimi", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["versions"]["jax"] == jax.__version__ and found["bundled"] == ["tiny-kimi"]
    backends = found["backends"]
    assert backends["attention"] == {"cycle": "xla", "prompts": "xla"}
    assert backends["tree_walk"] == "xla" and "found cpu" in backends["mosaic_gpu"]
    verifier, drafter = found["verifier"], found["drafter"]
    assert verifier["family"] == "deepseek_v3"
    assert verifier["cache_bytes_per_token"] == 4 * 4 * (12 + 8)
    assert verifier["attention"].startswith("latent, 4 heads, rank 12; rope theta 10000")
    assert verifier["experts"].endswith(" layers; sigmoid, 2 of 4 groups")
    assert sum(verifier["parameters"].values()) == 2 * verifier["parameters"]["total"]
    total = verifier["parameters"]["total"]
    assert verifier["weights_bytes"] == {"float32": 4 * total, "total": 4 * total}
    assert drafter["boundaries"] == [1, 2, 3] and drafter["draft_vocabulary"] == 64
    assert drafter["recommended"]["dtype"] == "float32" and drafter["training"] == {"updates": 7}
    assert "vocabulary" not in drafter["parameters"]
    status, out, _ = run("info")
    assert status == 0 and "versions.jax" in out


def test_kernels_that_cannot_run_here_are_refused(run):
    """One line that says why; and an unknown name is the command line's to refuse."""
    status, out, err = run("info", "--kernels", "mosaic_gpu")
    assert (status, out) == (2, "")
    assert err.startswith("eagle3: error: kernels 'mosaic_gpu': the kernels need a GPU")
    assert err.count("\n") == 1
