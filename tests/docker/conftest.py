"""Images are built and the line is started once for all tests here; nothing of it is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support import compose as support
from support.client import Client
from support.compose import PROJECT, SERVICES, Compose, docker

FROM_SCHEDULER = f"""
FROM {PROJECT}-scheduler:latest
ENV QUARTET_NAME=scheduler-next
"""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Compose:
    """Built; and one more image of the scheduler, with the tag `next`."""
    if (reason := support.why_not()) is not None:
        pytest.fail(reason)
    settings = {
        "executor": {
            "QUARTET_EXECUTOR_DTYPE": "float32",
            "QUARTET_EXECUTOR_NUM_BLOCKS": "1024",
            "QUARTET_EXECUTOR_MAX_MODEL_LEN": "2048",
        }
    }
    compose = Compose(tmp_path_factory.mktemp("compose"), settings)
    begun = time.monotonic()
    compose("build")
    docker("build", "--tag", f"{PROJECT}-scheduler:next", "-", input=FROM_SCHEDULER)
    print(f"\nimages built in {time.monotonic() - begun:.0f} s")
    return compose


@pytest.fixture(scope="session")
def line(images: Compose) -> Iterator[Compose]:
    """Up and healthy. At the end it is stopped, and every service must have left by itself."""
    images("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "0")
    try:
        begun = time.monotonic()
        images("up", "-d", "--wait", "--wait-timeout", "300")
        print(f"\nup and healthy in {time.monotonic() - begun:.0f} s")
        yield images
        images("stop")
        left = images("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").stdout.split("\n")
        assert {f"{service} 0" for service in SERVICES} <= set(left), f"{left}\n{images.logs()[-4000:]}"
    except BaseException:
        print(images("ps", "--all", check=False).stdout, images("logs", "--tail", "60", check=False).stdout)
        raise
    finally:
        images("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "0")
    for kind in ("container", "volume", "network"):
        labelled = docker(kind, "ls", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").stdout
        assert labelled == "", f"a {kind} is left"


@pytest.fixture
def client(line: Compose) -> Iterator[Client]:
    client = Client(line.address)
    client.wait_ready(120)
    yield client
    client.close()
