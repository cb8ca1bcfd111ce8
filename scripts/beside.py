"""The target that an export brings along in ``target/``: an ordinary model folder, which engines load as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import EyasError

if TYPE_CHECKING:
    from models.drafter import Drafter, Serving
    from models.frozen import FrozenTarget


@dataclass(frozen=True)
class TargetBeside:
    """Nothing, by default. source: folder of the target that was trained with. checkpoint: that of a joint run, which
    holds what became of the target: the tuned one is written. stitched: a copy (of the tuned one, if there is one) that
    carries the drafter's MTP modules is written. how: arguments of Target.load."""

    source: Path | None = None
    checkpoint: Path | None = None
    stitched: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tuned(self) -> bool:
        return self.checkpoint is not None

    def check(self, drafter: Drafter) -> None:
        """Raise EyasError if the drafter can't be carried by a target."""
        if self.stitched and not drafter.carried_by_target:
            from models.recognise import title_of

            raise EyasError(f"export.stitch=true: targets carry MTP modules; {title_of(type(drafter))} stays outside")

    def note(self, served: Serving) -> Serving:
        """The drafter, whose config then says so if only a tuned target goes with it."""
        from models.tuned import as_model

        if self.checkpoint is None:
            return served
        told = {**served.config.get("eyas", {}), "target": as_model(self.checkpoint)}
        return replace(served, config=served.config | {"eyas": told})

    def write_tuned(self, export: Path) -> FrozenTarget | None:
        """Write the tuned target into ``export``; what drafters read of it, read back. None if there is none."""
        from models.load_frozen import load_frozen
        from models.portable import TARGET
        from models.tuned import write_tuned

        if self.checkpoint is None or self.source is None:
            return None
        (export / TARGET).mkdir()
        write_tuned(self.source, self.checkpoint, export / TARGET, **self.how)
        return load_frozen(export / TARGET)

    def write_stitched(self, export: Path, served: Serving, dtype: str) -> None:
        """Write the copy that carries the modules, in place of the tuned target if there is one, and read it back."""
        import shutil

        import torch

        from models.portable import DTYPES, TARGET, load_export
        from models.stitch import stitch_drafter

        if not self.stitched or self.source is None:
            return
        out, source = export / TARGET, self.source
        if self.tuned:
            source = out.rename(export / f"{TARGET}-tuned")
        stitch_drafter(source, served, out, DTYPES[dtype])
        if self.tuned:
            shutil.rmtree(source)
        alone, carried = (load_export(folder).state_dict() for folder in (export, out))
        for name, tensor in alone.items():
            if name not in carried or not torch.equal(tensor, carried[name]):
                raise EyasError(f"{out}: {name} of the modules in it is not the exported one")
