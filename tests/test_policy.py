"""The policy in words: README.md says what data/chats/policy.py says, name by name."""

from __future__ import annotations

import re
from pathlib import Path

from data.chats.policy import REJECTS, REPAIRS

README = Path(__file__).parent.parent / "README.md"


def test_the_table_in_the_readme_is_the_policy() -> None:
    found = re.findall(
        r"^\| `(\w+)` \| (rejected|repaired) \| (.+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name: meaning for name, what, meaning in found if what == "rejected"} == REJECTS
    assert {name: meaning for name, what, meaning in found if what == "repaired"} == REPAIRS
    assert len(found) == len(REJECTS) + len(REPAIRS)
