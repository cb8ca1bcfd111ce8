"""Files of every shape to rows: which shape is seen, where each row lies, what damage costs."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chats.conversations import read_conversations
from data.chats.json_rows import unfinished
from data.chats.rejects import RejectLog
from data.chats.rows import read_rows, sources_of
from models.errors import EyasError

Pack = Callable[[bytes], bytes]
Told = list[tuple[int, object]]  # of each row its number, and its value or its problem


def told(path: Path, content: bytes | str) -> Told:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [(row.row, row.problem or row.value) for row in read_rows(str(path))]


A, B, C = {"a": 1}, {"b": 2}, {"c": [3]}


# --- where data begins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("blanks", [20_000, 3 << 20])
def test_any_amount_of_white_space_comes_before_the_data(tmp_path: Path, pack: Pack, mark: bytes, blanks: int) -> None:
    space = mark + b" " * blanks + b"\n\r\n\t\n"  # three lines
    lines = b'{"a": 1}\n\n{"b": 2}\n'
    assert told(tmp_path / "d", pack(space + lines)) == [(4, A), (6, B)]
    assert told(tmp_path / "d", pack(space + b'[{"a": 1}, {"b": 2}]')) == [(1, A), (2, B)]
    assert told(tmp_path / "d", pack(space)) == [(1, "empty_file")]


def test_the_place_in_a_message_counts_what_comes_before(tmp_path: Path) -> None:
    # 5 blanks, then "[1, 2" in characters 5 to 9: the brace is character 10.
    with pytest.raises(EyasError, match="not valid JSON in row 3, at character 10: Expecting value"):
        told(tmp_path / "d", "  \n  [1, 2} 3]")


def test_a_long_first_line_is_seen_whole(tmp_path: Path) -> None:
    first = "x" * 300_000
    assert told(tmp_path / "d", json.dumps(first) + '\n{"a": 1}\n') == [(1, first), (2, A)]
    assert told(tmp_path / "d", json.dumps(first)) == [(1, first)]


# --- lines -------------------------------------------------------------------------------------------------------

STRAY = [
    "not json",
    "# c",
    "\0" * 100,
    '{"a" 1}',
    '{"a": "b',
    '{"a": [',
    "{",
    '{"a": 1} x',
    "[INFO] started",
    "]",
    "id,text",
]


@pytest.mark.parametrize("stray", STRAY)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_broken_line_costs_that_line_wherever_it_is(tmp_path: Path, stray: str, place: int) -> None:
    lines = ['{"a": 1}', '{"b": 2}', '{"c": [3]}']
    lines.insert(place, stray)
    rows: list[object] = [A, B, C]
    rows.insert(place, "broken_json")
    assert told(tmp_path / "d", "\n".join(lines) + "\n") == list(enumerate(rows, start=1))


@pytest.mark.parametrize("stray", ["[]", '["x", 1]', '"x"', "3", "null"])
def test_a_line_of_json_that_is_no_object_is_a_row(tmp_path: Path, stray: str) -> None:
    assert told(tmp_path / "d", f'{stray}\n{{"a": 1}}\n') == [(1, json.loads(stray)), (2, A)]


@pytest.mark.parametrize("text", ["not json\nat all\n", "a,b\n1,2\n", "# c\n{% block %}\n", "\0" * 100, "'a'\n{\n"])
def test_a_file_without_json_stops_the_run(tmp_path: Path, text: str) -> None:
    with pytest.raises(EyasError, match="expected a JSON array of conversations or one JSON object a line, found"):
        told(tmp_path / "d", text)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"\0" * 100, b"PK\3\4\x14", b"caf\xe9"])
@pytest.mark.parametrize("key", ["data.valid_path", "verify.prompts"])
def test_a_file_that_is_no_text_is_told_under_its_key_without_its_bytes(
    tmp_path: Path, content: bytes, key: str
) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    for path in (tmp_path / "d.jsonl", tmp_path):
        with pytest.raises(EyasError) as caught:
            list(read_rows(str(path), key=key))
        assert str(caught.value) == (
            f"{key}={tmp_path}/d.jsonl: expected a JSON array of conversations or one JSON object a line, "
            "found data that is no UTF-8 text"
        )


def test_a_text_of_another_kind_is_told_under_its_key(tmp_path: Path) -> None:
    for name, text in (("d.csv", "a,b\n1,2\n"), ("d.md", "# h\u00e9ron\n"), ("d.parquet", "PAR1")):
        (tmp_path / name).write_text(text)
        with pytest.raises(EyasError, match=f"^verify.prompts={tmp_path}/{name}: ") as caught:
            list(read_rows(str(tmp_path / name), key="verify.prompts"))
        assert name == "d.parquet" or repr(text.strip()) in str(caught.value)


def test_lines_that_end_in_carriage_returns(tmp_path: Path) -> None:
    assert told(tmp_path / "d", '\r{"a": 1}\r{"b" 2}\r\r{"c": [3]}\r') == [(2, A), (3, "broken_json"), (5, C)]
    assert told(tmp_path / "d", '{"a": 1}\r\n{"b": 2}\r\n') == [(1, A), (2, B)]


@pytest.mark.parametrize("line", ['{"a": 1} {"b": 2}', '{"a" 1}', "[1, 2} 3]", "nope", '{"a": "\\q'])
def test_only_a_line_that_more_text_could_mend_is_truncated(tmp_path: Path, line: str) -> None:
    assert told(tmp_path / "d", f'{{"a": 1}}\n{line}') == [(1, A), (2, "broken_json")]


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{ "a": 1}{"b": 2}{"c": [3]}',
        '{"a": 1} {"b": 2}\n{"c":\n[3]}',
        '{ "a":\n 1}\n{ "b": 2}\n{ "c": [\n3\n]\n}\n',
        '{"a": 1},\n{"b": 2},\n{"c": [3]},\n',
        '{\r"a": 1\r}\r{\r"b": 2\r}\r{"c": [3]}',
        '[{"a": 1},\n{"b": 2},\n{"c": [3]}\n]',
    ],
)
def test_objects_one_after_the_other(tmp_path: Path, text: str) -> None:
    assert told(tmp_path / "d", text) == [(1, A), (2, B), (3, C)]


@pytest.mark.parametrize(
    ("text", "row", "place"),
    [
        ("[1, 2} 3]", 3, 5),
        ('[1, {"a": 2, 3}]', 2, 13),
        ('[{"a" 1},\n{"b": 2}\n]', 1, 6),
        ('{ "a": 1,\n"b" 2}', 1, 14),
        ('[["\\u12zz"]]', 1, 4),
        ("[1, trux]", 2, 4),
    ],
)
def test_a_broken_value_that_hides_the_next_row_stops_the_run(tmp_path: Path, text: str, row: int, place: int) -> None:
    with pytest.raises(EyasError, match=f"d: not valid JSON in row {row}, at character {place}: "):
        told(tmp_path / "d", text)


WHOLE = r'[{"t": "é\u00e9\ud83d\ude00\\"}, {"n": [-1.5e+3, true, null, -Infinity], "o": {}}]'


@pytest.mark.parametrize("stop", range(1, len(WHOLE)))
def test_an_array_cut_anywhere_is_truncated(tmp_path: Path, stop: int) -> None:
    *rows, last = told(tmp_path / "d", WHOLE[:stop])
    assert rows == [(i + 1, row) for i, row in enumerate(json.loads(WHOLE)[: len(rows)])]
    assert last == (len(rows) + 1, "truncated_file")


@pytest.mark.parametrize("stop", range(1, len(WHOLE) - 1))
def test_an_object_cut_anywhere_is_truncated(tmp_path: Path, stop: int) -> None:
    text = '{"x": ' + WHOLE[:stop]
    assert told(tmp_path / "d", '{"a": 1}\n' + text) == [(1, A), (2, "truncated_file")]
    assert told(tmp_path / "d", '{\n"a": 1\n}\n' + text) == [(1, A), (2, "truncated_file")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, min_size=1, max_size=3), st.booleans(), st.data())
def test_what_is_cut_off_json_is_unfinished(value: list[object], ascii: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(cut, strict=False)
    assert unfinished(caught.value, cut)


def test_a_number_across_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.chats.json_rows.HEAD", 1)
    for size in range(1, 9):
        monkeypatch.setattr("data.chats.json_rows.CHUNK", size)
        assert told(tmp_path / "d", "[12.5e+2, 1.5, -7]") == [(1, 1250.0), (2, 1.5), (3, -7)]


# --- packed files ------------------------------------------------------------------------------------------------


def test_a_gzip_file_cut_behind_a_row_is_still_truncated(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"a": 1}\n{"b": 2}\n')
    assert told(tmp_path / "d", packed[:-8])[-1][1] == "truncated_file"  # without checksum and length
    assert told(tmp_path / "d", packed[:12]) == [(1, "truncated_file")]
    with pytest.raises(EyasError, match="d: cannot be read"):
        told(tmp_path / "d", packed[:-8] + b"\xff" * 8)


def parquet(path: Path, rows: list[dict[str, object]], **options: object) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path.read_bytes()


@pytest.mark.parametrize("codec", ["snappy", "gzip", "none"])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, codec: str) -> None:
    rows: list[dict[str, object]] = [{"a": f"text {i * i}"} for i in range(3000)]
    whole = parquet(tmp_path / "d.parquet", rows, compression=codec, use_dictionary=False)
    assert [row.value for row in read_rows(str(tmp_path / "d.parquet"))] == rows
    damaged = whole[:200] + b"\xff" * 400 + whole[600:]
    cut = whole[: len(whole) // 2]
    for content in (damaged, cut, whole[:4], whole[:-20] + whole[-8:]):
        with pytest.raises(EyasError, match=r"d\.parquet: not a readable parquet file"):
            told(tmp_path / "d.parquet", content)


def test_broken_utf8_in_a_parquet_file_costs_its_row(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "d", [{"a": "one"}, {"a": "twXY"}, {"a": "three"}], compression="none")
    found = told(tmp_path / "d", whole.replace(b"twXY", b"tw\xff\xfe"))
    assert found == [(1, {"a": "one"}), (2, "invalid_unicode"), (3, {"a": "three"})]


def test_large_rows_of_a_parquet_file_come_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    sizes = []
    batches = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: object, batch_size: int) -> object:
        sizes.append(batch_size)
        return batches(self, batch_size=batch_size)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    monkeypatch.setattr("data.chats.rows.BATCH_BYTES", 10_000)
    rows: list[dict[str, object]] = [{"a": str(i) * 1000} for i in range(10)]  # ten of them are 10,000 bytes
    parquet(tmp_path / "d", rows, use_dictionary=False)
    assert [row.value for row in read_rows(str(tmp_path / "d"))] == rows
    assert 5 <= sizes[0] <= 10
    parquet(tmp_path / "d", [])
    assert [(row.row, row.problem) for row in read_rows(str(tmp_path / "d"))] == [(1, "empty_file")]


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"a": i} for i in range(100)]).save_to_disk(str(tmp_path / "saved"))
    assert len(list(read_rows(str(tmp_path / "saved")))) == 100
    (data,) = (tmp_path / "saved").glob("*.arrow")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(EyasError, match="saved: not a readable saved dataset"):
        list(read_rows(str(tmp_path / "saved")))


# --- what is told of them ----------------------------------------------------------------------------------------


def test_rejected_rows_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    nasty = "\x1b[31mred\ud800\u202e\n\0"
    shown = "\\x1b[31mred\\ud800\\u202e\\n\\x00"
    log = RejectLog(tmp_path / "rejects.jsonl", rows=1)
    log.add(f"{nasty}.jsonl", 1, nasty, "no_conversation_column", f"found the keys {nasty}")
    log.close()
    table = log.table()
    assert table.count(shown) == 2 and table.count(shown.replace("\\", "\\\\")) == 1  # the id stands in quotes
    assert table.replace("\n", "").isprintable() and len(table.splitlines()) == 3
    table.encode()
    assert json.loads((tmp_path / "rejects.jsonl").read_text()) == {
        "file": f"{shown}.jsonl",
        "row": 1,
        "id": shown,
        "reason": "no_conversation_column",
        "detail": f"found the keys {shown}",
    }


def test_column_names_of_any_kind_can_be_told(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(r'{"\ud800": 1, "\u001b[31mred": 2}' + "\n")
    log = RejectLog()
    assert not list(read_conversations(path, rejects=log))
    assert [r.detail for r in log.rejects] == [r"found the keys \ud800, \x1b[31mred"]
    assert log.table().encode().count(rb"\ud800, \x1b[31mred") == 1


# --- folders -------------------------------------------------------------------------------------------------------


def test_what_is_taken_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data files at any depth by name; hidden files are no data, other kinds are counted, dead links are mistakes."""
    folder = tmp_path / "data"
    for name in ("b.jsonl", "deep/a.JSON", "._b.jsonl", ".cache/c.jsonl", "notes.txt", "README"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    with caplog.at_level("INFO"):
        assert [Path(s.name).name for s in sources_of(str(folder))] == ["b.jsonl", "a.JSON"]
    assert "2 files of other kinds are passed over" in caplog.text
    asked = sources_of(str(folder), suffixes=(".txt",))
    assert [Path(s.name).name for s in asked] == ["notes.txt"]
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(EyasError, match=r"gone\.json is a link to nothing"):
        sources_of(str(folder))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EyasError, match="not a regular file"):
        sources_of(str(tmp_path / "pipe"))
