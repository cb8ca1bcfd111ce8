"""The local engine: the target, loaded with transformers, answers in batches.

Every answer has its own random stream, and which rows share a batch depends on the input alone. So neither a broken
run nor the other rows change an answer; only rounding (another batch size, another machine) may turn a token.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from data.masks.template import ChatTemplate, decode
from data.regenerate.replay import Answer, Asked, Outcome, Replay, Sampling
from models.errors import EyasError

OPENING = 32  # tokens that a tag which opens the reasoning has at most
WINDOW = 32  # batches whose rows are sorted by length together

log = logging.getLogger(__name__)

Count = Callable[[int], None]


class LocalEngine:
    """Answers with a transformers model.

    load: gives the model, when there is something to answer. template: renders its prompts, and brings the tokenizer.
    eos_ids: ids that end an answer. settings: provenance of every row. cut: see :class:`Replay`. batch_size: rows
    answered at a time; halved for the rest of the run when the device's memory doesn't hold them.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        template: ChatTemplate,
        eos_ids: frozenset[int],
        sampling: Sampling,
        settings: dict[str, Any],
        *,
        cut: str = "drop",
        batch_size: int = 32,
    ) -> None:
        self._load, self._template, self._eos_ids, self._sampling = load, template, eos_ids, sampling
        self._cut, self._batch_size, self._fits = cut, batch_size, batch_size
        self.settings = settings

    def answer(
        self, asked: Iterable[Asked], done: Container[int], emit: Callable[[Outcome], None], count: Count
    ) -> None:
        """See :class:`Engine`. A batch that is partly done is answered whole: the same batch as before."""
        model: PreTrainedModel | None = None
        for batch in batches(asked, self._batch_size):
            if all(row.index in done for row in batch):
                continue
            model = model if model is not None else self._load()
            replays = [Replay(row, self._cut) for row in batch]
            while active := [replay for replay in replays if replay.open]:
                self._ask(model, active, count)
            for replay in replays:
                if replay.asked.index not in done:
                    emit(replay.outcome(self.settings))

    def _ask(self, model: PreTrainedModel, active: Sequence[Replay], count: Count) -> None:
        """The next turn of every conversation."""
        ready = [(replay, ids) for replay in active if (ids := self._prompt(model, replay))]
        for start in range(0, len(ready), self._fits):
            self._generate(model, ready[start : start + self._fits], count)

    def _prompt(self, model: PreTrainedModel, replay: Replay) -> list[int]:
        """The history with the generation prompt; empty, and the conversation ended, if it can't be asked."""
        try:
            ids = self._template.prompt_ids(replay.messages())
        except EyasError as refusal:
            replay.end("template_error", str(refusal))
            return []
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if room and len(ids) + self._sampling.max_new_tokens > room:
            needed = f"{len(ids)} tokens and regenerate.max_new_tokens={self._sampling.max_new_tokens}"
            replay.end("prompt_too_long", f"{needed} exceed the target's {room} positions")
            return []
        return ids

    def _generate(self, model: PreTrainedModel, batch: Sequence[tuple[Replay, list[int]]], count: Count) -> None:
        outputs = self._try(model, batch, count)
        if outputs is None and len(batch) == 1:
            replay, ids = batch[0]
            replay.end("out_of_memory", f"a prompt of {len(ids)} tokens alone")
        elif outputs is None:
            half = len(batch) // 2
            self._fits = min(self._fits, half)
            log.warning("out of memory with %d conversations at a time: going on with %d", len(batch), self._fits)
            self._generate(model, batch[:half], count)
            self._generate(model, batch[half:], count)
        else:
            for (replay, ids), tokens in zip(batch, outputs, strict=True):
                reason = "stop" if tokens[-1] in self._eos_ids else "length"
                replay.take(Answer(self._text(ids, tokens), reason))

    def _try(
        self, model: PreTrainedModel, batch: Sequence[tuple[Replay, list[int]]], count: Count
    ) -> list[list[int]] | None:
        """New tokens, or None if the device's memory doesn't hold the batch."""
        names = [self._sampling.stream(replay.asked.id, len(replay.answers)) for replay, _ in batch]
        streams = [random.Random(name) for name in names]
        try:
            return generate(model, [ids for _, ids in batch], streams, self._eos_ids, self._sampling, count)
        except torch.OutOfMemoryError:
            pass  # what it holds is free only after this block
        torch.cuda.empty_cache()
        return None

    def _text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The answer as it reads, without its end token."""
        ended = tokens[-1] in self._eos_ids
        text = str(
            self._template.tokenizer.decode(
                list(tokens[:-1] if ended else tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
        # A cut may fall inside a character, which decodes to replacement marks that the target never wrote.
        text = text if ended else text.rstrip("\ufffd")
        # A generation prompt may open the reasoning itself: the answer is stored with what it stands behind.
        manner = self._template.locator.manner
        opened = manner.opened_by(decode(self._template.tokenizer, prompt[-OPENING:]))
        return manner.asked + text if opened else text


def batches(asked: Iterable[Asked], size: int) -> Iterator[list[Asked]]:
    """Rows of like length and number of turns together, which saves padding and half-empty later turns."""
    rows = iter(asked)
    while window := list(islice(rows, WINDOW * size)):
        window.sort(key=lambda row: (len(row.questions.turns), sum(map(len, row.questions.turns)), row.index))
        for start in range(0, len(window), size):
            yield window[start : start + size]


def choose(logits: Tensor, uniforms: Sequence[float], sampling: Sampling) -> Tensor:
    """One token [B] per row of `logits` [B, V]: the distribution function inverted at `uniforms` [B] in [0, 1).

    Temperature 0 is greedy and leaves `uniforms` unused.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probs = torch.softmax(logits.double() / sampling.temperature, -1)
    order = None
    if sampling.top_p < 1:
        probs, order = probs.sort(-1, descending=True)
        # A token stays if the more probable ones do not reach top_p: the nucleus always holds the best token.
        probs = probs.where(probs.cumsum(-1) - probs < sampling.top_p, torch.zeros_like(probs))
    cumulative = probs.cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, points, right=True).clamp(max=logits.shape[-1] - 1)
    return (index if order is None else order.gather(-1, index))[:, 0]


