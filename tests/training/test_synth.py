"""Synthesis: whose rows they are, what is learned of them, and a file that survives its writer."""

import collections
import dataclasses
import fcntl
import json

import jax
import pytest

from eagle3_jax import testing
from eagle3_jax.configs import Sampling
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.generation import encode_prompt, generate
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.training import synth
from eagle3_jax.training.data import read_documents
from eagle3_jax.training.prompts import read_prompt_rows
from eagle3_jax.training.synth import SynthConfig, synthesise
from eagle3_jax.verifier import Verifier

TOKENIZER = Tokenizer(
    testing.tiny_tokenizer()._backend.to_str(),
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}"
    "{% if add_generation_prompt %}a({% endif %}",
)
# End tokens that come often: an answer ends after some ten.
VERIFIER = Verifier(
    dataclasses.replace(testing.LLAMA, eos_tokens=(1, 5, 9, 13, 17, 21)),
    jax.random.key(0),
    "tiny-llama",
    TOKENIZER,
)
CONFIG = SynthConfig(temperatures=(0.0, 1.0, 1.0), max_new_tokens=16, length=80)
ROWS = [{"id": f"p{i}", "prompt": "ab" * (i + 1)} for i in range(8)] + [
    {"id": "two", "turns": ["abc", "def"]},
    {
        "id": "said",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
    },
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(path) -> dict[str, dict]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines)}
    assert len(rows) == len(lines)
    return rows


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", ROWS)


