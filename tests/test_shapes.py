"""Tree shapes: which nodes they draft, against hand-worked examples and a slow reference of EAGLE-2's rule."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from eval.drafts.draws import Draws, Start
from eval.drafts.shapes import AdaptiveDepth, DynamicTree, Shape, StaticTree, chain, classic, fit, read_tree, save_tree
from eval.drafts.tree import ROOT, DraftTree, Drawn
from eval.verify.sampling import Sampling
from models.errors import EyasError
from models.vocab import DraftVocab
from tests.table_session import Row, TableSession, Text, random_row, states

GREEDY = Sampling(0.0)


def draft(
    shape: Shape, row: Row, vocab: DraftVocab, texts: Sequence[Text], limits: Sequence[int], sampling: Sampling = GREEDY
) -> tuple[list[DraftTree], TableSession]:
    """Trees after the texts, one slot each."""
    session, parts = TableSession(row), []
    for slot, text in enumerate(texts):
        session.reset(slot, text[0])
        part = states(0, len(text) - 1)
        ids = torch.tensor(text[1:], dtype=torch.int64)
        parts.append(session.extend([slot], [len(text) - 1], part.taps, part.final, ids))
    start = Start(torch.cat(parts), limits, texts, [random.Random(0).random] * len(texts), session.expand)
    return shape.draft(start, Draws(vocab, sampling)), session


def paths(tree: DraftTree) -> list[Text]:
    """Every node as the tokens from the root down to it."""
    tokens = tree.tokens.tolist()
    return [tuple(tokens[n] for n in tree.path(node)) for node in range(len(tree))]


# --- static trees --------------------------------------------------------------------------------------------


def test_paths_are_ordered_by_level() -> None:
    tree = StaticTree.of_paths([[0, 1], [1], [0], [0, 1, 0], [1, 3]])
    assert tree.paths == ((0,), (1,), (0, 1), (1, 3), (0, 1, 0))
    assert (tree.levels, tree.nodes) == (3, 5)
    assert tree.parents == (ROOT, ROOT, 0, 1, 2)
    assert chain(3) == StaticTree.of_paths([[0], [0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[0], [0, -1]], r"entry 2 \(\[0, -1\]\): ranks are whole numbers"),
        ([[0], [True]], r"entry 2 \(\[True\]\): ranks are whole numbers"),
        ([[0], [0.0]], r"entry 2 \(\[0.0\]\): ranks are whole numbers"),
        ([[0], []], r"entry 2 \(\[\]\): must be a list of ranks"),
        ([0], r"entry 1 \(0\): must be a list of ranks"),
        (["01"], r"entry 1 \('01'\): must be a list of ranks"),
        ([[0], [1], [0]], r"entry 3 \(\[0\]\): the same as entry 1"),
        ([[0], [1, 0]], r"entry 2 \(\[1, 0\]\): its parent \[1\] is missing"),
        ([], "a tree needs at least one path"),
    ],
)
def test_wrong_paths_are_named(entries: list[list[int]], message: str, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=message):
        StaticTree.of_paths(entries)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(EyasError, match=f"^verify.tree={file}: {message}"):
        read_tree(file)


def test_files(tmp_path: Path) -> None:
    tree = StaticTree.of_paths([[0], [2], [0, 1]])
    for name, text in {
        "list.json": "[[0], [2], [0, 1]]",
        "about.json": '{"about": "why", "paths": [[0], [2], [0, 1]]}',
        "list.yaml": "- [0]\n- [2]\n- [0, 1]\n",
        "about.yml": "paths:\n- [0]\n- [2]\n- [0, 1]\n",
        "marked.json": "\ufeff[[0], [2], [0, 1]]",
        "marked.yaml": "\ufeff- [0]\n- [2]\n- [0, 1]\n",
    }.items():
        (tmp_path / name).write_text(text)
        assert read_tree(str(tmp_path / name)) == tree
    save_tree(tmp_path / "new.json", tree, 'of "mine"')
    assert read_tree(tmp_path / "new.json") == tree
    assert json.loads((tmp_path / "new.json").read_text())["about"] == 'of "mine"'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[[0] [1]]", "is not valid JSON: Expecting ',' delimiter in line 1, column 6$"),
        ("a.yaml", b"- [0\n- [1", "is not valid YAML: expected ',' or ']', but got '\\[' in line 2, column 3$"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("a.yaml", b"\x1b[31m", "is not valid YAML$"),
        ("a.json", b"\xff\xfe[[0]]", "is not UTF-8 text$"),
        ("a.json", b"[" * 100_000, "is nested too deeply; it must hold a list of paths"),
        ("a.json", b"[[" + b"9" * 5000 + b"]]", "holds a value that is no rank; it must hold a list of paths"),
        ("a.yaml", b"[[1], 2020-13-45]", "holds a value that is no rank; it must hold a list of paths"),
        ("a.yaml", b"[!!timestamp x]", "holds a value that is no rank; it must hold a list of paths"),
        ("a.yaml", b"[[-0x" + b"f" * 9000 + b"]]", "entry 1 \\(too long to show\\): ranks are whole numbers"),
        ("a.json", b'[["' + b"x" * 99 + b'"]]', "entry 1 \\(\\['x{58}\\.\\.\\.\\): ranks are whole numbers"),
        ("a.json", b"[[[0]]]", "entry 1 \\(\\[\\[0\\]\\]\\): ranks are whole numbers"),
        ("a.json", b'{"tree": [[0]]}', "must hold a list of paths of ranks such as"),
        ("a.json", b"3", "must hold a list of paths"),
        ("a.yaml", b"", "the file is empty; it must hold a list of paths"),
        ("a.json", b"\xef\xbb\xbf \n", "the file is empty"),
        ("a.json", None, "no such file"),
    ],
)
def test_wrong_files_are_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EyasError, match=f"^verify.tree={tmp_path / name}: {message}") as caught:
        read_tree(tmp_path / name)
    assert "sys." not in str(caught.value) and len(str(caught.value)) < len(str(tmp_path)) + 200


def test_a_folder_is_no_tree_file(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=f"^verify.tree={tmp_path}: is a folder; give a file"):
        read_tree(tmp_path)


@pytest.mark.parametrize(("name", "widths", "ranks"), [("medusa", [10, 28, 23, 2], 10), ("eagle1", [4, 8, 8, 3, 2], 4)])
def test_classic_trees_have_their_published_sizes(name: str, widths: list[int], ranks: int) -> None:
    tree = classic(name)
    assert [sum(len(path) == level for path in tree.paths) for level in range(1, tree.levels + 1)] == widths
    assert max(rank for path in tree.paths for rank in path) == ranks - 1
    for path in tree.paths:  # the likelier sibling is always there
        assert not path[-1] or (*path[:-1], path[-1] - 1) in tree.paths


def test_trimming_by_hand() -> None:
    tree = StaticTree.of_paths([[0], [1], [4], [0, 0], [4, 0], [0, 0, 0], [0, 0, 4], [4, 0, 0]])
    assert tree.trimmed(None, 5) == (tree, 0)
    assert tree.trimmed(2, 9) == (StaticTree.of_paths([[0], [1], [4], [0, 0], [4, 0]]), 3)
    # Rank 4 does not exist among four tokens: [4], all below it, and [0, 0, 4].
    assert tree.trimmed(None, 4) == (StaticTree.of_paths([[0], [1], [0, 0], [0, 0, 0]]), 4)
    assert chain(7).trimmed(4, 100) == (chain(4), 3)
    late = StaticTree.of_paths([[3], [3, 0]])
    for levels, told in ((None, "3 tokens"), (1, "1 level and 3 tokens"), (2, "2 levels and 3 tokens")):
        with pytest.raises(EyasError, match=f"none of its nodes can be drafted, the drafter has {told}$"):
            late.trimmed(levels, 3)
    # Candidates: 4 + 4 * 16 = 68 at first, 3 + 1 * 9 = 12 with two levels and three tokens.
    assert DynamicTree(5, 4, 60).trimmed(2, 3) == (DynamicTree(2, 3, 60), 56)
    assert DynamicTree(5, 4, 60).trimmed(None, 4) == (DynamicTree(5, 4, 60), 0)


def test_trimming_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit(chain(3), "verify.tree=chain", None, 100) == chain(3)
        assert not caplog.records
        assert fit(chain(7), "verify.tree=chain", 4, 100) == chain(4)
    assert [r.getMessage() for r in caplog.records] == [
        "verify.tree=chain: 3 nodes are left out, the drafter has 4 levels and 100 tokens"
    ]


def by_hand(text: Text) -> Tensor:
    """Draft vocabulary 10, 20, 30, 40; the order of its likeliest tokens by the text's last token."""
    order = {
        5: (20, 10, 40, 30),
        10: (30, 20, 10, 40),
        20: (40, 30, 20, 10),
        30: (10, 40, 30, 20),
        40: (20, 40, 10, 30),
    }
    return torch.tensor([4.0 - order[text[-1]].index(token) for token in (10, 20, 30, 40)])


