"""Loading: folders and names to models, dtypes, and every way they do not fit."""

import dataclasses
import json
import runpy
import shutil
import tempfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from jax.core import Tracer

from checkpoints import gguf
from checkpoints.drafters import Manifest, write_drafter
from checkpoints.tensors import read_tensors, write_tensors
from eagle3_jax import load, testing
from eagle3_jax.configs import Speculation
from eagle3_jax.contracts import ContractError, LoadError, UnsupportedError
from eagle3_jax.drafter import Drafter
from eagle3_jax.load import load_drafter, load_verifier, recommended_speculation
from eagle3_jax.packed import PARTS, PackedWeight
from eagle3_jax.states import arrays_of, fill
from eagle3_jax.verifier import Verifier

GOLDEN = Path(__file__).parent / "golden"
MODELS = runpy.run_path(str(GOLDEN / "tiny_models.py"))
NAME = "deepseek_a"
BOUNDARIES = (1, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A verifier's folder with a tokenizer; read only."""
    folder = MODELS["write_folder"](NAME, tmp_path_factory.mktemp("models") / "big")
    (folder / "tokenizer.json").write_text(testing.tiny_tokenizer()._backend.to_str())
    settings = {"chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    settings |= {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def verifier(folder) -> Verifier:
    """Loaded once, in float32."""
    return load_verifier(folder, dtype="float32")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def make_drafter(verifier: Verifier) -> Drafter:
    """A small drafter that fits."""
    config = dataclasses.replace(
        testing.tiny_drafter("llama").config,
        verifier_width=verifier.config.width,
        vocab_size=verifier.config.vocab_size,
    )
    return Drafter(config, verifier.spec(BOUNDARIES), jax.random.key(5))


@pytest.fixture
def drafter_folder(verifier, tmp_path):
    """Writes a drafter's folder with changes to its spec or configuration."""
    drafter = make_drafter(verifier)
    arrays = {name: np.asarray(value) for name, value in arrays_of(drafter).items()}

    def write(spec=None, config=None, recommended=None, change=None) -> Path:
        manifest = Manifest(
            config=dataclasses.replace(drafter.config, **(config or {})),
            spec=dataclasses.replace(drafter.spec, **(spec or {})),
            recommended=recommended or {},
        )
        write_drafter(tmp_path / "run" / "drafter", manifest, {**arrays, **(change or {})})
        return tmp_path / "run"

    return write


def test_a_verifier_is_what_its_folder_says(verifier, folder):
    assert verifier.name == "big" and verifier.config.vocab_size == 97
    tensors = MODELS["hub_tensors"](NAME)
    np.testing.assert_array_equal(verifier.embedding[...], tensors["model.embed_tokens.weight"])
    assert verifier.tokenizer is not None
    assert verifier.tokenizer.chat([{"role": "user", "content": "ab"}])[0] == 0
    assert verifier.tokenizer.special == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert verifier.spec((1,)).tokenizer == verifier.tokenizer.fingerprint
    assert load_verifier(str(folder)).dtype == verifier.dtype


def test_bfloat16_leaves_norms_and_router_in_float32(folder):
    low = load_verifier(folder, dtype="bfloat16")
    assert low.dtype == jnp.bfloat16
    kinds = {name: value.dtype for name, value in arrays_of(low).items()}
    for name, kind in kinds.items():
        keep = "norm" in name or "router" in name
        assert kind == (jnp.float32 if keep else jnp.bfloat16), name
    assert {"moe_layers.router.correction", "norm.weight", "head.kernel"} <= set(kinds)


def test_no_weights_are_drawn_while_loading(folder, monkeypatch):
    """The module is built abstractly: only then is a large model's loading not its drawing, too."""
    drawn = []
    normal = jax.random.normal
    monkeypatch.setattr(
        jax.random, "normal", lambda key, *rest: drawn.append(key) or normal(key, *rest)
    )
    load_verifier(folder)
    assert drawn and all(isinstance(key, Tracer) for key in drawn)


@pytest.mark.parametrize(
    "source, words",
    [
        ("no-such-model", "neither a folder nor a bundled name"),
        ("tiny-kimmi", "did you mean tiny-kimi"),
    ],
)
def test_an_unknown_name_is_refused(source, words, tmp_path, monkeypatch):
    (tmp_path / "tiny-kimi" / "verifier").mkdir(parents=True)
    monkeypatch.setattr(load, "BUNDLED", tmp_path)
    assert load.bundled() == ["tiny-kimi"]
    with pytest.raises(LoadError, match=words) as refusal:
        load_verifier(source)
    assert "\n" not in str(refusal.value)


def test_a_bundled_name_is_its_folder(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "small" / "verifier")
    monkeypatch.setattr(load, "BUNDLED", tmp_path)
    assert load_verifier("small").name == "small"


def test_folders_that_hold_no_model(tmp_path, folder):
    with pytest.raises(LoadError, match="holds no config.json"):
        load_verifier(tmp_path)
    with pytest.raises(LoadError, match="is a file; expected a folder"):
        load_verifier(folder / "config.json")


def test_damaged_folders_are_refused(copy):
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(LoadError, match="truncated"):
        load_verifier(copy)
    weights.write_bytes(whole)
    tensors = {k: v.copy() for k, v in read_tensors(weights).items()}
    tensors["model.norm.weight"][3] = np.nan
    write_tensors(weights, tensors)
    with pytest.raises(LoadError, match="NaN or infinite values in model.norm.weight"):
        load_verifier(copy)
    weights.unlink()
    with pytest.raises(LoadError, match="model.safetensors is missing"):
        load_verifier(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(LoadError, match="no JSON file"):
        load_verifier(copy)


def shard(folder: Path) -> None:
    """Split the weights of a folder over two shards and an index."""
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    named = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        write_tensors(folder / file, {k: tensors[k] for k, where in named.items() if where == file})
    index = {"metadata": {}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_load_as_one_file_does(copy, verifier):
    before = {path.name for path in copy.iterdir()}
    shard(copy)
    after = {path.name for path in copy.iterdir()}
    wanted, found = arrays_of(verifier), arrays_of(load_verifier(copy, dtype="float32"))
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert {path.name for path in copy.iterdir()} == after and after - before
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match="missing shards: model-00002-of-00002.safetensors"):
        load_verifier(copy)


def test_other_end_tokens_and_no_tokenizer(copy):
    assert load_verifier(copy).config.eos_tokens == (1,)
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (copy / "tokenizer.json").rename(copy / "tiktoken.model")
    bare = load_verifier(copy)
    assert bare.config.eos_tokens == (2, 3)
    assert bare.tokenizer is None and "tiktoken file (tiktoken.model)" in bare.no_tokenizer


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_of_a_folder_is_named(copy, name, content):
    (copy / name).write_bytes(content)
    with pytest.raises(LoadError, match=name) as refusal:
        load_verifier(copy)
    assert "\n" not in str(refusal.value)


def in_cache(folder: Path, cache: Path, name: str) -> Path:
    """A folder copied to where the hub's library keeps what it has fetched."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("f" * 40)
    return Path(shutil.copytree(folder, repository / "snapshots" / ("f" * 40)))


def test_hub_ids(folder, verifier, drafter_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    in_cache(folder, tmp_path / "cache", "org/big")
    fetched = in_cache(drafter_folder() / "drafter", tmp_path / "cache", "org/drafter")
    found = load_verifier("org/big@main")
    assert found.name == "org/big" and found.tokenizer == verifier.tokenizer
    assert load.find_drafter("org/drafter") == fetched
    assert load_drafter("org/drafter", verifier).spec == verifier.spec(BOUNDARIES)
    with pytest.raises(LoadError, match="org/drafter holds no config.json; expected a verifier"):
        load_verifier("org/drafter")
    with pytest.raises(LoadError, match="org/other is no folder here"):
        load_verifier("org/other")
    # What lies here under that name goes first.
    (tmp_path / "org" / "big").mkdir(parents=True)
    with pytest.raises(LoadError, match="folder org/big holds no config.json"):
        load_verifier("org/big")


def test_gguf_files(tmp_path, monkeypatch):
    path = Path(__file__).parent / "golden" / "gguf" / "tiny.gguf"
    found = load_verifier(path)
    assert found.name == "tiny" and found.config.family == "llama"
    monkeypatch.setattr(gguf, "find_smollm2", lambda: path)
    assert load_verifier("smollm2").name == "smollm2"
    shutil.copy(path, tmp_path / "x.gguf")
    with pytest.raises(LoadError, match="holds no config.json; pass the file x.gguf itself"):
        load_verifier(tmp_path)
    with pytest.raises(LoadError, match="y.gguf"):
        load_verifier(tmp_path / "y.gguf")
    with pytest.raises(LoadError, match="did you mean smollm2"):
        load_verifier("smolm2")


KEYS = sorted(json.loads(json.dumps(MODELS["CONFIGS"][NAME])))
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**9, 10**18, 10**400, float("nan"), float("inf"), -1e30, 1e-300]),
    st.text(max_size=3),
    st.lists(st.integers(-1, 1), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(key=st.sampled_from(KEYS), value=JUNK)
def test_a_config_is_refused_in_one_line_or_loads(key, value):
    """Whatever one key says: no other error, no crash, no endless work."""
    with tempfile.TemporaryDirectory() as name:
        folder = MODELS["write_folder"](NAME, name)
        (folder / "config.json").write_text(json.dumps({**MODELS["CONFIGS"][NAME], key: value}))
        try:
            load_verifier(folder, dtype="float32")
        except (LoadError, UnsupportedError) as error:
            assert "\n" not in str(error)


@given(data=st.data())
def test_a_flipped_byte_is_refused_in_one_line_or_changes_one_number(data, verifier):
    """Of the weights' file: headers are checked, and numbers that stay finite are numbers."""
    with tempfile.TemporaryDirectory() as name:
        folder = MODELS["write_folder"](NAME, name)
        path = folder / "model.safetensors"
        whole = bytearray(path.read_bytes())
        where = data.draw(st.integers(0, 5000) | st.integers(0, len(whole) - 1))
        whole[where] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        try:
            found = arrays_of(load_verifier(folder, dtype="float32"))
        except (LoadError, UnsupportedError) as error:
            assert "\n" not in str(error)
            return
    wanted = arrays_of(verifier)
    assert sum(int((found[k] != x).sum()) for k, x in wanted.items()) <= 1


def test_int4_folders(tmp_path):
    """Experts stay packed; logits are those of transformers with the weights that it widens."""
    tiny = runpy.run_path(str(GOLDEN / "tiny_int4.py"))
    golden = np.load(GOLDEN / "int4.npz")
    config, tensors = tiny["config"]("kimi_k"), tiny["tensors"]("kimi_k")
    checksum = 0
    for name, value in sorted(tensors.items()):
        checksum = zlib.crc32(value.tobytes(), zlib.crc32(name.encode(), checksum))
    assert checksum == golden["weights_crc32"]
    found = load_verifier(tiny["MODELS"]["write_files"](config, tensors, tmp_path), "float32")
    kinds = {name: x.dtype for name, x in arrays_of(found).items() if name.startswith("experts")}
    assert kinds == {
        f"experts.{kernel}.{part}": kind
        for kernel in ("gate_up", "down")
        for part, kind in (("codes", jnp.uint8), ("scales", jnp.bfloat16))
    }
    logits = found.score(jnp.asarray(golden["tokens"]), (1,)).logits
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)


def test_int8(folder, tmp_path):
    """Packed while loading; a tied head is the embedding's memory."""
    found = load_verifier(folder, dtype="bfloat16", quantization="int8")
    assert found.dtype == jnp.bfloat16 and found.embedding.codes.dtype == jnp.int8
    assert found.experts is not None and found.experts.down.codes.dtype == jnp.int8
    tied = load_verifier(MODELS["write_folder"]("llama_tied", tmp_path), quantization="int8")
    assert tied.config.tied_head and tied.head.kernel.codes is tied.embedding.codes
    with pytest.raises(LoadError, match="quantization 'int3' is unknown; expected int8"):
        load_verifier(folder, quantization="int3")


def test_a_gguf_stays_as_stored():
    """Where asked to, value for value; kernels whose parts have several formats do not."""
    path = GOLDEN / "gguf" / "tiny.gguf"
    found = arrays_of(load_verifier(path, "float32", quantization="stored"))
    plain = arrays_of(load_verifier(path, "float32"))
    packed = {name.rpartition(".")[0] for name in found if name.endswith(".codes")}
    assert packed and packed < set(plain)
    for name in packed:
        parts = {p: found[f"{name}.{p}"] for p in PARTS if f"{name}.{p}" in found}
        weight = PackedWeight(**parts, table=name == "embedding")
        np.testing.assert_array_equal(weight[...], plain[name], err_msg=name)
    with pytest.raises(LoadError, match="'stored' wants float32 on one device, found bfloat16"):
        load_verifier(path, "bfloat16", quantization="stored")
    with pytest.raises(LoadError, match="'stored' wants a GGUF file, found tiny-kimi"):
        load_verifier("tiny-kimi", "float32", quantization="stored")


def test_unknown_dtypes_are_refused(folder):
    with pytest.raises(LoadError, match="dtype 'float8' is unknown; expected float32 or bfloat16"):
        load_verifier(folder, dtype="float8")


def test_a_drafter_comes_back(verifier, drafter_folder):
    recommended = {"speculation": {"depth": 3}, "dtype": "float32"}
    run = drafter_folder(recommended=recommended)
    for source in (run, str(run / "drafter")):
        drafter = load_drafter(source, verifier)
        assert drafter.spec == verifier.spec(BOUNDARIES)
        wanted = arrays_of(make_drafter(verifier))
        for name, value in arrays_of(drafter).items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)
        assert recommended_speculation(drafter) == Speculation(depth=3)
        assert hash(drafter.recommended) is not None
    assert load.find_drafter(run) == run / "drafter"


def test_a_drafter_takes_the_dtype_of_its_verifier(folder, drafter_folder):
    drafter = load_drafter(drafter_folder(), load_verifier(folder, dtype="bfloat16"))
    assert drafter.dtype == jnp.bfloat16
    assert drafter.norm.weight.dtype == jnp.float32
    assert drafter.vocabulary.dtype == jnp.int32


def test_default_speculation():
    assert recommended_speculation(None) == Speculation(depth=0)
    assert recommended_speculation(testing.tiny_drafter("llama")) == Speculation()


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"spec": {"width": 32}, "config": {"verifier_width": 32}},
            "width 32, the verifier big has width 64",
        ),
        ({"spec": {"num_layers": 6}}, "a verifier of 6 layers, the verifier big has 5"),
        ({"config": {"vocab_size": 101}}, "vocabulary of 101 tokens, the verifier big has 97"),
    ],
)
def test_a_drafter_of_another_model_is_refused(verifier, drafter_folder, changes, words):
    with pytest.raises(ContractError, match=words) as refusal:
        load_drafter(drafter_folder(**changes), verifier)
    assert "\n" not in str(refusal.value)


