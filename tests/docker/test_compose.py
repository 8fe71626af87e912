"""docker-compose.yml as a user meets it: up, both APIs, keys, hardening, API keys, and its overrides."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support import http
from support.client import Client
from support.compose import PROJECT, ROOT, SERVICES, Compose, docker
from support.stack import eventually, free_port

pytestmark = pytest.mark.docker

PROMPT = "The capital of France is"


def test_it_streams_to_the_host_over_both_apis(line: Compose, client: Client) -> None:
    over_grpc = client.generate(PROMPT, max_tokens=24, temperature=0.0)
    assert len(over_grpc.token_ids) == 24
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True}
    events = http.post(line.http_address, "/v1/completions", body).events()
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == over_grpc.text
    assert len(events) > 5, "it came in one piece"


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_may_do_little(line: Compose, service: str) -> None:
    found = line.inspect(service)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] and host["Init"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert host["Memory"] > 0 and host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert found["Config"]["StopTimeout"] == 40
    assert found["State"]["Health"]["Status"] == "healthy"
    status = dict(
        part.split(":", 1)
        for part in line.python(service, "print(open('/proc/1/status').read())").stdout.split("\n")
        if part
    )
    assert status["Uid"].split() == ["1000"] * 4
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    written = line.python(service, "open('/opt/quartet/x', 'w')", check=False)
    assert "Read-only file system" in written.stderr
    line.python(service, "open('/tmp/x', 'w').close(); open('/run/quartet/x', 'w').close()")


def test_each_side_has_only_its_keys(line: Compose) -> None:
    has = {
        s: line.python(s, "import os; print(*sorted(os.listdir('/etc/quartet/keys')))").stdout.split() for s in SERVICES
    }
    assert has["gateway"] == has["scheduler"] == ["client.key", "server.key_secret"]
    assert has["tokenizer"] == has["executor"] == ["client.key_secret", "server.key"]


def test_a_stranger_on_the_network_gets_nothing(line: Compose) -> None:
    """A tokenizer without keys is refused by gateway and scheduler, and says why."""
    name = f"{PROJECT}-stranger"
    command = ["run", "--detach", "--name", name, "--network", f"{PROJECT}_links"]
    command += ["--volume", f"{line.volume('models')}:/var/cache/quartet:ro", f"{PROJECT}-tokenizer", "tokenizer"]
    command += ["--scheduler-link", "tcp://scheduler:5702", "--gateway-links", "tcp://gateway:5701"]
    docker(*command)
    try:

        def log() -> str:
            said = docker("logs", name)
            return said.stdout + said.stderr

        eventually(lambda: log().count("connection refused") >= 2, 30)
        assert "peer up" not in log()
        assert docker("exec", name, "quartet", "health", "tokenizer", check=False).returncode == 1
    finally:
        print(log()[-2000:])
        docker("rm", "--force", name)


def test_the_links_have_no_way_out(line: Compose) -> None:
    """The network of who handles prompts and weights is its own; only the gateway's host ports lead in."""
    (network,) = json.loads(docker("network", "inspect", f"{PROJECT}_links").stdout)
    assert network["Internal"]
    for service in SERVICES:
        networks = set(line.inspect(service)["NetworkSettings"]["Networks"])
        assert networks == {f"{PROJECT}_links", *([f"{PROJECT}_default"] if service == "gateway" else [])}


def test_a_second_up_changes_nothing(line: Compose, client: Client) -> None:
    before = {service: line.inspect(service)["Id"] for service in SERVICES}
    line("up", "-d", "--wait")
    assert {service: line.inspect(service)["Id"] for service in SERVICES} == before


