"""What the terminal shows of a document, for text and terminals of every kind."""

import io
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chats.rejects import RejectLog
from data.look.preview import Piece, excerpt, pieces, preview_text, print_preview, token_repr
from data.look.statistics import describe
from data.masks.template import Example
from models.tiny_target import tiny_tokenizer
from models.visible import visible

BYTES = tiny_tokenizer()  # one token a byte
START, END = 1, 2  # <|im_start|>, <|im_end|>


def ids_of(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False))


def document(read: str, answer: str, source: str = "a.json:1:x") -> Example:
    head, tail = [START, *ids_of(read), END], [*ids_of(answer), END]
    return Example(head + tail, [False] * len(head) + [True] * len(tail), source)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's way: blanks are part of the word after them, unknown characters are their bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "o", "k", "ok", "▁ok"]
    backend = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [("o", "k"), ("▁", "ok")], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


# --- tokens and their text ---


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd<")))
def test_every_character_comes_whole_and_once(text: str) -> None:
    found = list(pieces(BYTES, ids_of(text)))
    assert [(piece.text, piece.stop - piece.first) for piece in found] == [(c, len(c.encode())) for c in text]


@given(st.lists(st.integers(0, 258), max_size=80))
def test_every_token_of_broken_text_is_in_one_piece(ids: list[int]) -> None:
    found = list(pieces(BYTES, ids))
    assert [piece.first for piece in found] == [0, *(piece.stop for piece in found)][: len(found)]
    assert (found[-1].stop if found else 0) == len(ids)
    assert all(0 < piece.stop - piece.first <= 16 for piece in found)


def test_half_a_character_does_not_swallow_what_follows() -> None:
    first, second = ids_of("é")
    a, b = ids_of("ab")
    assert list(pieces(BYTES, [first, a, b])) == [("\ufffd", 0, 1), ("a", 1, 2), ("b", 2, 3)]
    assert list(pieces(BYTES, [a, first, second, first])) == [("a", 0, 1), ("é", 1, 3), ("\ufffd", 3, 4)]
    replacement = [("a", 0, 1), ("\ufffd", 1, 4), ("b", 4, 5)]  # the character U+FFFD itself, three bytes
    assert list(pieces(BYTES, ids_of("a\ufffdb"))) == replacement
    stray = list(pieces(BYTES, [second] * 40))
    assert (stray[0].first, stray[-1].stop) == (0, 40)
    assert all(left.stop == right.first for left, right in pairwise(stray))


def test_blanks_of_words_stay() -> None:
    tokenizer = word_tokenizer()
    ids = tokenizer.encode("ok ok 你ok", add_special_tokens=False)
    names = ["▁ok", "▁ok", "▁", "<0xE4>", "<0xBD>", "<0xA0>", "ok"]
    assert tokenizer.convert_ids_to_tokens(ids) == names
    assert list(pieces(tokenizer, ids)) == [("ok", 0, 1), (" ok", 1, 2), (" ", 2, 3), ("你", 3, 6), ("ok", 6, 7)]
    assert [token_repr(tokenizer, i) for i in (ids[0], ids[3], ids[6])] == ["' ok'", "'<0xE4>'", "'ok'"]


def test_a_long_document_is_cut_in_the_middle_and_never_through_a_character() -> None:
    ids = ids_of("你" * 100)
    head, gap, tail = excerpt(BYTES, ids, 100)  # 50 tokens either side: 16 characters of 3
    assert (len(head), gap, len(tail)) == (16, range(48, 252), 16)
    assert head[-1] == Piece("你", 45, 48) and tail[0] == Piece("你", 252, 255) and tail[-1].stop == 300
    assert excerpt(BYTES, ids, 300) == (list(pieces(BYTES, ids)), range(300, 300), [])
    assert excerpt(BYTES, ids, 1) == ([], range(0, 300), [])  # half a character is nothing to show


def test_control_and_invisible_characters_show_as_escapes() -> None:
    assert visible("a\x00b\x1b[31m\r\x7f\x9b") == "a\\x00b\\x1b[31m\\r\\x7f\\x9b"
    assert visible("\u202e\u2066\u200b\ufeff\u2028\ue000\udc80") == "\\u202e\\u2066\\u200b\\ufeff\\u2028\\ue000\\udc80"
    kept = "שלום\n\tसत्\u200dय 👩\u200d👧 ideographic\u3000space"
    assert visible(kept) == kept
    assert visible("a\nb\tc", kept="") == "a\\nb\\tc"


# --- documents ---


def test_supervised_text_stands_between_brackets_and_in_its_own_style() -> None:
    text = preview_text(document("hi\n", "grüß"), BYTES)
    assert text.plain == "<|im_start|>hi\n<|im_end|>⟦grüß<|im_end|>⟧"
    styled = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styled == {
        "<|im_start|>": "dim underline",
        "hi\n": "dim",
        "<|im_end|>": "bold green underline",  # the last of two
        "⟦grüß": "bold green",
        "⟧": "bold green",
    }


def test_text_that_looks_like_the_marks_is_not_taken_for_them() -> None:
    assert preview_text(document("⟦no⟧", "yes"), BYTES).plain == "<|im_start|>\\u27e6no\\u27e7<|im_end|>⟦yes<|im_end|>⟧"


def test_boundaries_follow_every_token() -> None:
    text = preview_text(document("a", "bé"), BYTES, boundaries=True)
    assert text.plain == "<|im_start|>│a│<|im_end|>│⟦b│é││<|im_end|>│⟧"


def test_a_cut_says_how_much_it_leaves_out() -> None:
    example = document("q" * 50, "a" * 1950)  # 52 + 1951 tokens
    text = preview_text(example, BYTES, 60).plain  # 30 and 30
    gap = "... 1,943 tokens left out here, 1,921 of them supervised ..."
    assert text == f"<|im_start|>{'q' * 29}\n{gap}\n⟦{'a' * 29}<|im_end|>⟧"


@pytest.mark.parametrize("encoding", ("utf-8", "ascii", "cp1252"))
@pytest.mark.parametrize("width", (4, 20, 120))
def test_any_text_in_any_terminal(encoding: str, width: int) -> None:
    nasty = "\x1b[2J\x07 שלום \u202eevil\u202c [bold]not markup[/bold] :smile: é 你好 \x00"
    example = Example(*vars(document(nasty, nasty)).values())
    example = Example(example.input_ids, example.supervised, "dir/\udcff\u202e[red].json:3:\x1b", True)
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width)
    lengths = np.array([len(example.input_ids)])
    print_preview([example] * 3, BYTES, count=2, console=console, statistics=describe(lengths, lengths, RejectLog(), 1))
    text = raw.getvalue().decode(encoding)
    assert text.count("\\x1b[2J\\x07") == 4  # twice in each of two examples
    assert text.count("[bold]not markup[/bold] :smile:") == 4
    assert "dir/\\udcff\\u202e[red].json:3:\\x1b: " in text and "cut at data.max_length" in text
    assert "tokens in each of 1 documents" in text
    assert not set(text) & {"\x1b", "\x00", "\x07", "\u202e"}
    opening, closing = ("⟦", "⟧") if encoding == "utf-8" else ("[[", "]]")
    assert text.count(opening) == text.count(closing) == 2


def test_colour_where_there_is_colour() -> None:
    console = Console(record=True, width=200, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    print_preview([document("[b]hi", "[i]hello")], BYTES, console=console)
    assert "\x1b[1;32m⟦[i]hello" in console.export_text(styles=True)