def run(prompts, out, config=CONFIG, **options):
    return synthesise(VERIFIER, None, [prompts], out, config, **{"rows": 3, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The rows of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    run(write(folder / "prompts.jsonl", ROWS), folder / "out.jsonl")
    return rows_of(folder / "out.jsonl")


def test_a_row_is_what_generate_gives(whole, tmp_path):
    alone = [row for row in whole.values() if len(row["loss"]) == 1]
    texts = [row["tokens"][: row["loss"][0][0]] for row in alone]
    samplings = [Sampling(temperature=row["temperature"], seed=row["seed"]) for row in alone]
    output = generate(VERIFIER, None, texts, max_new_tokens=16, rows=3, sampling=samplings)
    assert [row["tokens"] for row in alone] == [
        text + new for text, new in zip(texts, output.tokens, strict=True)
    ]
    for row in whole.values():
        assert row["loss"][-1][1] == len(row["tokens"])
        ended = row["tokens"][-1] in VERIFIER.config.eos_tokens
        assert row["finished"] == ended and (ended or len(row["tokens"]) - row["loss"][-1][0] == 16)
        assert (row["verifier"], row["dtype"]) == ("tiny-llama", "float32")
        assert row["source"] == "prompts.jsonl"
    assert {row["finished"] for row in whole.values()} == {True, False}
    assert {row["temperature"] for row in whole.values()} == {0.0, 1.0}
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert whole["said"]["tokens"][: whole["said"]["loss"][0][0]] == encode_prompt(VERIFIER, said)
    path = write(tmp_path / "rows.jsonl", whole.values())
    learned = {document.id: document.learn.sum() for document in read_documents(path, 64)}
    assert learned == {id: sum(b - a for a, b in row["loss"]) for id, row in whole.items()}


def test_the_order_changes_no_row(whole, tmp_path):
    run(write(tmp_path / "prompts.jsonl", ROWS[::-1]), tmp_path / "out.jsonl")
    assert rows_of(tmp_path / "out.jsonl") == whole


def test_going_on_past_the_end_token(whole, prompts, tmp_path):
    found = run(prompts, tmp_path / "on.jsonl", dataclasses.replace(CONFIG, go_on=True))
    assert found["written"] == len(ROWS)
    for id, row in rows_of(tmp_path / "on.jsonl").items():
        short = whole[id]
        assert row["tokens"][: len(short["tokens"])] == short["tokens"]
        assert row["loss"][:-1] == short["loss"][:-1] and row["finished"] == short["finished"]
        assert row["loss"][-1] == [short["loss"][-1][0], len(row["tokens"])]
        assert row["loss"][-1][1] - row["loss"][-1][0] == 16


def test_a_stopped_run_goes_on(whole, prompts, tmp_path):
    out = tmp_path / "out.jsonl"

    def stop(done, total):
        assert total == len(ROWS)
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(prompts, out, progress=stop)
    assert out.read_bytes().endswith(b"}\n") and out.read_bytes().count(b"\n") == 4
    out.write_bytes(out.read_bytes()[:-9])  # its last line was being written
    told = []
    found = run(prompts, out, progress=lambda *counts: told.append(counts))
    assert (found["done_before"], found["written"]) == (3, 7)
    assert told == [(i, 10) for i in range(4, 11)]
    assert rows_of(out) == whole
    again = run(prompts, out)
    assert (again["done_before"], again["written"], again["tokens"]) == (10, 0, 0)
    more = write(tmp_path / "more.jsonl", [*ROWS, {"id": "new", "prompt": "ba"}])
    assert run(more, out)["written"] == 1 and set(rows_of(out)) == {*whole, "new"}


def test_what_is_left_out_is_counted(tmp_path):
    rows = [
        {"id": "long", "prompt": "a" * 70},
        {"prompt": "b"},
        {"prompt": " B "},
        {"id": "turns", "turns": ["c", "d" * 50]},
        {"prompt": "e"},
        {"prompt": "f"},
    ]
    prompts, out = write(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    found = run(prompts, out, limit=3)
    counts = {"prompts": 6, "duplicates": 1, "too_long": 1, "done_before": 0, "written": 3}
    assert counts | {"cut_short": 1, "out": str(out)} == {
        key: found[key] for key in (*counts, "cut_short", "out")
    }
    cut = rows_of(out)["turns"]
    assert len(cut["loss"]) == 1 and cut["loss"][0][1] == len(cut["tokens"]) <= 80
    assert found["accept_length"] == 1.0 and found["tokens_per_second"] > 0


def talk_of(tmp_path, *turns) -> synth._Talk:
    (row,) = read_prompt_rows(write(tmp_path / "one.jsonl", [{"turns": turns}]))
    return synth._Talk(VERIFIER, CONFIG, row)


def test_the_loss_stops_where_reading_again_gives_other_tokens(tmp_path):
    talk = talk_of(tmp_path, "abc", "def")
    first = encode_prompt(VERIFIER, "abc")
    assert talk.tokens == first
    # Token 0 is a special one: it is no part of the answer's text.
    new = [*TOKENIZER.encode("xy"), 0, *TOKENIZER.encode("z"), 1]
    assert talk.take(new) and talk.finished
    said = [("user", "abc"), ("assistant", "xyz"), ("user", "def")]
    messages = [{"role": role, "content": text} for role, text in said]
    assert talk.tokens == encode_prompt(VERIFIER, messages)
    assert talk.loss == [(len(first), len(first) + 2)]
    length = len(talk.tokens)
    assert not talk.take([4, 4]) and not talk.finished
    assert talk.line()["loss"] == [(len(first), len(first) + 2), (length, length + 2)]


def test_plain_text_where_no_template_is_wanted(tmp_path):
    talk = talk_of(tmp_path, "abc", "def")
    raw = synth._Talk(VERIFIER, dataclasses.replace(CONFIG, raw=True), talk.row)
    assert raw.tokens == TOKENIZER.encode("abc")
    assert raw.take(TOKENIZER.encode("xy")) and raw.tokens == TOKENIZER.encode("abcxydef")
    assert raw.loss == [(3, 5)]
    prompts = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(RequestError, match="line 10 holds messages, which need a chat template"):
        run(prompts, tmp_path / "out.jsonl", dataclasses.replace(CONFIG, raw=True))
    assert not (tmp_path / "out.jsonl").exists()


def test_temperatures_come_in_equal_parts():
    config = SynthConfig()
    drawn = [config.sampling(f"id-{i}") for i in range(800)]
    counts = collections.Counter(each.temperature for each in drawn)
    assert set(counts) == {0.0, 0.7, 1.0}
    for temperature, share in ((0.0, 200), (0.7, 400), (1.0, 200)):
        assert abs(counts[temperature] - share) < 60
    assert len({each.seed for each in drawn}) > 795
    assert drawn[:50] != [SynthConfig(seed=1).sampling(f"id-{i}") for i in range(50)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperatures": ()}, "temperatures must name at least one"),
        ({"temperatures": (0.5, -1.0)}, "temperature -1.0 must be 0"),
        ({"seed": -1}, "seed -1 must be 0 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"length": 256}, "length 256 must be above max_new_tokens 256"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(RequestError, match=said):
        SynthConfig(**settings)


def test_an_output_that_is_not_ours_is_refused_and_kept(prompts, tmp_path):
    out, beside = tmp_path / "out.jsonl", tmp_path / "out.jsonl.settings.json"

    def refuse(said, config=CONFIG, **options):
        held = out.read_bytes() if out.exists() else None
        with pytest.raises(RequestError, match=said):
            run(prompts, out, config, **options)
        assert held == (out.read_bytes() if out.exists() else None)

    refuse("rows 0 and limit None must be at least 1", rows=0)
    refuse("rows 3 and limit 0 must be at least 1", limit=0)
    with pytest.raises(
        CapacityError, match="length 5000 passes the verifier's longest text of 4096"
    ):
        run(prompts, out, dataclasses.replace(CONFIG, length=5000))
    assert not out.exists()
    out.write_text("somebody's")
    refuse("holds something already, and there is no out.jsonl.settings.json beside it")
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refuse("is being written by another process")
    out.write_text("")
    run(prompts, out, limit=3)
    assert json.loads(beside.read_text())["max_new_tokens"] == 16
    other = dataclasses.replace(CONFIG, seed=1, length=90)
    refuse("begun with other settings: seed was 0, is 1; length was 80, is 90", other)
    out.write_text('{"id":"p0"}\n[]\n{"id"')
    refuse("out.jsonl line 2 is no row that synth has written")
    out.write_text("")  # nothing is written yet, so nothing is bound
    assert run(prompts, out, other, limit=3)["written"] == 3
