"""Prompt files: forms of a row, ids, duplicates."""

import json

import pytest

from eagle3_jax.contracts import RequestError
from eagle3_jax.training.prompts import read_prompt_rows, unique


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_forms(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    rows = read_prompt_rows(
        write(
            tmp_path / "a.jsonl",
            {"id": "x", "prompt": "one\u2028two"},
            "",
            {"id": 7, "turns": ["a", "b"]},
            {"messages": [system, user]},
            {"conversations": [user]},
        )
    )
    assert [row.turns for row in rows] == [("one\u2028two",), ("a", "b"), ("Hi",), ("Hi",)]
    assert [row.before for row in rows] == [(), (), (("system", "Be brief."),), ()]
    assert [row.id for row in rows[:2]] == ["x", "7"]
    assert rows[2].id != rows[3].id and len(rows[3].id) == 16
    assert rows[1].where == f"{tmp_path / 'a.jsonl'} line 3"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2 is no JSON"),
        ([1], "line 2 has list; expected"),
        ({"text": "x"}, r"line 2 has the keys \['text'\]; expected"),
        ({"turns": []}, "line 2: turns must be a list of texts"),
        ({"turns": ["a", 1]}, "line 2: turns must be a list of texts"),
        ({"prompt": ""}, "line 2 has an empty text"),
        ({"id": 1.5, "prompt": "a"}, "line 2: id must be a text or a whole number; found 1.5"),
        ({"messages": []}, "line 2: messages must be a list, at least one"),
        ({"messages": ["a"]}, "line 2: a message is a role and a content, both texts; found 'a'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "line 2: a message is a role and a"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "ends with a message of 'assi"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, row, said):
    path = write(tmp_path / "a.jsonl", {"prompt": "x"}, row)
    with pytest.raises(RequestError, match=said):
        read_prompt_rows(path)


def test_unreadable_and_empty_files(tmp_path):
    with pytest.raises(RequestError, match="nothing.jsonl cannot be read: No such file"):
        read_prompt_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(RequestError, match="holds no row"):
        read_prompt_rows(write(tmp_path / "a.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="b.jsonl cannot be read"):
        read_prompt_rows(tmp_path / "b.jsonl")


def test_texts_that_came_before_are_left_out(tmp_path):
    user = {"role": "user", "content": "SAY  hello"}
    rows = read_prompt_rows(
        write(
            tmp_path / "a.jsonl",
            {"id": "a", "prompt": "Say hello"},
            {"id": "b", "prompt": " say\nHELLO "},
            {"id": "c", "messages": [{"role": "system", "content": "s"}, user]},
            {"id": "d", "turns": ["Say hello", "again"]},
            {"id": "e", "messages": [user]},
            {"prompt": "other"},
            {"prompt": "Other"},
            {"id": "a", "prompt": "say hello"},
        )
    )
    assert [row.line for row in unique(rows)] == [1, 3, 4, 6]
    other = read_prompt_rows(write(tmp_path / "b.jsonl", {"id": "d", "prompt": "x"}))
    with pytest.raises(RequestError, match="b.jsonl line 1 has the id 'd' of .*a.jsonl line 4 and"):
        unique([*rows, *other])
