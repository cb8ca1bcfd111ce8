"""The data section as a whole: every row counted, the same documents from any number of processes, kept on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from data.chats.rows import Row, Source, inputs_of
from data.documents.corpus import read_corpus, read_documents
from data.documents.encode import Encoder, outcomes, pick_workers
from data.masks.template import ChatTemplate, decode
from models.errors import EyasError
from tests.chat_templates import CHATML, LLAMA3, byte_tokenizer
from tests.chats import TEMPLATE, TOKENIZER, listed, rows_file, runs, section, sharegpt

# --- counts ---------------------------------------------------------------------------------------------------------


def test_every_row_is_kept_or_rejected(tmp_path: Path) -> None:
    good = [sharegpt("q", f"answer {i}", id=str(i)) for i in range(600)]
    rows = [*good[:300], sharegpt("q" * 300, "late"), sharegpt("x"), *good[300:], good[7]]
    data = section(tmp_path, rows_file(tmp_path / "d.gz", *rows), max_length=120)
    found = read_documents(TEMPLATE, data, rejects_copy=tmp_path / "rejects.jsonl")
    assert [runs(e) for e in found.documents] == [[f"answer {i}<|im_end|>"] for i in range(600)]
    assert found.documents[-1].source == f"{tmp_path}/d.gz:602:599"
    log = found.log
    reasons = {"cut_before_answer": 1, "no_assistant_turn": 1, "duplicate": 1}
    assert (log.rows, log.kept, log.counts()) == (603, 600, reasons)
    assert listed(tmp_path / "rejects.jsonl") == [
        (301, "cut_before_answer"), (302, "no_assistant_turn"), (603, "duplicate"),
    ]  # fmt: skip
    supervised = sum(e.num_supervised for e in found.documents)
    tokens = sum(len(e.input_ids) for e in found.documents)
    assert found.summary().startswith(f"SUPERVISED: {supervised:,} of {tokens:,} tokens")
    assert "600 of 603 rows usable, 3 rejected" in found.summary()
    statistics = found.manifest["statistics"]
    assert (statistics["documents"], statistics["tokens"], statistics["supervised_tokens"]) == (600, tokens, supervised)
    assert "of " + f"{tmp_path}/d.gz, row 8" in (tmp_path / "rejects.jsonl").read_text()


@pytest.mark.parametrize("workers", [0, 2])
def test_max_documents_counts_usable_conversations(tmp_path: Path, workers: int) -> None:
    """Rows behind the last one kept are not read, whatever the workers have seen of them."""
    rows = [sharegpt("x"), *(sharegpt("q" * (300 if i % 2 else 1), f"a{i}", id=str(i)) for i in range(40))]
    data = section(tmp_path, rows_file(tmp_path / "d.gz", *rows), max_length=150, max_documents=7, workers=workers)
    found = read_documents(TEMPLATE, data)
    assert [e.source.split(":")[-1] for e in found.documents] == [str(i) for i in range(0, 14, 2)]
    assert found.log.kept == 7 and found.log.rows == found.log.kept + found.log.rejected == 14


def test_nothing_usable_stops_with_the_reasons(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "d.gz", sharegpt(), sharegpt("x"), sharegpt("x", "y"))
    data = section(tmp_path, path, max_length=8)
    with pytest.raises(EyasError, match=r"data\.path: 0 of 3 rows usable") as caught:
        read_documents(TEMPLATE, data, rejects_copy=tmp_path / "run" / "r.jsonl")
    for reason in ("empty_conversation", "no_assistant_turn", "cut_before_answer"):
        assert reason in str(caught.value)
    assert len(listed(tmp_path / "run" / "r.jsonl")) == 3
    assert [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_a_template_that_fits_no_row_stops_early(tmp_path: Path) -> None:
    """The template refuses the first thousand: the rest is not read. Rows that are only too long are no such case."""
    rows = [sharegpt("x"), *({**sharegpt(f"q{i}", "a"), "system": "s"} for i in range(3000))]
    refusing = ChatTemplate(TOKENIZER, CHATML.replace("{% for", "{% if messages[0].role == 'system' %}{{ "
                            "raise_exception('no system') }}{% endif %}{% for", 1))  # fmt: skip
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", *rows))
    with pytest.raises(EyasError, match=r"data\.path: 0 of 1001 rows usable(.|\n)*reading stopped here"):
        read_documents(refusing, data)
    late = [*(sharegpt("q" * 300, f"{i}") for i in range(1200)), sharegpt("q", "a")]
    data = section(tmp_path, rows_file(tmp_path / "e.jsonl", *late), max_length=100)
    assert len(read_documents(TEMPLATE, data).documents) == 1


def test_duplicates_across_files_by_choice(tmp_path: Path) -> None:
    """Equal turns under another dialect and id are the same conversation."""
    one = rows_file(tmp_path / "1.jsonl", sharegpt("a", "b", id="1"), sharegpt("a", "b", id="2"))
    other = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    two = rows_file(tmp_path / "2.jsonl", other, sharegpt("a", "c"))
    assert len(read_documents(TEMPLATE, section(tmp_path, [one, two])).documents) == 2
    assert len(read_documents(TEMPLATE, section(tmp_path, [one, two], duplicates="keep")).documents) == 4


def test_rows_that_differ_in_their_reasoning_are_no_duplicates(tmp_path: Path) -> None:
    def row(reasoning: str) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "b", "reasoning_content": reasoning}
        return {"messages": [{"role": "user", "content": "a"}, answer]}

    path = rows_file(tmp_path / "d.jsonl", row("r"), row("s"), row("r"))
    log = read_documents(TEMPLATE, section(tmp_path, path)).log
    assert (log.counts(), log.repairs) == ({"duplicate": 1}, {"reasoning_folded": 2})


def test_a_file_given_twice_is_all_duplicates_the_second_time(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "d.jsonl", sharegpt("a", "b"), sharegpt("c", "d"))
    log = read_documents(TEMPLATE, section(tmp_path, [path, {"path": path, "weight": 2.0}])).log
    assert (log.rows, log.counts()) == (4, {"duplicate": 2})


# --- processes ------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    rows: list[Any] = [sharegpt("q", f"answer {i} " * (i % 50), f"{i}", "x" * (i % 7)) for i in range(1500)]
    rows[::97] = [None, 7, {}, *rows[1:14]]
    path = rows_file(tmp_path / "d.jsonl", *rows)
    found = []
    for workers in (0, 1, 3):
        data = section(tmp_path, path, workers=workers) | {"cache_dir": str(tmp_path / str(workers))}
        found.append(read_documents(TEMPLATE, data))
    assert found[0].log.rows == 1500 and found[0].log.rejected > 3
    assert everything(found[0].folder) == everything(found[1].folder) == everything(found[2].folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_breaks_off_in_nonsense_is_told_alike(tmp_path: Path, workers: int) -> None:
    path = rows_file(tmp_path / "d.jsonl", sharegpt("a", "b"))
    broken = tmp_path / "broken.json"
    broken.write_text('[{"a": 1}, {"a": 2 "b": 3}, {"a": 4}, {"a": 5}]')
    with pytest.raises(EyasError, match=r"broken\.json: not valid JSON in row 2, at character 19"):
        read_documents(TEMPLATE, section(tmp_path, [path, str(broken)], workers=workers))


@pytest.mark.parametrize("workers", [0, 6])
def test_how_far_the_reader_is_ahead_does_not_matter(tmp_path: Path, workers: int) -> None:
    """Broken in row 3001; with ten documents wanted nobody gets there, and without a limit the rows before count."""
    rows = [json.dumps(sharegpt(f"q{i}", "a")) for i in range(3000)]
    path = tmp_path / "d.json"
    path.write_text(f"[{','.join(rows)}, {{'}}, {rows[0]}, {rows[1]}]")
    data = section(tmp_path, str(path), workers=workers)
    assert len(read_documents(TEMPLATE, data | {"max_documents": 10}).documents) == 10
    rows[7] = json.dumps({"id": "bad"})
    path.write_text(f"[{','.join(rows)}, {{'}}, {rows[0]}, {rows[1]}]")
    with pytest.raises(EyasError, match="not valid JSON in row 3001"):
        read_documents(TEMPLATE, data, rejects_copy=tmp_path / "r.jsonl")
    assert listed(tmp_path / "r.jsonl") == [(8, "no_conversation_column")]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_nested_too_deeply_to_be_sent(tmp_path: Path, workers: int) -> None:
    row = sharegpt("a", "b") | {"extra": json.loads("[" * 700 + "]" * 700)}
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", sharegpt("c", "d"), row), workers=workers)
    assert len(read_documents(TEMPLATE, data).documents) == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("place", [10, 600])
def test_the_proof_is_of_the_first_rows_wherever_they_are_encoded(tmp_path: Path, workers: int, place: int) -> None:
    """A tokenizer that takes accents away is found out by an answer among the first rows, and by none after."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    rows = [sharegpt(f"q{i}", "café" if i == place else "ok") for i in range(700)]
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", *rows), workers=workers)
    if place < 64:
        with pytest.raises(EyasError, match=r"row 11|:11:.*cannot be trusted"):
            read_documents(ChatTemplate(tokenizer, CHATML), data)
    else:
        assert len(read_documents(ChatTemplate(tokenizer, CHATML), data).documents) == 700


