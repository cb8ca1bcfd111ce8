"""The open section ``drafter``: its schema is the code that takes it.

A drafter's YAML names its class in ``_target_``; every other key must be a keyword of that class's ``create``
(or ``draft_vocab_size``, which all methods share) with a value of the annotated type.
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from models.errors import EyasError

if TYPE_CHECKING:
    from models.drafter import Drafter

SHARED_OPTIONS: dict[str, Any] = {"draft_vocab_size": int | None}  # null: the whole vocabulary of the target


def check_drafter(drafter: Mapping[str, Any]) -> None:
    """Refuse a drafter section whose class does not exist or whose options its ``create`` does not take."""
    method = method_of(drafter)
    check_options("drafter", options_of(method), drafter)
    method.check_options(drafter)


def method_of(drafter: Mapping[str, Any]) -> type[Drafter]:
    """The class that a drafter section names. Raises EyasError if there is none."""
    target = drafter.get("_target_")
    if not isinstance(target, str):
        raise EyasError(
            "drafter._target_: names the drafter's class; choose a file of conf/drafter, e.g. drafter=eagle3"
        )
    from models.checkpoint import drafter_class  # brings torch: only once a configuration is complete

    return drafter_class(target)


def adds_terms(drafter: Mapping[str, Any]) -> bool:
    """Whether the method has a term of its own beside the objective; depth k of that always counts decay^k."""
    from models.drafter import Drafter

    return method_of(drafter).extra_terms is not Drafter.extra_terms


def options_of(cls: Any) -> dict[str, Any]:
    """Options of a drafter class and their types: the keywords of its ``create`` behind the three fixed arguments."""
    parameters = list(inspect.signature(cls.create).parameters.values())[3:]
    hints = get_type_hints(cls.create)
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD and p.name != "seed"]  # the run's
    return SHARED_OPTIONS | {p.name: hints.get(p.name, Any) for p in named}


def check_options(section: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Every given key must be an option, with a value of its type."""
    for key, item in given.items():
        if key == "_target_":
            continue
        if key not in options:
            near = difflib.get_close_matches(str(key), options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(options))}"
            raise EyasError(f"{section}.{key}: there is no such option; {hint}")
        if not fits(item, options[key]):
            raise EyasError(f"{section}.{key}={item}: must be {wording(options[key])}")


def fits(item: Any, hint: Any) -> bool:
    """Whether a value from YAML is of the annotated type (an int passes for a float, a bool for nothing else)."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(item, option) for option in get_args(hint))
    if origin is Literal:
        return item in get_args(hint)
    if hint is None or hint is type(None):
        return item is None
    if hint in (int, float):
        return isinstance(item, int | hint) and not isinstance(item, bool)
    if origin in (list, tuple):
        return isinstance(item, list | tuple) and all(fits(x, get_args(hint)[0]) for x in item)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(item, kind)


def wording(hint: Any) -> str:
    """A type as the user would say it: ``int or null``, ``none or ddp``."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(wording(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(str(option) for option in get_args(hint))
    if hint is None or hint is type(None):
        return "null"
    return str(getattr(hint, "__name__", hint))
