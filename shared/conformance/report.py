"""What a run of the kit has found, rule by rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class Violation(Exception):
    """A rule is broken; it has been noted, and the scenario cannot go on."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class Report:
    """A rule has passed when it was looked at and never found broken. `rules`: name -> its sentence."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self.rules = dict(rules)
        self.scenario = ""
        self.num_checks = dict.fromkeys(rules, 0)
        self.failures: dict[str, list[str]] = {}

    def check(self, rule: str, holds: object, detail: str) -> None:
        """Notes a look at the rule; raises Violation when it does not hold."""
        self.num_checks[rule] += 1
        if not holds:
            self.failures.setdefault(rule, []).append(f"{detail} (in {self.scenario})")
            raise Violation(rule, detail)

    @property
    def passed(self) -> bool:
        return not self.failures

    def state(self, rule: str) -> str:
        if rule in self.failures:
            return "fail"
        return "pass" if self.num_checks[rule] else "skip"

    def lines(self) -> list[str]:
        """One line a rule, and under a broken one what was seen."""
        width = max(map(len, self.rules))
        lines = []
        for rule, sentence in self.rules.items():
            lines.append(f"{self.state(rule)}  {rule:{width}}  {sentence}")
            lines += [f"      {detail}" for detail in self.failures.get(rule, ())]
        return lines

    def summary(self) -> str:
        counts = {state: sum(self.state(rule) == state for rule in self.rules) for state in ("pass", "fail", "skip")}
        skipped = f", {counts['skip']} not looked at" if counts["skip"] else ""
        return f"{counts['pass']} rules passed, {counts['fail']} failed{skipped}"

    def to_json(self, **more: Any) -> str:
        rules = [
            {"rule": rule, "state": self.state(rule), "sentence": text, "failures": self.failures.get(rule, [])}
            for rule, text in self.rules.items()
        ]
        return json.dumps({**more, "passed": self.passed, "rules": rules})