def left_pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, n], attention mask [B, n]) with the rows aligned at their ends. The filler id is never attended to."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    streams: Sequence[random.Random],
    stop: frozenset[int],
    sampling: Sampling,
    count: Count = lambda tokens: None,
) -> list[list[int]]:
    """New tokens per prompt, including the stop token if one was drawn. Finished rows leave the batch at once.

    count: told the number of tokens of every step. Raises EyasError if the model gives NaN.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    ids, mask = left_pad(prompts, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    # transformers renamed the argument from past_key_values to cache
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kept: dict[str, Any] = {cache_name: cache, "use_cache": True, "logits_to_keep": 1}
    for _ in range(sampling.max_new_tokens):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **kept).logits[:, -1]
        if logits.isnan().any():
            raise EyasError("target: gives NaN instead of logits; try target.dtype=float32 (or bfloat16)")
        tokens = choose(logits, [streams[r].random() for r in rows], sampling)
        for r, token in zip(rows, tokens.tolist(), strict=True):
            outputs[r].append(token)
        count(len(rows))
        alive = [i for i, r in enumerate(rows) if outputs[r][-1] not in stop]
        if not alive:
            break
        if len(alive) < len(rows):
            rows = [rows[i] for i in alive]
            cache.batch_select_indices(torch.tensor(alive, device=model.device))
        ids = tokens[alive, None]
        mask = torch.cat([mask[alive], mask.new_ones(len(alive), 1)], -1)
        positions = positions[alive, -1:] + 1
    return outputs
