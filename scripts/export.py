"""Write the folder that serving engines load: ``python -m scripts.export conf=RECIPE``.

The folder is written under a temporary name, read back, re-scored (scripts/rescore.py) and only then put in place.
"""

from __future__ import annotations

import json
import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli import entry
from conf.schema import Config
from models.errors import EyasError
from models.run_folder import REPORT
from scripts.beside import TargetBeside

if TYPE_CHECKING:
    from models.drafter import Drafter, Serving
    from models.frozen import FrozenTarget
    from scripts.card import About

log = logging.getLogger(__name__)


def export(
    drafter: Drafter,
    frozen: FrozenTarget,
    folder: Path | str,
    about: About,
    *,
    dtype: str = "bfloat16",
    layout: str | None = None,
    beside: TargetBeside | None = None,
) -> Path:
    """Export ``drafter`` for ``frozen``'s target to ``folder`` and return it.

    about: what the model card tells of it. dtype: bfloat16, float16 or float32. layout: one of the drafter's layouts,
    None: its default. beside: a target that is written along. Raises EyasError, and leaves an earlier export as it is,
    if the result is not exactly what engines expect and training computed.
    """
    from models.portable import CARD, fill_export, read_config, serve, staged
    from scripts.card import model_card
    from scripts.rescore import rescore

    folder, beside = Path(folder), beside or TargetBeside()
    about = replace(about, tuned=beside.tuned, stitched=beside.stitched)
    exact = deepcopy(drafter).to("cpu").float().eval()
    exact.check_layout(layout)
    beside.check(exact)
    with staged(folder) as temporary:
        frozen = beside.write_tuned(temporary) or frozen.to("cpu")
        served = beside.note(name_base(serve(exact, frozen, layout), about.served))
        fill_export(served, temporary, dtype)
        proof = rescore(temporary, exact, served, frozen, dtype)
        beside.write_stitched(temporary, served, dtype)
        card = model_card(folder, read_config(temporary), about, proof, exact)
        (temporary / CARD).write_text(card, encoding="utf-8")
    log.info(
        "exported %s: %s, logits as engines compute them within %.1e, cast changed them by %.2f%%",
        folder,
        dtype,
        proof.engine,
        100 * proof.rounding,
    )
    return folder


def name_base(served: Serving, target: str) -> Serving:
    """The base model as others can find it, where a config names it."""
    key = "base_model_name_or_path"
    return replace(served, config=served.config | {key: target}) if key in served.config else served


def run_export(cfg: Config) -> Path:
    """Export this run's best checkpoint, or ``drafter_path``, to ``export.dir`` (default: ``export`` of the run)."""
    from models.load_frozen import load_frozen
    from models.portable import open_drafter
    from models.pypi import resolve
    from models.run_folder import best_checkpoint
    from models.tuned import tuned
    from scripts.card import About

    assert cfg.output_dir is not None
    run = Path(cfg.output_dir)
    source = best_checkpoint(Path(cfg.drafter_path or run)) or (Path(cfg.drafter_path) if cfg.drafter_path else None)
    if source is None:
        raise EyasError(f"{run}: no checkpoint to export; train first, or give drafter_path=FOLDER")
    target = resolve(cfg.target.path, revision=cfg.target.revision, trust_remote_code=cfg.target.trust_remote_code)
    frozen = load_frozen(target, dtype=cfg.target.dtype)
    drafter = open_drafter(source, target=frozen.config)
    if drafter.vocab.size != frozen.vocab_size:
        raise EyasError(
            f"{source}: drafts for a vocabulary of {drafter.vocab.size}, target.path={cfg.target.path} has "
            f"{frozen.vocab_size}; it was trained for another target"
        )
    into = Path(cfg.export.dir or run / "export").resolve()
    for key, used in (("target.path", Path(target)), ("drafter_path", source)):
        if used.resolve().is_relative_to(into):
            raise EyasError(f"export.dir={into}: holds {used}, which {key} names and an export would replace")
    how = {"dtype": cfg.target.dtype, "trust_remote_code": cfg.target.trust_remote_code}
    return export(
        drafter,
        frozen,
        Path(cfg.export.dir or run / "export"),
        About(
            target=cfg.target.path,
            target_path=target if cfg.target.path.startswith("pypi:") else None,
            data=None if cfg.drafter_path else describe(cfg.data.path),
            report=read_report(run, source, cfg.target.path),
        ),
        dtype=cfg.export.dtype,
        layout=cfg.export.layout,
        beside=TargetBeside(Path(target), source if tuned(source) else None, cfg.export.stitch, how),
    )


def read_report(run: Path, source: Path, target: str) -> dict[str, Any] | None:
    """The run's evaluation, if there was one and it measured the drafter in ``source`` with this target."""
    path = run / REPORT
    if not path.exists():
        return None
    from scripts.card import of_drafter

    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        report = of_drafter(whole, source) if whole["settings"]["target"] == target else None
    except (ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{path}: not a report of python -m eval ({error}); delete it or run the evaluation") from error
    if report is None:
        log.warning("%s did not measure %s with %s: the model card goes without it", path, source, target)
    return report


def describe(path: Any) -> str | None:
    """data.path for the card: file names without the folders of this machine."""
    paths = path if isinstance(path, list) else [path]
    return ", ".join(Path(str(p)).name if Path(str(p)).exists() else str(p) for p in paths if p) or None


@entry("export")
def main(cfg: Config) -> None:
    print(run_export(cfg))


if __name__ == "__main__":
    main()
