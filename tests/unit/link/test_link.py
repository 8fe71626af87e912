"""The link's rules, with both ends in one process, a fake wire and a clock that is moved by hand."""

import secrets

import pytest

from quartet.shared import link as link_module
from quartet.shared import messages
from quartet.shared.link import BinderLink, DialerLink, Identity, Status
from quartet.shared.messages import GetLoads, Hello, ModelInfo, Reset, Role


class Recorder:
    def __init__(self):
        self.log = []

    def on_up(self, peer):
        self.log.append(("up", peer.name))

    def on_down(self, peer, reason):
        self.log.append(("down", peer.name))

    def on_message(self, peer, message):
        self.log.append(("message", message))

    def on_status(self, peer):
        self.log.append(("status", peer.ready, peer.draining, peer.stalled))


class World:
    """A dialer and a binder; frames are delivered when `run` is called, unless the wire is cut."""

    def __init__(self, accept=lambda hello: None):
        self.now = 100.0
        self.cut = False
        self.full = False
        self.queue = []
        self.left, self.right = Recorder(), Recorder()
        self.left_status = Status(0, 0, True)
        self.right_status = Status(0, 0, True)
        self.redials = 0
        self.dialer = DialerLink(
            Identity(Role.TOKENIZER, "t"), self.left, lambda: self.left_status, Wire(self, "binder"), lambda: self.now
        )
        self.new_binder(accept)

    def new_binder(self, accept=lambda hello: None):
        self.right = Recorder()
        self.binder = BinderLink(
            Identity(Role.SCHEDULER, "s"),
            self.right,
            lambda: self.right_status,
            Wire(self, "dialer"),
            lambda: self.now,
            accept=accept,
        )

    def run(self):
        while self.queue:
            target, session, payload = self.queue.pop(0)
            if target == "binder":
                self.binder.on_frame(b"t", session, payload)
            else:
                self.dialer.on_frame(session, payload)
        self.dialer.run_pending()
        self.binder.run_pending()

    def advance(self, seconds, step=0.1):
        for _ in range(round(seconds / step)):
            self.now += step
            self.dialer.tick()
            self.binder.tick()
            self.run()

    def connect(self):
        self.dialer.on_connected()
        self.run()


class Wire:
    def __init__(self, world, target):
        self.world, self.target = world, target

    def send(self, route, session, payload):
        if self.world.full:
            return False
        if not self.world.cut:
            self.world.queue.append((self.target, session, payload))
        return True

    def wake(self):
        pass

    def reconnect(self):
        self.world.redials += 1


def ups(recorder):
    return [entry for entry in recorder.log if entry[0] in ("up", "down")]


def test_a_session_opens_on_both_sides_and_carries_messages():
    world = World()
    world.connect()
    assert ups(world.left) == [("up", "s")] and ups(world.right) == [("up", "t")]
    assert world.dialer.peer.send(GetLoads(7))
    world.run()
    assert world.right.log[-1] == ("message", GetLoads(7))
    assert world.dialer.peer.ready and world.binder.peers[b"t"].ready


def test_frames_of_another_session_are_dropped_and_answered_with_reset():
    world = World()
    world.connect()
    stale = secrets.token_bytes(8)
    world.binder.on_frame(b"t", stale, messages.encode(GetLoads(1)))
    assert ("message", GetLoads(1)) not in world.right.log
    assert world.binder.frames_dropped == 1
    assert world.queue.pop() == ("dialer", stale, messages.encode(Reset()))
    world.dialer.on_frame(stale, messages.encode(GetLoads(2)))
    assert world.dialer.frames_dropped == 1 and ("message", GetLoads(2)) not in world.left.log


def test_messages_queued_for_a_dead_binder_do_not_reach_its_successor():
    world = World()
    world.connect()
    world.dialer.peer.send(GetLoads(1))
    world.new_binder()
    world.run()
    assert not any(entry[0] == "message" for entry in world.right.log)
    # The successor's Reset makes the dialer open a session that it knows.
    assert ups(world.right) == [("up", "t")]
    assert ups(world.left) == [("up", "s"), ("down", "s"), ("up", "s")]


def test_a_reconnect_is_a_new_peer_on_both_sides():
    world = World()
    world.connect()
    before = world.binder.peers[b"t"]
    world.dialer.on_disconnected()
    assert ups(world.left)[-1] == ("down", "s")
    world.connect()
    assert world.binder.peers[b"t"] is not before and not before.alive
    assert ups(world.right) == [("up", "t"), ("down", "t"), ("up", "t")]
    assert not before.send(GetLoads(1))


def test_a_repeated_hello_is_harmless():
    world = World()
    world.dialer.on_connected()
    world.queue.extend(world.queue)
    world.run()
    assert ups(world.right) == [("up", "t")] and ups(world.left) == [("up", "s")]


def test_a_lost_hello_is_repeated():
    world = World()
    world.cut = True
    world.dialer.on_connected()
    world.cut = False
    world.advance(1.0)
    assert ups(world.left) == [("up", "s")]