class Deadly:
    """Ends the process that receives it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_dead_worker_is_an_error_that_names_the_key() -> None:
    encoder = Encoder(TEMPLATE, Deadly(), 100)  # type: ignore[arg-type]
    rows = [Row("f", i, sharegpt("a", "b")) for i in range(3)]
    with pytest.raises(EyasError, match=r"data\.workers=1: a worker process died"):
        list(outcomes(encoder, rows, 1))


def test_workers_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small.json"
    small.write_text("[]")
    assert pick_workers(None, [Source("file", str(small))]) == 0
    assert pick_workers(3, [Source("file", str(small))]) == 3
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)  # sparse
    big = [Source("file", str(large))]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert (pick_workers(None, big), pick_workers(0, big)) == (16, 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert pick_workers(None, big) == 0


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each reading encoded."""
    counts: list[int] = []
    call = Encoder.__call__

    def counted(self: Encoder, rows: Any, prove: bool = False) -> Any:
        counts.append(len(rows))
        return call(self, rows, prove)

    monkeypatch.setattr(Encoder, "__call__", counted)
    yield counts


def test_unchanged_input_is_not_read_again_and_every_change_is_noticed(tmp_path: Path, reads: list[int]) -> None:
    path = Path(rows_file(tmp_path / "d.jsonl", sharegpt("a", "bb"), sharegpt("c", "dd")))
    data = section(tmp_path, str(path))
    first = read_documents(TEMPLATE, data)
    again = read_documents(TEMPLATE, data | {"workers": 0}, rejects_copy=tmp_path / "r.jsonl")
    assert reads == [2] and again.folder == first.folder and (tmp_path / "r.jsonl").read_text() == ""
    for changed in ({"max_length": 64}, {"duplicates": "keep"}, {"roles": {"x": "user"}}, {"max_documents": 1}):
        read_documents(TEMPLATE, data | changed)
    read_documents(ChatTemplate(TOKENIZER, CHATML.replace("You help", "You assist")), data)
    read_documents(ChatTemplate(TOKENIZER, CHATML, supervise="last"), data)
    assert len(reads) == 7
    size = path.stat().st_size
    path.write_text(path.read_text().replace("dd", "de"))  # one row edited in place
    changed_row = read_documents(TEMPLATE, data)
    assert path.stat().st_size == size and len(reads) == 8
    assert runs(changed_row.documents[1]) == ["de<|im_end|>"] and runs(first.documents[1]) == ["dd<|im_end|>"]


