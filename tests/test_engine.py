"""data.regenerate.engine: what is drawn, when an answer ends, and that batching changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import data.regenerate.engine
from data.chats.conversations import Conversation, Message
from data.chats.prompts import Questions
from data.masks.template import ChatTemplate
from data.regenerate.engine import LocalEngine, batches, choose, generate
from data.regenerate.replay import Outcome, Sampling, ask
from models.errors import EyasError
from tests.tiny import tiny_target

EOS = frozenset({0, 2})
QUESTIONS = [
    Questions("a", "chat", "", ("Hi", "And then?"), "q.jsonl", 1),
    Questions("b", "code", "", ("Write a loop.",), "q.jsonl", 2),
    Questions("c", "math", "", ("What is 2 + 3, and what is 12 times 4?",), "q.jsonl", 3),
    Questions("d", "chat", "", ("Why?",), "q.jsonl", 4),
    Questions("e", "chat", "Be kind.", ("A longer first turn.", "Shorter.", "Thanks!"), "q.jsonl", 5),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("engine"), layers=2)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def engine(folder: Path, sampling: Sampling, eos: frozenset[int] = EOS, **options: Any) -> LocalEngine:
    template = ChatTemplate(AutoTokenizer.from_pretrained(folder), options.pop("template", None))
    return LocalEngine(lambda: load(folder), template, eos, sampling, {}, **options)


def answered(one: LocalEngine, questions: Sequence[Questions], done: Sequence[int] = ()) -> list[Outcome]:
    """Outcomes in the order of the input."""
    outcomes: list[Outcome] = []
    one.answer(ask(questions), done, outcomes.append, lambda tokens: None)
    return sorted(outcomes, key=lambda outcome: outcome.asked.index)


def texts(outcome: Outcome) -> list[str]:
    assert outcome.row is not None, outcome.reason
    return [turn["value"] for turn in outcome.row["conversations"] if turn["from"] == "gpt"]


def greedy(model: PreTrainedModel, ids: list[int], new: int, eos: frozenset[int]) -> list[int]:
    """transformers' own decoding of one unpadded prompt."""
    tokens = torch.tensor([ids])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": sorted(eos), "pad_token_id": 0}
    decode: Any = model.generate  # typed as something that is not callable
    return decode(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(ids) :].tolist()


# --- drawing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "uniform", "expected"),
    [
        (Sampling(0.0), 0.99, 1),  # the best token, whatever the number
        (Sampling(1.0), 0.29, 0),  # p = .3 .5 .2
        (Sampling(1.0), 0.31, 1),
        (Sampling(1.0), 0.81, 2),
        (Sampling(0.5), 0.23, 0),  # p squared = .09 .25 .04, over .38: .237 .658 .105
        (Sampling(0.5), 0.25, 1),
        (Sampling(0.5), 0.90, 2),
        (Sampling(1.0, top_p=0.6), 0.62, 1),  # nucleus by rank: .5 .3, over .8: .625 .375
        (Sampling(1.0, top_p=0.6), 0.63, 0),
        (Sampling(1.0, top_p=0.6), 0.999, 0),
        (Sampling(1.0, top_p=0.1), 0.999, 1),  # never empty
    ],
)
def test_choose_inverts_the_distribution(sampling: Sampling, uniform: float, expected: int) -> None:
    logits = torch.tensor([[math.log(p) for p in (0.3, 0.5, 0.2)]])
    assert choose(logits, [uniform], sampling).tolist() == [expected]


def test_choose_takes_each_row_with_its_own_number() -> None:
    logits = torch.zeros(3, 4)
    assert choose(logits, [0.1, 0.6, 0.9], Sampling(1.0)).tolist() == [0, 2, 3]


