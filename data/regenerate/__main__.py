"""``python -m data.regenerate conf=RECIPE data.path=FILE``: the target answers the questions of any conversations."""

from __future__ import annotations

from conf.cli import entry
from conf.schema import Config


@entry("regenerate")
def main(cfg: Config) -> None:
    from data.regenerate.run import regenerate

    regenerate(cfg)


if __name__ == "__main__":
    main()
