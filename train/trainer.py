"""The training loop of every method: nothing here knows which drafter it trains, or on how many processes.

Optimizer step s is a pure function of the weights, s and the configuration: its documents come from the plan
(data/features/order.py), its learning rate from train/optim.py, its random numbers from bin_seed. So continuing from a
checkpoint repeats exactly what an unbroken run would have done.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from conf.schema import Config
from data.features.order import StepPlan
from data.features.source import FeatureSource, TokensOnly
from models.drafter import Drafter, TrainSpec
from models.errors import EyasError
from models.frozen import FrozenTarget
from models.objective import Objective
from models.run_folder import STAGES, note_down
from models.signals import Interrupted, Stopped, StopRequest, agreed
from train.checkpoint import CheckpointDir, TrainState
from train.clock import Clock
from train.document_log import DocumentLog, rewind
from train.joint import JointTraining
from train.metrics import Totals
from train.optim import build_optimizer, lr_factor, set_lr
from train.optimizer_state import OptimizerStates
from train.places import Phase
from train.spread import spread
from train.strategy import Agreement, Strategy, passes_of
from train.summary import plan_of, step_line
from train.tracking import Tracker, progress, settle
from train.validation import Broken, Validator, is_impatient
from train.watchdog import Watchdog

VALIDATIONS = 8  # a run, where train.eval_every leaves it open

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """A finished run: the checkpoint to evaluate and export, its validation and the number of steps."""

    checkpoint: Path
    best: dict[str, Any] | None
    steps: int


class Trainer:
    """Trains ``drafter`` on ``train`` until the plan is done, continuing from the newest checkpoint if there is one.

    ``content`` are digests of what the run is fed (features, target, vocabulary): a checkpoint made from other
    content is refused. ``weights``: how often each training document comes in an epoch. ``frozen`` must be on the
    accelerator's device. ``joint``: the target is trained along. ``measure``: greedy tau of a copy of the drafter, by
    the verifier, which then decides what is best instead of the simulated one; every process is given one, only that of
    the main process is called. ``watchdog``: what is to be told where the run is.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        accelerator: Accelerator,
        drafter: Drafter,
        frozen: FrozenTarget,
        *,
        train: FeatureSource,
        valid: FeatureSource | None,
        content: Mapping[str, str],
        weights: Sequence[float] | None = None,
        joint: JointTraining | None = None,
        measure: Callable[[Drafter], float] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.cfg, self.run_dir, self.accelerator, self.frozen = cfg, run_dir, accelerator, frozen
        if valid is not None and not any(valid.slots):
            log.warning("no held-out document has a slot to score: the last checkpoint counts as the best")
            valid = None
        self.train_source, self.valid_source = train, valid
        t = cfg.train
        self.joint = joint
        self.watchdog = watchdog or Watchdog(accelerator, 60 * cfg.strategy.timeout_minutes)
        more = (t.depth_keep, t.top_k, t.top_k_weight, t.lk_eta)
        objective = Objective(t.loss, t.depth_weights, t.decay, t.chunk, *more)
        self.spec = TrainSpec(objective, t.depths, recompute=t.recompute)
        # Documents without a slot have no gradient, and a step of nothing else would have no denominator.
        self.documents = [d for d, slots in enumerate(train.slots) if slots]
        if not self.documents:
            raise EyasError("data.path: no document has two supervised tokens in a row after its first token")
        self.plan = StepPlan(
            [train.lengths[d] for d in self.documents],
            seed=cfg.seed,
            bin_tokens=t.bin_tokens,
            bins_per_step=t.bins_per_step,
            epochs=None if t.steps else t.epochs,
            steps=t.steps,
            weights=None if weights is None else [weights[d] for d in self.documents],
        )
        self.total = self.plan.total_steps
        self.eval_every = t.eval_every or math.ceil(self.total / VALIDATIONS)
        self.save_every = t.save_every or self.eval_every
        self.drafter = drafter.to(accelerator.device)
        self.module = joint.model if joint else self.drafter  # what is called
        self.module.train()
        self.checkpoints = CheckpointDir(run_dir, t.keep_last)
        self.state = TrainState(total_steps=self.total, content=dict(content))
        self.window = Totals(t.depths, accelerator.device)
        self.documents_read: DocumentLog | None = None
        self.clock, self.agreement = Clock(), Agreement(accelerator)
        self.stop = StopRequest()
        self.validator: Validator | None = None
        if valid is not None:
            given = (cfg, self.drafter, frozen, valid, self.spec, self.chain, measure)
            self.validator = Validator(*given, self._break_off, self._alone)

    # --- the run, from start to end ---

    def fit(self) -> Fitted:
        """Train to the last step. Raises EyasError when the loss stops being finite."""
        newest = self._resume()
        log.info("plan\n%s", plan_of(self))
        if self._finished():
            log.info("this run is finished: %d of %d steps done", self.state.step, self.total)
            if self.accelerator.is_main_process:
                settle(self.run_dir, self.cfg.tracker, step=self.state.step, config=asdict(self.cfg))
            return self._fitted()
        self._set_up(newest)
        self.clock.start(self.state.step, self.state.tokens, self.state.seconds)
        with self.stop, self._tracking() as (tracker, bar), self._documents() as self.documents_read:
            self.watchdog.stop = self.stop
            self._score_untrained()
            if self._owes_validation():  # a run that was stopped before it
                self._finish_step(tracker, keep=True)
            while not self._finished():
                self._train_step(self.state.step)
                bar.update()
                if self._due(self.cfg.train.log_every):
                    self._log_train(tracker, bar)
                self._finish_step(tracker)
            if self.state.stopped:
                log.info("step %d: no better tau in %d validations: stopping", self.state.step, self.state.stale)
        return self._fitted()

    def _finished(self) -> bool:
        return (self.state.step == self.total or self.state.stopped) and not self._owes_validation()

    def _owes_validation(self) -> bool:
        """Whether this step is one to validate after, and hasn't been."""
        due = self.state.step > 0 and self.validator is not None and self._due(self.eval_every)
        return due and self.state.validated != self.state.step

    def _finish_step(self, tracker: Tracker | None, *, keep: bool = False) -> None:
        """What is due between two steps: validation, a checkpoint (in any case to ``keep``), and leaving where a signal
        asks for it."""
        self._at(Phase.AGREEING)
        *asked, late = self.agreement.any([*self.stop.said, self._is_late()])
        improved = False
        with self.clock.paused():
            if not any(asked) and self._owes_validation():
                with suppress(Broken):
                    improved = self._validate(tracker)
                asked = self.agreement.any(self.stop.said)
            if any(asked) or late or improved or keep or self.state.stopped or self._due(self.save_every):
                self._save(tracker)
        if number := agreed(asked):
            raise Stopped(number, self.state.step)

    def _is_late(self) -> bool:
        """Whether a checkpoint is due by the main process's watch."""
        minutes = self.cfg.train.save_minutes
        return bool(minutes) and self.accelerator.is_main_process and time.monotonic() - self.saved > 60 * minutes

    def _break_off(self) -> bool:
        """Between the batches of a validation: whether one of the processes was asked to stop."""
        self._at(Phase.VALIDATING)
        return any(self.agreement.any(self.stop.said))

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        """While the main process does something at its own pace. Raises Asked if it is asked to stop meanwhile."""
        with self.watchdog.paused(doing), self.stop.breaking():
            yield

    def _at(self, phase: Phase) -> None:
        self.watchdog.at(self.state.step, phase)

    def _train_step(self, step: int) -> None:
        """One optimizer step: this process's bins, gradients over the valid slots of all processes' bins."""
        accelerator, world, at = self.accelerator, self.accelerator.num_processes, self.watchdog.at
        bins = [[self.documents[d] for d in members] for members in self.plan.bins(step)]
        documents = [d for docs in bins for d in docs]
        # Processes average their gradients; the sum over all slots is wanted, divided by their number.
        slots = sum(self.train_source.slots[d] for d in documents)
        weight = world / slots
        together = math.ceil(len(bins) / world) if self.strategy.lockstep else 1
        passes = passes_of(bins, accelerator, self.train_source.lengths, at_least=together)
        spec = self._spec_of(step, slots, documents)
        of_target = self.joint.lr_factor(step, self.total, self.cfg.optim) if self.joint else 0.0
        set_lr(self.strategy.param_groups, lr_factor(step, self.total, self.cfg.optim), of_target)
        for turn, (members, counts) in enumerate(passes):
            at(step + 1, Phase.READING)
            batch = self.train_source.batch(members).to(accelerator.device)
            number, last = accelerator.process_index + turn * world, turn == len(passes) - 1
            seed = bin_seed(self.cfg.seed, step, number)
            torch.manual_seed(seed)
            if counts and self.documents_read is not None:
                self.documents_read.write(step, number, [self.train_source.sources[d] for d in members])
            at(step + 1, Phase.EXCHANGING if last or self.strategy.lockstep else Phase.COMPUTING)
            given = weight if counts else 0.0
            score = self.strategy.learn(batch, self.frozen, replace(spec, seed=seed), given, last=last)
            if counts:
                self.window.add(score)
        at(step + 1, Phase.UPDATING)
        norm = self.strategy.step()
        if accelerator.is_main_process:
            self.window.add_step(norm)
        self.state.step = step + 1
        self.state.tokens += sum(self.train_source.lengths[d] for d in documents)
        self.state.supervised += sum(self.train_source.supervised[d] for d in documents)

    def _spec_of(self, step: int, slots: int, documents: Sequence[int]) -> TrainSpec:
        """What the model computes in this step. All sums are divided by the number of slots afterwards, so that of the
        target's own term, a mean over its tokens, is weighted accordingly."""
        if self.joint is None:
            return self.spec
        assert isinstance(self.train_source, TokensOnly)
        lm, draft = self.joint.weights(step, self.total)
        labels = sum(self.train_source.labels[d] for d in documents)
        return replace(self.spec, lm_weight=lm * slots / max(1, labels), draft_weight=draft)

    def _validate(self, tracker: Tracker | None) -> bool:
        """Score the held-out documents; whether the greedy tau that decides is the best so far. Raises Broken."""
        assert self.validator is not None
        row = self.validator.row(self.strategy)
        self._require_finite(row["loss"] + row.get("perplexity", 0.0), "the validation loss")
        if self.joint:
            self.state.perplexity["after"] = row["perplexity"]
        improved = self.validator.improves(self.state, row)
        if tracker is not None:
            tracker.log(self.state.step, "valid", row)
        self.validator.tell(self.state.step, row, improved=improved)
        return improved

    def _score_untrained(self) -> None:
        """Note what the held-out text is to a target before it is trained along."""
        if self.joint is None or self.validator is None or self.state.perplexity:
            return
        with self.clock.paused():
            try:
                totals, _ = self.validator.score(self.strategy)
            except Broken:
                raise Interrupted(agreed(self.agreement.any(self.stop.said))) from None
            self.state.perplexity["before"] = totals.averages()["perplexity"]

    # --- what is written ---

    def _log_train(self, tracker: Tracker | None, bar: tqdm) -> None:
        """A row of the averages since the last one."""
        self._at(Phase.LOGGING)
        row = self._window_averages()
        self.window.clear()
        if tracker is None:  # not the main process, which now holds the sums of all
            return
        tokens_per_s = self.clock.rate(self.state.tokens)
        groups = self.strategy.param_groups
        row |= {"lr_target": next(group["lr"] for group in groups if group["backbone"])} if self.joint else {}
        row |= {"lr": float(groups[0]["lr"]), "epoch": self.plan.epoch(self.state.step)}
        row |= {"tokens": self.state.tokens, "supervised": self.state.supervised}
        row |= {"tokens_per_s": tokens_per_s, "seconds": self.clock.seconds()}
        tracker.log(self.state.step, "train", row)
        bar.set_postfix_str(f"loss {row['loss']:.3f} tau~{row['tau_mean_field']:.2f} {tokens_per_s:,.0f} tok/s")
        level = logging.INFO if bar.disable else logging.DEBUG  # a terminal has the bar
        log.log(level, step_line(row, self.state.step, self.total, self.clock.left(self.state.step, self.total)))

    def _window_averages(self) -> dict[str, Any]:
        self.window.reduce(self.accelerator)
        row = self.window.averages()
        if self.accelerator.is_main_process:
            self._require_finite(row["loss"] + row.get("grad_norm", 0.0), "the training loss or its gradient")
        return row

    def _require_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            newest = self.checkpoints.latest()
            raise EyasError(
                f"step {self.state.step}: {what} is not finite. Lower optim.lr (now {self.cfg.optim.lr:g}), "
                + (f"joint.lr (now {self.cfg.joint.lr:g}), " if self.joint else "")
                + "lengthen optim.warmup or use train.precision=fp32, under another name=; the last checkpoint is "
                f"{newest or 'none'}"
            )

    def _save(self, tracker: Tracker | None) -> None:
        """Save this step, then record the best and drop what is no longer kept."""
        self._at(Phase.SAVING)
        self._window_averages()  # refuses to save what is not finite
        if self.documents_read is not None:
            self.documents_read.sync()
            self.accelerator.wait_for_everyone()
        weights, states = self.strategy.weights(), self.strategy.optimizer_states()
        if self.accelerator.is_main_process:
            assert tracker is not None
            tracker.sync()
            self.state.window, self.state.seconds = self.window.state(), self.clock.seconds()
            folder = self.checkpoints.save(self.state, self.drafter, weights, states, self.joint)
            self.checkpoints.mark_best(self.state.best)
            self.checkpoints.prune(self.state.best)
            log.debug("saved %s", folder)
        deque(states, maxlen=0)  # which all processes make together
        self.accelerator.wait_for_everyone()
        self.saved = time.monotonic()

    def _resume(self) -> Path | None:
        """Take weights and position from the newest whole checkpoint, if there is one, and return it."""
        newest, state = self.checkpoints.agree_on_latest(self.accelerator) or (None, self.state)
        if newest is not None:
            self.checkpoints.restore(newest, state, self.state, self.drafter, self.joint)
            self.state = state
            self.state.stopped = is_impatient(self.state, self.cfg)  # train.patience may be another one now
            if self.accelerator.is_main_process:
                self.window.load(self.state.window)
                self.checkpoints.mark_best(self.state.best)
        if self.accelerator.is_main_process:
            rewind(self.run_dir, self.state.step)
            note_down(self.run_dir / STAGES, {"steps": self.total})
        self.saved = time.monotonic()
        self.accelerator.wait_for_everyone()
        return newest

    def _set_up(self, newest: Path | None) -> None:
        """Spread the module, as it is now, over the processes; its optimizer continues what ``newest`` has of it."""
        cfg, joint = self.cfg, self.joint
        backbone = joint.model.trained_backbone() if joint else None
        optimizer = build_optimizer(self.drafter, cfg.optim, backbone=backbone, backbone_lr=cfg.joint.lr)
        # The first stage of joint training leaves the target's parameters alone, and depths that aren't trained theirs.
        unused = joint is not None or (self.drafter.max_depth or 0) > cfg.train.depths
        self.strategy: Strategy = spread(cfg, self.accelerator, self.module, optimizer, unused=unused)
        if newest is not None:
            self.strategy.load_optimizer(OptimizerStates(newest))
        longest = max(self.documents, key=self.train_source.slots.__getitem__)
        self.strategy.warm_up(
            lambda: self.train_source.batch([longest]).to(self.accelerator.device), self.frozen, self.spec
        )

    @contextmanager
    def _tracking(self) -> Iterator[tuple[Tracker | None, tqdm]]:
        """The tracker (on the main process) and the progress bar, closed whatever happens."""
        main = self.accelerator.is_main_process
        tracker = None
        if main:
            owes = "valid" if self._owes_validation() else None
            step, config = self.state.step, asdict(self.cfg)
            tracker = Tracker(self.run_dir, self.cfg.tracker, step=step, config=config, without=owes)
        bar = progress(self.total, self.state.step, enabled=main)
        try:
            with logging_redirect_tqdm():
                yield tracker, bar
        finally:
            self._at(Phase.ENDING)
            bar.close()
            if tracker is not None:
                tracker.close()

    def _documents(self) -> AbstractContextManager[DocumentLog | None]:
        """Where this process notes what it reads, if it is to."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return closing(DocumentLog(self.run_dir, rank, world)) if self.cfg.train.log_documents else nullcontext()

    def _fitted(self) -> Fitted:
        best = self.state.best
        step = best["step"] if best is not None else self.state.step
        return Fitted(self.checkpoints.folder(step), best, self.state.step)

    # --- small questions ---

    @property
    def chain(self) -> int:
        """Chain length of the simulated tau: what the verifier will draft."""
        return min(self.cfg.verify.gamma, self.drafter.max_depth or self.cfg.verify.gamma)

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.total


def bin_seed(seed: int, step: int, number: int) -> int:
    """Seed of everything random about a bin of a step, on whichever process it runs."""
    return ((seed * 1_000_003 + step) * 1_009 + number) % (1 << 62)
