"""A real Prometheus (apt-get install prometheus) scrapes a running line: every query of the dashboard finds something,
and the alert rules are evaluated. Without one there is nothing to see here."""

import json
import math
import re
import shutil
import subprocess
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from support import http
from support.stack import ROLES, eventually, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus here"),
]

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docker" / "grafana" / "quartet.json"
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
# What comes only with the death of a neighbour, or where there is a compiled decoder.
MAY_BE_EMPTY = {"quartet:executor_forward_seconds_total"}


class Prometheus:
    def __init__(self, folder, targets):
        """`targets`: {job: address}."""
        self.address = f"127.0.0.1:{free_port()}"
        jobs = [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()]
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self.address}", "--log.level=warn"]
        self.log = (folder / "prometheus.log").open("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def ask(self, path):
        answer = http.call(self.address, "GET", f"/api/v1/{path}").json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression):
        """The values of an instant vector."""
        reply = http.call(
            self.address,
            "POST",
            "/api/v1/query",
            f"query={quote(expression)}".encode(),
            headers={"content-type": "application/x-www-form-urlencoded"},
        ).json()
        assert reply["status"] == "success", f"{expression}: {reply}"
        return [float(entry["value"][1]) for entry in reply["data"]["result"]]

    def is_up(self):
        try:
            return http.call(self.address, "GET", "/-/ready").status == 200
        except OSError:
            assert self.process.poll() is None, self.said()
            return False

    def up(self):
        return {t["labels"]["job"] for t in self.ask("targets")["activeTargets"] if t["health"] == "up"}

    def rules(self):
        return {rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]}

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        self.process.terminate()
        self.process.wait(30)
        print(self.said()[-2000:])
        self.log.close()


def expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [expr.replace("$__rate_interval", "10s").replace("$model_name", ".*") for expr in targets]


def names(text):
    return set(re.findall(r"\bquartet:\w+", text))


def until(condition, missing):
    try:
        eventually(condition, 120)
    except AssertionError:
        raise AssertionError(f"there is nothing for {missing}") from None


def test_the_dashboard_finds_what_it_asks_for_and_the_alerts_are_evaluated(small, tiny_model, tmp_path):
    addresses = {f"{role}_metrics_address": f"127.0.0.1:{free_port()}" for role in ROLES}
    stack = small(model=tiny_model[0], tokenizer_tokenizer="byte", executor_max_model_len=4096, **addresses)
    prometheus = Prometheus(tmp_path, {role: addresses[f"{role}_metrics_address"] for role in ROLES})
    over = threading.Event()

    def load():
        body = {"prompt": "Once upon a time in a land", "max_tokens": 40, "n": 2, "temperature": 0, "ignore_eos": True}
        while not over.is_set():
            stack.client.generate("Once upon a time", max_tokens=40, ignore_eos=True)
            http.post(stack.http_address, "/v1/completions", body)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        eventually(prometheus.is_up, 60, "prometheus is not up")
        eventually(lambda: prometheus.up() == set(ROLES), 60, f"{prometheus.ask('targets')}")
        asked = expressions()
        assert len(asked) > 50
        known = names(" ".join(asked) + ALERTS.read_text()) - MAY_BE_EMPTY
        missing = set(known)

        def all_there():
            missing.difference_update({name for name in missing if prometheus.query(f"count({name})")})
            return not missing

        until(all_there, missing)
        empty = {expr for expr in asked if not names(expr) & MAY_BE_EMPTY}

        def all_told():
            values = {expr: prometheus.query(expr) for expr in empty}
            empty.difference_update(e for e, found in values.items() if found and not any(map(math.isnan, found)))
            return not empty

        until(all_told, empty)
        rules = prometheus.rules()
        assert len(rules) == len(yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"])
        eventually(lambda: all(rule["health"] == "ok" for rule in prometheus.rules().values()), 60)
        assert {name for name, rule in prometheus.rules().items() if rule["state"] != "inactive"} == set()
        stack.kill("executor")
        eventually(lambda: prometheus.rules()["QuartetNoExecutor"]["state"] == "pending", 60)
        eventually(lambda: prometheus.rules()["QuartetNotReady"]["state"] == "pending", 60)
        stack.start("executor")
        eventually(lambda: prometheus.rules()["QuartetNoExecutor"]["state"] == "inactive", 60)
    finally:
        over.set()
        thread.join()
        prometheus.close()


@pytest.mark.parametrize("what", ["config docker/prometheus/prometheus.yml", "rules docker/prometheus/alerts.yml"])
def test_the_files_are_right(what):
    checked = subprocess.run(["promtool", "check", *what.split()], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_comes_when_it_should_and_only_then():
    checked = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=ROOT / "tests/data", capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