FOUR = DraftVocab(torch.tensor([10, 20, 30, 40]), 50)


def test_a_static_tree_by_hand() -> None:
    tree = StaticTree.of_paths([[0], [2], [0, 0], [0, 1], [2, 1], [0, 1, 0], [2, 1, 3]])
    (found,), session = draft(tree, by_hand, FOUR, [(1, 5)], [9])
    # After 5: 20, (10), 40. After 20: 40, 30. After 40: (20), 40. After 30: 10; after 40 the fourth: 30.
    assert found.tokens.tolist() == [20, 40, 40, 30, 40, 10, 30]
    assert found.parents == (ROOT, ROOT, 0, 0, 1, 3, 4)
    assert set(found.drawn) == {Drawn.FIXED} and not found.q
    # Only nodes with children are expanded, numbered in that order.
    assert session.calls[1:] == [
        ("expand", [0, 0], [-1, -1], [20, 40], 1),
        ("expand", [0, 0], [0, 1], [30, 40], 2),
    ]
    (found,), session = draft(tree, by_hand, FOUR, [(1, 5)], [1])
    assert found.tokens.tolist() == [20, 40] and len(session.calls) == 1


def test_a_chain_is_the_argmax_chain() -> None:
    row, vocab = random_row(7, seed=3), DraftVocab(torch.tensor([0, 2, 3, 5, 8, 9, 11]), 12)
    texts: list[Text] = [(1, 4), (6,) * 5, (7, 7, 1)]
    trees, _ = draft(chain(4), row, vocab, [(0, *text) for text in texts], [4, 2, 9])
    for text, tree, length in zip(texts, trees, (4, 2, 4), strict=True):
        expected: Text = (0, *text)
        for _ in range(length):
            expected += (int(vocab.ids[row(expected).argmax()]),)
        assert tree.is_chain and tree.tokens.tolist() == list(expected[len(text) + 1 :])


