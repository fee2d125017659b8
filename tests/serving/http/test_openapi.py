"""/openapi.json held against the server that gives it: schemathesis makes requests from the
document, right ones and wrong ones.

Whatever comes, no answer is a 5xx that means "I did not think of that", and each has a status, a
type, headers and a body as the document says. A request that the document allows is answered, or
refused with a 400 for one of the reasons that a JSON schema cannot express, all of which are listed
here; one that it forbids is never answered as if it were right. The engine is a real child with the
fake backend.

The admin routes are asked the same way, on a server of two models: half of what is asked is about
these two, which are loaded, unloaded and swapped meanwhile, and in the end both of them serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serving.errors import EngineState
from serving.http.admin import ROUTES as ADMIN_ROUTES
from serving.http.app import ROUTES
from serving.http.limits import Limits
from serving.http.wire.openapi import document
from tests.serving.fakes import complete
from tests.serving.http.test_admin import Admin, two_models
from tests.serving.http.test_app_engine import engine, serving, tokenizer_path

__all__ = ["tokenizer_path"]


def operations(admin: bool) -> dict[str, Any]:
    """Those of the admin routes, or all others: label -> operation."""
    schema = schemathesis.openapi.from_dict(document((*ROUTES, *ADMIN_ROUTES), "m", Limits()))
    found = [operation.ok() for operation in schema.get_all_operations()]
    return {
        operation.label: operation for operation in found if ("/admin/" in operation.label) == admin
    }


OPERATIONS, ADMIN_OPERATIONS = operations(False), operations(True)
CHECKS: list[Any] = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXCUSES = re.compile(
    "maximum context length|out of range; the model has"  # depends on the model
    "|is not supported by the fake backend"  # depends on the backend
    "|only allowed together with stream|needs logprobs|max_completion_tokens differ|is more than "
    "the|too few to return n|not together with"
    # one field against another
    "|sequences a request are allowed|exactly one of prompt and messages|null; a text is needed"
    "|chat_template_kwargs\\.|the last message must be|differ; send one of them"
    "|two functions of the same name|has no function|names no function|role: missing|no message in"
    "|response_format|text.format|grammar|no JSON object"  # languages of their own
    "|Hermes and Qwen format|has no such thing|chat template"  # depends on the model's template
    "|expected `int.*`, got `float`"  # 1.0: an integer to a JSON schema, not to this server
)

_COUNTS = {
    "POST /v1/chat/completions": 40,
    "POST /v1/completions": 60,
    "POST /tokenize": 20,
    "POST /detokenize": 20,
}


@pytest.fixture(scope="module")
def url(tokenizer_path: Path) -> Iterator[str]:
    with serving(engine(tokenizer_path, slots=16)) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def conforms(case: Case, url: str, session: requests.Session) -> Response:
    """Send the request; raises where the answer is none that the document slos."""
    answer = case.call(base_url=url, session=session, timeout=20)
    case.validate_response(answer, checks=CHECKS)
    late = (
        answer.status_code == 504
        and isinstance(case.body, dict)
        and case.body.get("deadline_seconds")
    )
    assert answer.status_code < 500 or late, (answer.text, case.body)
    assert answer.headers["x-request-id"] and answer.headers["x-crossover-backend"]
    return answer


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_document_allows_is_answered(
    label: str, url: str, session: requests.Session
) -> None:
    @examples(_COUNTS.get(label, 8))
    @given(OPERATIONS[label].as_strategy(generation_mode=GenerationMode.POSITIVE), st.booleans())
    def holds(case: Case, streamed: bool) -> None:
        if streamed and label.endswith(("/completions", "/responses")):
            case.body["stream"] = True
        answer = conforms(case, url, session)
        if answer.status_code == 400:
            assert EXCUSES.search(answer.json()["error"]["message"]), (answer.json(), case.body)

    holds()


@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.startswith("POST")])
def test_what_the_document_forbids_is_refused(
    label: str, url: str, session: requests.Session
) -> None:
    @examples(_COUNTS[label])
    @given(OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def holds(case: Case) -> None:
        conforms(case, url, session)

    holds()


# --- the admin routes

ADMIN_EXCUSES = re.compile(
    # depends on what is served
    "is served already, so .* cannot be given|source is needed|is the only model"
    # which texts these are, a JSON schema could only say with an expression
    "|source must name a model|is no name"
    # what the source names is not there
    "|is no rung|no such|does not exist|not found|cannot be found"
    # which there are depends on the backend
    "|unknown backend|has no weight format|unknown KV dtype"
    "|expected `int.*, got `float`|out of range"
)
NAMES = st.sampled_from(["one", "two"])


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    with two_models(tmp_path_factory.mktemp("admin"), HF_HUB_OFFLINE="1") as found:
        yield found


@pytest.mark.parametrize("label", ADMIN_OPERATIONS)
def test_what_the_document_allows_an_administrator_is_done_or_refused_by_name(
    label: str, admin: Admin, session: requests.Session
) -> None:
    @examples(40 if label.startswith("POST") else 8)
    @given(
        ADMIN_OPERATIONS[label].as_strategy(generation_mode=GenerationMode.POSITIVE),
        NAMES | st.none(),
    )
    def holds(case: Case, name: str | None) -> None:
        if name is not None and isinstance(case.body, dict):
            case.body["name"] = name
        elif name is not None and case.path_parameters:
            case.path_parameters["name"] = name
        answer = conforms(case, f"http://127.0.0.1:{admin.port}", session)
        if answer.status_code == 400:
            assert ADMIN_EXCUSES.search(answer.json()["error"]["message"]), (
                answer.json(),
                case.body,
            )

    holds()
    are_well(admin)


@pytest.mark.parametrize("label", [label for label in ADMIN_OPERATIONS if label.startswith("POST")])
def test_what_the_document_forbids_an_administrator_changes_nothing(
    label: str, admin: Admin, session: requests.Session
) -> None:
    are_well(admin)
    before = [
        (model["name"], model["engine_pid"], model["loads"])
        for model in admin.ask("models").json["models"]
    ]

    @examples(40)
    @given(ADMIN_OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def holds(case: Case) -> None:
        answer = conforms(case, f"http://127.0.0.1:{admin.port}", session)
        assert 400 <= answer.status_code < 500, (answer.text, case.body)

    holds()
    assert [
        (model["name"], model["engine_pid"], model["loads"])
        for model in admin.ask("models").json["models"]
    ] == before


def are_well(admin: Admin) -> None:
    """No model has come of all that, and both serve as soon as they are told to, where they were
    unloaded or forgotten.
    """
    listed = {model["name"] for model in admin.ask("models").json["models"]}
    assert listed <= {"one", "two"}
    for name in ("one", "two"):
        assert (
            admin.ask(
                "load", {"name": name} if name in listed else {"name": name, "source": "fake"}
            ).json["state"]
            == "ready"
        )
        assert complete(admin.main_port, model=name, max_tokens=2).status == 200


def test_the_states_of_an_engine_are_listed_where_an_answer_has_one() -> None:
    schemas = document((*ROUTES, *ADMIN_ROUTES), "m", Limits())["components"]["schemas"]
    for name in ("Readiness", "ModelCard", "PlacementView", "ModelState"):
        state = schemas[name]["properties"]["state"]
        assert state["$ref"] == "#/components/schemas/EngineState"
    assert set(schemas["EngineState"]["enum"]) == set(EngineState)
