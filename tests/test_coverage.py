"""Draft-vocabulary report: a vocabulary of ten tokens by hand."""

import io
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from data.look.coverage import Coverage, percent
from data.look.preview import token_repr
from models.errors import EyasError
from models.tiny_target import tiny_tokenizer
from models.vocab import DraftVocab

#                      0   1   2   3  4  5  6  7  8  9
COUNTS = torch.tensor([0, 50, 20, 10, 8, 6, 3, 2, 1, 0])  # 100 in all
HELD = torch.tensor([1, 4, 2, 0, 0, 1, 0, 0, 0, 2])  # 10 in all
SPECIAL = (0, 9)


def test_shares_by_hand() -> None:
    coverage = Coverage.of(COUNTS, SPECIAL, (1, 3, 4, 6, 8, 12), chosen=4)
    # Both special tokens, and then the most frequent: 1; 1 2; 1 2 3 4; 1 2 3 4 5 6. 1 is too small for the special
    # tokens, 12 more than there are.
    assert [(s.size, s.train) for s in coverage.sizes] == [(3, 0.5), (4, 0.7), (6, 0.88), (8, 0.97), (10, 1.0)]
    assert all(s.held_out is None and s.share == s.train for s in coverage.sizes)


def test_held_out_shares_are_of_the_vocabulary_that_training_chose() -> None:
    coverage = Coverage.of(COUNTS, SPECIAL, (3, 4, 6, 8), chosen=4, held_out=HELD)
    # {0 1 9}: 1 + 4 + 2; with 2: + 2; 3 and 4 add nothing; with 5 and 6: + 1.
    assert [s.held_out for s in coverage.sizes] == [0.7, 0.9, 0.9, 1.0, 1.0]
    assert [s.share for s in coverage.sizes] == [0.7, 0.9, 0.9, 1.0, 1.0]
    assert [s.train for s in coverage.sizes] == [0.5, 0.7, 0.88, 0.97, 1.0]
    assert Coverage.of(COUNTS, SPECIAL, held_out=torch.zeros(10, dtype=torch.int64)).held_out is None


def test_tau_ceiling_by_hand() -> None:
    coverage = Coverage.of(COUNTS, SPECIAL, (4,), chosen=4)
    assert math.isclose(coverage.tau_ceiling(coverage.at(4)), 1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert coverage.tau_ceiling(coverage.at(10)) == 5
    assert math.isclose(Coverage.of(COUNTS, SPECIAL, gamma=2).tau_ceiling(coverage.at(3)), 1 + 0.5 + 0.25)


def test_most_frequent_tokens_lost() -> None:
    coverage = Coverage.of(COUNTS, SPECIAL, (4, 8), chosen=4)
    assert [lost.id for lost in coverage.lost(4)] == [3, 4, 5, 6, 7, 8]
    assert [tuple(lost) for lost in coverage.lost(8)] == [(7, 2, "#7"), (8, 1, "#8")]
    held_out = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 0])
    both = Coverage.of(COUNTS, SPECIAL, (8,), held_out=held_out).lost(8)
    assert [(lost.id, lost.occurrences) for lost in both] == [(7, 2), (8, 2)]  # as often: the lower id first


def test_lost_tokens_are_named() -> None:
    tokenizer = tiny_tokenizer()
    counts = torch.zeros(288, dtype=torch.int64)
    blank, x, part = (tokenizer.encode(text, add_special_tokens=False)[0] for text in (" ", "x", "é"))
    counts[[blank, x, part]] = torch.tensor([9, 8, 7])
    lost = Coverage.of(counts, (0, 1, 2), (3,), chosen=3, token_text=partial(token_repr, tokenizer)).lost(3)
    assert [token.text for token in lost] == ["' '", "'x'", "'Ã'"]  # the first byte of é, as the vocabulary has it


def test_recommended_is_the_smallest_listed_size_with_99_percent() -> None:
    counts = torch.tensor([0, 90, 9, 1, 0, 0])
    assert Coverage.of(counts, (), (1, 2, 3)).recommend() == 2  # exactly 99 of 100
    assert Coverage.of(counts, (), (1, 3)).recommend() == 3
    assert Coverage.of(counts, (), (1,)).recommend() == 6  # all, if nothing less will do
    held_out = torch.tensor([0, 50, 0, 0, 50, 0])  # token 4 never occurs in training, but fills up to five
    assert Coverage.of(counts, (), (2, 3, 5), held_out=held_out).recommend() == 5