# --- EAGLE-2 -------------------------------------------------------------------------------------------------


def test_a_dynamic_tree_by_hand() -> None:
    """Root: .7 .2 .1; after token 0: .5 .4 .1; after 1: .1 .25 .65; after 2 anything. Scores are products."""
    table = {9: (0.7, 0.2, 0.1), 0: (0.5, 0.4, 0.1), 1: (0.1, 0.25, 0.65), 2: (0.8, 0.1, 0.1)}

    def row(text: Text) -> Tensor:
        return torch.tensor(table[text[-1]]).log() + 3.0

    vocab = DraftVocab(torch.arange(3), 10)
    # Level 1: (0) .7, (1) .2. Level 2: (0,0) .35, (0,1) .28, (1,2) .13, (1,1) .05; frontier (0,0), (0,1).
    # Level 3: (0,0,0) .175, (0,0,1) .14, (0,1,2) .182, (0,1,1) .07. The best six, by level:
    (found,), session = draft(DynamicTree(3, 2, 6), row, vocab, [(8, 9)], [3])
    assert paths(found) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 2)]
    assert found.parents == (ROOT, ROOT, 0, 0, 2, 3)
    assert session.calls[1:] == [
        ("expand", [0, 0], [-1, -1], [0, 1], 1),
        ("expand", [0, 0], [0, 0], [0, 1], 2),
    ]
    (found,), _ = draft(DynamicTree(3, 2, 99), row, vocab, [(8, 9)], [2])
    assert paths(found) == [(0,), (1,), (0, 0), (0, 1), (1, 2), (1, 1)]