class Chain:
    """A "model" of four tokens whose next-token distribution is a row of a table, chosen by the last token."""

    device = torch.device("cpu")
    table = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, **rest: Any) -> Any:
        return SimpleNamespace(logits=self.table[input_ids[:, -1:]].log())

    __call__ = forward


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (
            Sampling(1.0, max_new_tokens=100),
            [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]],
        ),
        # squares over their sums: .16 .09 .04 .01 over .30; .49 .01 .01 .01 over .52
        (
            Sampling(0.5, max_new_tokens=100),
            [
                [16 / 30, 9 / 30, 4 / 30, 1 / 30],
                [1 / 30, 4 / 30, 9 / 30, 16 / 30],
                [0.25] * 4,
                [49 / 52, *[1 / 52] * 3],
            ],
        ),
    ],
)
def test_the_drawn_tokens_have_the_targets_distribution(sampling: Sampling, expected: list[list[float]]) -> None:
    """100 streams of 100 tokens, one chi-square for each of four states: false alarm in one of 2,500 seeds."""
    model: Any = Chain()
    streams = [random.Random(sampling.stream(f"row {i}", 0)) for i in range(100)]
    outputs = generate(model, [[0]] * 100, streams, frozenset(), sampling)
    counts = [[0] * 4 for _ in range(4)]
    for tokens in outputs:
        assert len(tokens) == 100
        for before, after in zip([0, *tokens], tokens, strict=False):
            counts[before][after] += 1
    for observed, probabilities in zip(counts, expected, strict=True):
        result = stats.chisquare(observed, [p * sum(observed) for p in probabilities])
        assert result.pvalue > 1e-4, (observed, probabilities)


def test_the_nucleus_holds_only_its_tokens() -> None:
    """top_p = .65: of .4 .3 .2 .1 the first two, 4/7 and 3/7; false alarm in one of 10,000 seeds."""
    streams = [random.Random(f"0:{i}:0") for i in range(4000)]
    drawn = choose(Chain.table[:1].log().expand(4000, 4), [s.random() for s in streams], Sampling(1.0, top_p=0.65))
    counts = torch.bincount(drawn, minlength=4).tolist()
    assert counts[2:] == [0, 0]
    assert stats.chisquare(counts[:2], [4000 * 4 / 7, 4000 * 3 / 7]).pvalue > 1e-4


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_batch_gives_what_each_prompt_gives_alone(tmp_path: Path, family: str) -> None:
    model = load(tiny_target(tmp_path, family, layers=2))
    prompts = [[5, 9, 11], list(range(20, 45)), [7], list(range(100, 112))]
    new = 16
    # end tokens that the runs do meet, at different steps, so that rows leave the batch one after the other
    eos = frozenset({greedy(model, prompts[0], new, EOS)[3], greedy(model, prompts[1], new, EOS)[9]})
    expected = [greedy(model, ids, new, eos) for ids in prompts]
    assert len({len(tokens) for tokens in expected}) > 1

    streams = [random.Random(i) for i in range(len(prompts))]
    steps: list[int] = []
    assert generate(model, prompts, streams, eos, Sampling(0.0, max_new_tokens=new), steps.append) == expected
    assert sum(steps) == sum(map(len, expected))


def test_finish_reasons_and_texts(target: Path) -> None:
    model, tokenizer = load(target), AutoTokenizer.from_pretrained(target)
    text = "<|im_start|>user\nWrite a loop.<|im_end|>\n<|im_start|>assistant\n"
    tokens = greedy(model, tokenizer(text)["input_ids"], 12, EOS)
    assert len(tokens) == 12 and not EOS & set(tokens)

    sampling = Sampling(0.0, max_new_tokens=12)
    [cut] = answered(engine(target, sampling, cut="keep"), [QUESTIONS[1]])
    assert cut.row is not None
    assert cut.row["conversations"][1]["finish_reason"] == "length"
    assert texts(cut) == [str(tokenizer.decode(tokens)).rstrip("\ufffd")]
    [dropped] = answered(engine(target, sampling), [QUESTIONS[1]])
    assert (dropped.row, dropped.reason) == (None, "answer_cut")

    stop = tokens[5]
    [ended] = answered(engine(target, sampling, frozenset({stop})), [QUESTIONS[1]])
    assert ended.row is not None
    assert ended.row["conversations"][1]["finish_reason"] == "stop"
    assert texts(ended) == [tokenizer.decode(tokens[: tokens.index(stop)])]