def test_reason_for_the_chosen_size() -> None:
    text = Coverage.of(COUNTS, SPECIAL, (4, 8), chosen=4, hidden=500_000).justify()
    for part in ("draft_vocab_size=4 ", "covers 70.00% of the supervised training", "300.0 of 1,000", "2.77 instead"):
        assert part in text
    assert "Doubling it would add 27.00 points for 2.0 M more parameters" in text  # 97 - 70; 4 x 500,000
    assert "10 is the smallest listed size that covers 99% of the supervised training tokens (100.00%)" in text
    text = Coverage.of(COUNTS, SPECIAL, (4, 8), chosen=4, held_out=HELD).justify(8)
    assert "covers 100.00% of the held-out supervised tokens (97.00% of the training ones)" in text
    assert "add 0.00 points; 8 is" in text


def test_full_vocabulary_is_the_identity() -> None:
    coverage = Coverage.of(COUNTS, SPECIAL, (4, 8), held_out=HELD)
    (full,) = [size for size in coverage.sizes if size.size == coverage.chosen]
    assert full == (10, 1.0, 1.0) and coverage.lost(10) == []
    vocab = DraftVocab.from_counts(COUNTS, 10, SPECIAL)
    assert vocab.ids.tolist() == list(range(10)) and not vocab.d2t.any() and vocab.t2d.all()
    assert coverage.justify().startswith("The full vocabulary of 10 tokens loses nothing; 8 is the smallest")
    assert "with 80% of the head" in coverage.justify()
    assert (
        Coverage.of(COUNTS, SPECIAL, ())
        .justify()
        .endswith("10 is the smallest listed size that covers 99% of the supervised training tokens.")
    )


def test_listed_sizes_and_the_head() -> None:
    counts = torch.ones(5000, dtype=torch.int64)
    coverage = Coverage.of(counts, range(1500), chosen=3000, hidden=64)
    assert [size.size for size in coverage.sizes] == [2048, 3000, 4096, 5000]
    assert coverage.head_parameters(3000) == 192_000
    assert [size.share for size in coverage.sizes] == [0.4096, 0.6, 0.8192, 1.0]


def test_mistakes_name_the_key() -> None:
    with pytest.raises(EyasError, match=r"drafter.draft_vocab_size=1 cannot hold the target's 2 special"):
        Coverage.of(COUNTS, SPECIAL, chosen=1)
    with pytest.raises(EyasError, match=r"drafter.draft_vocab_size=11: must be between 1 and the target's 10"):
        Coverage.of(COUNTS, SPECIAL, chosen=11)
    with pytest.raises(EyasError, match=r"data.path: no token is supervised"):
        Coverage.of(torch.zeros(10, dtype=torch.int64), SPECIAL)


def test_report_for_programs() -> None:
    report = Coverage.of(COUNTS, SPECIAL, (4, 8), chosen=4, hidden=16, held_out=HELD).to_json()
    assert json.loads(json.dumps(report)) == report
    assert (report["vocab_size"], report["chosen"], report["recommended"]) == (10, 4, 8)
    assert (report["supervised_tokens"], report["held_out_tokens"], report["gamma"]) == (100, 10, 4)
    four = report["sizes"][0]
    assert (four["size"], four["train_coverage"], four["held_out_coverage"]) == (4, 0.7, 0.9)
    assert math.isclose(four["lost_per_1000"], 100) and four["head_parameters"] == 64
    assert four["lost"][0] == {"id": 3, "occurrences": 10, "text": "#3"}


@pytest.mark.parametrize("width", (30, 80, 200))
@pytest.mark.parametrize("encoding", ("utf-8", "ascii"))
def test_table_in_any_terminal(width: int, encoding: str) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width)
    coverage = Coverage.of(COUNTS, SPECIAL, (4, 8), chosen=4, hidden=16, held_out=HELD)
    console.print(coverage.table(console.encoding))
    lines = raw.getvalue().decode(encoding).splitlines()
    assert max(map(len, lines)) <= width
    if width >= 80:
        (row,) = [line for line in lines if "* 4" in line]
        cells = ["*", "4", "70.00%", "90.00%", "10.00", "100.0", "4.10", "0.0"]
        assert row.replace("│", " ").replace("|", " ").split()[: len(cells)] == cells
    if width == 200:
        assert "#3 (10)  #4 (8)  #5 (7)  #6 (3)" in "\n".join(lines)


def test_plot_is_a_picture(tmp_path: Path) -> None:
    coverage = Coverage.of(COUNTS, SPECIAL, (4, 8), chosen=4, held_out=HELD)
    coverage.plot(tmp_path / "coverage.png")
    assert [path.name for path in tmp_path.iterdir()] == ["coverage.png"]
    height, width, _ = imread(tmp_path / "coverage.png").shape
    assert (height, width) == (560, 1008)  # 4 x 7.2 inches at 140 dots
    assert (tmp_path / "coverage.png").read_bytes() == coverage.png()


def test_only_all_is_100_percent() -> None:
    assert [percent(share) for share in (1.0, 0.99999, 0.29, 0.9428, 0.0)] == [
        "100.00%", "99.99%", "29.00%", "94.28%", "0.00%",
    ]  # fmt: skip