def test_of_equals_the_shallower() -> None:
    """After two equally likely tokens one is certain: four nodes of probability .5, and the fourth is left out."""

    def row(text: Text) -> Tensor:
        return torch.tensor([0.0, 0.0, -math.inf] if text[-1] == 2 else [-math.inf, -math.inf, 0.0])

    (found,), _ = draft(DynamicTree(2, 2, 3), row, DraftVocab(torch.arange(3), 3), [(1, 2)], [2])
    assert len(found) == 3 and found.depths == (0, 0, 1)
    assert sorted(paths(found)[:2]) == [(0,), (1,)]
    # The impossible children are no drafts even where there is room for them.
    (found,), _ = draft(DynamicTree(2, 2, 60), row, DraftVocab(torch.arange(3), 3), [(1, 2)], [2])
    assert sorted(paths(found)) == [(0,), (0, 2), (1,), (1, 2)]


def reference(row: Row, vocab: DraftVocab, text: Text, shape: DynamicTree, levels: int) -> set[Text]:
    """EAGLE-2 in float64, by enumeration of every path of the draft vocabulary."""
    tokens = vocab.ids.tolist()

    def log_prob(path: Text) -> float:
        logits = dict(zip(tokens, row(text + path[:-1]).double().tolist(), strict=True))
        return logits[path[-1]] - math.log(sum(math.exp(x) for x in logits.values()))

    def rank(path: Text) -> int:
        return sum(log_prob((*path[:-1], token)) > log_prob(path) for token in tokens)

    score: dict[Text, float] = {(): 0.0}
    frontier: set[Text] = {()}
    candidates: list[Text] = []
    for level in range(1, levels + 1):
        every = [path for path in itertools.product(tokens, repeat=level) if path[:-1] in frontier]
        new = [path for path in every if rank(path) < shape.branch]
        score |= {path: score[path[:-1]] + log_prob(path) for path in new}
        frontier = set(sorted(new, key=lambda path: -score[path])[: shape.branch])
        candidates += new
    return set(sorted(candidates, key=lambda path: (-score[path], len(path)))[: shape.nodes])


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_dynamic_trees_are_eagle2s(seed: int, slots: int) -> None:
    row, vocab = random_row(6, seed, spread=1.0 + seed), DraftVocab(torch.tensor([0, 3, 4, 6, 7, 9]), 10)
    shape = DynamicTree(4, 3, 5 + 6 * seed)
    texts: list[Text] = [(slot, 7, *range(slot)) for slot in range(slots)]
    limits = [4, 2, 1, 9][:slots]
    trees, session = draft(shape, row, vocab, texts, limits)
    for text, tree, limit in zip(texts, trees, limits, strict=True):
        assert set(paths(tree)) == reference(row, vocab, text, shape, min(limit, 4))
        assert set(tree.drawn) == {Drawn.FIXED} and len(set(paths(tree))) == len(tree)
        for node in (ROOT, *range(len(tree))):  # siblings are tried in the order of their probability
            before = text if node == ROOT else text + paths(tree)[node]
            logits = dict(zip(vocab.ids.tolist(), row(before).tolist(), strict=True))
            order = [logits[tree.tokens.tolist()[child]] for child in tree.children(node)]
            assert order == sorted(order, reverse=True)
    assert [call[0] for call in session.calls] == ["extend"] * slots + ["expand"] * 3  # all slots in one call a level


