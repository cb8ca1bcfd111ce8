"""``python -m data conf=RECIPE``: conversations to feature stores, the first stages of ``python -m train`` alone."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import cache
from pathlib import Path

from conf.cli import entry
from conf.schema import Config

log = logging.getLogger(__name__)


@entry("data")
def main(cfg: Config) -> None:
    import torch  # slow, as what follows: --help and mistakes in the configuration need not wait for it

    from data.look.report import report
    from data.prepare import Inputs, open_target
    from models.device import pick_device
    from models.run_folder import has_begun
    from models.target import Target

    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    device = pick_device(cfg.device)
    run_dir = Path(cfg.output_dir or Path("outputs") / cfg.name)
    rejects_dir = None if has_begun(run_dir) else run_dir
    target, data, store = asdict(cfg.target), asdict(cfg.data), asdict(cfg.store)
    inputs = Inputs.gather(
        open_target(target), target=target, data=data, store=store, prompts=cfg.verify.prompts, rejects_dir=rejects_dir
    )
    report(inputs, run_dir, cfg.preview, cfg.drafter.get("draft_vocab_size"), cfg.verify.gamma)
    if cfg.features == "online" or cfg.joint.backbone != "none":
        log.info("nothing is dumped: the target runs in the training loop (features=online or joint.backbone)")
        return

    @cache
    def load_target() -> Target:
        return inputs.load_target(device)

    for name, examples in (("training", inputs.corpus.train), ("held-out", inputs.corpus.valid)):
        if examples:
            features = inputs.stored(examples, load_target)
            log.info("%s features: %d documents in %s", name, len(features), features.folder)


if __name__ == "__main__":
    main()
