"""Values as JSON and back: what a journal holds of specs and facts.

A journal holds no code. Of a function that a spec expects with, its name stays; the rest is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import cattrs
from attrs import resolve_types
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.json import make_converter

from .core import evidence, facts, verdict
from .core import expect as expect_module
from .core import spec as spec_module
from .core.expect import Expect
from .core.facts import Fact, Fault
from .core.spec import EvalSpec

if TYPE_CHECKING:
    from cattrs.preconf.json import JsonConverter

T = TypeVar("T")
FACTS: Final = {kind.__name__: kind for kind in Fact.__subclasses__()}
"""The facts by name."""


def _converter() -> JsonConverter:
    """Make the converter between values and JSON."""
    converter = make_converter(
        forbid_extra_keys=True, unstruct_collection_overrides={Mapping: dict}
    )
    names = {
        **vars(facts),
        **vars(evidence),
        **vars(verdict),
        **vars(spec_module),
        **vars(expect_module),
    }
    for kind in (*FACTS.values(), Fault, EvalSpec, Expect):
        resolve_types(kind, globalns=names)
    # A command is text or words: JSON's own two types tell them apart.
    command = str | tuple[str, ...]
    for union in (command, command | None):
        converter.register_structure_hook(union, _structure_command)
    # A journal holds no code: of a function, its name stays.
    converter.register_unstructure_hook(
        Expect,
        make_dict_unstructure_fn(
            Expect,
            converter,
            predicates=override(unstruct_hook=sorted),
            _cattrs_omit_if_default=True,
        ),
    )
    converter.register_structure_hook(
        Expect,
        make_dict_structure_fn(
            Expect,
            converter,
            predicates=override(struct_hook=lambda value, _: dict.fromkeys(value)),
            _cattrs_forbid_extra_keys=True,
        ),
    )
    return converter


def _structure_command(value: Any, _: object) -> str | tuple[str, ...] | None:
    return tuple(value) if isinstance(value, list) else value


_CONVERTER: Final = _converter()


def encode(value: object) -> str:
    """Give a spec or a fact as JSON."""
    return _CONVERTER.dumps(value)


def decode(text: str, kind: type[T]) -> T:
    """Give a value of a kind back.

    Raises:
        ValueError: the text is not one; the message says where.
    """
    try:
        return _CONVERTER.loads(text, kind)
    except Exception as error:
        where = "; ".join(cattrs.transform_error(error)) or str(error)
        raise ValueError(f"not a {kind.__name__}: {where}") from error
