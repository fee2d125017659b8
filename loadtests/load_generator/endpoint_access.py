"""How an endpoint is reached: API key, headers, query and certificates.

    target = with_references(Target(url="https://host/v1?api-version=1", headers={"a": "secret"}))
    target.headers                    # {"a": "env:CROSSOVER_SECRET_A"}
    private_values(target).headers    # {"a": "secret"}

Values of headers and queries are written nowhere. A target names the environment variable that
holds such a value (`env:VARIABLE`), and only that name goes into a run folder. A value that stands
on the command line is put into a variable of this process, which its load generators inherit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from crossover.loadtests.errors import TargetUnusable

REFERENCE = "env:"
# models/child_process.py takes a variable with SECRET in its name for a secret.
VARIABLE = "CROSSOVER_SECRET_"
QUERY_VARIABLE = f"{VARIABLE}QUERY"
MIN_REDACTED_CHARACTERS = 8  # shorter values occur in messages by chance


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What requests to an endpoint carry beside their body, and which certificates are trusted."""

    api_key_env: str | None = None
    headers: dict[str, str] = {}
    query: str | None = None
    client_cert: str | None = None
    ca_file: str | None = None
    insecure: bool = False


AnyAccess = TypeVar("AnyAccess", bound=Access)


class PrivateValues(NamedTuple):
    """The values that an endpoint's requests carry and that nobody writes down."""

    api_key: str | None = None
    headers: dict[str, str] = {}
    query: str = ""


NO_VALUES = PrivateValues()


def private_values(access: Access) -> PrivateValues:
    """Return the values that an endpoint's access names. Raises TargetUnusable if a variable is
    not set."""
    api_key = None
    if access.api_key_env is not None:
        api_key = _value_of(access.api_key_env, "api_key_env", "the API key")
    headers = {
        name: _read_reference(value, f"headers.{name}", f"the value of the header {name}")
        for name, value in access.headers.items()
    }
    query = _read_reference(access.query or "", "query", "the query, without its question mark")
    return PrivateValues(api_key, headers, query.removeprefix("?"))


def with_references(access: AnyAccess, url: str | None = None) -> tuple[AnyAccess, str | None]:
    """Return the access, and the URL without its query, with a reference to a variable in place of
    each private value. Set these variables in this process."""
    address, _, url_query = (url or "").partition("?")
    query = access.query
    if url_query:
        if query is not None:
            raise TargetUnusable("The URL has a query, and --query names another. Give one of them")
        query = url_query.partition("#")[0]
    headers = {
        name: _keep_in_variable(value, variable_of_header(name))
        for name, value in access.headers.items()
    }
    if query is not None:
        query = _keep_in_variable(query, QUERY_VARIABLE)
    referenced = msgspec.structs.replace(access, headers=headers, query=query)
    return referenced, None if url is None else address


def variable_of_header(name: str) -> str:
    """Return the variable that holds the value of a header from the command line."""
    return VARIABLE + re.sub(r"\W", "_", name).upper()


def variables_of(access: Access) -> list[str]:
    """Return the environment variables whose values are sent to the endpoint."""
    values = (*access.headers.values(), access.query or "")
    names = [value.removeprefix(REFERENCE) for value in values if value.startswith(REFERENCE)]
    return [*filter(None, (access.api_key_env,)), *names]


def literal_faults(access: Access, url: str) -> list[str]:
    """Return the faults of a campaign's target: values that its run folder would record."""
    faults = [
        f"headers.{name} holds a value, which the run folder would record. Put it into an "
        f'environment variable and write {name} = "{REFERENCE}VARIABLE"'
        for name, value in access.headers.items()
        if not value.startswith(REFERENCE)
    ]
    if "?" in url or not (access.query or REFERENCE).startswith(REFERENCE):
        faults.append(
            "the query of the URL would be recorded in the run folder. Put it into an environment "
            f'variable, without the question mark, and write query = "{REFERENCE}VARIABLE"'
        )
    return faults


def public_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without values of headers and queries."""
    public_words: list[str] = []
    for word in words:
        flag = public_words[-1] if public_words else ""
        option, equals, value = word.partition("=")
        if option in ("--header", "--query") and equals:
            word = f"{option}={_public_value(option, value)}"
        elif flag in ("--header", "--query"):
            word = _public_value(flag, word)
        elif not word.startswith("-"):
            word = word.partition("?")[0]  # of a URL
        public_words.append(word)
    return public_words


def _public_value(flag: str, value: str) -> str:
    """Return the argument of --header or --query with a reference in place of its value."""
    if flag == "--query":
        return value if value.startswith(REFERENCE) else REFERENCE + QUERY_VARIABLE
    name, _, literal = value.partition("=")
    if literal.startswith(REFERENCE):
        return value
    return f"{name}={REFERENCE}{variable_of_header(name)}"


def redact(text: str, values: PrivateValues) -> str:
    """Return what a server wrote without the private values that it may have repeated."""
    queries = [pair.partition("=")[2] for pair in values.query.split("&")]
    for value in (values.api_key or "", *values.headers.values(), values.query, *queries):
        if len(value) >= MIN_REDACTED_CHARACTERS:
            text = text.replace(value, "(left out)")
    return text


def _keep_in_variable(value: str, variable: str) -> str:
    """Put a value into a variable of this process, unless it is a reference, and return the
    reference."""
    if value.startswith(REFERENCE):
        return value
    os.environ[variable] = value
    return REFERENCE + variable


def _read_reference(value: str, key: str, what: str) -> str:
    """Return the value that a reference stands for, or a value that is none."""
    if not value.startswith(REFERENCE):
        return value
    return _value_of(value.removeprefix(REFERENCE), key, what)


def _value_of(variable: str, key: str, what: str) -> str:
    if not (value := os.environ.get(variable)):
        raise TargetUnusable(
            f"{key}: The environment variable {variable!r} is not set. Set it to {what}"
        )
    return value
