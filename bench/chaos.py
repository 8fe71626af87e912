"""`make chaos`: streams on the real line while its services are killed, frozen and cut off from each other.

Every stream is checked: its indices follow each other, its text is that of its tokens, and greedy ones (in fp32) say
what an undisturbed run made first has said. Prints one JSON line:

streams      how many were followed to their end
lost         ended with an error, or never
gaps, duplicates   tokens skipped or told again
changed      greedy streams whose tokens or text differ from the undisturbed run's
sampled_changed    the same for seeded sampling, where equal numerics are not promised (not a failure)
stall        by fault: p50, p95 and max of the longest pause of each stream that the fault met, in seconds, from the
             kill on, or from the end of a freeze or cut; "none" is the pause between chunks with no fault
recomputed   tokens computed again per decoding stream that came to a new scheduler: count, mean and max
left_over    processes, sockets and files that outlived the end

Exits with 1 when anything was lost, skipped, told again, changed or left over. The same seed makes the same schedule.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.chaos_line import LINKS, ROLES, Fault, Line
from quartet.shared.client import AsyncClient

WENT_ON = re.compile(r"went on at token (\d+) instead of (\d+)")
WORDS = (
    "river",
    "stone",
    "lamp",
    "winter",
    "paper",
    "garden",
    "window",
    "music",
    "travel",
    "bread",
    "morning",
    "engine",
)
OPENINGS = (
    "Once upon a time",
    "The history of Rome began when",
    "def quicksort(array):",
    "My dear friend, I must tell you",
    "Ingredients: two eggs, a cup of flour and",
    "The mitochondria are",
    "Breaking news from the city:",
    "To whom it may concern,",
)
END_TIMEOUT = 180.0
RECOVERY_TIMEOUT = 90.0


@dataclass(frozen=True)
class Case:
    prompt: str
    options: dict[str, Any]

    @property
    def greedy(self) -> bool:
        return self.options["temperature"] == 0


@dataclass
class Followed:
    """One stream, as its client saw it. `times` are those of its chunks."""

    case: Case
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    request_id: str = ""
    error: str = ""
    complete: bool = False
    reconnects: int = 0


class Struck(NamedTuple):
    """A fault, and from when to when it was by time.monotonic(); `wall` is its begin by time.time()."""

    fault: Fault
    begun: float
    over: float
    wall: float


def make_cases(num: int, max_tokens: int, seed: int) -> list[Case]:
    """Prompts from a few tokens to a few hundred; greedy and seeded, with stop strings and two choices."""
    rng = random.Random(seed)
    cases = []
    for i in range(num):
        filler = " ".join(rng.choice(WORDS) for _ in range(rng.choice((0, 3, 12, 40, 150))))
        prompt = f"{filler}\n{OPENINGS[i % len(OPENINGS)]}".lstrip()
        options: dict[str, Any] = {"max_tokens": rng.randint(max_tokens // 2, max_tokens), "ignore_eos": True}
        options |= {"temperature": 0.0} if i % 2 == 0 else {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + i}
        if i % 4 in (0, 1):
            options["stop"] = [". The", "\n\n\n"]
        if i % 7 == 3:
            options["n"] = 2
        cases.append(Case(prompt, options))
    return cases


async def follow(client: AsyncClient, case: Case, followed: Followed) -> None:
    generation = client.generate(case.prompt, **case.options)
    try:
        async for chunk in generation:
            followed.request_id = generation.request_id
            followed.times.append(time.monotonic())
            followed.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
            followed.text[chunk.index] = followed.text.get(chunk.index, "") + chunk.text
            if chunk.finish_reason is not None:
                followed.finish[chunk.index] = f"{chunk.finish_reason} {chunk.stop_reason}"
        followed.complete = generation.usage is not None and len(followed.finish) == case.options.get("n", 1)
    except Exception as error:
        followed.error = str(error)
    followed.reconnects = generation.num_reconnects


class Chaos:
    """One run: undisturbed streams first, then the same kinds of streams under faults."""

    def __init__(self, line: Line, arguments: argparse.Namespace) -> None:
        self.line = line
        self.arguments = arguments
        self.rng = random.Random(arguments.seed)
        self.cases = make_cases(arguments.cases, arguments.max_tokens, arguments.seed)
        self.undisturbed: list[Followed] = []
        self.followed: list[Followed] = []
        self.faults: list[Struck] = []
        self.stopping = False
        self.problems: list[str] = []

    async def run(self) -> dict[str, Any]:
        arguments = self.arguments
        async with AsyncClient(self.line.address) as client:
            await client.wait_ready(120)
            self.undisturbed = [Followed(case) for case in self.cases]
            self.say(f"ready; {len(self.cases)} undisturbed streams first")
            await asyncio.gather(*(follow(client, each.case, each) for each in self.undisturbed))
            for each in self.undisturbed:
                if not each.complete:
                    raise RuntimeError(f"an undisturbed stream failed: {each.error}")
            workers = [asyncio.create_task(self.worker(client, i)) for i in range(arguments.streams)]
            deadline = time.monotonic() + arguments.seconds
            for fault in self.schedule():
                await asyncio.sleep(self.rng.uniform(*arguments.pause))
                if time.monotonic() >= deadline:
                    break
                await self.strike(client, fault)
            self.stopping = True
            _, late = await asyncio.wait(workers, timeout=END_TIMEOUT)
            for worker in late:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self.check_text(client)
        return self.report()

    async def worker(self, client: AsyncClient, number: int) -> None:
        while not self.stopping:
            followed = Followed(self.cases[(number + len(self.followed)) % len(self.cases)])
            self.followed.append(followed)
            await follow(client, followed.case, followed)

    def schedule(self) -> Iterator[Fault]:
        """Rounds in a seeded order, so that every service meets every kind; now and then two at once."""
        kinds = self.arguments.faults.split(",")
        while True:
            faults = [Fault("kill", (role,)) for role in ROLES if "kill" in kinds]
            faults += [Fault("stop", (role,), self.rng.uniform(0.3, 5.0)) for role in ROLES if "stop" in kinds]
            faults += [Fault("cut", (link,), self.rng.uniform(0.3, 5.0)) for link in LINKS if "cut" in kinds]
            if "kill" in kinds and not self.arguments.single:
                faults += [Fault("kill", tuple(sorted(self.rng.sample(ROLES, 2)))) for _ in range(2)]
            self.rng.shuffle(faults)
            yield from faults

    async def strike(self, client: AsyncClient, fault: Fault) -> None:
        self.say(f"{fault.name} {fault.seconds:.1f} s" if fault.seconds else fault.name)
        begun, wall = time.monotonic(), time.time()
        over = await self.line.strike(fault)
        self.faults.append(Struck(fault, begun, over, wall))
        try:
            # The next fault comes when streams flow again.
            await client.wait_ready(RECOVERY_TIMEOUT)
            async with asyncio.timeout(RECOVERY_TIMEOUT):
                while not self.flows(over):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.problems.append(f"no recovery from {fault.name} within {RECOVERY_TIMEOUT:g} s")

    def flows(self, since: float) -> bool:
        """Whether every stream that had begun before has gone on or ended."""
        return not any(f.times and f.times[-1] < since and not f.complete and not f.error for f in self.followed)

    async def check_text(self, client: AsyncClient) -> None:
        """A stream's text is what its tokens say, up to a stop string or half a character."""
        for each in (*self.undisturbed, *self.followed):
            for index, ids in each.token_ids.items() if each.complete else ():
                said = await client.detokenize(ids, skip_special_tokens=True)
                text = each.text[index]
                stopped = each.finish[index].startswith("stop")
                if not said.startswith(text.rstrip("\ufffd")) or (not stopped and len(said) != len(text)):
                    self.problems.append(f"the text of {each.request_id}/{index} is not that of its tokens")

    # --- the report -------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        expected = {id(each.case): each for each in self.undisturbed}
        lost = gaps = duplicates = 0
        for each in self.followed:
            went_on = WENT_ON.search(each.error)
            if went_on is not None:
                gaps += int(went_on[1]) > int(went_on[2])
                duplicates += int(went_on[1]) < int(went_on[2])
            elif not each.complete:
                lost += 1
                self.problems.append(f"{each.request_id or 'a new request'}: {each.error or 'never ended'}")
        complete = [each for each in self.followed if each.complete]
        differ = [each for each in complete if self.differs(each, expected[id(each.case)])]
        recomputed = self.recomputed()
        return {
            "streams": len(self.followed),
            "lost": lost,
            "gaps": gaps,
            "duplicates": duplicates,
            "changed": sum(each.case.greedy for each in differ),
            "sampled_changed": sum(not each.case.greedy for each in differ),
            "stall": self.stalls(),
            "recomputed": {
                "count": len(recomputed),
                "mean": round(statistics.fmean(recomputed), 2) if recomputed else 0,
                "max": max(recomputed, default=0),
            },
            "faults": len(self.faults),
            "reconnects": sum(each.reconnects for each in self.followed),
            "seed": self.arguments.seed,
            "load_average": round(os.getloadavg()[0], 2),
        }

    def recomputed(self) -> list[int]:
        """Of the streams that went to a new scheduler while everything else lived."""
        counts = []
        for at, count in self.line.recomputed():
            last = max((f for f in self.faults if f.wall <= at), key=lambda f: f.wall, default=None)
            if last is not None and last.fault == Fault("kill", ("scheduler",)):
                counts.append(count)
        return counts

    def differs(self, each: Followed, expected: Followed) -> bool:
        if each.token_ids == expected.token_ids and each.text == expected.text and each.finish == expected.finish:
            return False
        if each.case.greedy:
            for index, ids in each.token_ids.items():
                known = expected.token_ids[index]
                at = next(
                    (i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), min(len(ids), len(known))
                )
                self.problems.append(f"{each.request_id}/{index} differs from token {at} on")
        return True

    def stalls(self) -> dict[str, dict[str, float]]:
        pauses: dict[str, list[float]] = {"none": []}
        for i, (fault, begun, over, _) in enumerate(self.faults):
            until = self.faults[i + 1].begun if i + 1 < len(self.faults) else float("inf")
            for each in self.followed:
                met = [
                    later - max(earlier, over)
                    for earlier, later in zip(each.times, each.times[1:], strict=False)
                    # A pause into the next fault is that one's, unless it has been going on since this one.
                    if later > over and (earlier < over or later < until)
                ]
                if met and each.times[0] < begun:
                    pauses.setdefault(fault.name, []).append(max(met))
        for each in self.undisturbed:
            pauses["none"] += [b - a for a, b in zip(each.times, each.times[1:], strict=False)]
        return {name: spread(values) for name, values in sorted(pauses.items()) if values}

    def say(self, text: str) -> None:
        if not self.arguments.quiet:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {
        "p50": round(statistics.median(ordered), 3),
        "p95": round(p95, 3),
        "max": round(ordered[-1], 3),
        "count": len(ordered),
    }


