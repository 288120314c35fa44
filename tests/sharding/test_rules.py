"""Rules match every array of every family once, and cut it so that parts fit together."""

import dataclasses

import jax
import numpy as np
import pytest

from eagle3_jax import testing
from eagle3_jax.configs import ExpertsConfig
from eagle3_jax.contracts import RequestError
from eagle3_jax.verifier import Verifier
from sharding.mapped import shapes_of
from sharding.mesh import MODEL, MeshShape
from sharding.rules import RULES, Cut, PartitionRules, Rule, kv_heads

MOE = ExpertsConfig(count=8, chosen=3, width=12, score="softmax of chosen", bias=True, limit=7.0)
CONFIGS = {
    "llama": testing.LLAMA,
    "deepseek": testing.DEEPSEEK,
    "gpt_oss": dataclasses.replace(
        testing.LLAMA, qk_norm=True, experts=MOE, sinks=True, attention_bias=True
    ),
}
FOUR = MeshShape(tensor=2, expert=2)


def abstract(config):
    return jax.eval_shape(lambda: Verifier(config, jax.random.key(0)))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_array_has_one_rule_and_is_divided(name):
    RULES.check(shapes_of(abstract(CONFIGS[name])), CONFIGS[name], FOUR)


def test_no_rule_and_two_rules_are_refused():
    with pytest.raises(RequestError, match="no rule for dense_layers.new.kernel"):
        RULES.rule("dense_layers.new.kernel")
    twice = PartitionRules(sinks=Rule(r"head\.kernel"))
    with pytest.raises(RequestError, match="rules head and sinks match head.kernel"):
        twice.rule("head.kernel")


def test_an_axis_used_twice_is_refused():
    for cuts in (
        (Cut(-1, MODEL), Cut(-2, ("expert",))),
        (Cut(-1, ("tensor",)), Cut(-1, ("expert",))),
        (Cut(-3, MODEL),),
    ):
        with pytest.raises(RequestError, match="head.kernel uses an axis twice"):
            PartitionRules(head=Rule(r"head\.kernel", cuts)).cuts("head.kernel", (8, 8))


def test_what_a_mesh_does_not_divide_is_named_in_one_line():
    shapes = shapes_of(abstract(testing.DEEPSEEK))
    with pytest.raises(RequestError, match=r"heads 4 over 12; vocabulary 64 over 12; .*experts 8 "):
        RULES.check(shapes, testing.DEEPSEEK, MeshShape(tensor=4, expert=3))
    config = dataclasses.replace(testing.LLAMA, num_heads=12, num_kv_heads=6, mlp_width=64)
    with pytest.raises(RequestError, match="key/value heads 6 over 4"):
        RULES.check({}, config, FOUR)


@pytest.mark.parametrize(("parts", "kv"), [(2, 1), (4, 1), (1, 2)])
def test_each_part_has_the_key_value_heads_of_its_query_heads(parts, kv):
    c = testing.LLAMA  # 4 heads over 2, of width 8
    assert kv_heads(c, parts) == kv
    heads = np.arange(8).repeat(c.head_width)  # 4 query, 2 key, 2 value heads
    cut = Cut(-1, MODEL, "heads")
    for part in range(parts):
        found = np.concatenate([heads[s] for s in cut.spans(len(heads), part, parts, c)])
        assert len(found) == cut.size(len(heads), parts, c)
        q, rest = np.split(found[:: c.head_width], [c.num_heads // parts])
        keys, values = np.split(rest, 2)
        assert set(q // 2) == set(keys - 4) == set(values - 6)


def test_halves_are_cut_side_by_side_and_what_is_there_once_is_on_the_first():
    c = testing.LLAMA
    columns = np.arange(12)
    halves = [Cut(-1, MODEL, "halves").spans(12, part, 3, c) for part in range(3)]
    assert [columns[a].tolist() + columns[b].tolist() for a, b in halves] == [
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
    ]
    once = [Cut(-1, MODEL, "once").spans(12, part, 3, c) for part in range(3)]
    assert once == [[slice(0, 12)], [], []]


def test_packed_kernels_are_cut_as_what_they_hold():
    path = "moe_layers.mlp.down.kernel"  # [in, out], cut over in; codes and scales are [out, in]
    assert [cut.axis for cut in RULES.cuts(path, (4, 32, 16))] == [-2]
    assert [cut.axis for cut in RULES.cuts(f"{path}.codes", (4, 16, 32))] == [-1]
    assert RULES.cuts(f"{path}.scales", (4, 16, 1)) == ()
    experts = RULES.cuts("experts.gate_up.codes", (4, 8, 24, 32))
    assert [(cut.axis, cut.over) for cut in experts] == [(-3, ("expert",)), (-2, ("tensor",))]
