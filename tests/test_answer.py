"""data.answer: what is drawn, when an answer ends, and that neither batching nor a broken run changes the result."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from data import answer
from data.answer import Answerer, Prompt, Sampling, answer_file, choose, generate, read_jsonl, read_prompts
from models.errors import EyasError
from tests.tiny import tiny_target

EOS = frozenset({0, 2})
QUICKSTART = Path(answer.__file__).parent / "quickstart"
PROMPTS = [
    Prompt("a", "chat", ("Hi", "And then?")),
    Prompt("b", "code", ("Write a loop.",)),
    Prompt("c", "math", ("What is 2 + 3, and what is 12 times 4?",)),
    Prompt("d", "chat", ("Why?",)),
    Prompt("e", "chat", ("A longer first turn.", "Shorter.", "Thanks!")),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("answer"), layers=2)


def load(folder: Path, sampling: Sampling, eos: frozenset[int] = EOS) -> Answerer:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Answerer(model, AutoTokenizer.from_pretrained(folder), eos, sampling)


def greedy(model: PreTrainedModel, ids: list[int], new: int, eos: frozenset[int]) -> list[int]:
    """transformers' own decoding of one unpadded prompt."""
    tokens = torch.tensor([ids])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": sorted(eos), "pad_token_id": 0}
    decode: Any = model.generate  # typed as something that is not callable
    return decode(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(ids) :].tolist()


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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_batch_gives_what_each_prompt_gives_alone(tmp_path: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target(tmp_path, family, layers=2)).eval()
    prompts = [[5, 9, 11], list(range(20, 45)), [7], list(range(100, 112))]
    new = 16
    # end tokens that the runs do meet, at different steps, so that rows leave the batch one after the other
    eos = frozenset({greedy(model, prompts[0], new, EOS)[3], greedy(model, prompts[1], new, EOS)[9]})
    expected = [greedy(model, ids, new, eos) for ids in prompts]
    assert len({len(tokens) for tokens in expected}) > 1

    streams = [random.Random(i) for i in range(len(prompts))]
    assert generate(model, prompts, streams, eos, Sampling(0.0, max_new_tokens=new)) == expected


def test_finish_reasons_and_texts(target: Path) -> None:
    sampling = Sampling(0.0, max_new_tokens=12)
    one = load(target, sampling)
    prompt = Prompt("b", "code", ("Write a loop.",))
    text = "<|im_start|>user\nWrite a loop.<|im_end|>\n<|im_start|>assistant\n"
    tokens = greedy(one.model, one.tokenizer(text)["input_ids"], 12, EOS)
    assert len(tokens) == 12 and not EOS & set(tokens)

    cut = one.answer([prompt])[0]
    assert (cut.finish_reason, cut.answers) == ("length", [str(one.tokenizer.decode(tokens)).rstrip("\ufffd")])

    stop = tokens[5]
    ended = load(target, sampling, frozenset({stop})).answer([prompt])[0]
    assert (ended.finish_reason, ended.answers) == ("stop", [one.tokenizer.decode(tokens[: tokens.index(stop)])])


def test_every_turn_is_answered_after_the_answers_before_it(target: Path) -> None:
    sampling = Sampling(0.0, max_new_tokens=300)
    probe = load(target, sampling)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    eos = frozenset(greedy(probe.model, probe.tokenizer(text)["input_ids"], 8, EOS)[3:4])
    answerer = load(target, sampling, eos)

    state = answerer.answer([PROMPTS[0]])[0]
    history = f"{text}{state.answers[0]}<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    second = greedy(probe.model, probe.tokenizer(history)["input_ids"], 300, eos)
    assert len(state.answers) == 2
    assert state.answers[1] == answerer.text(second)
    turns = state.row("tiny", sampling)["conversations"]
    assert [t["from"] for t in turns] == ["human", "gpt", "human", "gpt"]
    assert [t["value"] for t in turns] == ["Hi", state.answers[0], "And then?", state.answers[1]]


def test_a_cut_answer_ends_its_conversation(target: Path) -> None:
    sampling = Sampling(0.0, max_new_tokens=4)
    state = load(target, sampling).answer([PROMPTS[4]])[0]
    row = state.row("tiny", sampling)
    assert row["finish_reason"] == "length"
    assert [t["value"] for t in row["conversations"]] == ["A longer first turn.", state.answers[0]]


class Killed(Exception):
    """Stands for the end of the process."""


