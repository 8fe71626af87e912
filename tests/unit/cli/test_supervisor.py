"""Restart and shutdown decisions, on a clock that only the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.services.cli.supervisor import BEHIND_GATEWAY, FETCH, GATEWAY, Action, Backoff, Phase, Supervisor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def starts(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if action.kind == "start"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def running(clock: Clock) -> Supervisor:
    supervisor = Supervisor(clock, drain_timeout=30, stop_timeout=5)
    supervisor.poll()
    supervisor.on_exit(FETCH, 0)
    assert starts(supervisor.poll(gateway_bound=True)) == list(BEHIND_GATEWAY)
    return supervisor


def test_gateway_starts_first_and_the_rest_wait_for_port_and_model(clock: Clock) -> None:
    supervisor = Supervisor(clock)
    assert starts(supervisor.poll()) == [GATEWAY, FETCH]
    assert supervisor.poll(gateway_bound=True) == []
    supervisor.on_exit(FETCH, 0)
    assert supervisor.poll(gateway_bound=False) == []
    assert starts(supervisor.poll(gateway_bound=True)) == list(BEHIND_GATEWAY)
    assert supervisor.next_poll() is None


def test_first_restart_is_at_once_then_doubles_to_ten_seconds() -> None:
    backoff = Backoff()
    assert [backoff.delay_after(1.0) for _ in range(9)] == [0, 0.25, 0.5, 1, 2, 4, 8, 10, 10]
    assert backoff.delay_after(9.9) == 10
    assert backoff.delay_after(10.0) == 0
    assert backoff.delay_after(1.0) == 0.25


def test_a_dead_child_comes_back_when_its_delay_is_over(clock: Clock, running: Supervisor) -> None:
    assert running.on_exit("executor", -9) == 0
    assert starts(running.poll()) == ["executor"]
    assert running.on_exit("executor", 1) == 0.25
    assert running.poll() == []
    assert running.next_poll() == pytest.approx(0.25)
    clock.now += 0.25
    assert starts(running.poll()) == ["executor"]
    assert starts(running.poll()) == []


def test_wrong_settings_end_everything_with_that_code(running: Supervisor) -> None:
    running.on_exit("scheduler", 2)
    assert {action.name for action in running.poll()} == {GATEWAY, "tokenizer", "executor"}
    for name in (GATEWAY, "tokenizer", "executor"):
        running.on_exit(name, 0)
    running.poll()
    assert (running.phase, running.exit_code) == (Phase.DONE, 2)
    assert "scheduler" in running.message


def test_settings_that_break_under_a_running_server_do_not_end_it(running: Supervisor) -> None:
    running.on_exit("scheduler", -9)
    running.poll()
    assert running.on_exit("scheduler", 2) == 0.25
    assert running.phase is Phase.RUNNING


def test_a_taken_port_ends_everything_before_loading(clock: Clock) -> None:
    supervisor = Supervisor(clock)
    supervisor.poll()
    clock.now += 1
    supervisor.on_exit(GATEWAY, 1)
    assert supervisor.poll() == [Action("terminate", FETCH)]
    supervisor.on_exit(FETCH, -15)
    supervisor.poll()
    assert (supervisor.phase, supervisor.exit_code) == (Phase.DONE, 1)


def test_a_gateway_killed_early_or_failing_late_is_restarted(clock: Clock, running: Supervisor) -> None:
    clock.now += 20
    assert running.on_exit(GATEWAY, 1) == 0
    running.poll()
    assert running.on_exit(GATEWAY, 1) == 0.25
    young = Supervisor(clock)
    young.poll()
    assert young.on_exit(GATEWAY, -9) == 0


def test_a_failed_download_ends_everything(clock: Clock) -> None:
    supervisor = Supervisor(clock)
    supervisor.poll()
    supervisor.on_exit(FETCH, 1)
    assert supervisor.poll(gateway_bound=True) == [Action("terminate", GATEWAY)]
    supervisor.on_exit(GATEWAY, 0)
    supervisor.poll()
    assert (supervisor.phase, supervisor.exit_code) == (Phase.DONE, 1)


def test_the_gateway_drains_while_the_rest_is_kept_alive(clock: Clock, running: Supervisor) -> None:
    running.on_signal()
    assert running.poll() == [Action("terminate", GATEWAY)]
    running.on_exit("executor", -9)
    assert starts(running.poll()) == ["executor"]
    clock.now += 29
    assert running.poll() == []
    running.on_exit(GATEWAY, 0)
    assert sorted(running.poll()) == [Action("terminate", name) for name in sorted(BEHIND_GATEWAY)]
    for name in BEHIND_GATEWAY:
        running.on_exit(name, 0)
    running.poll()
    assert (running.phase, running.exit_code) == (Phase.DONE, 0)


def test_what_does_not_leave_in_time_is_killed(clock: Clock, running: Supervisor) -> None:
    running.on_signal()
    running.poll()
    clock.now += 30
    assert running.poll() == [Action("kill", GATEWAY)]
    running.on_exit(GATEWAY, -9)
    running.poll()
    clock.now += 5
    assert sorted(running.poll()) == [Action("kill", name) for name in sorted(BEHIND_GATEWAY)]
    for name in BEHIND_GATEWAY:
        running.on_exit(name, -9)
    running.poll()
    assert (running.phase, running.exit_code) == (Phase.DONE, 0)


def test_a_signal_while_loading_stops_at_once(clock: Clock) -> None:
    supervisor = Supervisor(clock)
    supervisor.poll()
    supervisor.on_signal()
    assert sorted(supervisor.poll()) == [Action("terminate", FETCH), Action("terminate", GATEWAY)]


def test_a_second_signal_kills_everything(clock: Clock, running: Supervisor) -> None:
    running.on_signal()
    running.poll()
    clock.now += 0.6
    running.on_signal()
    assert {action.name for action in running.poll() if action.kind == "kill"} == {GATEWAY, *BEHIND_GATEWAY}


def test_one_stop_that_arrives_twice_counts_once(clock: Clock, running: Supervisor) -> None:
    running.on_signal()
    clock.now += 0.01
    running.on_signal()
    assert running.poll() == [Action("terminate", GATEWAY)]
    assert running.phase is Phase.DRAINING


events = st.lists(
    st.one_of(
        st.tuples(st.just("exit"), st.sampled_from([GATEWAY, FETCH, *BEHIND_GATEWAY]), st.sampled_from([0, 1, 2, -9])),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.25, 3.0, 12.0, 61.0])),
        st.tuples(st.just("bound")),
        st.tuples(st.just("signal")),
    ),
    max_size=60,
)


@given(events)
def test_whatever_happens_children_are_started_once_and_all_leave(script: list[tuple]) -> None:
    clock = Clock()
    supervisor = Supervisor(clock)
    alive: set[str] = set()
    bound = False

    def step() -> None:
        for action in supervisor.poll(bound):
            if action.kind == "start":
                assert action.name not in alive
                assert supervisor.phase not in (Phase.STOPPING, Phase.DONE)
                alive.add(action.name)
            elif action.kind == "kill" and action.name in alive:
                alive.discard(action.name)
                supervisor.on_exit(action.name, -9)
        assert supervisor.phase is not Phase.DONE or not alive

    for event, *rest in script:
        step()
        if event == "exit" and rest[0] in alive:
            alive.discard(rest[0])
            supervisor.on_exit(*rest)
        elif event == "wait":
            clock.now += rest[0]
        elif event == "bound":
            bound = True
        elif event == "signal":
            supervisor.on_signal()
    clock.now += 1
    supervisor.on_signal()
    for _ in range(6):  # children that ignore SIGTERM are killed when their time is over
        step()
        clock.now += 61
    assert supervisor.phase is Phase.DONE
    assert not alive
