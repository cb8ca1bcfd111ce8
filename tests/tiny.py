"""Tiny random targets for tests: the ones of the debug recipe."""

from models.tiny_target import CHATML, FAMILIES, SPECIAL, tiny_config, tiny_model, tiny_target, tiny_tokenizer

__all__ = ["CHATML", "FAMILIES", "SPECIAL", "tiny_config", "tiny_model", "tiny_target", "tiny_tokenizer"]
