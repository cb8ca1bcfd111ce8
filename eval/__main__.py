"""``python -m eval conf=RECIPE [drafter=FOLDER] [prompts=FILE]``: acceptance length and speed."""

from conf.cli import entry
from conf.schema import Config


@entry("eval")
def main(cfg: Config) -> float | None:
    from eval.processes import launched  # these bring torch: --help and mistakes in the configuration need not wait
    from eval.run import evaluate_run

    with launched(cfg.device) as processes:
        tau: float | None = evaluate_run(cfg, processes)["runs"][0]["acceptance"]["tau"]
    return tau


if __name__ == "__main__":
    main()
