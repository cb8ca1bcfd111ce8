"""How engines are started with an exported folder: what its model card says under "Serving", a function a method."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.drafter import Drafter
from models.mtp_names import default_layout
from models.mtp_serving import QWEN2_BLOCKS
from models.recognise import Method

NAMED = "vLLM (name the method, do not leave it to be guessed from the path)"
MIMO_OVERRIDES = {"num_nextn_predict_layers": 1}


@dataclass(frozen=True)
class Export:
    """folder and config: what was exported. target: what engines are given to load; it carries the modules if
    ``stitched``, and ``bare_target`` is the one that doesn't (None: there is none). levels: tokens to draft at a time,
    as far as the drafter can."""

    method: Method
    folder: Path
    config: Mapping[str, Any]
    target: str
    levels: int
    drafter: Drafter
    stitched: bool = False
    bare_target: str | None = None

    @property
    def depth(self) -> int:
        most = self.drafter.max_depth
        return self.levels if most is None else min(self.levels, most)

    @property
    def layout(self) -> str:
        return str(self.config["eyas"]["layout"])


def starting(export: Export) -> Iterator[str]:
    """Paragraphs of Markdown."""
    yield from STARTING[export.method.name](export)


def eagle1(export: Export) -> Iterator[str]:
    yield f"{NAMED}:"
    yield vllm(export)
    yield from sglang(export)


def eagle3(export: Export) -> Iterator[str]:
    yield f"{NAMED}:"
    yield vllm(export)
    if len(export.drafter.tap_ids) == 1:
        yield "SGLang can't serve this drafter: it skips the projection of a single tapped state."
    else:
        yield from sglang(export)


def medusa(export: Export) -> Iterator[str]:
    if export.layout == "fasterdecoding":
        yield (
            "The layout of the Medusa authors' own code, whose model class loads the folder. For vLLM export with "
            "`export.layout=vllm`."
        )
        return
    yield f"{NAMED}, up to 0.32, the last version that has Medusa; nothing in the path may begin with `eagle-`:"
    every = export.drafter.max_depth or export.levels  # vLLM drafts with each head, however many are asked for
    yield vllm(replace(export, levels=every))
    yield "SGLang has no Medusa."


def mtp(export: Export) -> Iterator[str]:
    """vLLM loads a MiMo-style module of a plain layer by itself, beside a target without; others are found in the
    target, if its family has a class."""
    family = str(export.config["model_type"])
    if export.layout == "mimo" and export.config["num_nextn_predict_layers"] == 1 and family in QWEN2_BLOCKS:
        if export.bare_target is None:
            yield "vLLM loads this module from here, beside a target without it: export with `export.stitch=false`."
            return
        yield "vLLM, which must be told that the target has a module:"
        beside = replace(export, target=export.bare_target)
        yield vllm(beside, "--hf-overrides", json.dumps(MIMO_OVERRIDES))
    elif default_layout(family).name == "mimo":
        yield f"No engine has MTP for a {family} target, so far."
    elif not export.stitched:
        yield (
            "Engines find these MTP modules in the target. `export.stitch=true` writes a copy of the target that "
            "carries them."
        )
    else:
        yield f"vLLM, from the copy of the target in `{Path(export.target).name}/`, which carries the modules:"
        yield vllm(export, inside=True)


STARTING: dict[str, Callable[[Export], Iterator[str]]] = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "medusa": medusa,
    "mtp": mtp,
}


def vllm(export: Export, *options: str, inside: bool = False) -> str:
    """The command; ``inside``: the drafter is found in the target."""
    own = {} if inside else {"model": str(export.folder)}
    told = {"method": export.method.vllm, **own, "num_speculative_tokens": export.depth}
    return code(["vllm", "serve", export.target, *options, "--speculative-config", json.dumps(told)])


def sglang(export: Export) -> Iterator[str]:
    yield "SGLang, the same chain:"
    options = {
        "--model-path": export.target,
        "--speculative-algorithm": str(export.method.sglang),
        "--speculative-draft-model-path": str(export.folder),
        "--speculative-num-steps": str(export.depth),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(export.depth + 1),
        "--dtype": str(export.config["dtype"]),
    }
    yield code(["python", "-m", "sglang.launch_server", *(part for pair in options.items() for part in pair)])


def code(command: list[str]) -> str:
    return f"```bash\n{shlex.join(command)}\n```"