def test_a_damaged_or_half_written_folder_is_made_again(tmp_path: Path, reads: list[int]) -> None:
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", sharegpt("a", "bb")))
    first = read_documents(TEMPLATE, data)
    whole = everything(first.folder)
    (first.folder / "tokens.bin").write_bytes(b"")
    assert everything(read_documents(TEMPLATE, data).folder) == whole
    (first.folder / "manifest.json").write_text("{")
    left = first.folder.with_name(f".{first.folder.name}.part")
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    assert everything(read_documents(TEMPLATE, data).folder) == whole and not left.exists()
    assert len(reads) == 3


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_weights_reach_the_documents_of_their_file(tmp_path: Path) -> None:
    one = rows_file(tmp_path / "1.jsonl", sharegpt("a", "b1"), sharegpt("a", "b2"))
    two = rows_file(tmp_path / "2.jsonl", sharegpt("a", "b3"))
    corpus = read_corpus(TEMPLATE, section(tmp_path, [{"path": one, "weight": 0.5}, two], valid_fraction=0.0))
    assert corpus.weights == [0.5, 0.5, 1.0] and len(corpus.valid) == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "f", "weight": 0}, "a weight must be a number above 0"),
        ({"path": "f", "weight": True}, "a weight must be a number above 0"),
        ({"path": "f", "weight": float("inf")}, "a weight must be a number above 0"),
        ({"file": "f"}, "an input is a path or"),
        ({"path": "f", "wieght": 2}, "an input is a path or"),
        ([], "no file given"),
    ],
)
def test_mistakes_in_inputs(given: Any, says: str) -> None:
    with pytest.raises(EyasError, match=r"^data\.path") as caught:
        inputs_of(given)
    assert says in str(caught.value)


def test_the_date_of_a_template_does_not_follow_the_clock(tmp_path: Path) -> None:
    """One day in the configuration is one text, and another day is another, noticed by the folder."""
    data = section(tmp_path, rows_file(tmp_path / "d.jsonl", sharegpt("a", "bb")))
    first = read_documents(ChatTemplate(TOKENIZER, LLAMA3), data)
    assert "01 Jan 2025" in decode(TOKENIZER, first.documents[0].input_ids)
    other = read_documents(ChatTemplate(TOKENIZER, LLAMA3, {"today": "2024-07-26"}), data)
    assert "26 Jul 2024" in decode(TOKENIZER, other.documents[0].input_ids) and other.folder != first.folder
