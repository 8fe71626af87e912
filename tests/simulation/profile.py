"""What a seed makes of a run: the model, the settings, the clients, and the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from simulation.client import Client
from simulation.vocabulary import LETTERS, POISON, TOKEN_BYTES, VOCAB_SIZE
from support.fake_executor import model_info

from quartet.shared.messages import ModelInfo, Role

if TYPE_CHECKING:
    from simulation.world import Process, World

STOPS = ["ab", "cab", "de f", "é", "龜", "aa", "hgf", "bca", "a b", "😀a", "zzzz"]
LINKS = (("t0", "gateway"), ("t1", "gateway"), ("t0", "scheduler-tokenizer"), ("t1", "scheduler-tokenizer"),
         ("executor", "scheduler-executor"))  # fmt: skip


@dataclass
class Profile:
    """Drawn for each seed, so that runs differ in kind and not only in chance."""

    slots: list[tuple[str, Role]]
    model: ModelInfo
    policy: str
    prefix_caching: bool
    short_prompt_share: float
    mixed_step_share: float
    grace: float
    recovery_deadline: float
    max_unread_bytes: int
    latency: float
    slow_by: float
    p_stale: float
    num_clients: int
    faults_until: float
    events_per_fault: float
    faults: list[str]
    p_poison: float
    p_slow: float
    step_times: tuple[float, ...]
    diverges: bool

    @classmethod
    def draw(cls, r: random.Random) -> Profile:
        tight = r.random() < 0.5
        max_model_len = 44
        block_size = r.choice((1, 2, 4, 4, 8))
        least = -(-max_model_len // block_size)
        model = model_info(
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=r.randint(least, least + 4) if tight else 3 * least,
            max_num_seqs=r.choice((1, 2, 4, 8)),
            max_num_batched_tokens=r.choice((4, 8, 32)),
        )
        slots = [("gateway", Role.GATEWAY), ("t0", Role.TOKENIZER)]
        if r.random() < 0.6:
            slots.append(("t1", Role.TOKENIZER))
        slots += [("scheduler", Role.SCHEDULER), ("executor", Role.EXECUTOR)]
        if r.random() < 0.1:
            slots.append(("executor2", Role.EXECUTOR))
        r.shuffle(slots)
        calm = r.random() < 0.05
        faults = r.sample(sorted(FAULTS), r.choice((1, 2, 2, 3, 3, 4, len(FAULTS))))
        p_slow = 0.5 if r.random() < 0.15 else 0.0
        profile = cls(
            slots=slots,
            model=model,
            policy=r.choice(("fcfs", "priority")),
            prefix_caching=r.random() < 0.8,
            short_prompt_share=r.choice((0.0, 0.25, 1.0)),
            # Drawn from what is drawn already, so that seeds keep their course.
            mixed_step_share=(0.1, 0.75, 1.0)[len(faults) % 3],
            grace=r.choice((0.5, 3.0, 3.0)),
            recovery_deadline=r.choice((2.0, 20.0)),
            max_unread_bytes=400 if p_slow else 1 << 20,
            latency=r.choice((0.0001, 0.001, 0.005, 0.05)),
            slow_by=r.choice((0.0, 0.01, 0.5)),
            p_stale=r.choice((0.0, 0.1, 1.0)),
            num_clients=r.choice((1, 2, 3, 4, 5, 7)),
            faults_until=r.choice((0.5, 2.0, 5.0)),
            events_per_fault=float("inf") if calm else r.choice((8.0, 25.0, 60.0, 200.0)),
            faults=faults,
            p_poison=0.3 if r.random() < 0.1 else 0.0,
            p_slow=p_slow,
            step_times=r.choice(((0.003, 0.01, 0.03), (0.003, 0.01, 0.03), (0.05, 0.2))),
            diverges=r.random() < 0.5,
        )
        if r.random() < 0.1:
            # A crowd in a small pool: preemptions, and blocks that are reused while others look for them.
            profile.num_clients = 9
            profile.model.num_blocks = least
            profile.model.max_num_seqs = 8
            profile.model.max_num_batched_tokens = 32
            profile.prefix_caching = True
            profile.events_per_fault = 500.0
        elif r.random() < 0.1 and len(slots) > 4:
            # Gateways that come and go between tokenizers that both remember.
            profile.faults = ["break_tokenizer", "break_tokenizer", "kill_gateway"]
            profile.step_times = (0.05, 0.2)
            profile.grace = 3.0
            profile.faults_until = 5.0
            profile.events_per_fault = r.choice((25.0, 60.0))
        elif r.random() < 0.15:
            # Nothing but connections and the processes at their ends, and all that is lost comes late.
            profile.faults = ["break_connection", "kill"]
            profile.p_stale = 1.0
            profile.latency = r.choice((0.005, 0.05))
            profile.events_per_fault = r.choice((8.0, 25.0))
            profile.diverges = True
        return profile

    # --- faults -----------------------------------------------------------------------------------

    def inject(self, world: World) -> None:
        world.num_faults += 1
        FAULTS[world.random.choice(self.faults)](world)

    # --- errors that are due ----------------------------------------------------------------------

    def check_error(self, world: World, client: Client, error: Any) -> None:
        """Anything else is a violation."""
        code, details = error.code(), error.details()
        due = (
            (code is grpc.StatusCode.INTERNAL and client.is_poisoned)
            # The limit is so low there that a burst after a recovery may pass it too.
            or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and "max_unread_bytes" in details and self.p_slow > 0)
            # It was alone in three deaths, though not to blame.
            or (code is grpc.StatusCode.INTERNAL and "times with this request" in details and world.num_deaths >= 3)
        )
        if not due:
            world.violation(f"{client.name}: an error that is not due: {error}")


def make_clients(world: World) -> list[Client]:
    """They come one after the other, often in the midst of the faults."""
    r, profile = world.random, world.profile
    clients = []
    spread = r.choice((0.01, 0.01, 0.2, 2.0))
    for number in range(profile.num_clients):
        client = _client(world, f"client{number}")
        clients.append(client)
        world.at(0.3 + r.random() * spread, None, client.start)
    return clients


def _client(world: World, name: str) -> Client:
    r, profile = world.random, world.profile
    prompt: str | list[int]
    max_tokens = r.choice((1, 2, 5, 10, 15, 20, 20))
    longest = profile.model.max_model_len - max_tokens
    length = r.choice((1, 2, 4, 5, 8, 9, r.randint(1, longest)))
    if r.random() < 0.5:
        prompt = "".join(r.choice(LETTERS[:2]) for _ in range(length))
    else:
        # Often one of few beginnings, so that blocks are shared.
        prompt = [4 + r.randrange(2)] * length
        if r.random() < 0.5:
            prompt[r.randrange(length) :] = [r.randrange(4, VOCAB_SIZE) for _ in range(r.randint(1, 5))]
    prompt = prompt[:longest]
    if isinstance(prompt, list) and r.random() < profile.p_poison:
        prompt[r.randrange(len(prompt))] = POISON
    options: dict[str, Any] = {"max_tokens": max_tokens, "seed": r.randrange(1000)}
    if r.random() < 0.3:
        options["n"] = r.choice((2, 2, 3, 4))
    if r.random() < 0.4:
        options["stop"] = r.sample(STOPS, r.randint(1, 4))
    if r.random() < 0.3:
        options["stop_token_ids"] = r.sample(range(len(TOKEN_BYTES)), 3)
    if r.random() < 0.2:
        options["min_tokens"] = r.randint(0, max_tokens)
    if r.random() < 0.6:
        options["ignore_eos"] = True
    # Log-probabilities are large, and only who is slow may leave too much unread.
    if r.random() < 0.2 and not profile.p_slow:
        options["logprobs"] = 0
    if r.random() < 0.1:
        options["prompt_logprobs"] = 0
    if r.random() < 0.1:
        options["cache_salt"] = "salt"
    if r.random() < 0.3:
        options["priority"] = r.randrange(3)
    if r.random() < 0.7:
        options["detach_grace_ms"] = r.choice((100, 1000, 3000))
    kind = r.random()
    return Client(
        world,
        name,
        prompt,
        options,
        pace=r.choice((0.05, 0.5)) if r.random() < profile.p_slow else 0.0,
        leaves_at=r.randint(1, 4) if kind < 0.07 else None,
        aborts_at=r.randint(1, 4) if 0.07 < kind < 0.12 else None,
    )


# --- faults -------------------------------------------------------------------------------------------


def _process(world: World, *roles: Role) -> Process | None:
    found = [slot.process for slot in world.slots.values() if slot.process and (not roles or slot.role in roles)]
    return world.random.choice(found) if found else None


def kill(world: World) -> None:
    process = _process(world)
    if process is not None:
        world.num_deaths += 1
        world.kill(process)


def kill_two(world: World) -> None:
    kill(world)
    kill(world)


def freeze(world: World) -> None:
    process = _process(world)
    if process is not None:
        world.freeze(process, world.random.choice((0.01, 0.3, 2.0, 3.0, 8.0)))


def break_connection(world: World) -> None:
    if world.network.connections:
        world.num_deaths += 1
        world.network.break_off(world.random.choice(world.network.connections))


def break_tokenizer(world: World) -> None:
    found = [c for c in world.network.connections if c.binder.address == "gateway"]
    if found:
        world.network.break_off(world.random.choice(found))


def kill_gateway(world: World) -> None:
    process = _process(world, Role.GATEWAY)
    if process is not None:
        world.kill(process)


def cut(world: World) -> None:
    link = world.random.choice(LINKS)
    if link not in world.network.cuts:
        world.num_deaths += 1
        world.trace("cut", *link)
        world.network.cuts.add(link)
        world.at(world.random.choice((0.01, 0.5, 3.0, 8.0)), None, world.network.heal, *link)


def terminate(world: World) -> None:
    process = _process(world)
    if process is not None:
        world.num_deaths += 1
        world.terminate(process)


def terminate_all(world: World) -> None:
    """The whole line is stopped."""
    for slot in world.slots.values():
        if slot.process is not None and world.random.random() < 0.8:
            world.num_deaths += 1
            world.terminate(slot.process)


def break_client(world: World) -> None:
    if world.clients:
        client = world.random.choice(world.clients)
        world.trace("break client", client.name)
        client.break_off()


def fail_step(world: World) -> None:
    process = _process(world, Role.EXECUTOR)
    if process is not None:
        world.num_deaths += 1
        process.node.runner.fails_next = True


def hang(world: World) -> None:
    process = _process(world, Role.EXECUTOR)
    if process is not None:
        process.node.hangs_for = world.random.choice((0.5, 5.0, 40.0))


FAULTS = {
    function.__name__: function
    for function in (
        kill, kill_two, kill_gateway, freeze, break_connection, break_tokenizer, break_client, cut,
        terminate, terminate_all, fail_step, hang,
    )
}  # fmt: skip
