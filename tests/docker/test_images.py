"""What is in the images, and how large they are."""

import re

import pytest
from support.compose import PROJECT, ROOT, Compose, docker

pytestmark = pytest.mark.docker

LIMIT = 120e6  # bytes that an image without torch may add to its base


def size(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image).stdout)


@pytest.fixture(scope="module")
def base() -> str:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    (version,) = re.findall(r"^ARG PYTHON_VERSION=(\S+)$", dockerfile, re.MULTILINE)
    return f"python:{version}-slim"


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "scheduler"])
def test_a_service_without_torch_adds_little(images: Compose, base: str, service: str) -> None:
    added = size(f"{PROJECT}-{service}") - size(base)
    print(f"\n{service} adds {added / 1e6:.0f} MB to {base} ({size(base) / 1e6:.0f} MB)")
    assert 1e6 < added < LIMIT
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    docker("run", "--rm", "--network", "none", "--entrypoint", "python", f"{PROJECT}-{service}", "-c", look)


def test_the_executor_has_torch_and_nothing_of_the_gateway(images: Compose, base: str) -> None:
    print(f"\nexecutor adds {(size(f'{PROJECT}-executor') - size(base)) / 1e6:.0f} MB")
    look = "import importlib.util as u, torch; assert u.find_spec('grpc') is None and u.find_spec('starlette') is None"
    docker("run", "--rm", "--network", "none", "--entrypoint", "python", f"{PROJECT}-executor", "-c", look)


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "scheduler", "executor"])
def test_an_image_tells_what_it_is(images: Compose, service: str) -> None:
    """By itself, as whoever runs it without compose has it: not root, help at once, a wrong setting told."""
    image = f"{PROJECT}-{service}"
    assert docker("image", "inspect", "--format", "{{.Config.User}}", image).stdout.strip() == "1000:1000"
    assert f"usage: quartet {service}" in docker("run", "--rm", "--network", "none", image, service, "--help").stdout
    wrong = docker("run", "--rm", "--network", "none", image, service, "--no-such-setting", "1", check=False)
    assert wrong.returncode == 2 and "--no-such-setting" in wrong.stderr
