"""Evaluation: prompt files, conversations, and figures from sums."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import testing
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.generation import generate
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.training import evaluation
from eagle3_jax.training.evaluation import (
    accept_lengths,
    conversation,
    evaluate,
    first_difference,
    mean,
    not_chosen,
    read_prompts,
)
from eagle3_jax.verifier import Verifier


def verifier_with(tokenizer: Tokenizer, **changes) -> Verifier:
    config = dataclasses.replace(testing.LLAMA, **changes)
    return Verifier(config, jax.random.key(0), "tiny-llama", tokenizer)


PLAIN = testing.tiny_tokenizer()
CHAT = Tokenizer(
    PLAIN._backend.to_str(),
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}",
)


LENGTHS = {"accept_length", "acceptance_by_depth", "new_tokens"}


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompt_files(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        json.dumps({"turns": ["one", "two"], "id": 3}),
        "",
        json.dumps({"prompt": "three\u2028four"}, ensure_ascii=False),
    )
    assert read_prompts(path) == [["one", "two"], ["three\u2028four"]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 has list; expected"),
        ('{"text": "x"}', r"line 2 has the keys \['text'\]; expected"),
        ('{"turns": []}', "line 2: turns must be a list of texts"),
        ('{"turns": ["a", 1]}', "line 2: turns must be a list of texts"),
        ('{"prompt": ""}', "line 2 has an empty text"),
        (
            json.dumps({"messages": [{"role": r, "content": "x"} for r in ("system", "user")]}),
            "line 2 begins in the middle of a conversation",
        ),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, line, said):
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}', line)
    with pytest.raises(RequestError, match=said):
        read_prompts(path)


def test_unreadable_and_empty_files(tmp_path):
    with pytest.raises(RequestError, match="nothing.jsonl cannot be read: No such file"):
        read_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(RequestError, match="holds no row"):
        read_prompts(write(tmp_path / "a.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="b.jsonl cannot be read"):
        read_prompts(tmp_path / "b.jsonl")


def test_a_later_turn_continues_the_conversation():
    plain, chat = verifier_with(PLAIN), verifier_with(CHAT)
    assert conversation(plain, ["a", "b", "c"], ["1", "2"]) == "a1b2c"
    assert conversation(chat, ["a", "b"], ["1"]) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "b"},
    ]


def recorded(monkeypatch):
    """Every call of `generate` that an evaluation makes: drafter, prompt, capacity, output."""
    calls = []

    def spy(verifier, drafter, prompts, **settings):
        output = generate(verifier, drafter, prompts, **settings)
        calls.append((drafter, prompts[0], settings["capacity"], settings["rows"], output))
        return output

    monkeypatch.setattr(evaluation, "generate", spy)
    return calls


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["text", "messages"])
def test_figures_are_from_sums_over_every_turn(monkeypatch, tokenizer):
    calls = recorded(monkeypatch)
    verifier = verifier_with(tokenizer)
    drafter = testing.tiny_drafter("llama")
    sets = {"one": [["def f", "more"], ["abc"]], "two": [["xyz"], ["never"]]}
    told = []
    found = evaluate(
        verifier,
        {"d": drafter},
        {"one": sets["one"], "two": sets["two"][:1]},
        max_new_tokens=6,
        speculation=Speculation(depth=2),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(found) == {"sets", "mean"} and set(found["sets"]) == {"one", "two"}
    assert {rows for *_, rows, _ in calls} == {1}

    # Two calls a set warm up; then both ways run on each turn.
    one = calls[2:8]
    assert len(calls) == 2 + 6 + 2 + 2
    assert len({capacity for _, _, capacity, _, _ in one}) == 1
    # Who goes first changes from turn to turn.
    assert [call[0] is None for call in one] == [True, False, False, True, True, False]
    answer = one[0][-1].text[0]
    prompt = conversation(verifier, ["def f", "more"], [answer])
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)  # type: ignore
    assert one[2][1] == one[3][1] == ids

    for figures, part in ((found["sets"]["one"], one), (found["sets"]["two"], calls[10:])):
        drafted = [call[-1] for call in part if call[0] is not None]
        plain = [call[-1] for call in part if call[0] is None]
        rows = [output.rows[0] for output in drafted]
        new, cycles = sum(len(row.tokens) - 1 for row in rows), sum(row.cycles for row in rows)
        assert figures["accept_length"] == new / cycles
        first = sum(row.accepted[0] for row in rows)
        second = sum(row.accepted[1] for row in rows)
        expected = [first / cycles, second / first if first else 0.0]
        assert figures["acceptance_by_depth"] == expected
        speeds = [
            sum(len(output.tokens[0]) - 1 for output in outputs)
            / sum(output.stats.seconds for output in outputs)
            for outputs in (drafted, plain)
        ]
        assert figures["tokens_per_second"] == pytest.approx(speeds[0])
        assert figures["plain_tokens_per_second"] == pytest.approx(speeds[1])
        assert figures["speedup"] == pytest.approx(speeds[0] / speeds[1])
        assert figures["same_tokens"] == 1.0 and "same_dtype_speedup" not in figures
        assert figures["new_tokens"] == sum(len(row.tokens) for row in rows)
        broken_even = figures["accept_length"] / figures["break_even_accept_length"]
        assert broken_even == pytest.approx(figures["speedup"])
    for key, value in found["mean"].items():
        columns = [found["sets"][name][key] for name in ("one", "two")]
        np.testing.assert_allclose(value, np.mean(columns, axis=0))
    json.dumps(found)


def test_several_drafters_limit_and_no_plain():
    verifier = verifier_with(PLAIN)
    drafters = {"a": testing.tiny_drafter("llama"), "b": testing.tiny_drafter("llama", seed=2)}
    sets = {"s": [["def f"], ["never run"]]}
    told = []
    found = evaluate(
        verifier,
        drafters,
        sets,
        max_new_tokens=4,
        speculation=Speculation(depth=2),
        plain=False,
        limit=1,
        progress=lambda *counts: told.append(counts),
    )
    assert told == [(1, 1)]
    assert set(found) == {"drafters"} and set(found["drafters"]) == {"a", "b"}
    for one in found["drafters"].values():
        assert set(one["sets"]["s"]) == {*LENGTHS, "tokens_per_second"}


def test_refusals_say_where():
    drafter = {"d": testing.tiny_drafter("llama")}
    short = verifier_with(PLAIN, max_length=32)
    with pytest.raises(CapacityError, match="set s, conversation 1, turn 1: prompt"):
        evaluate(short, drafter, {"s": [["a" * 40]]}, max_new_tokens=4)
    with pytest.raises(RequestError, match="at least one drafter"):
        evaluate(short, {}, {"s": [["a"]]})
    with pytest.raises(RequestError, match="at least one set"):
        evaluate(short, drafter, {"s": []})
    with pytest.raises(RequestError, match="limit 0"):
        evaluate(short, drafter, {"s": [["a"]]}, limit=0)


def test_mean_is_plain():
    sets = {"a": {"x": 1.0, "y": [0.0, 1.0]}, "b": {"x": 3.0, "y": [1.0, 0.0]}}
    assert mean(sets) == {"x": 2.0, "y": [0.5, 0.5]}


def test_plain_decoding_in_a_dtype_of_its_own(monkeypatch):
    calls = recorded(monkeypatch)
    verifier, low = verifier_with(PLAIN), in_bfloat16(verifier_with(PLAIN))
    drafter = {"d": testing.tiny_drafter("llama")}
    sets = {"s": [["def f", "abc"]]}
    common = {"max_new_tokens": 6, "speculation": Speculation(depth=2), "plain_verifier": low}
    found = evaluate(verifier, drafter, sets, **common)["sets"]["s"]
    ways = [output.stats for *_, output in calls[3:]]
    assert len(ways) == 6
    speeds = [2 * 5 / (ways[a].seconds + ways[b].seconds) for a, b in ((0, 5), (1, 4), (2, 3))]
    assert found["plain_tokens_per_second"] == pytest.approx(speeds[0])
    assert found["same_dtype_speedup"] == pytest.approx(speeds[2] / speeds[1])
    # The conversation goes on with the answer of plain decoding in its own dtype.
    answer = calls[3][-1].text[0]
    assert calls[6][1] == PLAIN.encode(conversation(verifier, ["def f", "abc"], [answer]))  # type: ignore
    assert (
        "same_dtype_speedup"
        not in evaluate(verifier, drafter, {"s": [["x"]]}, **common, same_dtype=False)["mean"]
    )
    assert len(calls) == 9 + 4


def in_bfloat16(verifier: Verifier) -> Verifier:
    def low(value):
        small = value.ndim > 1 and jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(jnp.bfloat16) if small else value

    return jax.tree.map(low, verifier)


def test_lengths_alone_are_those_of_one_row_at_a_time():
    verifier = verifier_with(PLAIN)
    drafters = {"a": testing.tiny_drafter("llama"), "b": testing.tiny_drafter("llama", seed=2)}
    sets = {"one": [["def f", "more"], ["abc"], ["x y z"]], "two": [["xyz"]]}
    told = []
    common = {
        "max_new_tokens": 9,
        "speculation": Speculation(depth=2),
        "sampling": Sampling(temperature=0.9),
    }
    found = accept_lengths(
        verifier, drafters, sets, rows=2, progress=lambda *counts: told.append(counts), **common
    )
    alone = evaluate(verifier, drafters, sets, plain=False, **common)
    for name in drafters:
        for label, figures in found["drafters"][name]["sets"].items():
            assert set(figures) == LENGTHS
            one = alone["drafters"][name]["sets"][label]
            assert figures == {key: one[key] for key in LENGTHS}
    assert told[-1] == (10, 10) and told == sorted(told)
    with pytest.raises(CapacityError, match="set s, turn 1: prompt 2"):
        accept_lengths(verifier, drafters, {"s": [["a"], ["a" * 5000]]}, **common)


def test_tokens_that_plain_decoding_would_not_have_chosen():
    verifier = verifier_with(PLAIN)
    prompt = [5, 6, 7]
    new = generate(verifier, None, [prompt], max_new_tokens=12).tokens[0]
    assert not_chosen(verifier, prompt, new) == 0
    assert not_chosen(verifier, prompt, [*new[:5], (new[5] + 1) % 64]) == 1
    assert not_chosen(verifier, prompt, new, Sampling(temperature=0.5)) is None
    assert not_chosen(verifier, prompt, new, Sampling(repetition_penalty=1.2)) is None
    # At the very end of the longest text there is no room to pad.
    short = verifier_with(PLAIN, max_length=len(prompt) + len(new))
    assert not_chosen(short, prompt, new) == 0


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
