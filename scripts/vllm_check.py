"""Acceptance length as vLLM itself counts it, and beside what ``python -m eval`` says of the same prompts.

Stands alone: run it with the python of an environment that has vLLM (it needs nothing of Eyas). Prompts are token ids,
so that no template or tokenizer comes between; T = 0.

    VLLM_CPU_KVCACHE_SPACE=2 python scripts/vllm_check.py TARGET DRAFTER --ours outputs/x/report.json
    VLLM_CPU_KVCACHE_SPACE=2 python scripts/vllm_check.py TARGET ngram --ours outputs/x/report.json
    VLLM_CPU_KVCACHE_SPACE=2 python scripts/vllm_check.py outputs/x/export/target mtp --ours outputs/x/report.json
    VLLM_CPU_KVCACHE_SPACE=2 python scripts/vllm_check.py TARGET DRAFTER prompts.jsonl --gamma 4 --max-new-tokens 64

With --ours the prompts are those of the generations.jsonl beside the report, the settings are the report's, and a
table compares both sides; the exit status is 1 if any of its numbers differ by more than --tolerance. vLLM counts
accepted drafts past an end of text and no passes without drafts, so it is the report's *uncut* numbers that are
compared. Otherwise prompts.jsonl holds one prompt a line: a list of ids, or an object with ``prompt_ids``. Writes one
JSON object to --json, or to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NGRAM, MTP = "ngram", "mtp"  # what needs no folder of its own: prompt lookup; modules that the target carries
METHODS = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "mtp": "mtp",
}  # an export's note of its method -> vLLM's name
# Words in a drafter's path by which vLLM takes it for something else, whatever method it is told.
MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Task:
    """What vLLM is to do. drafter: an exported folder, MTP, or NGRAM with its shortest and longest n; stop_ids:
    further tokens that end an output, beside those that vLLM finds in the target's folder."""

    target: str
    drafter: str
    method: str
    prompts: list[list[int]]
    gamma: int
    max_new_tokens: int
    max_model_len: int
    dtype: str
    ngram: tuple[int, int]
    stop_ids: tuple[int, ...] = ()

    def speculative_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.gamma}
        if self.method == NGRAM:
            return config | {"prompt_lookup_min": self.ngram[0], "prompt_lookup_max": self.ngram[1]}
        return config if self.drafter == MTP else config | {"model": self.drafter}

    def overrides(self) -> dict[str, Any]:
        """What vLLM must be told of the target: an MTP folder is taken only beside one that has modules."""
        return {"num_nextn_predict_layers": 1} if self.method == MTP and self.drafter != MTP else {}

    def about(self) -> dict[str, Any]:
        """What the report says of it."""
        lookup = {"ngram_min": self.ngram[0], "ngram_max": self.ngram[1]} if self.method == NGRAM else {}
        return {
            "engine": "vllm",
            "method": self.method,
            "drafter": self.drafter,
            **lookup,
            "drafting": "chain",
            "gamma": self.gamma,
            "temperature": 0.0,
            "bonus_counted": True,
            "prompts": len(self.prompts),
            "max_new_tokens": self.max_new_tokens,
        }


@dataclass(frozen=True)
class Ours:
    """Our side: the greedy run of one drafter. settings: the report's, with the chain's gamma; uncut: acceptance as
    engines count it; outputs: ids, one list a prompt."""

    name: str
    settings: dict[str, Any]
    uncut: dict[str, Any]
    prompts: list[list[int]]
    outputs: list[list[int]]


def vllm_method(drafter: str, told: str | None) -> str:
    """vLLM's name of the way a drafter drafts: as told, or as its export noted."""
    if drafter in (NGRAM, MTP):
        return drafter
    if told is not None:
        return told
    return METHODS.get(read_config(drafter).get("eyas", {}).get("method")) or sys.exit(
        f"{drafter}: its config.json does not say how it drafts, in a way that vLLM serves; give --method"
    )


def check_servable(drafter: str, method: str, gamma: int) -> None:
    """vLLM's Medusa drafts one token with each of its heads, however many were asked for, and guesses methods from
    paths."""
    if method != "medusa":
        return
    heads = next((n for key, n in read_config(drafter).items() if "num" in key and "heads" in key), 5)
    if heads != gamma:
        raise SystemExit(f"{drafter}: vLLM drafts with all its {heads} heads; measure with gamma {heads}, not {gamma}")
    if word := next((word for word in MISLEADING if word in drafter.lower()), None):
        raise SystemExit(f"{drafter}: vLLM takes a path with {word!r} for another method; give it another name")


