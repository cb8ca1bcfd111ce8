"""One run under every strategy, by the real command: the same curves, documents and weights as on one process.

Three bins a step, so that the second of two processes has one to the first's two, and of four one has none; in the last
step there is one bin for all of them. Some documents teach only the first depth, so processes come to depths in which
they have no slot. That is also every split of a step over processes and accumulation: 1 x 3, 2 + 1 and 1 + 1 + 1 + 0;
the even ones, 1 x 4, 2 x 2 and 4 x 1, come at the end.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data import DATA_DIR
from tests.processes import launch
from tests.tiny import tiny_target
from train.document_log import read_documents
from train.tracking import METRICS, read_metrics

STEPS = 50
TRAIN = (
    *("conf=debug", "train.bin_tokens=128", "train.bins_per_step=3", "train.log_every=1", "train.log_documents=true"),
    *("verify.max_prompts=1", "verify.max_new_tokens=8", "verify.temperatures=[0.0]", "verify.costs=false"),
    *("verify.baseline=false", "export.dtype=float32", "device=cpu", "threads=1", "tracker=none", "preview=0"),
)