def test_a_broken_run_ends_with_the_same_file(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(0.7, max_new_tokens=20, seed=3)
    answerer = load(target, sampling)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert answer_file(answerer, PROMPTS, whole, "tiny", batch_size=2) == 5
    assert [row["id"] for _, row in read_jsonl(whole)] == list("abcde")

    done: list[str] = []
    complete = Answerer.answer

    def killed_after_one_batch(self: Answerer, prompts: list[Prompt]) -> list[answer.Answered]:
        if done:
            raise Killed
        done.extend(p.id for p in prompts)
        return complete(self, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer", killed_after_one_batch)
        with pytest.raises(Killed):
            answer_file(answerer, PROMPTS, broken, "tiny", batch_size=2)
    with broken.open("a") as file:
        file.write('{"id": "c", "conv')
    assert answer_file(answerer, PROMPTS, broken, "tiny", batch_size=2) == 3
    assert broken.read_bytes() == whole.read_bytes()
    assert answer_file(answerer, PROMPTS, broken, "tiny", batch_size=2) == 0
    assert broken.read_bytes() == whole.read_bytes()


def test_the_seed_decides_the_answers(target: Path) -> None:
    def texts(seed: int) -> list[list[str]]:
        return [s.answers for s in load(target, Sampling(0.7, max_new_tokens=20, seed=seed)).answer(PROMPTS)]

    assert texts(1) == texts(1)
    assert all(one != two for one, two in zip(texts(1), texts(2), strict=True))


def test_rows_of_another_job_are_refused(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answer_file(load(target, Sampling(0.0, max_new_tokens=4)), PROMPTS[:2], out, "tiny")
    before = out.read_bytes()
    with pytest.raises(EyasError, match=r"out\.jsonl:1: made with another temperature, max_new_tokens"):
        answer_file(load(target, Sampling(0.7, max_new_tokens=5)), PROMPTS, out, "tiny")
    changed = [PROMPTS[0], Prompt("b", "code", ("Write two loops.",))]
    with pytest.raises(EyasError, match=r"out\.jsonl:2: 'b' answers another prompt"):
        answer_file(load(target, Sampling(0.0, max_new_tokens=4)), changed, out, "tiny")
    assert out.read_bytes() == before


def test_a_prompt_without_room_for_an_answer_is_named(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, layers=1, max_position_embeddings=64)
    answerer = load(folder, Sampling(0.0, max_new_tokens=10))
    with pytest.raises(EyasError, match="prompt 'long': .* exceed the target's 64 positions"):
        answerer.answer([Prompt("long", "chat", ("word " * 40,))])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "turns": []}', "2: a prompt needs"),
        ('{"id": "x", "turns": ["ok", "  "]}', "2: a prompt needs"),
        ('{"turns": ["ok"]}', "2: a prompt needs"),
        ('{"id": "a", "turns": ["ok"]}', "2: id 'a' occurs twice"),
        ('{"id": "x", "turns"', "2: not JSON"),
        ("[1]", "2: expected an object, got list"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "split": "train", "turns": ["Hi"]}\n' + line + "\n")
    with pytest.raises(EyasError, match=message):
        read_prompts(path)


def test_command_line(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": p.id, "category": p.category, "split": "dev", "turns": p.turns} for p in PROMPTS]
    rows.append({"id": "z", "category": "chat", "split": "test", "turns": ["Left out"]})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--target", str(target), "--name", "tiny", "--prompts", str(prompts), "--out", str(out)]
    assert answer.main([*command, "--split", "dev", "--max-new-tokens", "6", "--temperature", "1"]) == 0
    written = [row for _, row in read_jsonl(out)]
    assert [row["id"] for row in written] == list("abcde")
    assert {row["target"] for row in written} == {"tiny"} and {row["temperature"] for row in written} == {1.0}
    assert answer.main([*command, "--split", "no such"]) == 2
    assert "no prompts of split 'no such'" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_shipped_rows_answer_the_shipped_prompts(split: str) -> None:
    wanted = {p.id: p for p in read_prompts(QUICKSTART / "prompts.jsonl", split)}
    rows = [row for _, row in read_jsonl(QUICKSTART / f"{split}.jsonl")]
    assert [row["id"] for row in rows] == list(wanted)
    for row in rows:
        turns = row["conversations"]
        asked = tuple(t["value"] for t in turns if t["from"] == "human")
        assert [t["from"] for t in turns] == ["human", "gpt"] * len(asked)
        assert asked == wanted[row["id"]].turns[: len(asked)]
        assert row["finish_reason"] == "length" or asked == wanted[row["id"]].turns
        assert all(t["value"].strip() for t in turns)


def test_no_shipped_prompt_occurs_twice() -> None:
    first = [" ".join(p.turns[0].casefold().split()) for p in read_prompts(QUICKSTART / "prompts.jsonl")]
    assert len(first) == len(set(first))
