"""schemathesis on the server's own description: requests made from it, and answers held against it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.http import call, post

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
# Requests that generate without end are not what this is about.
LENGTHS = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 16}
GOOD = {"prompt": "Is all well?", "temperature": 0, "max_tokens": 4}


def bounded(case):
    if isinstance(case.body, dict):
        for name, most in LENGTHS.items():
            given_here = case.body.get(name)
            if isinstance(given_here, int) and given_here > most:
                case.body[name] = most
        names = ("max_tokens", "max_completion_tokens") if "/completions" in case.path else ()
        if names and not any(isinstance(case.body.get(name), int) for name in names):
            case.body["max_tokens"] = LENGTHS["max_tokens"]
    return case


def hold(line, num_examples):
    schema = schemathesis.openapi.from_dict(call(line.http, "GET", "/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 9
    for operation in operations:
        modes = [operation.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]
        has_input = operation.method.upper() == "POST" or "{" in operation.path

        @settings(
            max_examples=num_examples if has_input else 1,
            deadline=None,
            database=None,
            derandomize=num_examples < 100,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.one_of(modes) if operation.body else modes[0])
        def run(case):
            bounded(case).call_and_validate(f"http://{line.http}", checks=CHECKS, timeout=60)

        run()
        assert post(line.http, "/v1/completions", GOOD).status == 200, line.stack.tail()


def test_answers_are_as_described(line):
    hold(line, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_very_many_answers_are_as_described(line):
    hold(line, 100)
