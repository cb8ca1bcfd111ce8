"""Configuration: the schema, the recipes (conf/*.yaml, chosen by ``conf=NAME``) and their groups.

Recipes live beside config.yaml and are registered here as the Hydra group ``conf``, so that
``python -m train conf=eagle3_llama``, sweeps over recipes and ``--help`` all know them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from conf.schema import Config

CONF_DIR = Path(__file__).parent.resolve()
PRIMARY = "config"
RECIPES = tuple(sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != PRIMARY))
GROUPS = ("conf", *sorted(path.name for path in CONF_DIR.iterdir() if any(path.glob("*.yaml"))))


def folder_name(text: str, limit: int = 96) -> str:
    """``text`` as one folder name: the same text gives the same name, different texts different ones.

    Characters that a shell or a path would trip over become ``_``; where anything was lost, a digest of the
    whole text is appended.
    """
    safe = re.sub(r"[^\w.,=+-]+", "_", text, flags=re.ASCII).strip(".")
    if safe == text and len(safe) <= limit:
        return safe or "default"
    return f"{safe[:limit]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for recipe in RECIPES:
        node = OmegaConf.load(CONF_DIR / f"{recipe}.yaml")
        store.store(group="conf", name=recipe, node=node, package="_global_")
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)


_register()