def read_config(drafter: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((Path(drafter) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{drafter}: no exported folder ({error})") from error
    return config


# --- our side ------------------------------------------------------------------------------------------------------


def read_ours(report_file: Path, name: str | None, method: str) -> Ours:
    """The greedy run of a report and its rows of generations.jsonl. name: the drafter's in the report; None: the only
    one that drafts the method's way."""
    report = json.loads(report_file.read_text(encoding="utf-8"))
    drafter = find_drafter(report, name, NGRAM if method == NGRAM else "drafter")
    settings = {**report["settings"], "gamma": drafter["levels"]}
    check_comparable(drafter, settings)
    name = str(drafter["name"])
    runs = [run for run in report["runs"] if run["drafter"] == name and run["temperature"] == 0]
    lines = report_file.with_name("generations.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["drafter"] == name and row["temperature"] == 0]
    if len(runs) != 1 or not rows:
        raise SystemExit(f"--ours: {name!r} was not measured at T = 0")
    prompts, outputs = ([row[key] for row in rows] for key in ("prompt_ids", "output_ids"))
    return Ours(name, settings, runs[0]["uncut"], prompts, outputs)


def find_drafter(report: dict[str, Any], name: str | None, kind: str) -> dict[str, Any]:
    """The entry of the drafter of this name, or of the only one of this kind."""
    drafters: list[dict[str, Any]] = report["drafters"]
    found = [d for d in drafters if d["name"] == name or (name is None and d["kind"] == kind)]
    if len(found) != 1:
        raise SystemExit(f"--ours: say by --name which drafter is meant: {', '.join(d['name'] for d in drafters)}")
    return found[0]


def check_comparable(drafter: dict[str, Any], settings: dict[str, Any]) -> None:
    """vLLM drafts chains of one length and knows none of these settings."""
    if drafter["nodes"] != drafter["levels"]:
        raise SystemExit(f"--ours: {drafter['name']!r} drafted trees ({drafter['tree']}); vLLM drafts chains")
    plain: dict[str, Any] = {"adaptive": False, "off_above": None, "stop": [], "repetition_penalty": 1.0}
    for key, value in plain.items():
        if settings.get(key, value) != value:
            raise SystemExit(f"--ours: measured with verify.{key}={settings[key]}; vLLM is run without")


def read_prompts(path: Path) -> list[list[int]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row["prompt_ids"] if isinstance(row, dict) else row for row in rows]


# --- vLLM's side ---------------------------------------------------------------------------------------------------


def measure(task: Task) -> tuple[dict[str, Any], list[list[int]]]:
    """Serve the prompts greedily and read vLLM's own counters; the report and the outputs."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=task.target,
        dtype=task.dtype,
        enforce_eager=True,
        max_model_len=task.max_model_len,
        disable_log_stats=False,  # otherwise there are no counters
        speculative_config=task.speculative_config(),
        hf_overrides=task.overrides(),
    )
    start = time.perf_counter()
    done = llm.generate(
        [{"prompt_token_ids": ids} for ids in task.prompts],
        SamplingParams(temperature=0.0, max_tokens=task.max_new_tokens, stop_token_ids=list(task.stop_ids)),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - start
    outputs = [list(request.outputs[0].token_ids) for request in done]
    speed = {"output_tokens": sum(map(len, outputs)), "seconds": round(seconds, 2)}
    return task.about() | speed | summary(read_counters(llm.get_metrics())), outputs


def read_counters(metrics: list[Any]) -> dict[str, Any]:
    """vLLM's speculative decoding counters without their prefix: name -> value, or values by position."""
    prefix = "vllm:spec_decode_num_"
    found = {m.name.removeprefix(prefix): m for m in metrics if m.name.startswith(prefix)}
    return {name: metric.values if hasattr(metric, "values") else metric.value for name, metric in found.items()}


def summary(counters: dict[str, Any]) -> dict[str, Any]:
    """Acceptance length 1 + accepted / drafts, and the unconditional rate of every position."""
    drafts = counters["drafts"]
    if not drafts:
        raise SystemExit("vLLM drafted nothing: every prompt ended with its first token, or no n-gram came twice")
    return {
        "drafts": drafts,
        "accepted": counters["accepted_tokens"],
        "acceptance_length": 1 + counters["accepted_tokens"] / drafts,
        "rate_per_position": [count / drafts for count in counters["accepted_tokens_per_pos"]],
    }


# --- both ----------------------------------------------------------------------------------------------------------


def compare(ours: Ours, theirs: dict[str, Any], outputs: list[list[int]], tolerance: float) -> dict[str, Any]:
    """Both sides' numbers in rows, how many outputs are the same, and whether all numbers are within ``tolerance``."""
    pairs = [("acceptance length", ours.uncut["tau"], theirs["acceptance_length"])]
    rates = zip(ours.uncut["rate"], theirs["rate_per_position"], strict=True)
    pairs += [(f"accepted at {depth}", a, b) for depth, (a, b) in enumerate(rates)]
    rows = [{"what": what, "ours": a, "vllm": b, "difference": round(a - b, 9) + 0.0} for what, a, b in pairs]
    return {
        "drafter": ours.name,
        "passes": {"ours": ours.uncut["passes"], "vllm": theirs["drafts"]},
        "rows": rows,
        "same_outputs": sum(a == b for a, b in zip(ours.outputs, outputs, strict=True)),
        "tolerance": tolerance,
        "within": all(abs(row["difference"]) <= tolerance for row in rows),
    }


def table(comparison: dict[str, Any], prompts: int) -> str:
    passes, width = comparison["passes"], max(len(row["what"]) for row in comparison["rows"])
    lines = [f"{'':{width}}  {'ours':>8}  {'vLLM':>8}  {'difference':>10}"]
    lines += [
        f"{r['what']:{width}}  {r['ours']:8.4f}  {r['vllm']:8.4f}  {r['difference']:+10.4f}" for r in comparison["rows"]
    ]
    lines.append(f"{'drafts':{width}}  {passes['ours']:8d}  {passes['vllm']:8d}")
    lines.append(f"{comparison['same_outputs']} of {prompts} outputs are the same token by token")
    word = "within" if comparison["within"] else "NOT within"
    return "\n".join([*lines, f"{word} {comparison['tolerance']:g}"])


def main() -> None:
    args = parse()
    method = vllm_method(args.drafter, args.method)
    ours = None if args.ours is None else read_ours(args.ours, args.name, method)
    task = plan(args, method, ours)
    report, outputs = measure(task)
    if ours is not None:
        report["comparison"] = compare(ours, report, outputs, args.tolerance)
        print(table(report["comparison"], len(outputs)), file=sys.stdout if args.json else sys.stderr)
    if args.outputs:
        args.outputs.write_text("".join(json.dumps(ids) + "\n" for ids in outputs), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    else:
        print(json.dumps(report, indent=2))
    sys.exit(0 if ours is None or report["comparison"]["within"] else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target model")
    parser.add_argument("drafter", help=f"exported folder, {MTP}: the target's own modules, or {NGRAM}: prompt lookup")
    parser.add_argument("prompts", type=Path, nargs="?", help="JSONL of token ids; not with --ours")
    parser.add_argument("--method", help="vLLM's name of the way a folder drafts, where its config.json does not tell")
    parser.add_argument("--ours", type=Path, help="report.json to compare with; generations.jsonl lies beside it")
    parser.add_argument("--name", help="the drafter's name in that report, where it has several")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference that passes")
    parser.add_argument("--gamma", type=int, default=4, help="draft tokens per verification pass")
    parser.add_argument("--ngram-min", type=int, default=2, help="shortest n-gram looked up")
    parser.add_argument("--ngram-max", type=int, default=4, help="longest n-gram looked up")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompts", type=int, default=None)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write the report here, not to standard output")
    parser.add_argument("--outputs", type=Path, help="also write the generated ids here, one list a line")
    args = parser.parse_args()
    if (args.ours is None) == (args.prompts is None):
        parser.error("give either a file of prompts or --ours")
    if args.ours is not None and args.max_prompts is not None:
        parser.error("--max-prompts: a comparison needs all prompts of the report")
    return args


def plan(args: argparse.Namespace, method: str, ours: Ours | None) -> Task:
    """The task: its settings are our report's where there is one."""
    told = vars(args) if ours is None else {**vars(args), **ours.settings}
    prompts = read_prompts(args.prompts)[: args.max_prompts] if ours is None else ours.prompts
    check_servable(args.drafter, method, told["gamma"])
    need = max(map(len, prompts)) + told["max_new_tokens"] + told["gamma"] + 1
    if need > args.max_model_len:
        raise SystemExit(f"the longest prompt and its output need --max-model-len {need}")
    return Task(
        target=args.target,
        drafter=args.drafter,
        method=method,
        prompts=prompts,
        gamma=told["gamma"],
        max_new_tokens=told["max_new_tokens"],
        max_model_len=args.max_model_len,
        dtype=told["dtype"],
        ngram=(told["ngram_min"], told["ngram_max"]),
        stop_ids=tuple(told.get("eos_ids", ())),
    )


if __name__ == "__main__":
    main()
