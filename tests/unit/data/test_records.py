from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.data.records import DataError, Record, Turn, expand_files, parse_record, read_records
from launcher.errors import UserError


def parse(fields: Any, data_format: str = "auto", system_prompt: str | None = None) -> Record:
    raw = fields if isinstance(fields, bytes) else json.dumps(fields, ensure_ascii=False).encode()
    return parse_record(raw, data_format, source="train.jsonl", line=7, system_prompt=system_prompt)


ASKED = (Turn("user", "Why?"), Turn("assistant", "Because."))


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({"question": "Why?", "answer": "Because."}, ASKED),
        ({"prompt": "Why?", "completion": "Because."}, ASKED),
        ({"instruction": "Why?", "output": "Because."}, ASKED),
        ({"instruction": "Why?", "input": "", "output": "Because."}, ASKED),
        ({"instruction": "Why?", "input": None, "output": "Because."}, ASKED),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, (Turn("user", "Add\n\n1 2"), Turn("assistant", "3"))),
        ({"messages": [{"role": t.role, "content": t.content} for t in ASKED]}, ASKED),
        ({"messages": [{"role": "assistant", "content": "Hello."}], "text": "x"}, (Turn("assistant", "Hello."),)),
        ({"question": "为什么?", "answer": "因为", "id": 3}, (Turn("user", "为什么?"), Turn("assistant", "因为"))),
    ],
)
def test_every_format_is_found_by_its_fields(fields: dict[str, Any], turns: tuple[Turn, ...]) -> None:
    record = parse(fields)
    assert record.turns == turns
    assert (record.text, record.source, record.line) == ("", "train.jsonl", 7)


def test_plain_text_has_no_turns() -> None:
    assert parse({"text": "once"}) == Record("train.jsonl", 7, text="once")


def test_data_format_decides_where_several_fit() -> None:
    fields = {"question": "Why?", "answer": "Because.", "text": "whole"}
    assert parse(fields).turns == ASKED
    assert parse(fields, "text").text == "whole"


def test_a_system_prompt_goes_in_front_unless_the_record_has_one() -> None:
    fields = {"question": "Why?", "answer": "Because."}
    assert parse(fields, system_prompt="Be brief.").turns == (Turn("system", "Be brief."), *ASKED)
    own = {
        "messages": [{"role": "system", "content": "Own."}, *({"role": t.role, "content": t.content} for t in ASKED)]
    }
    assert parse(own, system_prompt="Be brief.").turns[0] == Turn("system", "Own.")
    assert parse({"text": "once"}, system_prompt="Be brief.").text == "once"


def test_a_byte_order_mark_is_no_part_of_the_record() -> None:
    assert parse(b'\xef\xbb\xbf{"question": "Why?", "answer": "Because."}').turns == ASKED


@pytest.mark.parametrize(
    ("fields", "data_format", "parts"),
    [
        (b"\xff\xfe", "auto", ["not UTF-8"]),
        (b'{"a": ', "auto", ["not JSON", "column", "one JSON object a line"]),
        ([1], "auto", ["a JSON list where an object is needed"]),
        (3, "auto", ["a JSON int where an object is needed"]),
        ({"foo": 1, "bar": 2}, "auto", ["no known format", "foo, bar", "qa: question, answer"]),
        ({"question": "Why?"}, "auto", ["no known format"]),
        ({"question": "Why?", "answer": "x"}, "alpaca", ["data.format is alpaca", "instruction, output"]),
        ({"question": "Why?", "answer": 3}, "auto", ["`answer` is a int where a text is needed"]),
        ({"question": "Why?", "answer": None}, "auto", ["`answer` is a NoneType"]),
        ({"question": " ", "answer": "x"}, "auto", ["`question` is empty"]),
        ({"text": "\n"}, "auto", ["`text` is empty"]),
        ({"instruction": "a", "input": 3, "output": "b"}, "auto", ["`input` is a int"]),
        ({"messages": []}, "auto", ["at least one message"]),
        ({"messages": "hello"}, "auto", ["must be a list"]),
        ({"messages": [{"role": "user"}]}, "auto", ["messages[0] needs `role` and `content`"]),
        ({"messages": [{"role": "user", "content": "a"}]}, "auto", ["the last message has the role 'user'"]),
        ({"messages": [{"role": "assistant", "content": ["a"]}]}, "auto", ["messages[0].content"]),
    ],
)
def test_what_cannot_be_used_is_told_with_file_and_line(fields: Any, data_format: str, parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        parse(fields, data_format)
    message = str(caught.value)
    assert message.startswith("train.jsonl:7: ")
    for part in parts:
        assert part in message
    assert caught.value.exit_code == 2


def test_records_of_all_files_in_a_fixed_order_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "3"}')
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n\n  \r\n{"text": "2"}\r\n')
    records = list(read_records([str(tmp_path / "*.jsonl")], "auto"))
    assert [(Path(r.source).name, r.line, r.text) for r in records] == [
        ("a.jsonl", 1, "1"),
        ("a.jsonl", 4, "2"),
        ("b.jsonl", 1, "3"),
    ]


def test_the_line_of_a_bad_record_deep_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "x"}\n' * 999 + "{oops}\n")
    with pytest.raises(DataError, match=r"train\.jsonl:1000: not JSON"):
        list(read_records([str(path)], "auto"))


def test_files_of_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c [1].jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()
    found = expand_files([str(tmp_path / "c [1].jsonl"), str(tmp_path / "[ab].jsonl")])
    assert [path.name for path in found] == ["c [1].jsonl", "a.jsonl", "b.jsonl"]
    with pytest.raises(UserError, match=r"no file matches '.*gone\*'"):
        expand_files([str(tmp_path / "gone*")])
