"""Tokenizer, scheduler and executor as simulated processes. The first two are the real service classes; the
executor's glue, which a real thread holds together, is written again here in a few lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.gateway import GatewayNode
from simulation.loop import Dies
from simulation.network import SimDialer
from simulation.vocabulary import LOADED, POISON
from support.fake_executor import FakeRunner, Row, next_token

from quartet.services.executor.loop import ExecutorLoop
from quartet.services.scheduler import service as scheduler_service
from quartet.services.scheduler.invariants import check_invariants
from quartet.services.scheduler.settings import SchedulerSettings
from quartet.services.tokenizer import service as tokenizer_service
from quartet.services.tokenizer.settings import TokenizerSettings
from quartet.shared.link import Identity, Peer, Status
from quartet.shared.messages import AnyMessage, ModelInfo, Role, StepPlan, StepResult

if TYPE_CHECKING:
    from simulation.world import Process, World

DRAIN_DECISION = 0.1


class TokenizerNode:
    def __init__(self, world: World, process: Process) -> None:
        settings = TokenizerSettings(
            name=process.slot,
            gateway_links=["gateway"],
            scheduler_link="scheduler-tokenizer",
            attach_grace=world.profile.grace,
            recovery_deadline=world.profile.recovery_deadline,
            run_dir="/nowhere",
        )
        self.service = tokenizer_service.TokenizerService(settings, LOADED, None)  # type: ignore[arg-type]
        for link in (self.service._scheduler, *self.service._gateways):
            _traced(world, process, link.link._handler)
        self.service.start()

    def drain(self) -> None:
        service = self.service
        service.core.draining = True
        for link in (service._scheduler, *service._gateways):
            link.announce()

    def has_drained(self) -> bool:
        return not self.service.core.num_owed

    def leave(self) -> None:
        pass

    def left_over(self) -> list[str]:
        core = self.service.core
        counts = {"requests": len(core._requests), "pending": len(core._pending), "calls": len(core._calls)}
        return [f"tokenizer: {count} {name}" for name, count in counts.items() if count]


def _traced(world: World, process: Process, handler: Any) -> None:
    inner = handler.on_message

    def on_message(peer: Peer, message: AnyMessage) -> None:
        world.trace_message(process.name, peer, message)
        inner(peer, message)

    handler.on_message = on_message


# --- scheduler ------------------------------------------------------------------------------------


class SchedulerNode:
    def __init__(self, world: World, process: Process) -> None:
        profile = world.profile
        settings = SchedulerSettings(
            name=process.slot,
            tokenizer_link="scheduler-tokenizer",
            executor_link="scheduler-executor",
            owner_grace=profile.grace,
            policy=profile.policy,
            enable_prefix_caching=profile.prefix_caching,
            short_prompt_share=profile.short_prompt_share,
            mixed_step_share=profile.mixed_step_share,
            run_dir="/nowhere",
        )
        self.service = scheduler_service.SchedulerService(settings)
        self.service._loop = process.loop  # type: ignore[assignment]
        for link in (self.service.executor_link, self.service.tokenizer_link):
            _traced(world, process, link.link._handler)
            link.start()
        process.check = self.check
        self._checked = (-1, -1)

    def check(self) -> None:
        # Beats leave the core as it was.
        seen = self.service._progress, self.service.core.state.last_plan
        if seen != self._checked:
            self._checked = seen
            check_invariants(self.service.core)

    def drain(self) -> None:
        self.service.drain()

    def has_drained(self) -> bool:
        return self.service.drained.is_set()

    def leave(self) -> None:
        pass

    def left_over(self) -> list[str]:
        core = self.service.core
        state = core.state
        counts = {
            "requests": len(core.ledger.groups),
            "unfinished": state.num_unfinished,
            "plans in flight": len(state.in_flight),
            "blocks taken": state.kv.pool.num_blocks - state.kv.num_free_blocks,
            "rows taken": state.max_num_seqs - state.rows.num_free - state.rows.num_left,
            "owners gone": sum(owner.down_since is not None for owner in core.ledger.owners.values()),
            "died": len(state.died) + len(state.suspects),
        }
        return [f"scheduler: {count} {name}" for name, count in counts.items() if count]


# --- executor -------------------------------------------------------------------------------------


class SimRunner(FakeRunner):
    """Dies of a poisoned prompt, and fails a step when it is told to. Where numerics diverge, a row may
    go on otherwise than an earlier one with the same tokens; all that was ever sampled is known."""

    def __init__(self, model: ModelInfo, world: World, process: Process) -> None:
        super().__init__(model)
        self._world = world
        self._process = process
        self.fails_next = False
        self._salts: dict[int, int] = {}
        self._kept: list[Any] = []

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            if self.fails_next:
                self.fails_next = False
                self.fail(plan)
                raise RuntimeError("the device failed")
            return super().execute(plan)
        except AssertionError as error:
            # The loop would take it for a failed step.
            self._world.verdict = f"the executor was told what cannot be: {error!r}"
            raise Dies from error

    def _next_token(self, row: Row, chain: int, banned: frozenset[int]) -> int:
        world = self._world
        if not world.profile.diverges:
            return super()._next_token(row, chain, banned)
        salt = self._salts.get(id(row.new))
        if salt is None:
            salt = self._salts[id(row.new)] = world.random.choice((0, 0, 1, 2))
            self._kept.append(row.new)
        seed, choice = row.new.sampling.seed, row.new.choice_index
        token_id = next_token(hash((chain, salt)) if salt else chain, seed, choice, self.model.vocab_size, banned)
        world.sampled.add((seed, choice, chain, token_id))
        return token_id

    def _write(self, index: int, row: Any, position: int) -> None:
        if row.tokens[position] == POISON and position < row.num_prompt:
            self._world.num_deaths += 1
            raise Dies
        super()._write(index, row, position)


class ExecutorNode:
    """A thread moves messages (it lives while a step runs), the main thread runs steps."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.runner = SimRunner(world.profile.model, world, process)
        self.loop = ExecutorLoop(self.runner, int(world.wall_clock() * 1e6))
        self.inbox: deque[tuple[Peer, AnyMessage]] = deque()
        self.num_received = self.num_handled = 0
        self.busy = False
        self.hangs_for = 0.0
        self.draining = False
        self.draining_since = 0.0
        identity = Identity(Role.EXECUTOR, process.slot, model=world.profile.model)
        self.link = SimDialer("scheduler-executor", identity, self, self._status)
        self.link.start()

    def _status(self) -> Status:
        outstanding = self.num_received - self.num_handled
        return Status(self.num_handled, outstanding, not self.draining, self.draining)

    def on_up(self, peer: Peer) -> None:
        pass

    def on_down(self, peer: Peer, reason: str) -> None:
        pass

    def on_status(self, peer: Peer) -> None:
        pass

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self.world.trace_message(self.process.name, peer, message)
        self.num_received += 1
        self.inbox.append((peer, message))
        self._next()

    def _next(self) -> None:
        if self.inbox and not self.busy:
            self.busy = True
            peer, message = self.inbox.popleft()
            duration = self.hangs_for or (
                self.world.random.choice(self.world.profile.step_times) if isinstance(message, StepPlan) else 0.0005
            )
            self.hangs_for = 0.0
            self.process.loop.call_later(duration, self._handle, peer, message, peer.alive)

    def _handle(self, peer: Peer, message: AnyMessage, alive: bool) -> None:
        if alive:
            answer = self.loop.handle(message)
            if answer is not None:
                peer.send(answer)
        self.num_handled += 1
        self.busy = False
        self._next()

    def drain(self) -> None:
        self.draining = True
        self.draining_since = self.world.now
        self.link.announce()

    def has_drained(self) -> bool:
        if self.busy or self.inbox:
            return False
        scheduler = self.link.peer
        if scheduler is None or not scheduler.alive:
            return True
        return self.world.now - self.draining_since > DRAIN_DECISION and not scheduler.draining

    def leave(self) -> None:
        pass

    def left_over(self) -> list[str]:
        return [f"executor: {len(self.inbox)} messages"] if self.inbox or self.busy else []


NODES: dict[Role, Callable[[World, Process], Any]] = {
    Role.GATEWAY: GatewayNode,
    Role.TOKENIZER: TokenizerNode,
    Role.SCHEDULER: SchedulerNode,
    Role.EXECUTOR: ExecutorNode,
}
