"""``python -m train conf=RECIPE [key=value ...]``: conversations to exported drafter; the same command continues.

``status`` among the arguments tells where the run stands instead (train/status.py).
"""

from conf.cli import entry
from conf.schema import Config
from train.status import show_status
from train.sweep import run_sweep


@entry("train", sweep=run_sweep, words={"status": show_status})
def main(cfg: Config) -> float | None:
    from train.stages import walk  # brings torch: --help and mistakes in the configuration need not wait for it

    return walk(cfg)


if __name__ == "__main__":
    main()