class Ban(LogitsProcessor):
    """Bans every token of the text so far."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids, -math.inf)


def test_a_dynamic_tree_under_a_ban() -> None:
    """No token stands twice on a path: the tree is that of a drafter that can't repeat itself."""
    row, vocab = random_row(6, 5), DraftVocab(torch.tensor([0, 3, 4, 6, 7, 9]), 10)

    def banned(text: Text) -> Tensor:
        return row(text).masked_fill(torch.isin(vocab.ids, torch.tensor(text)), -math.inf)

    for sampling in (Sampling(0.0, extra=(Ban(),)), Sampling(0.7, top_k=1, extra=(Ban(),))):
        (tree,), _ = draft(DynamicTree(3, 4, 60), row, vocab, [(3, 5)], [3], sampling)
        (plain,), _ = draft(DynamicTree(3, 4, 60), banned, vocab, [(3, 5)], [3])
        assert paths(tree) == paths(plain) and tree.parents == plain.parents
        assert all(len(set(path)) == len(path) and 3 not in path for path in paths(tree))
    # Five tokens are left at the root, four after each: with a branch of six all of them, and no more.
    (tree,), _ = draft(DynamicTree(2, 6, 60), row, vocab, [(3, 5)], [2], Sampling(0.0, extra=(Ban(),)))
    assert len(tree) == 5 + 5 * 4


@pytest.mark.parametrize("key", ["gamma", "branch", "nodes"])
def test_sizes_must_be_positive(key: str) -> None:
    sizes = {"gamma": 2, "branch": 2, "nodes": 2, key: 0}
    with pytest.raises(EyasError, match=f"verify.{key}=0"):
        DynamicTree(*sizes.values())
    with pytest.raises(EyasError, match="verify.gamma=0"):
        chain(0)


# --- adaptive depth, geometry --------------------------------------------------------------------------------


def test_adaptive_depth_by_hand() -> None:
    depth = AdaptiveDepth(4, decay=0.5)
    depth.begin(0)
    depth.begin(1)
    levels = []
    for accepted in (0, 0, 0, 1, 2, 2, 4):  # averages 2, 1, .5, .75, 1.375, 1.6875, 2.84375
        depth.learn(1, accepted)
        levels.append(depth.levels(1))
    assert levels == [3, 2, 2, 2, 2, 3, 4]
    assert depth.levels(0) == 4  # its own average is untouched
    depth.move(1, 0)
    depth.learn(0, 0)  # 1.421875
    assert depth.levels(0) == 2
    depth.begin(0)
    assert depth.levels(0) == 4
    for _ in range(9):
        depth.learn(0, 0)
    assert depth.levels(0) == 1  # drafting never stops: otherwise nothing could be learnt


def test_the_block_of_a_tree_by_hand() -> None:
    #       root 3 -> 5, 7;  7 -> 1;  1 -> 2
    tree = DraftTree(torch.tensor([5, 7, 1, 2]), (ROOT, ROOT, 1, 2), (Drawn.FIXED,) * 4)
    block = tree.block(3)
    assert block.tokens.tolist() == [3, 5, 7, 1, 2]
    assert list(block.depths or ()) == [0, 1, 1, 2, 3]  # siblings share a position
    assert block.seen is not None and block.seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]
    for chained in (DraftTree.chain([4, 6]), DraftTree.empty()):
        block = chained.block(3)
        assert block.tokens.tolist() == [3, *chained.tokens.tolist()]
        assert block.depths is None and block.seen is None


def test_a_part_of_a_tree_by_hand() -> None:
    q = (torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.9]))
    tree = DraftTree(torch.tensor([0, 1, 1, 0]), (ROOT, ROOT, 1, 2), (Drawn.DISTINCT,) * 4, q, (0, 0, 1, 1))
    part = tree.only([1, 2])
    assert part.tokens.tolist() == [1, 1] and part.parents == (ROOT, 0)
    assert part.q_row == (0, 1) and part.q is q
    assert tree.only(range(4)) is tree
