"""Requests that can never be served are refused as they are written down, each in one line."""

import math

import pytest

from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import RequestError


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -1.0, "temperature -1.0 must be 0"),
        ("temperature", math.nan, "temperature nan must be 0"),
        ("temperature", math.inf, "temperature inf must be 0"),
        ("temperature", 1e-40, "at least 1e-6"),
        ("top_k", -1, r"top_k -1 must be 0 \(off\) or more"),
        ("top_p", 0.0, "top_p 0.0 must be above 0 and at most 1"),
        ("top_p", 2.0, "top_p 2.0 must be above 0 and at most 1"),
        ("top_p", math.nan, "top_p nan must be above 0"),
        ("min_p", 2.0, "min_p 2.0 must be between 0 and 1"),
        ("min_p", -0.1, "min_p -0.1 must be between 0 and 1"),
        ("repetition_penalty", 0.0, "repetition_penalty 0.0 must be above 0"),
        ("repetition_penalty", math.inf, "repetition_penalty inf must be above 0"),
        ("min_new_tokens", -1, "min_new_tokens -1 must be 0 or more"),
        ("max_new_tokens", 0, "max_new_tokens 0 must be at least 1"),
        ("stop", ("a", ""), r"stop \('a', ''\) must be texts that are not empty"),
        ("seed", -1, "seed -1 must be 0 or more"),
        ("seed", 2**63, "below 2\\*\\*63"),
        ("logit_bias", ((3, math.inf),), "logit_bias .* must be pairs of a token id and a finite"),
    ],
)
def test_settings_of_sampling_that_make_no_sense(field, value, said):
    with pytest.raises(RequestError, match=f"^sampling .*{said}") as refusal:
        Sampling(**{field: value})
    assert "\n" not in str(refusal.value)


def test_a_text_is_never_shorter_than_its_minimum():
    Sampling(min_new_tokens=5, max_new_tokens=5)
    with pytest.raises(RequestError, match="max_new_tokens 4 must be at least 5"):
        Sampling(min_new_tokens=5, max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": -1}, "depth -1 is outside 0 to 16"),
        ({"depth": 17}, "depth 17 is outside 0 to 16"),
        ({"topk": 0}, "topk 0 is outside 1 to 16"),
        ({"topk": 17}, "topk 17 is outside 1 to 16"),
        ({"depth": 4, "nodes": 5}, r"nodes 5: a chain \(topk 1\) of depth 4 has 4 nodes"),
        ({"depth": 0, "topk": 2, "nodes": 2}, "depth 0 and topk 2 drafts nothing"),
        ({"depth": 4, "topk": 2}, "a tree of depth 4 and topk 2 needs nodes"),
        ({"depth": 4, "topk": 2, "nodes": 3}, "nodes 3: .* keeps 4 to 14 nodes"),
        ({"depth": 4, "topk": 2, "nodes": 15}, "nodes 15: .* keeps 4 to 14 nodes"),
        ({"depth": 8, "topk": 8, "nodes": 129}, "nodes 129: .* keeps 8 to 128 nodes"),
    ],
)
def test_shapes_of_speculation_that_make_no_sense(settings, said):
    with pytest.raises(RequestError, match=f"^(speculation |a tree ).*{said}|^{said}") as refusal:
        Speculation(**settings)
    assert "\n" not in str(refusal.value)


def test_shapes_of_speculation_at_their_limits():
    assert Speculation(depth=4, nodes=4).candidates == 4
    assert Speculation(depth=1, topk=16, nodes=16).candidates == 16
    assert Speculation(depth=16, topk=16, nodes=128).candidates == 16 + 15 * 256
