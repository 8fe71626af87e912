"""kill -STOP: noticed within seconds, told by readiness, healed by SIGCONT."""

import signal
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.stack import eventually

from quartet.shared.liveness import check, status_path

# 3 s are promised on a machine that is not busy.
NOTICED_WITHIN = 3.0 + 3.0


def serving(stack: Any) -> bool:
    stub = health_pb2_grpc.HealthStub(stack.client.channel)
    request = health_pb2.HealthCheckRequest(service="inference.v1.InferenceService")
    try:
        return stub.Check(request, timeout=2).status == health_pb2.HealthCheckResponse.SERVING
    except grpc.RpcError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["tokenizer", "scheduler", "executor"])
def test_a_frozen_service_is_noticed_and_heals(line: Any, streams: Any, victim: str) -> None:
    stack = line()
    running = streams(stack, 4, max_tokens=120).begun()
    pid = stack.processes[victim].pid
    stack.signal(victim, signal.SIGSTOP)
    at = time.monotonic()
    eventually(lambda: not serving(stack), NOTICED_WITHIN, "a frozen service was not noticed")
    noticed = time.monotonic() - at
    stack.signal(victim, signal.SIGCONT)
    running.check()
    assert stack.processes[victim].pid == pid and stack.processes[victim].poll() is None
    assert noticed < NOTICED_WITHIN


@pytest.mark.slow
def test_a_frozen_gateway_is_noticed_from_outside(line: Any, streams: Any) -> None:
    stack = line()
    running = streams(stack, 2, max_tokens=60).begun()
    path = status_path(stack.run_dir, "gateway")
    assert check(path) is None
    stack.signal("gateway", signal.SIGSTOP)
    eventually(lambda: check(path) is not None, NOTICED_WITHIN)
    stack.signal("gateway", signal.SIGCONT)
    running.check()
