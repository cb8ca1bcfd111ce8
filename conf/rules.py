"""What values are allowed, key by key, and which keys make others void: the tables that conf/validate.py goes by."""

from __future__ import annotations

from collections.abc import Callable

from conf.options import adds_terms
from conf.schema import Config
from conf.values import NGRAM, drafters

RESERVED_NAMES = ("features", "sweeps")  # folders of outputs/ that are not runs

CHOICES: dict[str, tuple[str | None, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "features": ("store", "online"),
    "target.dtype": ("float32", "bfloat16", "float16"),
    "target.quantize": (None, "8bit", "4bit"),
    "data.supervise": ("assistant", "last", "all"),
    "data.too_long": ("cut", "split", "reject"),
    "data.tools": ("render", "reject"),
    "data.duplicates": ("drop", "keep"),
    "data.decontaminate": ("warn", "drop", "keep"),
    "regenerate.cut": ("drop", "keep"),
    "verify.draws": ("without_replacement", "with_replacement", "top"),
    "verify.rule": ("lossless", "typical"),
    "store.dtype": ("bfloat16", "float32"),
    "optim.name": ("adamw", "muon"),
    "optim.schedule": ("cosine", "wsd", "constant"),
    "train.loss": ("ce", "kl", "lk", "tv", "expected_length", "nll"),
    "train.depth_weights": ("decay", "dpace"),
    "train.precision": ("auto", "fp32", "bf16"),
    "train.tau": ("simulated", "measured"),
    "joint.backbone": ("none", "lora", "full"),
    "joint.schedule": ("constant", "sine"),
    "strategy.name": ("none", "ddp", "zero1", "zero2", "zero3"),
    "export.dtype": ("bfloat16", "float16", "float32"),
    "tracker.wandb": ("offline", "online", "disabled"),
}

AT_LEAST: dict[str, int] = {
    "seed": 0,
    "threads": 0,
    "preview": 0,
    "data.workers": 0,
    "regenerate.max_new_tokens": 1,
    "regenerate.batch_size": 1,
    "regenerate.concurrency": 1,
    "regenerate.retries": 0,
    "data.max_length": 3,  # fewer tokens than the first draft needs
    "data.max_documents": 1,
    "store.shard_mib": 1,
    "store.batch_tokens": 1,
    "train.steps": 1,
    "train.bin_tokens": 1,
    "train.bins_per_step": 1,
    "train.depths": 1,
    "train.chunk": 1,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.save_every": 0,
    "train.keep_last": 1,
    "train.top_k": 0,
    "train.tau_prompts": 1,
    "train.patience": 1,
    "joint.rank": 1,
    "verify.max_prompts": 1,
    "verify.max_new_tokens": 1,
    "verify.gamma": 1,
    "verify.branch": 1,
    "verify.nodes": 1,
    "verify.off_above": 0,
    "verify.ngram_min": 1,
    "verify.ngram_max": 1,
    "verify.top_k": 0,
    "verify.tune_prompts": 1,
}

AT_MOST: dict[str, int] = {"seed": 2**32 - 1, "threads": 4096, "store.shard_mib": 1 << 20}

# Single files and folders; the readers of target.path and data.path tell names from paths themselves.
PATHS = (
    "output_dir",
    "data.cache_dir",
    "store.dir",
    "export.dir",
    "verify.prompts",
    "regenerate.out",
    "train.init_from",
    "strategy.deepspeed",
)

Range = tuple[str, Callable[[float], bool]]
ABOVE_ZERO: Range = ("above 0", lambda x: x > 0)
NOT_NEGATIVE: Range = ("0 or more", lambda x: x >= 0)
BELOW_ONE: Range = ("0 or more and below 1", lambda x: 0 <= x < 1)
SHARE: Range = ("between 0 and 1", lambda x: 0 <= x <= 1)
RANGES: dict[str, Range] = {
    "data.valid_fraction": BELOW_ONE,
    "optim.lr": ABOVE_ZERO,
    "optim.muon_lr": ABOVE_ZERO,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.warmup": NOT_NEGATIVE,
    "optim.min_lr": SHARE,
    "optim.decay": SHARE,
    "optim.max_grad_norm": ABOVE_ZERO,
    "train.epochs": ABOVE_ZERO,
    "train.decay": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "train.depth_keep": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "train.top_k_weight": ABOVE_ZERO,
    "train.lk_eta": ABOVE_ZERO,
    "train.save_minutes": NOT_NEGATIVE,
    "strategy.timeout_minutes": ABOVE_ZERO,
    "joint.weight": NOT_NEGATIVE,
    "joint.warmup": NOT_NEGATIVE,
    "joint.lr": ABOVE_ZERO,
    "joint.alpha": ABOVE_ZERO,
    "joint.dropout": BELOW_ONE,
    "regenerate.temperature": NOT_NEGATIVE,
    "regenerate.timeout": ABOVE_ZERO,
    "regenerate.top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "verify.top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "verify.min_p": SHARE,
    "verify.repetition_penalty": ABOVE_ZERO,
    "verify.typical_eps": BELOW_ONE,
    "verify.typical_delta": ABOVE_ZERO,
}

# A key typed by the user that another key makes void: (key, the other key is in force, what to do)
Conflict = tuple[str, Callable[[Config], bool], str]
CONFLICTS: tuple[Conflict, ...] = (
    ("train.epochs", lambda c: c.train.steps is not None, "train.steps is set too; give one (train.steps=null)"),
    ("verify.tree", lambda c: c.verify.tune, "verify.tune chooses the tree; give one of them"),
    (
        "data.valid_fraction",
        lambda c: c.data.valid_path is not None,
        "data.valid_path is set too; give one (data.valid_path=null)",
    ),
)
TREES = ("chain", "dynamic", "medusa", "eagle1")  # anything else is a file
LEVELLED = ("chain", "dynamic")
MATCHES = ("ngram_min", "ngram_max")
MEASURING = ("eval", "lossless", "profile")  # verbs that load drafters and prompts
ADAPTERS = ("rank", "alpha", "dropout")
JOINT = ("weight", "schedule", "warmup", "lr", *ADAPTERS, "distill")
OVERLAP_ONLY = ("tv", "expected_length")  # losses that see nothing but the overlap of draft and target
SERVERS = ("model", "concurrency", "retries", "timeout", "api_key_env")
STORED = ("dir", "shard_mib")  # of a store on disk
STORE = (*STORED, "dtype", "batch_tokens")
LIVE = "a target that is trained along (joint.backbone) runs in the training loop"
BY_VALIDATION = ("tau", "tau_prompts", "patience")


def holds_nothing_out(cfg: Config) -> bool:
    return cfg.data.valid_path is None and cfg.data.valid_fraction == 0


UNUSED: tuple[Conflict, ...] = (
    ("optim.muon_lr", lambda c: c.optim.name != "muon", "optim.name is not muon"),
    ("optim.decay", lambda c: c.optim.schedule != "wsd", "optim.schedule is not wsd"),
    ("optim.min_lr", lambda c: c.optim.schedule == "constant", "optim.schedule is constant"),
    (
        "train.decay",
        lambda c: c.train.depth_weights != "decay" and not adds_terms(c.drafter),
        "train.depth_weights is not decay",
    ),
    (
        "train.decay",
        lambda c: c.train.loss == "expected_length" and not c.train.top_k and not adds_terms(c.drafter),
        "train.loss=expected_length weighs depths itself",
    ),
    (
        "train.depth_weights",
        lambda c: c.train.loss == "expected_length" and not c.train.top_k,
        "train.loss=expected_length needs none",
    ),
    ("train.lk_eta", lambda c: c.train.loss != "lk", "train.loss is not lk"),
    ("train.top_k_weight", lambda c: not c.train.top_k, "train.top_k is 0"),
    ("train.tau_prompts", lambda c: c.train.tau != "measured", "train.tau is not measured"),
    *((f"joint.{key}", lambda c: c.joint.backbone == "none", "joint.backbone is none") for key in JOINT),
    *((f"joint.{key}", lambda c: c.joint.backbone == "full", "joint.backbone is not lora") for key in ADAPTERS),
    ("features", lambda c: c.joint.backbone != "none", LIVE),
    *((f"store.{key}", lambda c: c.joint.backbone != "none", LIVE) for key in STORE),
    *((f"store.{key}", lambda c: c.features == "online", "features is online") for key in STORED),
    *((f"train.{key}", holds_nothing_out, "nothing is held out (data.valid_fraction=0)") for key in BY_VALIDATION),
    ("regenerate.batch_size", lambda c: c.regenerate.server is not None, "a server batches itself"),
    *((f"regenerate.{key}", lambda c: c.regenerate.server is None, "regenerate.server is not set") for key in SERVERS),
    ("regenerate.top_p", lambda c: c.regenerate.temperature == 0, "regenerate.temperature is 0 (greedy)"),
    *(
        (f"verify.{key}", lambda c: not any(c.verify.temperatures), "verify.temperatures are all 0 (greedy)")
        for key in ("top_k", "top_p", "min_p", "draws", "typical_eps", "typical_delta")
    ),
    *(
        (f"verify.{key}", lambda c: c.verify.tree != "dynamic", "verify.tree is not dynamic")
        for key in ("branch", "nodes")
    ),
    (
        "verify.gamma",
        lambda c: c.verify.tree not in LEVELLED and NGRAM not in drafters(c),
        "verify.tree has levels of its own",
    ),
    ("verify.gamma", lambda c: c.verify.tune and NGRAM not in drafters(c), "verify.tune chooses the levels"),
    ("verify.draws", lambda c: c.verify.tree == "dynamic", "a dynamic tree drafts the likeliest tokens"),
    ("verify.typical_eps", lambda c: c.verify.rule != "typical", "verify.rule is not typical"),
    ("verify.typical_delta", lambda c: c.verify.rule != "typical", "verify.rule is not typical"),
    ("verify.tune_prompts", lambda c: not c.verify.tune, "verify.tune is off"),
    *((f"verify.{key}", lambda c: NGRAM not in drafters(c), "drafter_path has no ngram") for key in MATCHES),
)
