"""Who asked for what: owners, requests by id, and the highest attempt seen of each."""

from __future__ import annotations

import collections
from collections.abc import Hashable

from quartet.services.scheduler.request import Owner, RequestGroup

# Attempts of ids that are gone are remembered this long, against late messages of older owners.
MAX_PAST_ATTEMPTS = 16384


class Ledger:
    def __init__(self) -> None:
        self.owners: dict[Hashable, Owner] = {}
        self.groups: dict[int, RequestGroup] = {}
        self._past_attempts: collections.OrderedDict[int, int] = collections.OrderedDict()

    def owner(self, key: Hashable) -> Owner:
        if key not in self.owners:
            self.owners[key] = Owner(key)
        return self.owners[key]

    def is_outdated(self, request_id: int, attempt: int) -> bool:
        group = self.groups.get(request_id)
        highest = group.attempt if group is not None else self._past_attempts.get(request_id, attempt)
        return attempt < highest

    def current(self, request_id: int, attempt: int) -> RequestGroup | None:
        """The group that a message speaks of; None when it is unknown or the message outdated."""
        return None if self.is_outdated(request_id, attempt) else self.groups.get(request_id)

    def add(self, group: RequestGroup) -> None:
        self.groups[group.request_id] = group
        group.owner.request_ids.add(group.request_id)
        self._past_attempts.pop(group.request_id, None)

    def move(self, group: RequestGroup, owner: Owner, attempt: int) -> None:
        """The request belongs to `owner` from now on."""
        group.owner.request_ids.discard(group.request_id)
        group.owner = owner
        group.attempt = attempt
        owner.request_ids.add(group.request_id)
        for request in group.choices.values():
            request.own(group)

    def remove(self, group: RequestGroup) -> None:
        del self.groups[group.request_id]
        group.owner.request_ids.discard(group.request_id)
        self._past_attempts[group.request_id] = group.attempt
        if len(self._past_attempts) > MAX_PAST_ATTEMPTS:
            self._past_attempts.popitem(last=False)

    def check_invariants(self) -> None:
        for request_id, group in self.groups.items():
            assert group.request_id == request_id and group.choices
            assert request_id in group.owner.request_ids and self.owners[group.owner.key] is group.owner
            for index, request in group.choices.items():
                assert request.index == index and request.group is group
                assert request.attempt == group.attempt and request.outbox is group.owner.outbox
        assert sum(len(owner.request_ids) for owner in self.owners.values()) == len(self.groups)