def test_a_sibling_only_warns(verifier, drafter_folder):
    with pytest.warns(UserWarning, match="trained with verifier other"):
        load_drafter(drafter_folder(spec={"verifier": "other"}), verifier)


def test_a_convention_is_not_taken_for_our_own_folders(verifier, drafter_folder):
    with pytest.raises(ContractError, match="names boundaries itself"):
        load_drafter(drafter_folder(), verifier, convention="boundary")


def test_a_vocabulary_map_that_cannot_be_one_is_refused(verifier, drafter_folder):
    offsets = np.zeros((40,), np.int32)
    with pytest.raises(ContractError, match="offsets was read as ids"):
        load_drafter(drafter_folder(change={"vocabulary": offsets}), verifier)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"extra": np.zeros(3)}, "missing or unknown: extra"),
        ({"norm.weight": np.zeros(3, np.float32)}, r"norm.weight has shape \[3\]; expected \[24\]"),
    ],
)
def test_arrays_that_do_not_fit_are_named(verifier, drafter_folder, change, words):
    with pytest.raises(LoadError, match=words):
        load_drafter(drafter_folder(change=change), verifier)


def test_fill_wants_every_array():
    arrays = {name: np.asarray(x) for name, x in arrays_of(testing.tiny_drafter("llama")).items()}
    arrays.pop("head.kernel")
    with pytest.raises(LoadError, match="missing or unknown: head.kernel"):
        fill(lambda: testing.tiny_drafter("llama"), arrays, jnp.float32)


@pytest.mark.parametrize("settings", [(("width", 3),), (("depth", 99),), 7])
def test_a_recommendation_that_cannot_be_followed_is_named(settings):
    drafter = testing.tiny_drafter()
    odd = jax.tree.map(lambda x: x, drafter)
    odd.recommended = (("speculation", settings),)
    with pytest.raises(LoadError, match="manifest recommends"):
        recommended_speculation(odd)