def test_silence_ends_the_session_and_the_link_heals():
    world = World()
    world.connect()
    world.cut = True
    world.advance(2.3)
    assert ups(world.left)[-1] == ("up", "s")
    world.advance(0.6)
    assert ups(world.left)[-1] == ("down", "s") and ups(world.right)[-1] == ("down", "t")
    assert world.redials >= 1
    world.cut = False
    world.connect()
    world.advance(1.0)
    assert ups(world.left)[-1] == ("up", "s") and ups(world.right)[-1] == ("up", "t")


def test_a_greeting_that_nobody_answers_redials():
    world = World()
    world.cut = True
    world.dialer.on_connected()
    world.advance(6.0)
    assert 1 <= world.redials <= 3


def test_standing_still_with_work_is_noticed_and_heals():
    world = World()
    world.right_status = Status(5, 2, True)
    world.connect()
    world.advance(link_module.STALL_AFTER + 1.0)
    assert world.dialer.peer.stalled
    world.right_status = Status(6, 2, True)
    world.advance(1.0)
    assert not world.dialer.peer.stalled
    # Idle is not a standstill.
    world.right_status = Status(6, 0, True)
    world.advance(2 * link_module.STALL_AFTER)
    assert not world.dialer.peer.stalled


def test_announce_tells_the_status_at_once():
    world = World()
    world.connect()
    world.right_status = Status(1, 0, False, draining=True)
    world.binder.announce()
    world.run()
    assert world.left.log[-1] == ("status", False, True, False)


@pytest.mark.parametrize("versions", [(99, 99), (0, 0)])
def test_protocol_versions_that_do_not_meet_are_refused_with_a_reason(versions):
    world = World()
    hello = Hello(*versions, Role.TOKENIZER, "t", 1)
    world.binder.on_frame(b"t", b"12345678", messages.encode(hello))
    refused = messages.decode(world.queue.pop()[2])
    assert isinstance(refused, messages.Refused) and "protocol versions" in refused.reason
    assert not world.binder.peers


def test_a_higher_version_that_speaks_ours_is_taken():
    world = World()
    hello = Hello(messages.PROTOCOL_VERSION + 5, 1, Role.TOKENIZER, "t", 1)
    world.binder.on_frame(b"t", b"12345678", messages.encode(hello))
    assert world.binder.peers[b"t"].protocol_version == messages.PROTOCOL_VERSION


def test_a_dialer_pointed_to_the_wrong_service_stays_away():
    world = World()
    world.dialer = DialerLink(
        world.dialer.identity,
        world.left,
        lambda: world.left_status,
        Wire(world, "binder"),
        lambda: world.now,
        expect=Role.GATEWAY,
    )
    world.connect()
    assert world.left.log == [] and world.dialer.peer is None


def test_a_refused_dialer_tries_again_later():
    wanted = ["wrong model"]
    world = World(accept=lambda hello: wanted[0] if wanted else None)
    world.connect()
    assert not world.left.log
    wanted.clear()
    world.advance(link_module.REFUSED_RETRY + 0.5)
    assert ups(world.left) == [("up", "s")]


def test_a_send_that_fails_ends_the_session_but_not_within_the_call():
    world = World()
    world.connect()
    peer = world.binder.peers[b"t"]
    world.full = True
    assert not peer.send(GetLoads(1))
    assert ups(world.right) == [("up", "t")]
    world.full = False
    world.binder.run_pending()
    assert ups(world.right) == [("up", "t"), ("down", "t")]


def test_frames_that_do_not_decode_are_counted_and_dropped():
    world = World()
    world.connect()
    session = world.binder.peers[b"t"].session
    good = messages.encode(GetLoads(1))
    for payload in (b"", b"\xc1", good[:-1], good + b"\x00", b"\x93\x06\x01", b"\x92\xcd\xff\xff\x01", b"\xdc\xff\xff"):
        world.binder.on_frame(b"t", session, payload)
    assert world.binder.frames_dropped == 7
    assert world.binder.peers[b"t"].alive


def test_a_model_that_changes_during_the_greeting_is_told():
    world = World()
    model = ModelInfo("m", "f", 1, 1, 1, 1, 1, 1, "float32", "cpu")
    world.dialer.on_connected()
    world.dialer.identity.model = model
    world.dialer.announce_model()  # there is no peer yet
    world.run()
    assert world.binder.peers[b"t"].model == model


def test_a_field_that_a_newer_sender_appends_is_ignored():
    world = World()
    world.connect()
    world.binder.on_frame(b"t", world.binder.peers[b"t"].session, b"\x93\x06\x01\xa3new")
    assert world.right.log[-1] == ("message", GetLoads(1))


def test_silence_is_noticed_when_it_is_too_long_not_at_the_next_beat():
    world = World()
    world.connect()
    world.advance(0.5)
    world.cut = True
    begun = world.now
    # As the timer does: the tick says when the next one is to be.
    while (delay := world.dialer.tick()) and ("down", "s") not in world.left.log:
        world.now += delay
        assert world.now - begun < 5.0
    limit = link_module.SILENT_BEATS * link_module.HEARTBEAT_INTERVAL
    assert world.now - begun <= limit + 0.05


def test_all_links_of_a_host_beat_at_the_same_times():
    interval = link_module.HEARTBEAT_INTERVAL
    for now in (0.0, 0.3, 0.79, 0.8, 123456.7):
        at = link_module.next_beat(now)
        assert now < at <= now + interval + 1e-6
        assert abs(at / interval - round(at / interval)) < 1e-6
