"""Acceptance length as vLLM itself counts it, for comparison with ``python -m eval``.

Stands alone: run it with the python of an environment that has vLLM (it needs nothing of Eyas), on prompts given
as token ids, so that no template or tokenizer comes between:

    VLLM_CPU_KVCACHE_SPACE=2 python scripts/vllm_check.py TARGET DRAFTER prompts.jsonl --gamma 4 --max-new-tokens 64

prompts.jsonl holds one prompt a line: a list of ids, or an object with ``prompt_ids``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target model")
    parser.add_argument("drafter", help="exported folder")
    parser.add_argument("prompts", type=Path, help="JSONL of token ids")
    parser.add_argument("--method", default="eagle3", help="vLLM's name of the drafting method")
    parser.add_argument("--gamma", type=int, default=4, help="draft tokens per verification pass")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompts", type=int, default=None)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--outputs", type=Path, default=None, help="also write the generated ids here, one list a line")
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)[: args.max_prompts]
    report, outputs = measure(args, prompts)
    if args.outputs:
        args.outputs.write_text("".join(json.dumps(ids) + "\n" for ids in outputs), encoding="utf-8")
    print(json.dumps(report, indent=2))


def read_prompts(path: Path) -> list[list[int]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row["prompt_ids"] if isinstance(row, dict) else row for row in rows]


def measure(args: argparse.Namespace, prompts: list[list[int]]) -> tuple[dict[str, Any], list[list[int]]]:
    """Serve the prompts greedily and read vLLM's own counters."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.target,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=args.max_model_len,
        disable_log_stats=False,  # otherwise there are no counters
        speculative_config={
            "method": args.method,
            "model": args.drafter,
            "num_speculative_tokens": args.gamma,
        },
    )
    start = time.perf_counter()
    done = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - start
    outputs = [list(request.outputs[0].token_ids) for request in done]
    counters = read_counters(llm.get_metrics())
    tokens = sum(len(ids) for ids in outputs)
    return {
        "engine": "vllm",
        "drafting": "chain",
        "gamma": args.gamma,
        "temperature": 0.0,
        "bonus_counted": True,
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "output_tokens": tokens,
        "seconds": round(seconds, 2),
        **summary(counters),
    }, outputs


def read_counters(metrics: list[Any]) -> dict[str, Any]:
    """vLLM's speculative decoding counters without their prefix: name -> value, or values by position."""
    prefix = "vllm:spec_decode_num_"
    found = {m.name.removeprefix(prefix): m for m in metrics if m.name.startswith(prefix)}
    return {name: metric.values if hasattr(metric, "values") else metric.value for name, metric in found.items()}


def summary(counters: dict[str, Any]) -> dict[str, Any]:
    """Acceptance length 1 + accepted / drafts, and the unconditional rate of every position."""
    drafts = counters["drafts"]
    if not drafts:
        raise SystemExit("vLLM drafted nothing: every prompt ended with its first token")
    return {
        "drafts": drafts,
        "accepted": counters["accepted_tokens"],
        "acceptance_length": 1 + counters["accepted_tokens"] / drafts,
        "rate_per_position": [count / drafts for count in counters["accepted_tokens_per_pos"]],
    }


if __name__ == "__main__":
    main()