def test_every_turn_is_answered_after_the_answers_before_it(target: Path) -> None:
    model, tokenizer = load(target), AutoTokenizer.from_pretrained(target)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    eos = frozenset(greedy(model, tokenizer(text)["input_ids"], 8, EOS)[3:4])
    question = Questions("a", "", "Be brief.", ("Hi", "And then?"), "q.jsonl", 1)
    [outcome] = answered(engine(target, Sampling(0.0, max_new_tokens=300), eos), [question])
    first, second = texts(outcome)
    head = f"{text}{first}<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert second == tokenizer.decode(greedy(model, tokenizer(head)["input_ids"], 300, eos)[:-1])
    assert outcome.row is not None
    assert [turn["from"] for turn in outcome.row["conversations"]] == ["system", "human", "gpt", "human", "gpt"]


def test_neither_batch_size_nor_company_nor_a_resumed_run_changes_an_answer(target: Path) -> None:
    eos, sampling = frozenset(range(280, 288)), Sampling(0.7, max_new_tokens=20, seed=3)
    wanted = answered(engine(target, sampling, eos, cut="keep"), QUESTIONS)
    assert len({text for outcome in wanted for text in texts(outcome)}) > 5
    for size in (1, 2, 3):
        assert answered(engine(target, sampling, eos, cut="keep", batch_size=size), QUESTIONS) == wanted
    rest = answered(engine(target, sampling, eos, cut="keep", batch_size=2), QUESTIONS, done=(0, 3))
    assert rest == [wanted[i] for i in (1, 2, 4)]
    other = answered(engine(target, Sampling(0.7, max_new_tokens=20, seed=4), eos, cut="keep"), QUESTIONS)
    assert all(texts(one) != texts(two) for one, two in zip(wanted, other, strict=True))


def test_batches_hold_rows_of_like_length_and_every_row_once() -> None:
    rows = [Questions(str(i), "", "", ("x" * (i * 7 % 13 + 1),) * (i % 2 + 1), "f", i + 1) for i in range(20)]
    found = list(batches(ask(rows), 3))
    assert sorted(row.index for batch in found for row in batch) == list(range(20))
    sizes = [[(len(row.questions.turns), len(row.questions.turns[0])) for row in batch] for batch in found]
    assert sizes == sorted(sizes)


def test_the_prompt_is_the_start_of_the_training_render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Date, switches and BOS of the template are those of training: the same ids up to the answer."""
    source = (
        "{{ '<|endoftext|>' }}{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + strftime_now('%Y-%m-%d') + "
        "mood + '\\n' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant ' + strftime_now('%Y-%m-%d') + mood + '\\n' }}{% endif %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_target(tmp_path, layers=1, chat_template=source))
    template = ChatTemplate(tokenizer, None, {"mood": " calm", "today": "2024-02-29"})
    asked: list[list[int]] = []

    def remember(model: Any, prompts: Any, *rest: Any) -> list[list[int]]:
        asked.extend(prompts)
        return [[5, 6, 2] for _ in prompts]

    monkeypatch.setattr(data.regenerate.engine, "generate", remember)
    one = LocalEngine(lambda: load(tmp_path), template, EOS, Sampling(0.0, max_new_tokens=9), {})
    [outcome] = answered(one, [QUESTIONS[1]])
    messages = (Message("user", "Write a loop."), Message("assistant", texts(outcome)[0]))
    [example] = template.encode(Conversation("b", messages, "f", 1), 4096)
    assert example.input_ids[: len(asked[0])] == asked[0]
    assert example.supervised.index(True) == len(asked[0])
    assert "2024-02-29 calm" in tokenizer.decode(asked[0])


@pytest.mark.parametrize("tag", ["<think>", "[THINK]"])
def test_an_opened_reasoning_block_belongs_to_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    """A generation prompt that opens a block, a history without reasoning: the row trains on what was generated."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    end = f"{tag[0]}/{tag[1:]}"
    source = source.replace("<think>", tag).replace("</think>", end)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target(tmp_path, layers=1, chat_template=source))
    generated = list(tokenizer(f"so\n{end}\n\nYes.")["input_ids"])
    asked: list[list[int]] = []

    def remember(model: Any, prompts: Any, *rest: Any) -> list[list[int]]:
        asked.extend(prompts)
        return [[*generated, 2] for _ in prompts]

    monkeypatch.setattr(data.regenerate.engine, "generate", remember)
    [outcome] = answered(engine(tmp_path, Sampling(0.0, max_new_tokens=99)), [QUESTIONS[3]])
    assert texts(outcome) == [f"{tag}\nso\n{end}\n\nYes."]
    messages = (Message("user", "Why?"), Message("assistant", texts(outcome)[0]))
    [example] = ChatTemplate(tokenizer).encode(Conversation("d", messages, "f", 1), 4096)
    assert example.input_ids == [*asked[0], *generated, 2]
    assert example.supervised == [False] * len(asked[0]) + [True] * (len(generated) + 1)


