"""Types and checks for the settings of a process.

The settings of a process are one frozen dataclass. Its fields define the flags, the environment
variables, the keys of the config file, their help, their bounds and their documentation. A flag has
the name of its field, unless the field's `Parameter` gives another name. The docstring below a
field is its help. The bounds are checked whenever an instance is made, be it from flags or in code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Ge, Gt, Le
from cyclopts import Parameter, Token

NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
PositiveInt = Annotated[int, Gt(0)]
PositiveFloat = Annotated[float, Gt(0)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogFormat = Literal["text", "json"]


MAX_LABEL_COUNT = 16  # labels of one worker, or needs of one session
MAX_LABEL_LENGTH = 128  # characters of the name or the value of a label


def _split(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    parts = (part.strip() for token in tokens for part in token.value.split(","))
    return tuple(part for part in parts if part)


Names = Annotated[tuple[str, ...], Parameter(converter=_split, n_tokens=1, negative=())]
"""Values separated by commas. The config file may have a list instead."""


def check_bounds(settings: object) -> None:
    """Check the bounds of every number of a settings dataclass. Its `__post_init__` calls this.

    Raises ValueError with a message that begins with the name of the field. If the flag of the
    field has another name, the message has it, too. NaN is outside every bound.
    """
    for name, bounds in _bounds_of(type(settings)):
        value = getattr(settings, name)
        if value is None or isinstance(value, str):
            continue  # not a number, such as `auto`
        for bound in bounds:
            if problem := _problem(bound, value):
                raise ValueError(f"{name} is {value}, must {problem}{_flag(bounds)}")


def check_arguments(function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Check the bounds of every number among the arguments of a function that is a command.

    Raises ValueError with a message that begins with the flag. NaN is outside every bound.
    """
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int | float)}
    # The types of functions of libraries, such as the one for --help, may be unknown here.
    hints = get_type_hints(function, include_extras=True) if numbers else {}
    for name, value in numbers.items():
        metadata = tuple(_metadata(hints[name]))
        flag = next(_flags(metadata), "--" + name.replace("_", "-"))
        for bound in metadata:
            if problem := _problem(bound, value):
                raise ValueError(f"{flag} is {value}, must {problem}")


def _flag(metadata: Sequence[object]) -> str:
    """Return the flag that a `Parameter` names, in brackets; empty if none does."""
    return next((f" (flag {name})" for name in _flags(metadata)), "")


def _flags(metadata: Sequence[object]) -> Iterator[str]:
    return (name for each in metadata if isinstance(each, Parameter) for name in each.name or ())


@functools.cache
def _bounds_of(settings: Any) -> tuple[tuple[str, tuple[object, ...]], ...]:
    hints = get_type_hints(settings, include_extras=True)
    return tuple((field.name, tuple(_metadata(hints[field.name]))) for field in fields(settings))


def _metadata(hint: Any) -> Iterator[object]:
    """Yield the metadata of a type and of the members of a union such as `PositiveInt | None`."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        yield from _metadata(inner)


def _problem(bound: object, value: Any) -> str:
    match bound:
        case Ge(ge=limit) if not value >= limit:
            return f"not be below {limit}"
        case Gt(gt=limit) if not value > limit:
            return f"be above {limit}"
        case Le(le=limit) if not value <= limit:
            return f"not be above {limit}"
        case _:
            return ""


def parse_labels(texts: Sequence[str], setting: str) -> dict[str, str]:
    """Parse labels written as KEY=VALUE.

    Raises ValueError with a message that begins with `setting`.
    """
    labels: dict[str, str] = {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not name or not value:
            raise ValueError(f"{setting}: {text!r} is not KEY=VALUE")
        if max(len(name), len(value)) > MAX_LABEL_LENGTH:
            raise ValueError(f"{setting}: {text!r} is longer than {MAX_LABEL_LENGTH} characters")
        if name in labels:
            raise ValueError(f"{setting}: {name!r} is given twice")
        labels[name] = value
    if len(labels) > MAX_LABEL_COUNT:
        raise ValueError(f"{setting}: there are more than {MAX_LABEL_COUNT}")
    return labels