async def run(arguments: argparse.Namespace) -> int:
    flags = ["--executor-dtype", arguments.dtype, "--executor-max-model-len", "2048", "--executor-num-blocks", "2048"]
    if arguments.threads:
        flags += ["--executor-num-threads", str(arguments.threads)]
    line = Line(flags, tcp="cut" in arguments.faults.split(","))
    await line.start()
    chaos = Chaos(line, arguments)
    report: dict[str, Any] = {}
    try:
        report = await chaos.run()
    finally:
        left_over = await line.stop()
        for problem in chaos.problems:
            chaos.say(f"PROBLEM {problem}")
    report["left_over"] = left_over
    good = not any(report[key] for key in ("lost", "gaps", "duplicates", "changed", "left_over"))
    good = good and not chaos.problems
    if good:
        line.log.unlink()
    else:
        chaos.say(f"the services' log is {line.log}")
    print(json.dumps(report), flush=True)
    return 0 if good else 1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long faults go on (default 180)")
    parser.add_argument("--streams", type=int, default=50, help="concurrent streams (default 50)")
    parser.add_argument("--cases", type=int, default=24, help="different requests among them (default 24)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest output (default 96)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and the requests (default 0)")
    parser.add_argument(
        "--faults", default="kill,stop,cut", help="kinds (default kill,stop,cut; without cut: ipc links)"
    )
    parser.add_argument("--single", action="store_true", help="never two services at once")
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 3.0), metavar="S", help="between faults")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=0, help="of the executor; 0: as it chooses")
    parser.add_argument("--quiet", action="store_true", help="only the JSON line")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