# --- what cannot be answered -------------------------------------------------------------------------------------


def test_a_prompt_without_room_for_an_answer_is_rejected_and_later_turns_left_out(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, layers=1, max_position_embeddings=100)
    # "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" is 1+5+2+1+1+1+10 = 21 tokens of bytes
    rows = [
        Questions("long", "", "", ("word " * 20,), "q.jsonl", 1),
        Questions("two", "", "", ("Hi", "word " * 20), "q.jsonl", 2),
        Questions("fits", "", "", ("Hi",), "q.jsonl", 3),
    ]
    long, two, fits = answered(engine(folder, Sampling(0.7, max_new_tokens=79), frozenset(range(3, 288))), rows)
    assert (long.row, long.reason) == (None, "prompt_too_long")
    assert "119 tokens and regenerate.max_new_tokens=79 exceed the target's 100 positions" in long.detail
    assert fits.reason == two.reason == "empty_answer"  # every token ends an answer: asked, that is


def test_a_template_that_refuses_the_turns_rejects_the_row(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    folder = tiny_target(tmp_path, layers=1, chat_template=source)
    outcomes = answered(engine(folder, Sampling(0.7, max_new_tokens=9), cut="keep"), QUESTIONS[3:])
    assert outcomes[0].row is not None
    assert (outcomes[1].row, outcomes[1].reason) == (None, "template_error")
    assert "no system here" in outcomes[1].detail


def test_a_batch_that_memory_does_not_hold_is_halved(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eos, sampling = frozenset(range(280, 288)), Sampling(0.7, max_new_tokens=20)
    wanted = answered(engine(target, sampling, eos, cut="keep"), QUESTIONS)
    sizes: list[int] = []

    def small(model: Any, prompts: Any, *rest: Any) -> list[list[int]]:
        sizes.append(len(prompts))
        if len(prompts) > 2 or max(map(len, prompts)) > 500:
            raise torch.OutOfMemoryError("as if")
        return generate(model, prompts, *rest)

    monkeypatch.setattr(data.regenerate.engine, "generate", small)
    rows = [*QUESTIONS, Questions("huge", "", "", ("x" * 500,), "q.jsonl", 6)]
    *found, huge = answered(engine(target, sampling, eos, cut="keep", batch_size=8), rows)
    assert found == wanted
    assert (huge.row, huge.reason) == (None, "out_of_memory")
    assert sizes[:3] == [6, 3, 1]  # d b c huge a e by turns and length
    assert max(sizes[3:]) <= 3 and sizes.count(6) == 1


def test_a_target_that_gives_nan_stops_the_run(target: Path) -> None:
    broken = load(target)
    with torch.no_grad():
        broken.get_output_embeddings().weight[7] = math.nan
    template = ChatTemplate(AutoTokenizer.from_pretrained(target))
    one = LocalEngine(lambda: broken, template, EOS, Sampling(0.0, max_new_tokens=4), {})
    with pytest.raises(EyasError, match="NaN instead of logits; try target.dtype=float32"):
        answered(one, QUESTIONS)


def test_nothing_is_loaded_when_nothing_is_missing(target: Path) -> None:
    def never() -> PreTrainedModel:
        raise AssertionError("loaded")

    template = ChatTemplate(AutoTokenizer.from_pretrained(target))
    one = LocalEngine(never, template, EOS, Sampling(), {})
    assert answered(one, QUESTIONS, done=range(5)) == []
