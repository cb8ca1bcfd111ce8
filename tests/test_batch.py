"""The index rule by hand."""

import torch

from models.batch import slots_of, valid_slots
from models.drafter import TrainSpec
from models.objective import Objective
from tests.drafters import random_batch, random_drafter, random_frozen, random_vocab


def marks(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text])


def test_seven_tokens_answer_three_to_six() -> None:
    # tokens 0..6, answer = 3..6. Slot p at depth k needs x[p+1..p+2+k] all in 3..6:
    # p >= 2 and p+2+k <= 6, so depth 0: p = 2,3,4; depth 1: 2,3; depth 2: 2; depth 3: none.
    valid = valid_slots(marks("0001111"), torch.tensor([0, 7]), 4)
    assert [row.nonzero().flatten().tolist() for row in valid] == [[2, 3, 4], [2, 3], [2], []]


def test_documents_and_turns_do_not_run_into_each_other() -> None:
    # document A = tokens 0..4, answer 2..4 (to its end); document B = 5..11 with answers 6..7 and 9..11.
    valid = valid_slots(marks("00111" + "0110111"), torch.tensor([0, 5, 12]), 3)
    assert [row.nonzero().flatten().tolist() for row in valid] == [[1, 2, 5, 8, 9], [1, 8], []]


def test_a_supervised_first_token_of_the_next_document_is_not_the_next_token() -> None:
    valid = valid_slots(marks("111" + "111"), torch.tensor([0, 3, 6]), 2)
    assert [row.nonzero().flatten().tolist() for row in valid] == [[0, 3], []]


def test_nothing_supervised_or_one_token_documents() -> None:
    assert not valid_slots(marks("000"), torch.tensor([0, 3]), 2).any()
    assert not valid_slots(marks("11"), torch.tensor([0, 1, 2]), 2).any()


def test_only_the_tokens_of_the_rule_get_gradient() -> None:
    # answer = 3..6 of 7 tokens: features of slots 0..4 are read (0, 1 only as context), 5 and 6 never.
    frozen = random_frozen()
    frozen.embedding.requires_grad_()
    batch = random_batch(frozen, [7], supervised=marks("0001111"))
    batch.taps.requires_grad_()
    batch = type(batch)(**(vars(batch) | {"input_ids": torch.arange(10, 17)}))  # all tokens distinct
    drafter = random_drafter(frozen, random_vocab(40, 20))
    drafter(batch, frozen, TrainSpec(Objective(), 7)).loss_sum.backward()
    assert batch.taps.grad is not None and frozen.embedding.grad is not None
    assert (batch.taps.grad.abs().sum(1) > 0).tolist() == [True] * 5 + [False] * 2
    # inputs: slots 0..4 read x[p+1] = 1..5 at depth 0; depths 1, 2 read x[4..5] and x[5]; x[6] is only predicted.
    used = (frozen.embedding.grad.abs().sum(1) > 0).nonzero().flatten().tolist()
    assert used == [11, 12, 13, 14, 15]
    assert slots_of(batch, 7).index.tolist() == [2, 3, 4]
