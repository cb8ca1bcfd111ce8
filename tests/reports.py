"""A report as a measurement would write it: 3 drafters, 2 temperatures, 8 categories. Nothing was measured; the passes
are drawn from made-up acceptance rates and everything else is counted from them, so that the numbers fit together."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

from eval.costs.cost import theory
from eval.numbers.intervals import Sums, difference, quotient, tau_sums
from eval.numbers.metrics import DEFINITION, Round, acceptance, by_category, by_position, counted, uncut

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TEXT = (
    "The young hawk learns to fly by watching the old one . It waits on a high branch , looks down at the field and "
    "does not move . Then the wind turns , the grass bends , and a mouse runs from one stone to the next . Now it "
    "falls like a stone itself , opens its wings a little above the ground and rises again with empty claws . The "
    "old one has seen it all and says nothing ; tomorrow they will try once more , in the same field , at the same "
    "hour , until the branch is no longer needed .\n"
)
NASTY = (
    "</script><script>alert(1)</script>",
    "<!-- ",
    " & &amp;",
    "\u2028\u2029",
    "\u202eabc\u202c",
    "\x00\x1b[31m",
    "'\"`",
)
WORDS = [*(word if word in ",.;" else f" {word}" for word in TEXT.split()), "\n", "\n\n", "\t", *NASTY, "<|im_end|>"]
EOS = len(WORDS) - 1
WIDTHS = (4, 6, 7, 6, 4, 3)  # of a tree of 30 nodes
FORWARD_MS, NODE_MS, BATCHES = 30.0, 0.5, (1, 4, 8)


@dataclass(frozen=True)
class Fake:
    """A drafter: levels of its chain (or of the tree), share of drafts accepted by category easy or hard."""

    name: str
    kind: str
    path: str | None
    tree: str
    levels: int
    nodes: int
    alpha: tuple[float, float]
    draft_ms: float
    target: Mapping[str, Any] | None = None  # of one that was trained together with its target


FAKES = (
    Fake("eagle3-smollm2", "drafter", "outputs/run/checkpoints/step_00002000", "dynamic", 6, 30, (0.9, 0.7), 2.4),
    Fake("SmolLM2-135M", "model", "HuggingFaceTB/SmolLM2-135M-Instruct", "chain", 5, 5, (0.75, 0.6), 9.0),
    Fake("ngram", "ngram", None, "chain", 4, 4, (0.5, 0.2), 0.02),
)
TUNED = replace(FAKES[0], name="medusa2", target={"kind": "lora", "perplexity": {"before": 7.125, "after": 6.5}})
EXPORT = replace(TUNED, name="medusa2 (2)", path="outputs/run/export", target={"kind": "whole", "perplexity": None})


def token_text(ids: Sequence[int]) -> list[str]:
    return [WORDS[i] for i in ids]


@dataclass
class Faker:
    """questions: prompts, each of one turn but every fourth of two."""

    questions: int = 20
    seed: int = 0
    lossy: bool = False
    temperatures: tuple[float, ...] = (0.0, 1.0)
    fakes: Sequence[Fake] = FAKES
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def build(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The report and the rows of generations.jsonl."""
        rows = [
            self.row(fake, temperature, number, turn)
            for fake in self.fakes
            for temperature in self.temperatures
            for number in range(self.questions)
            for turn in range(1 + (number % 4 == 3))
        ]
        runs = [self.run(fake, temperature, rows) for fake in self.fakes for temperature in self.temperatures]
        report = {
            "version": 2,
            "definition": DEFINITION,
            "settings": self.settings(),
            "drafters": [self.drafter(fake) for fake in self.fakes],
            "runs": runs,
            "comparisons": [
                self.compare(a, b, t, rows) for a, b in combinations(self.fakes, 2) for t in self.temperatures
            ],
            "cost_model": self.cost_model(runs),
        }
        return report, rows

    # --- generations ---------------------------------------------------------------------------------------------

    def row(self, fake: Fake, temperature: float, number: int, turn: int) -> dict[str, Any]:
        category = CATEGORIES[number % len(CATEGORIES)]
        alpha = fake.alpha[number % 2] * (0.85 if temperature else 1.0)
        truth = self.truth(number + turn)
        output, passes = truth[:1], list[Round]()
        while output[-1] != EOS and len(output) < 64:
            spent = self.spend(fake, alpha, truth, len(output))
            output += truth[len(output) : len(output) + spent.kept]
            passes.append(spent)
        return {
            "prompt": number,
            "turn": turn,
            "id": f"questions.jsonl:{number + 1}",
            "category": category,
            "drafter": fake.name,
            "temperature": temperature,
            "prompt_ids": [number, *range(20, 32), EOS],
            "output_ids": output,
            "text": "".join(token_text(output)),
            "finish": "eos" if output[-1] == EOS else "length",
            "rounds": [asdict(spent) for spent in passes],
        }

    def truth(self, number: int) -> list[int]:
        """What the target writes, the same for every drafter."""
        length = 90 if number % 3 else 40
        start = 7 * number
        found = [(start + i) % (EOS - len(NASTY)) for i in range(length)]
        found[11:11] = range(EOS - len(NASTY), EOS)
        return [*found, EOS, *found]

    def spend(self, fake: Fake, alpha: float, truth: list[int], at: int) -> Round:
        """One pass behind the first ``at`` tokens; a long text ends at 64 tokens."""
        parents = tuple(range(-1, fake.levels - 1)) if fake.nodes == fake.levels else self.tree()
        accepted, path, node = truth[at:], list[int](), -1
        tokens = [self.rng.randrange(EOS) for _ in parents]
        while (children := [i for i, parent in enumerate(parents) if parent == node]) and self.rng.random() < alpha:
            node = children[0] if self.rng.random() < 0.8 else self.rng.choice(children)
            tokens[node] = accepted[len(path)]
            path.append(node)
        kept = len(path) + 1
        if EOS in accepted[:kept]:
            kept = accepted.index(EOS) + 1
        kept = min(kept, 64 - at)
        return Round(fake.levels, len(path), kept, tuple(tokens), parents, tuple(path))

    def tree(self) -> tuple[int, ...]:
        """Parents of a tree whose levels are as wide as WIDTHS; early nodes of a level have the most children."""
        parents, begin = [-1] * WIDTHS[0], 0
        for above, width in pairwise(WIDTHS):
            parents += sorted(begin + min(int(self.rng.expovariate(1.2)), above - 1) for _ in range(width))
            begin += above
        return tuple(parents)

    # --- the report ----------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        rule = (
            "typical: eps 0.09, delta 0.3 (lossy)"
            if self.lossy
            else "lossless: argmax match at T = 0, rejection sampling"
        )
        return {
            "target": "HuggingFaceTB/SmolLM2-360M-Instruct",
            "prompt_source": "questions.jsonl",
            "template": "0123456789abcdef",
            "prompts": self.questions,
            "prompt_tokens": 14 * self.questions,
            "max_new_tokens": 64,
            "tree": "dynamic",
            "gamma": 6,
            "branch": 10,
            "nodes": 30,
            "draws": "without_replacement",
            "rule": rule,
            "lossless": not self.lossy,
            "temperatures": list(self.temperatures),
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": [],
            "batch_sizes": list(BATCHES),
            "adaptive": False,
            "off_above": None,
            "eos_ids": [EOS],
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
            "seed": self.seed,
        }

    def drafter(self, fake: Fake) -> dict[str, Any]:
        about = {"name": fake.name, "kind": fake.kind, "path": fake.path, "tree": fake.tree, "target": fake.target}
        known = {"draft_vocab": 8192 if fake.kind == "drafter" else None}
        return about | {"levels": fake.levels, "nodes": fake.nodes} | known

    def run(self, fake: Fake, temperature: float, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        mine = of_run(rows, fake.name, temperature)
        rounds, prompts = passes_of(mine), sorted({row["prompt"] for row in mine})
        accepted, engines = by_prompt(mine, counted(rounds)), by_prompt(mine, uncut(rounds))
        categories = [CATEGORIES[number % len(CATEGORIES)] for number in prompts]
        starts = [len(row["prompt_ids"]) + 1 for row in mine]
        found, grouped = acceptance(accepted, fake.levels), by_category(accepted, categories, fake.levels)
        simulated = {"tau": found.tau and found.tau * 1.01, "per_depth": found.conditional, "measured": found.tau}
        ends = ("eos", "length", "context", "stop")
        drafts = "fixed (n-gram)" if fake.kind == "ngram" else "sampled, without replacement" if temperature else "top"
        return {
            "drafter": fake.name,
            "temperature": temperature,
            "drafts": drafts,
            "lossless": not (self.lossy and temperature),
            "questions": len(mine),
            "acceptance": found.to_dict(),
            "uncut": acceptance(engines, fake.levels).to_dict(),
            "categories": {name: part.to_dict() for name, part in grouped.items()},
            "positions": by_position(rounds, starts, (0, 32, 64), prompts=[row["prompt"] for row in mine]),
            "simulated": simulated | {"difference": 0.01} if fake.kind == "drafter" else None,
            "finish": {name: sum(row["finish"] == name for row in mine) for name in ends},
            "same_as_plain": None if temperature else self.same(mine),
            "cost": cost(fake, [one for passes in rounds for one in passes]),
            "speed": [speed_entry(fake, mine, size) for size in BATCHES],
        }

    def same(self, mine: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = [{"prompt": 3, "token": 17, "logit_gap": 2.4e-6}]
        return {"identical": len(mine) - 1, "prompts": len(mine), "differences": found}

    def compare(self, a: Fake, b: Fake, temperature: float, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sides = [of_run(rows, fake.name, temperature) for fake in (a, b)]
        tau = difference(*(tau_sums(by_prompt(mine, counted(passes_of(mine)))) for mine in sides))
        speed = quotient(*(speed_sums(fake, mine) for fake, mine in zip((a, b), sides, strict=True)))
        return {
            "a": a.name,
            "b": b.name,
            "temperature": temperature,
            "tau_difference": tau.value,
            "interval": tau.interval,
            "speed_ratio": speed.value,
            "speed_interval": speed.interval,
        }

    def cost_model(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        target = [{"tokens": n, "ms": forward_ms(n)} for n in (1, 2, 4, 8, 16, 32, 64)]
        draft = {
            fake.name: [{"level": level, "nodes": 1, "ms": fake.draft_ms} for level in range(fake.levels)]
            for fake in self.fakes
        }
        models = {fake.name: fake for fake in self.fakes if fake.kind != "ngram"}
        predictions = [prediction(models[run["drafter"]], run) for run in runs if run["drafter"] in models]
        return {"past": 256, "target": target, "draft": draft, "predictions": predictions}


def cost(fake: Fake, passes: Sequence[Round]) -> dict[str, Any]:
    c, chain = fake.draft_ms / FORWARD_MS, fake.tree == "chain"
    formula = theory([one.accepted for one in passes], [one.drafted for one in passes], c) if chain else None
    return {"draft": c, "verify": forward_ms(fake.nodes + 1) / FORWARD_MS, "theory": formula}


def prediction(fake: Fake, run: Mapping[str, Any]) -> dict[str, Any]:
    """By the rates measured: a chain accepts what the run did, trees (at T = 0 only) are better by their size."""
    rate = [r or 0.0 for r in run["acceptance"]["rate"]]
    chain = [
        {"gamma": g, **predicted(fake, 1 + (1.0 if fake.tree == "chain" else 0.7) * sum(rate[:g]), g, g)}
        for g in range(1, fake.levels + 1)
    ]
    sizes = (4, 8, 12, 16, 24, 30, 40, 60) if fake.tree == "dynamic" and not run["temperature"] else ()
    trees = [
        {"nodes": n, "levels": levels, **predicted(fake, 1 + 1.1 * sum(rate[:levels]) * n / (n + 4), n, levels)}
        for n in sizes
        for levels in (3, 6)
    ]
    shapes = [{"tree": "chain", "levels": p["gamma"], "nodes": p["gamma"], **p} for p in chain]
    shapes += [{"tree": "grown", **p} for p in trees]
    best: dict[str, Any] = max(shapes, key=lambda p: p["speed_up"])
    best.pop("gamma", None)
    return {
        "drafter": run["drafter"],
        "temperature": run["temperature"],
        "chain": chain,
        "trees": trees,
        "best": best,
    }


def predicted(fake: Fake, tokens: float, nodes: int, levels: int) -> dict[str, float]:
    ms = forward_ms(nodes + 1) + levels * fake.draft_ms
    return {"tokens_per_pass": tokens, "ms": ms, "speed_up": tokens * FORWARD_MS / ms}


def forward_ms(tokens: int) -> float:
    return FORWARD_MS + NODE_MS * (tokens - 1)


def of_run(rows: Sequence[Mapping[str, Any]], drafter: str, temperature: float) -> list[Mapping[str, Any]]:
    return [row for row in rows if (row["drafter"], row["temperature"]) == (drafter, temperature)]


def passes_of(rows: Sequence[Mapping[str, Any]]) -> list[list[Round]]:
    return [[Round(**spent) for spent in row["rounds"]] for row in rows]


def by_prompt(rows: Sequence[Mapping[str, Any]], values: Sequence[Sequence[int]]) -> list[list[int]]:
    joined: dict[int, list[int]] = {}
    for row, part in zip(rows, values, strict=True):
        joined.setdefault(row["prompt"], []).extend(part)
    return list(joined.values())


def seconds_of(fake: Fake, row: Mapping[str, Any], size: int = 1) -> dict[str, float]:
    """What a row's passes take if ``size`` sequences share them."""
    passes = len(row["rounds"])
    draft = passes * fake.levels * fake.draft_ms / 1e3
    verify = passes * (FORWARD_MS + NODE_MS * ((fake.nodes + 1) * size - 1)) / size / 1e3
    other = passes * 1.5e-3
    return {"prefill": 0.08, "draft": draft, "verify": verify, "other": other, "decode": draft + verify + other}


def speed_sums(fake: Fake, rows: Sequence[Mapping[str, Any]]) -> Sums:
    joined: dict[int, tuple[float, float]] = {}
    for row in rows:
        tokens, seconds = joined.get(row["prompt"], (0.0, 0.0))
        more = len(row["output_ids"]) - 1, seconds_of(fake, row)["decode"]
        joined[row["prompt"]] = tokens + more[0], seconds + more[1]
    return Sums.of(*zip(*joined.values(), strict=True))


def speed_entry(fake: Fake, rows: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    tokens, passes = sum(len(row["output_ids"]) - 1 for row in rows), sum(len(row["rounds"]) for row in rows)
    spent = [seconds_of(fake, row, size) for row in rows]
    seconds = {phase: sum(one[phase] for one in spent) for phase in spent[0]}
    plain_ms = (FORWARD_MS + NODE_MS * (size - 1)) / size + 0.5
    plain = {
        "prefill": seconds["prefill"],
        "draft": 0.0,
        "verify": tokens * (plain_ms - 0.5) / 1e3,
        "other": tokens * 5e-4,
    }
    plain["decode"] = plain["verify"] + plain["other"]
    per_token = [
        1e3 * one["decode"] * size / (len(row["output_ids"]) - 1) for one, row in zip(spent, rows, strict=True)
    ]
    ratio = tokens * plain_ms / 1e3 / seconds["decode"]
    return {
        "batch_size": size,
        "speculative": speed(tokens, passes, seconds, per_token, passes * fake.levels),
        "plain": speed(tokens, tokens, plain, [plain_ms * size] * len(rows), 0),
        "speed_up": tokens / seconds["decode"] / (tokens / plain["decode"]),
        "speed_up_interval": [ratio * 0.95, ratio * 1.06],
    }


def speed(
    tokens: int, passes: int, seconds: dict[str, float], per_token: Sequence[float], drafts: int
) -> dict[str, Any]:
    ordered = sorted(per_token)
    tpot = {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p95": ordered[int(0.95 * len(ordered))],
    }
    return {
        "tokens": tokens,
        "passes": passes,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds["decode"],
        "ttft_ms": {"mean": 80.0, "p50": 79.0, "p95": 96.0},
        "tpot_ms": tpot,
        "ms_per_draft": 1e3 * seconds["draft"] / drafts if drafts else None,
        "ms_per_forward": 1e3 * seconds["verify"] / passes,
        "ms_per_rest": 1e3 * seconds["other"] / passes,
    }
