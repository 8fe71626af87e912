"""From the setting to the policy: a built-in one by its name, or a class of the user's own."""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Sequence
from typing import Any

from quartet.services.scheduler.policies.fair import FairPolicy
from quartet.services.scheduler.policies.fcfs import FcfsPolicy
from quartet.services.scheduler.policies.policy import Policy
from quartet.services.scheduler.policies.priority import PriorityPolicy
from quartet.services.scheduler.policies.srf import SrfPolicy
from quartet.services.scheduler.request import Owner, Request, RequestGroup
from quartet.shared.config import SettingsError
from quartet.shared.messages import ChoicePast, NewRequest
from quartet.shared.sampling_params import SamplingParams

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "fair": FairPolicy,
    "srf": SrfPolicy,
}


def load_policy(name: str, options: Sequence[str] = ()) -> Policy:
    """`name` is one of POLICIES or `package.module:Class`; `options` are `name=number`.

    Raises SettingsError, naming what is wrong, when there is no such policy, when it is not made like
    one, or when it fails on two requests made up for the trial.
    """
    kind = POLICIES.get(name) or _import(name)
    values = _values(options)
    try:
        inspect.signature(kind).bind(**values)
    except TypeError as error:
        raise SettingsError(f"policy_options: {name} takes {_parameters(kind)}: {error}") from None
    try:
        policy, on_trial = kind(**values), kind(**values)
    except Exception as error:
        raise SettingsError(f"policy_options: {error}") from error
    try:
        _try(on_trial)
    except Exception as error:
        raise SettingsError(f"policy: {name} fails on a trial request: {type(error).__name__}: {error}") from error
    return policy


def _import(name: str) -> type[Policy]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"policy: must be one of {', '.join(POLICIES)} or package.module:Class, got {name!r}")
    try:
        kind: Any = pkgutil.resolve_name(name)
    except Exception as error:  # a module may raise anything while it is imported
        raise SettingsError(f"policy: cannot load {name}: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise SettingsError(f"policy: {name} is not a subclass of {Policy.__module__.rpartition('.')[0]}.Policy")
    return kind


def _values(options: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for option in options:
        name, _, text = option.rpartition("=")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            name = ""
        if not name.strip() or not math.isfinite(values[name.strip()]):
            raise SettingsError(f"policy_options: must be like name=number, got {option!r}")
    return values


def _parameters(kind: type[Policy]) -> str:
    names = [str(parameter) for parameter in inspect.signature(kind).parameters.values()]
    return f"the options {', '.join(names)}" if names else "no options"


def _try(policy: Policy) -> None:
    """Calls everything as the scheduler will."""
    requests = []
    for i in (1, 2):
        message = NewRequest(i, 1, [1, 2, 3], SamplingParams(max_tokens=4), [], [], priority=i, tenant=str(i))
        requests.append(Request(RequestGroup(message, Owner(None), i, float(i)), ChoicePast(0)))
    for request in requests:
        policy.waits(request)
    keys = [(policy.key(request), request.group.arrival) for request in requests]
    if not (min(keys) < max(keys) and keys[0][0] == keys[0][0]):
        raise TypeError(f"key gave {keys[0][0]!r} and {keys[1][0]!r}, which have no order")
    for request in requests:
        if not isinstance(rank := policy.rank(policy.flow(request)), (int, float)):
            raise TypeError(f"rank gave {rank!r}, which is no number")
        policy.waits_no_more(request)
        policy.admitted(request)
    policy.served(requests)
