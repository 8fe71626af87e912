"""The line in containers, as `docker compose` runs it, and what can be done to it: a `Line` for bench.chaos."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from support.stack import free_port

from bench.chaos_line import Fault

ROOT = Path(__file__).parents[2]
PROJECT = "quartet-test"
SERVICES = ("gateway", "tokenizer", "scheduler", "executor")
# As the out-of-memory killer would: what compose kills by itself is not started again.
KILL = """
import os, signal
for pid in open("/proc/1/task/1/children").read().split():
    os.kill(int(pid), signal.SIGKILL)
"""


def docker(*arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(["docker", *arguments], check=check, **options)


def run(
    command: list[str], check: bool = True, timeout: float = 1200, **options: Any
) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert not check or ran.returncode == 0, f"{' '.join(command)}: {ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran


def why_not() -> str | None:
    """What keeps containers from being run here, None when nothing does."""
    if shutil.which("docker") is None:
        return "there is no docker here"
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if ran.returncode:
            return f"{' '.join(command)}: {ran.stderr.strip()[-200:]}"
    return None


class Compose:
    """docker-compose.yml as a project of its own, on free ports. `settings`: {service: {variable: value}}.

    QUARTET_TEST_COMPOSE_OVERRIDE names one more compose file: how images are built and the model is fetched on a
    machine without a plain network.
    """

    def __init__(self, folder: Path, settings: dict[str, dict[str, str]]) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.grpc_port}"
        self.http_address = f"127.0.0.1:{self.http_port}"
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("QUARTET_", "COMPOSE_"))}
        self.environ |= {"QUARTET_IMAGE": PROJECT, "QUARTET_TAG": "latest"}
        self.environ |= {"QUARTET_PORT": str(self.grpc_port), "QUARTET_HTTP_PORT": str(self.http_port)}
        own = folder / "settings.json"
        own.write_text(json.dumps({"services": {name: {"environment": values} for name, values in settings.items()}}))
        self.files = ["docker-compose.yml", str(own)]
        if override := os.environ.get("QUARTET_TEST_COMPOSE_OVERRIDE"):
            self.files.append(str(Path(override).resolve()))

    def __call__(
        self, *arguments: str, check: bool = True, more: tuple[str, ...] = (), **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """`docker compose …`; `more`: further compose files; `environ`: variables of this command."""
        command = ["docker", "compose", "--project-name", PROJECT]
        for file in (*self.files, *more):
            command += ["--file", file]
        return run([*command, *arguments], check=check, cwd=ROOT, env=self.environ | environ)

    def volume(self, name: str) -> str:
        """As the engine knows it."""
        volumes = json.loads(self("config", "--format", "json").stdout)["volumes"]
        return str(volumes[name]["name"])

    def containers(self, service: str) -> list[str]:
        """Names of its running containers."""
        return self("ps", "--format", "{{.Name}}", service).stdout.split()

    def inspect(self, service: str) -> dict[str, Any]:
        (name,) = self.containers(service)
        (found,) = json.loads(docker("inspect", name).stdout)
        return dict(found)

    def python(self, service: str, code: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs it in the service's container."""
        return self("exec", "-T", service, "python", "-c", code, check=check)

    def kill(self, container: str) -> None:
        docker("exec", container, "python", "-c", KILL)

    def logs(self, *services: str) -> str:
        return self("logs", "--no-color", *services).stdout


class ComposeLine:
    """Faults of bench.chaos on containers. A fault's targets are services.

    kill        the process is killed; the restart policy brings it back
    restart     `docker compose restart`: SIGTERM, and the same container again
    disconnect  the container is cut off the links' network for `seconds`
    replace     `docker compose up --no-deps` with the image of the tag `next`
    add         a second container of the service beside the first
    remove      the first of two is killed for good
    """

    def __init__(self, compose: Compose) -> None:
        self.compose = compose
        self.address = compose.address

    async def strike(self, fault: Fault) -> float:
        (service,) = fault.targets
        await asyncio.to_thread(getattr(self, f"_{fault.kind}"), service)
        begun = time.monotonic()
        if fault.kind == "disconnect":
            await asyncio.sleep(fault.seconds)
            begun = time.monotonic()
            await asyncio.to_thread(self._reconnect, service)
        return begun

    def recomputed(self) -> list[tuple[float, int]]:
        return []

    def _kill(self, service: str) -> None:
        self.compose.kill(self.compose.containers(service)[0])

    def _restart(self, service: str) -> None:
        self.compose("restart", "--no-deps", service)

    def _disconnect(self, service: str) -> None:
        (self._cut_off,) = self.compose.containers(service)
        docker("network", "disconnect", f"{PROJECT}_links", self._cut_off)

    def _reconnect(self, service: str) -> None:
        docker("network", "connect", "--alias", service, f"{PROJECT}_links", self._cut_off)

    def _replace(self, service: str) -> None:
        self.compose("up", "-d", "--no-deps", service, QUARTET_TAG="next")

    def _add(self, service: str) -> None:
        self.compose("up", "-d", "--wait", "--no-deps", "--no-recreate", "--scale", f"{service}=2", service)

    def _remove(self, service: str) -> None:
        docker("kill", self.compose.containers(service)[0])