def test_api_keys_are_a_secret(line: Compose, tmp_path: Path) -> None:
    keys = tmp_path / "api_keys"
    keys.write_text(f"alice={hashlib.sha256(b'qk-test').hexdigest()}\n")
    keys.chmod(0o644)
    line(
        *("up", "-d", "--wait", "--no-deps", "gateway"), more=("docker/compose.api-keys.yml",), API_KEYS_FILE=str(keys)
    )
    try:
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert http.post(line.http_address, "/v1/completions", body).status == 401
        headers = {"authorization": "Bearer qk-test"}
        assert http.post(line.http_address, "/v1/completions", body, headers=headers).status == 200
        assert "qk-test" not in json.dumps(line.inspect("gateway"))
    finally:
        line("up", "-d", "--wait", "--no-deps", "gateway")


@pytest.mark.parametrize("override", sorted(path.name for path in (ROOT / "docker").glob("compose.*.yml")))
def test_an_override_fits(images: Compose, override: str) -> None:
    merged = images("--profile", "*", "config", "--format", "json", more=(f"docker/{override}",))
    services = json.loads(merged.stdout)["services"]
    plain = json.loads(images("--profile", "*", "config", "--format", "json").stdout)["services"]
    assert services.keys() == plain.keys()
    changed = {name for name in services if services[name] != plain[name]}
    assert changed == {"gpu": {"executor"}, "keys": set(SERVICES)}.get(override.split(".")[1], {"gateway"})


def test_two_tokenizers_have_names_of_their_own(line: Compose, client: Client) -> None:
    """One of the same name would be taken for the other's successor."""

    def names() -> set[str]:
        return {tokenizer.name for tokenizer in client.server_info().tokenizers if tokenizer.ready}

    line("up", "-d", "--wait", "--no-deps", "--no-recreate", "--scale", "tokenizer=2", "tokenizer")
    try:
        eventually(lambda: len(names()) == 2, 60, f"{names()}")
    finally:
        line("up", "-d", "--wait", "--no-deps", "--scale", "tokenizer=1", "tokenizer")


def test_prometheus_finds_all_services_and_more_that_come(line: Compose) -> None:
    services = json.loads(line("--profile", "*", "config", "--format", "json").stdout)["services"]
    image = services["prometheus"]["image"]
    if docker("image", "inspect", image, check=False).returncode and docker("pull", image, check=False).returncode:
        pytest.skip(f"{image} cannot be had here")
    port = free_port()
    observe, scale = ("--profile", "observability"), ("up", "-d", "--wait", "--no-deps", "--no-recreate", "--scale")

    def asked(path: str) -> Any:
        return http.call(f"127.0.0.1:{port}", "GET", f"/api/v1/{path}").json()["data"]

    def jobs() -> list[str]:
        return sorted(t["labels"]["job"] for t in asked("targets")["activeTargets"] if t["health"] == "up")

    def rules() -> list[dict[str, Any]]:
        return [rule for group in asked("rules")["groups"] for rule in group["rules"]]

    line(*observe, "up", "-d", "--wait", "--no-deps", "prometheus", PROMETHEUS_PORT=str(port))
    try:
        eventually(lambda: jobs() == sorted(SERVICES), 60, f"{jobs()}")
        eventually(lambda: rules() and all(rule["health"] == "ok" for rule in rules()), 60)
        line(*scale, "tokenizer=2", "tokenizer")
        eventually(lambda: jobs() == sorted([*SERVICES, "tokenizer"]), 60, f"{jobs()}")
        query = quote("count by (name) (quartet:service_info{service='tokenizer'})")
        eventually(lambda: len(asked(f"query?query={query}")["result"]) == 2, 60, "the two have no names of their own")
    finally:
        line("up", "-d", "--wait", "--no-deps", "--scale", "tokenizer=1", "tokenizer")
        line(*observe, "rm", "--stop", "--force", "--volumes", "prometheus")


def test_files_that_are_mounted_are_there(images: Compose) -> None:
    services = json.loads(images("--profile", "*", "config", "--format", "json").stdout)["services"]
    mounted = [
        volume for service in services.values() for volume in service.get("volumes", ()) if volume["type"] == "bind"
    ]
    assert "prometheus" in services and "grafana" in services and mounted
    for volume in mounted:
        assert Path(volume["source"]).exists() and volume["read_only"], volume
