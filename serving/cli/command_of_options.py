"""Builds a command from a struct of options: one parameter for each field."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer

from crossover.serving.errors import ServingError
from crossover.serving.faults import converted
from crossover.serving.option_help import About, flags_of, texts_of, unbounded


def command_of(kind: type[Any], run: Callable[[Any], int | None]) -> Callable[..., None]:
    """Return a function for typer whose parameters are the fields of `kind`.

    It calls `run` with the struct; the exit status is what `run` returns.
    """
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    dict_types = {name: unbounded(field.type) for name, field in fields.items()}
    dict_types = {name: kind for name, kind in dict_types.items() if get_origin(kind) is dict}
    flags = flags_of(kind)

    def command(**values: Any) -> None:
        for name, dict_type in dict_types.items():
            are_texts = get_args(dict_type)[1] is str
            values[name] = parse_options(values[name] or (), flags[name], are_texts=are_texts)
        set_values = {name: value for name, value in values.items() if value is not None}
        options = converted(set_values, kind, ServingError, name_of=flags.__getitem__)
        raise typer.Exit(run(options) or 0)

    parameters = [
        _parameter_of(fields[name], flags[name], about) for name, about in texts_of(kind).items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = _literal(run.__doc__ or "")
    return command


def _parameter_of(field: msgspec.structs.FieldInfo, flag: str, about: About) -> inspect.Parameter:
    """Return the parameter from which typer makes the option, or argument, of this field."""
    value_type = unbounded(field.type)
    is_required = field.default is msgspec.NODEFAULT
    default: Any = inspect.Parameter.empty if is_required else field.default
    if get_origin(value_type) in (dict, tuple):  # given several times, each time as text
        value_type, default = list[str] | None, None
    help_arguments: dict[str, Any] = {
        "help": _literal(about.text),
        "metavar": about.metavar or None,
    }
    if about.is_argument:
        info: Any = typer.Argument(**help_arguments)
    else:
        flags = f"{flag}/--no-{flag[2:]}" if default is True else flag
        info = typer.Option(flags, rich_help_panel=about.panel or None, **help_arguments)
    annotation = Annotated[value_type, info]  # type: ignore[valid-type]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _literal(text: str) -> str:
    """Return the text with what rich would take as markup, such as [slo], escaped."""
    return re.sub(r"\[(?=[a-z#/@])", r"\\[", text)


def parse_options(
    pairs: list[str] | tuple[str, ...], flag: str, *, are_texts: bool = False
) -> dict[str, Any]:
    """Return {"step_seconds": 0.01, "mlock": True} for ("step_seconds=0.01", "mlock=true").

    A value that is not JSON is taken as text, and all values if `are_texts`. Raises ServingError
    that names the flag.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            shown = "a value" if are_texts else repr(pair)  # texts may be secret
            raise ServingError(f"{flag}: {shown} is not of the form KEY=VALUE.")
        if are_texts:
            options[key.strip()] = value
            continue
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
