"""A made-up line as /live tells it: the same numbers on each run."""

from __future__ import annotations

import random
from typing import Any

T0 = 1764400000.0
ROLES = ("gateway", "tokenizer", "scheduler", "executor")


class Script:
    """A pool with running requests that share their first blocks, and some waiting ones."""

    def __init__(self, num_blocks: int = 2048, num_running: int = 24, num_waiting: int = 5, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.num_blocks = num_blocks
        self.t = T0
        self.seq = -1
        self.num_steps = 0
        self.output_tokens = 0
        self.blocks: dict[int, list[Any]] = {}  # id to [ref_cnt, hash, parent, hits]
        self.requests: dict[str, dict[str, Any]] = {}
        self.incarnations = {role: f"{i + 1:016x}" for i, role in enumerate(ROLES)}
        self.next_block = 1
        shared = self.chain(0, 4, ref_cnt=num_running, hits=num_running - 1)
        for i in range(num_running):
            group = i % 3
            table = shared[: 2 + group] if group else list(shared)
            table = table + self.chain(table[-1], self.random.randint(2, 30), ref_cnt=1)
            self.add(i, "running", table)
        for i in range(num_waiting):
            self.add(num_running + i, "waiting" if i else "preempted", [])
        for i in range(20):
            self.chain(shared[-1] if i % 2 else 0, self.random.randint(1, 12), ref_cnt=0, hits=i % 5)

    def chain(self, parent: int, count: int, ref_cnt: int, hits: int = 0) -> list[int]:
        ids = []
        for _ in range(count):
            block, self.next_block = self.next_block, self.next_block + 1
            if block > self.num_blocks:
                break
            self.blocks[block] = [ref_cnt, f"{self.random.getrandbits(32):08x}", parent, hits]
            parent = block
            ids.append(block)
        return ids

    def add(self, number: int, state: str, table: list[int]) -> None:
        key = f"{self.random.getrandbits(64):016x}/0"
        num_tokens = 16 * len(table) if table else 200
        self.requests[key] = {
            "key": key,
            "request_id": key[:16],
            "choice": 0,
            "state": state,
            "num_prompt_tokens": num_tokens * 2 // 3 or 40,
            "num_cached_tokens": 32 if table else 0,
            "num_computed_tokens": num_tokens if table else 0,
            "num_output_tokens": num_tokens // 3 if table else 0,
            "num_preemptions": int(state == "preempted"),
            "priority": 0,
            "tenant": "",
            "arrived_at": T0 - 30 + number,
            "block_table": {"from": 0, "ids": table},
        }

    def snapshot(self) -> dict[str, Any]:
        return self.event(
            model={"name": "tiny", "max_model_len": 2048, "vocab_size": 49152, "dtype": "bfloat16", "device": "cpu"},
            blocks=self.columns(self.blocks),
            requests=list(self.requests.values()),
            num_requests_more=0,
            latency={
                "window_s": 30,
                "ttft": {"count": 40, "p50": 312.0, "p90": 740.5, "p99": 1310.0},
                "itl": {"count": 4000, "p50": 31.2, "p90": 44.0, "p99": 120.0},
            },
            services=self.services(),
            steps=[self.step(prefill=self.random.choice([0, 0, 0, 48, 160])) for _ in range(100)],
            **self.figures(),
        )

    def event(self, **members: Any) -> dict[str, Any]:
        self.seq += 1
        self.t += 0.2
        return {"seq": self.seq, "t": self.t, **members}

    def figures(self) -> dict[str, Any]:
        used = sum(block[0] > 0 for block in self.blocks.values())
        states = [request["state"] for request in self.requests.values()]
        return {
            "pool": {
                "num_blocks": self.num_blocks,
                "block_size": 16,
                "num_free": self.num_blocks - used,
                "num_cached": sum(bool(block[1]) for block in self.blocks.values()),
            },
            "queue": {
                "num_running": states.count("running"),
                "num_waiting": states.count("waiting"),
                "num_preempted": states.count("preempted"),
                "max_num_seqs": 256,
                "token_budget": 256,
            },
            "counters": {
                "steps": self.num_steps,
                "preemptions": 1,
                "prefix_cache_queries": 4000,
                "prefix_cache_hits": 1500,
                "output_tokens": self.output_tokens,
            },
        }

    def step(self, prefill: int = 0, lost: bool = False) -> dict[str, Any]:
        running = sum(request["state"] == "running" for request in self.requests.values())
        self.num_steps += 1
        self.output_tokens += running
        return {
            "epoch": 7,
            "step_id": self.num_steps,
            "t": self.t,
            "num_prefill_tokens": prefill,
            "num_decode_tokens": running,
            "token_budget": 256,
            "prefills": [],
            "num_running": running,
            "num_waiting": 4,
            "num_preempted": 0,
            "schedule_ms": 0.08,
            "update_ms": 0.11,
            "executor_ms": 21.3,
            "total_ms": 24.0,
            "lost": lost,
        }

    def services(self, gone: str = "", **changes: Any) -> list[dict[str, Any]]:
        return [
            {
                "role": role,
                "name": f"{role}-17",
                "incarnation": self.incarnations[role],
                "version": "0.1.0",
                "alive": role != gone,
                "ready": role != gone,
                "draining": False,
                "stalled": False,
            }
            | changes
            for role in ROLES
        ]

    @staticmethod
    def columns(blocks: dict[int, list[Any]]) -> dict[str, list[Any]]:
        """`blocks` in the form of the feed."""
        runs: list[int] = []
        for block in sorted(blocks):
            if runs and runs[-2] + runs[-1] == block:
                runs[-1] += 1
            else:
                runs += [block, 1]
        rows = [blocks[block] for block in sorted(blocks)]
        names = ("ref_cnt", "hash", "parent", "hits")
        return {"runs": runs} | {name: [row[i] for row in rows] for i, name in enumerate(names)}
