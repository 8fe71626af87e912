"""OpenTelemetry is imported only where an endpoint is set, prometheus-client only by who serves metrics."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
import quartet.services.{service}
found = sorted(name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "prometheus_client"))
assert not found, found
"""


@pytest.mark.parametrize("service", ["scheduler.service", "tokenizer.service", "executor.loop", "gateway.stream_table"])
def test_neither_is_imported_with_a_service(service):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", CODE.format(service=service)], check=True, env=environ)
