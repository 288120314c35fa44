"""Safetensors and JSON files: what is whole comes back, what is not is named."""

import ml_dtypes
import numpy as np
import pytest

from checkpoints.tensors import (
    MOST_JSON,
    finite,
    one_line,
    read_json,
    read_tensors,
    read_text,
    some,
    write_json,
    write_tensors,
)
from eagle3_jax.contracts import LoadError

TENSORS = {
    "a.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b.weight": np.linspace(-1, 1, 50).astype(ml_dtypes.bfloat16),
    "c.ids": np.arange(5, dtype=np.int32),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(path, TENSORS)
    return path


def test_tensors_come_back_in_their_dtype(file):
    found = read_tensors(file)
    assert set(found) == set(TENSORS)
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_nothing_is_left_beside(file):
    assert [path.name for path in file.parent.iterdir()] == ["model.safetensors"]


def test_transposed_tensors_are_written_as_they_read(tmp_path):
    """A view with strides of its own is stored by value, not by memory."""
    write_tensors(tmp_path / "t", {"x": TENSORS["a.weight"].T})
    np.testing.assert_array_equal(read_tensors(tmp_path / "t")["x"], TENSORS["a.weight"].T)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.9, 0.999])
def test_a_truncated_file_is_named(file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(LoadError, match=r"model.safetensors .*may be truncated") as refusal:
        read_tensors(file)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LoadError, match="model.safetensors is missing from"):
        read_tensors(tmp_path / "model.safetensors")


def test_another_kind_of_file_is_refused(file):
    file.write_text("<html>not found</html>" * 20)
    with pytest.raises(LoadError, match="no whole safetensors file"):
        read_tensors(file)


def test_a_pointer_in_place_of_a_file_is_named(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(LoadError, match="model.safetensors is the pointer of Git LFS.* git lfs pu"):
        read_tensors(file)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_weights_that_are_no_numbers_are_named(tmp_path, name, bad):
    broken = {k: v.copy() for k, v in TENSORS.items()}
    broken[name].flat[7] = bad
    write_tensors(tmp_path / "t", broken)
    with pytest.raises(LoadError, match=f"NaN or infinite values in {name};"):
        read_tensors(tmp_path / "t")


def test_finite():
    assert finite(np.array([1, 2])) and finite(np.array([1.0, -1e30]))
    assert not finite(np.array([np.nan])) and not finite(np.array([np.inf], ml_dtypes.bfloat16))


def test_long_lists_of_names_are_cut():
    assert some(["a", "b"]) == "a, b"
    assert some(list("abcdef")) == "a, b, c, d and 2 more"


def test_odd_names_stay_in_one_line():
    """Names come from files, and a message is one line that any terminal can print."""
    assert some(["größe", "a\nb", "\ud800"]) == r"größe, 'a\nb', '\ud800'"
    assert len(some(["a" * 10_000])) < 500
    assert one_line("a\n  b\tc") == "a b c" and len(one_line("a" * 10_000)) < 500


def test_json_comes_back(tmp_path):
    write_json(tmp_path / "x.json", {"a": [1, 2.5, None]})
    assert read_json(tmp_path / "x.json") == {"a": [1, 2.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "x.json is missing"),
        ("{", "no JSON file"),
        ("", "no JSON file"),
        ("[1]", "holds list"),
        ("[" * 100_000, "no JSON file"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
    ],
)
def test_bad_json_is_named(tmp_path, text, words):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(LoadError, match=words):
        read_json(tmp_path / "x.json")


def test_a_key_that_says_the_same_twice_is_fine(tmp_path):
    (tmp_path / "x.json").write_text('{"a": [1], "b": NaN, "a": [1]}')
    assert read_json(tmp_path / "x.json").keys() == {"a", "b"}


def test_what_is_no_text_file_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.mkdir()
    with pytest.raises(LoadError, match="x.json is no file"):
        read_text(path)
    path.rmdir()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match="x.json cannot be read: .*utf-8"):
        read_text(path)
    with path.open("wb") as file:
        file.truncate(MOST_JSON + 1)  # takes no room on the disk
    with pytest.raises(LoadError, match=r"has 268435457 bytes; expected at most"):
        read_json(path)


def test_a_failed_write_leaves_the_old_file(file):
    """The new one is written beside; until it is whole the old one stays."""
    before = file.read_bytes()
    with pytest.raises(Exception, match="object"):
        write_tensors(file, {"x": np.array([object()])})
    assert file.read_bytes() == before
    with pytest.raises(TypeError):
        write_json(file, {"x": object()})
    assert file.read_bytes() == before
