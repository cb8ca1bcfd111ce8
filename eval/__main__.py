"""``python -m eval conf=RECIPE [drafter_path=FOLDER] [verify.prompts=FILE]``: acceptance length and speed."""

from conf.cli import entry
from conf.schema import Config


@entry("eval")
def main(cfg: Config) -> float | None:
    from eval.run import evaluate_run  # brings torch: --help and mistakes in the configuration need not wait for it

    tau: float | None = evaluate_run(cfg)["runs"][0]["acceptance"]["tau"]
    return tau


if __name__ == "__main__":
    main()
