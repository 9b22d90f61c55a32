"""The session without I/O: what each request does, what it answers, and what it is refused for.

The world behind it is recorded by `World`, which stands for memory, ring and engine; with the real ones the same rules
are shown over sockets in test_vhost_daemon.py and its neighbours.
"""

from __future__ import annotations

import logging

import pytest

from virtaccel.device.front_end import MemoryRegion, RequestRefused, RingSetup
from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Message, Request
from virtaccel.device.vhost_user.session import Descriptors, EndSession, FrontEndSession

PF = 1 << 30
V1 = 1 << 32
REPLY_ACK = 1 << 3
CONFIG = bytes(range(16))
REGION = MemoryRegion(0x1000, 0x10000, 0x7F0000000000, 0)


class Fds:
    """Descriptor numbers, and what became of them."""

    def __init__(self, *numbers: int) -> None:
        self.left = list(numbers)

    def __len__(self) -> int:
        return len(self.left)

    def take(self) -> int:
        return self.left.pop(0)


class World:
    """Records what a session does."""

    config_space = CONFIG
    max_ring_size = 1024

    def __init__(self) -> None:
        self.did: list[tuple[object, ...]] = []
        self.needs_reset = False
        self.stands_at = 0
        self.refuses: set[str] = set()
        self.kick: int | None = None

    def _do(self, name: str, *arguments: object) -> None:
        if name in self.refuses:
            raise RequestRefused(f"{name} refused by the test")
        self.did.append((name, *arguments))

    def replace_memory(self, regions: tuple[MemoryRegion, ...], fds: Descriptors) -> None:
        self._do("replace_memory", regions, [fds.take() for _ in regions])

    def add_memory(self, region: MemoryRegion, fds: Descriptors) -> None:
        self._do("add_memory", region, fds.take())

    def remove_memory(self, region: MemoryRegion) -> None:
        self._do("remove_memory", region)

    def check_ring(self, setup: RingSetup) -> None:
        self._do("check_ring", setup)

    def run_ring(self, setup: RingSetup) -> None:
        self._do("run_ring", setup)
        self.stands_at = setup.base

    def stop_ring(self) -> int:
        self._do("stop_ring")
        return self.stands_at

    def set_kick(self, fd: int | None, *, poll: bool = False) -> None:
        self._do("set_kick", fd, poll)

    def set_call(self, fd: int | None) -> None:
        self._do("set_call", fd)

    def set_error(self, fd: int | None) -> None:
        self._do("set_error", fd)

    def set_backend_channel(self, fd: int) -> None:
        self._do("set_backend_channel", fd)

    def reset(self, why: str) -> None:
        self._do("reset")

    def names(self) -> list[object]:
        return [item[0] for item in self.did]


class Table:
    """A session under test with its world."""

    def __init__(self, *, acks: bool = True, features: int | None = PF | V1) -> None:
        self.world = World()
        self.session = FrontEndSession(self.world, logging.getLogger("test"))
        if acks:
            assert self.ask(Request.SET_PROTOCOL_FEATURES, u64(REPLY_ACK)) is None
        if features is not None:
            self.tell(Request.SET_FEATURES, u64(features))
        self.world.did.clear()

    def ask(self, request: int, payload: bytes = b"", *fds: int, need_reply: bool = False) -> bytes | None:
        """The raw reply."""
        flags = 1 | (8 if need_reply else 0)
        return self.session.handle(Message(request, flags, payload), Fds(*fds))

    def tell(self, request: int, payload: bytes = b"", *fds: int) -> None:
        assert self.ask(request, payload, *fds) is None

    def ack(self, request: int, payload: bytes = b"", *fds: int) -> int:
        """The acknowledgement's number."""
        reply = self.ask(request, payload, *fds, need_reply=True)
        assert reply is not None
        number, flags, size = m.HEADER.unpack(reply[:12])
        assert (number, flags, size) == (request, 5, 8)
        return int.from_bytes(reply[12:], "little")

    def get(self, request: int, payload: bytes = b"", *, need_reply: bool = False) -> bytes:
        """The reply's payload."""
        reply = self.ask(request, payload, need_reply=need_reply)
        assert reply is not None
        number, flags, size = m.HEADER.unpack(reply[:12])
        assert (number, flags, size) == (request, 5, len(reply) - 12)
        return reply[12:]

    def set_up(self, base: int = 0, *, size: int = 16, at: int = 0x7F0000000000, kick: int = 10) -> None:
        self.tell(Request.SET_VRING_NUM, state(size))
        self.tell(Request.SET_VRING_BASE, state(base))
        self.tell(Request.SET_VRING_ADDR, address(at))
        self.tell(Request.SET_VRING_KICK, u64(0), kick)

    def start(self, base: int = 0, **where: int) -> None:
        self.set_up(base, **where)
        self.tell(Request.SET_VRING_ENABLE, state(1))

    def stop(self) -> int:
        self.tell(Request.SET_VRING_ENABLE, state(0))
        return int.from_bytes(self.get(Request.GET_VRING_BASE, state(0))[4:], "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def state(num: int, index: int = 0) -> bytes:
    return index.to_bytes(4, "little") + num.to_bytes(4, "little")


def address(at: int, index: int = 0) -> bytes:
    """A ring of 16 at user address `at`: table, available and used ring 0x1000 apart."""
    return index.to_bytes(4, "little") + bytes(4) + u64(at) + u64(at + 0x2000) + u64(at + 0x1000) + u64(0)


def setup(base: int = 0, size: int = 16, at: int = 0x7F0000000000) -> RingSetup:
    return RingSetup(size, at, at + 0x1000, at + 0x2000, base)


# -- every request, by its shape

GOOD: dict[int, tuple[bytes, tuple[int, ...]]] = {
    Request.GET_FEATURES: (b"", ()),
    Request.SET_FEATURES: (u64(PF | V1), ()),
    Request.SET_OWNER: (b"", ()),
    Request.RESET_OWNER: (b"", ()),
    Request.SET_MEM_TABLE: (m.encode_table([REGION]), (9,)),
    Request.SET_VRING_NUM: (state(16), ()),
    Request.SET_VRING_ADDR: (address(0x7F0000000000), ()),
    Request.SET_VRING_BASE: (state(3), ()),
    Request.GET_VRING_BASE: (state(0), ()),
    Request.SET_VRING_KICK: (u64(0), (9,)),
    Request.SET_VRING_CALL: (u64(0), (9,)),
    Request.SET_VRING_ERR: (u64(0), (9,)),
    Request.GET_PROTOCOL_FEATURES: (b"", ()),
    Request.SET_PROTOCOL_FEATURES: (u64(REPLY_ACK), ()),
    Request.GET_QUEUE_NUM: (b"", ()),
    Request.SET_VRING_ENABLE: (state(1), ()),
    Request.SET_BACKEND_REQ_FD: (b"", (9,)),
    Request.GET_CONFIG: (m.encode_config(0, bytes(16)), ()),
    Request.SET_CONFIG: (m.encode_config(0, bytes(1)), ()),
    Request.RESET_DEVICE: (b"", ()),
    Request.GET_MAX_MEM_SLOTS: (b"", ()),
    Request.ADD_MEM_REG: (m.encode_single_region(REGION), (9,)),
    Request.REM_MEM_REG: (m.encode_single_region(REGION), ()),
    Request.SET_STATUS: (u64(1), ()),
    Request.GET_STATUS: (b"", ()),
}
GETS = {
    Request.GET_FEATURES, Request.GET_VRING_BASE, Request.GET_PROTOCOL_FEATURES, Request.GET_QUEUE_NUM,
    Request.GET_CONFIG, Request.GET_MAX_MEM_SLOTS, Request.GET_STATUS,
}  # fmt: skip
EVERY = sorted(GOOD)


def test_the_list_of_requests_is_complete() -> None:
    assert set(GOOD) == set(m.RULES)


def expect_refused(table: Table, request: int, payload: bytes, *fds: int) -> None:
    """Refused in the way that the request allows, and not acted on."""
    if request == Request.GET_CONFIG:
        assert table.ask(request, payload, *fds) == m.encode_reply(request, b"")
    elif request in GETS:
        with pytest.raises(EndSession):
            table.ask(request, payload, *fds)
    else:
        assert table.ack(request, payload, *fds) != 0
        with pytest.raises(EndSession):
            table.ask(request, payload, *fds)
    assert table.world.did == []


@pytest.mark.parametrize("request_number", [number for number in EVERY if GOOD[number][0]])
def test_short(request_number: int) -> None:
    payload, fds = GOOD[request_number]
    shorter = payload[: m.CONFIG_HEAD.size - 1] if request_number in (24, 25) else payload[:-1]
    expect_refused(Table(), request_number, shorter, *fds)
    expect_refused(Table(), request_number, b"", *fds)


@pytest.mark.parametrize("request_number", EVERY)
def test_long(request_number: int) -> None:
    payload, fds = GOOD[request_number]
    most = m.RULES[request_number].most
    expect_refused(Table(), request_number, payload + bytes(most + 1 - len(payload)), *fds)


@pytest.mark.parametrize("request_number", EVERY)
def test_wrong_number_of_descriptors(request_number: int) -> None:
    payload, fds = GOOD[request_number]
    more = (*fds, 7, 8) if request_number == Request.REM_MEM_REG else (*fds, 7)
    expect_refused(Table(), request_number, payload, *more)
    if fds:
        expect_refused(Table(), request_number, payload)


@pytest.mark.parametrize("request_number", EVERY)
def test_acknowledged_when_asked_and_only_then(request_number: int) -> None:
    """V2: REPLY_ACK on every SET, none for a GET, which has its own reply."""
    payload, fds = GOOD[request_number]
    if request_number in GETS:
        assert Table().get(request_number, payload) == Table().get(request_number, payload, need_reply=True)
        return
    expected = 1 if request_number == Request.SET_CONFIG else 0
    assert Table().ack(request_number, payload, *fds) == expected
    assert Table().ask(request_number, payload, *fds) is None


@pytest.mark.parametrize("request_number", sorted(set(EVERY) - GETS - {Request.SET_PROTOCOL_FEATURES}))
def test_no_acknowledgement_that_was_not_negotiated(request_number: int) -> None:
    payload, fds = GOOD[request_number]
    assert Table(acks=False).ask(request_number, payload, *fds, need_reply=True) is None


def test_set_protocol_features_acknowledges_itself() -> None:
    """V2: honoured even though GET_PROTOCOL_FEATURES was never asked."""
    table = Table(acks=False)
    assert table.ack(Request.SET_PROTOCOL_FEATURES, u64(REPLY_ACK)) == 0
    assert table.ack(Request.SET_OWNER) == 0


VRING = [
    Request.SET_VRING_NUM, Request.SET_VRING_ADDR, Request.SET_VRING_BASE, Request.GET_VRING_BASE,
    Request.SET_VRING_KICK, Request.SET_VRING_CALL, Request.SET_VRING_ERR, Request.SET_VRING_ENABLE,
]  # fmt: skip


@pytest.mark.parametrize("request_number", VRING)
@pytest.mark.parametrize("index", [1, 2, 255])
def test_a_vring_that_does_not_exist(request_number: int, index: int) -> None:
    payload, fds = GOOD[request_number]
    table = Table()
    payload = index.to_bytes(4, "little") + payload[4:]
    if request_number == Request.GET_VRING_BASE:
        with pytest.raises(EndSession):
            table.ask(request_number, payload)
    else:
        assert table.ack(request_number, payload, *fds) != 0
        assert table.ask(request_number, payload, *fds) is None, "one front end error does not end the session"
    assert table.world.did == []


@pytest.mark.parametrize(
    "request_number",
    [0, 6, 7, 19, 20, 23, 27, 29, 32, 33, 35, 44, 1000, 0xFFFFFFFF],
)
def test_what_is_not_offered_is_refused(request_number: int) -> None:
    table = Table()
    assert table.ack(request_number, bytes(8), 5) != 0
    assert table.ask(request_number, bytes(8)) is None
    assert table.get(Request.GET_QUEUE_NUM) == u64(1)


@pytest.mark.parametrize("request_number", [22, 26, 28, 30, 31, 41, 42, 43])
def test_what_waits_for_an_answer_that_cannot_be_given_ends_the_session(request_number: int) -> None:
    with pytest.raises(EndSession):
        Table().ask(request_number, bytes(8))


# -- negotiation


def test_features_offered() -> None:
    table = Table()
    offered = int.from_bytes(table.get(Request.GET_FEATURES), "little")
    assert offered == V1 | PF
    for bit in (26, 28, 29, 33, 34, 35, 40):  # LOG_ALL, INDIRECT, EVENT_IDX, IOMMU, PACKED, IN_ORDER, RING_RESET
        assert not offered >> bit & 1


def test_protocol_features_offered() -> None:
    offered = int.from_bytes(Table().get(Request.GET_PROTOCOL_FEATURES), "little")
    assert offered == sum(1 << bit for bit in (0, 3, 5, 9, 13, 15, 16))


def test_unoffered_bits_are_never_acted_on() -> None:
    table = Table(acks=False)
    table.tell(Request.SET_FEATURES, u64((1 << 64) - 1))
    assert table.session.features == V1 | PF
    table.tell(Request.SET_PROTOCOL_FEATURES, u64((1 << 64) - 1))
    assert table.session.protocol_features & (1 << 12 | 1 << 14) == 0


def test_queue_number_and_slots() -> None:
    assert Table().get(Request.GET_QUEUE_NUM) == u64(1)
    assert int.from_bytes(Table().get(Request.GET_MAX_MEM_SLOTS), "little") >= 32


def test_set_owner_twice_changes_nothing() -> None:
    table = Table()
    table.start()
    assert table.ack(Request.SET_OWNER) == table.ack(Request.SET_OWNER) == 0
    assert "stop_ring" not in table.world.names()


# -- config space


@pytest.mark.parametrize(("offset", "size"), [(0, 16), (6, 2), (1, 3), (15, 1), *((i, 1) for i in range(16))])
def test_v3_config_ranges_are_exact(offset: int, size: int) -> None:
    asked = m.CONFIG_HEAD.pack(offset, size, 0)
    expected = asked + CONFIG[offset : offset + size]
    assert Table().get(Request.GET_CONFIG, asked + bytes(size)) == expected
    assert Table().get(Request.GET_CONFIG, asked) == expected


@pytest.mark.parametrize(
    ("offset", "size"), [(16, 4), (0xFFFFFFFF, 4), (15, 2), (0, 17), (0, 0), (0, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)]
)
def test_v3_config_ranges_outside_answer_with_nothing(offset: int, size: int) -> None:
    table = Table()
    assert table.get(Request.GET_CONFIG, m.CONFIG_HEAD.pack(offset, size, 0) + bytes(4)) == b""
    assert table.get(Request.GET_QUEUE_NUM) == u64(1), "the session lives"


def test_v3_config_cannot_be_set() -> None:
    table = Table()
    for flags in (0, 1):
        assert table.ack(Request.SET_CONFIG, m.encode_config(0, b"\xff", flags)) != 0
    assert table.ask(Request.SET_CONFIG, m.encode_config(0, b"\xff")) is None
    assert table.get(Request.GET_CONFIG, m.CONFIG_HEAD.pack(0, 16, 0))[12:] == CONFIG


# -- memory


def test_memory_requests_reach_the_world_with_their_descriptors() -> None:
    table = Table()
    table.tell(Request.SET_MEM_TABLE, m.encode_table([REGION, REGION]), 4, 5)
    table.tell(Request.ADD_MEM_REG, m.encode_single_region(REGION), 6)
    table.tell(Request.REM_MEM_REG, m.encode_single_region(REGION))
    assert table.world.did == [
        ("replace_memory", (REGION, REGION), [4, 5]),
        ("add_memory", REGION, 6),
        ("remove_memory", REGION),
    ]


def test_a_removed_region_may_bring_a_descriptor_that_nobody_takes() -> None:
    table = Table()
    fds = Fds(6)
    table.session.handle(Message(Request.REM_MEM_REG, 1, m.encode_single_region(REGION)), fds)
    assert fds.left == [6], "left for the channel to close"


@pytest.mark.parametrize("request_number", [Request.SET_MEM_TABLE, Request.ADD_MEM_REG, Request.REM_MEM_REG])
def test_memory_that_cannot_be_had_is_refused(request_number: int) -> None:
    table = Table()
    table.world.refuses |= {"replace_memory", "add_memory", "remove_memory"}
    payload, fds = GOOD[request_number]
    assert table.ack(request_number, payload, *fds) != 0
    assert table.ask(request_number, payload, *fds) is None


def test_a_ring_without_memory_runs_when_the_memory_comes() -> None:
    table = Table()
    table.world.refuses.add("run_ring")
    table.set_up()
    assert table.ack(Request.SET_VRING_ENABLE, state(1)) != 0
    table.world.refuses.clear()
    table.tell(Request.SET_MEM_TABLE, m.encode_table([REGION]), 4)
    assert table.world.did[-1] == ("run_ring", setup())


# -- vring set-up


@pytest.mark.parametrize("size", [1, 2, 8, 256, 1024])
def test_r6_ring_sizes_served(size: int) -> None:
    assert Table().ack(Request.SET_VRING_NUM, state(size)) == 0


@pytest.mark.parametrize("size", [0, 3, 2048, 32768, 65536, 0xFFFFFFFF])
def test_r6_ring_sizes_refused(size: int) -> None:
    table = Table()
    assert table.ack(Request.SET_VRING_NUM, state(size)) != 0
    table.tell(Request.SET_VRING_ADDR, address(0x7F0000000000))
    table.tell(Request.SET_VRING_KICK, u64(0), 10)
    table.tell(Request.SET_VRING_ENABLE, state(1))
    assert "run_ring" not in table.world.names()


@pytest.mark.parametrize("part", ["descriptors", "used", "available"])
def test_r6_misaligned_parts_are_refused(part: str) -> None:
    table = Table()
    fields = m.decode_vring_address(address(0x7F0000000000))
    wrong = fields._replace(**{part: getattr(fields, part) + 1})
    assert table.ack(Request.SET_VRING_ADDR, m.VRING_ADDRESS.pack(*wrong)) != 0


def test_r6_parts_outside_memory_are_refused() -> None:
    table = Table()
    table.tell(Request.SET_VRING_NUM, state(16))
    table.world.refuses.add("check_ring")
    assert table.ack(Request.SET_VRING_ADDR, address(0)) != 0


def test_refused_addresses_never_leave_the_old_ones_in_force() -> None:
    table = Table()
    table.start()
    table.stop()
    assert table.ack(Request.SET_VRING_ADDR, address(1)) != 0
    table.world.did.clear()
    table.tell(Request.SET_VRING_KICK, u64(0), 11)
    table.tell(Request.SET_VRING_ENABLE, state(1))
    assert "run_ring" not in table.world.names()


@pytest.mark.parametrize("base", [0, 1, 0xFFFF])
def test_base_is_where_the_ring_starts(base: int) -> None:
    table = Table()
    table.start(base)
    assert table.world.did[-1] == ("run_ring", setup(base))


def test_base_of_more_than_16_bits_is_refused() -> None:
    assert Table().ack(Request.SET_VRING_BASE, state(0x10000)) != 0


@pytest.mark.parametrize("request_number", [Request.SET_VRING_NUM, Request.SET_VRING_BASE])
def test_a_running_ring_is_not_set_up_again(request_number: int) -> None:
    table = Table()
    table.start()
    assert table.ack(request_number, state(4)) != 0
    assert "stop_ring" not in table.world.names()


def test_a_running_ring_may_be_told_its_own_addresses() -> None:
    table = Table()
    table.start()
    table.world.did.clear()
    table.tell(Request.SET_VRING_ADDR, address(0x7F0000000000))
    assert table.world.did == []


def test_a_running_ring_may_move() -> None:
    table = Table()
    table.start()
    table.world.stands_at = 5
    table.tell(Request.SET_VRING_ADDR, address(0x7E0000000000))
    assert table.world.did[-1] == ("run_ring", setup(5, at=0x7E0000000000))
    assert "reset" not in table.world.names()


@pytest.mark.parametrize("on", [2, 0xFFFFFFFF])
def test_enable_is_a_truth_value(on: int) -> None:
    assert Table().ack(Request.SET_VRING_ENABLE, state(on)) != 0


def test_descriptors_go_to_the_world() -> None:
    table = Table()
    table.tell(Request.SET_VRING_KICK, u64(0), 4)
    table.tell(Request.SET_VRING_CALL, u64(0), 5)
    table.tell(Request.SET_VRING_ERR, u64(0), 6)
    table.tell(Request.SET_BACKEND_REQ_FD, b"", 7)
    assert table.world.did == [
        ("set_kick", 4, False), ("set_call", 5), ("set_error", 6), ("set_backend_channel", 7),
    ]  # fmt: skip


def test_no_descriptor_means_polling_or_silence() -> None:
    table = Table()
    for request in (Request.SET_VRING_KICK, Request.SET_VRING_CALL, Request.SET_VRING_ERR):
        table.tell(request, u64(0x100))
    assert table.world.did == [("set_kick", None, True), ("set_call", None), ("set_error", None)]


# -- ring states


def test_a_ring_needs_everything_before_it_runs() -> None:
    table = Table()
    steps = [
        (Request.SET_VRING_NUM, state(16), ()),
        (Request.SET_VRING_ADDR, address(0x7F0000000000), ()),
        (Request.SET_VRING_KICK, u64(0), (10,)),
        (Request.SET_VRING_ENABLE, state(1), ()),
    ]
    for request, payload, fds in steps:
        assert "run_ring" not in table.world.names()
        table.tell(request, payload, *fds)
    assert table.world.names().count("run_ring") == 1


def test_v4_without_protocol_features_the_first_kick_runs_the_ring() -> None:
    table = Table(acks=False, features=V1)
    table.set_up()
    assert "run_ring" not in table.world.names()
    table.session.kicked()
    assert table.world.did[-1] == ("run_ring", setup())


def test_v4_a_second_set_features_stops_nothing() -> None:
    for first, second in ((V1, V1), (V1, V1 | PF), (V1 | PF, V1 | PF), (V1 | PF, V1)):
        table = Table(acks=False, features=first)
        table.start()
        table.session.kicked()
        table.tell(Request.SET_FEATURES, u64(second))
        assert table.world.names().count("run_ring") == 1
        assert "stop_ring" not in table.world.names()


def test_disable_and_enable_is_no_restart() -> None:
    table = Table()
    table.start()
    for stands_at in (0, 7):
        table.world.stands_at = stands_at
        table.tell(Request.SET_VRING_ENABLE, state(0))
        assert table.world.did[-1] == ("stop_ring",)
        table.tell(Request.SET_VRING_ENABLE, state(1))
        assert table.world.did[-1] == ("run_ring", setup(stands_at))
    assert "reset" not in table.world.names()


def test_get_vring_base_stops_the_ring_and_says_where() -> None:
    table = Table()
    table.start()
    table.world.stands_at = 0x1234
    assert table.get(Request.GET_VRING_BASE, state(0)) == state(0x1234)
    assert table.world.did[-2:] == [("stop_ring",), ("set_kick", None, False)]
    table.session.kicked()
    assert table.world.names().count("run_ring") == 1, "stopped until the next SET_VRING_KICK"


def test_get_vring_base_before_anything() -> None:
    table = Table()
    assert table.get(Request.GET_VRING_BASE, state(0)) == state(0)
    table.tell(Request.SET_VRING_BASE, state(9))
    assert table.get(Request.GET_VRING_BASE, state(0)) == state(9)


def test_reset_owner_only_disables() -> None:
    table = Table()
    table.start()
    table.tell(Request.RESET_OWNER)
    assert table.world.did[-1] == ("stop_ring",)
    assert "reset" not in table.world.names()


# -- reset or pause


@pytest.mark.parametrize(
    ("stood_at", "starts_at", "same_place", "resets"),
    [
        (7, 7, True, False),
        (7, 7, False, False),
        (7, 0, True, True),
        (7, 8, True, True),
        (0, 0, True, False),
        (0, 0, False, True),
        (0, 7, True, True),
    ],
)
def test_reset_is_told_from_pause(stood_at: int, starts_at: int, same_place: bool, resets: bool) -> None:
    table = Table()
    table.start()
    table.world.stands_at = stood_at
    assert table.stop() == stood_at
    table.tell(Request.SET_FEATURES, u64(PF | V1))
    table.start(starts_at, at=0x7F0000000000 if same_place else 0x7F0000100000)
    assert ("reset" in table.world.names()) is resets
    if resets:
        assert table.world.names()[-2:] == ["reset", "run_ring"]


def test_order_of_set_up_does_not_decide_whether_it_was_a_reset() -> None:
    table = Table()
    table.start()
    assert table.stop() == 0
    table.tell(Request.SET_VRING_KICK, u64(0), 4)
    table.tell(Request.SET_VRING_ENABLE, state(1))
    assert table.world.names()[-1] == "run_ring", "addresses and base still stand: a pause"
    table.stop()
    table.world.did.clear()
    table.tell(Request.SET_VRING_KICK, u64(0), 4)
    table.tell(Request.SET_VRING_ADDR, address(0x7F0000100000))
    table.tell(Request.SET_VRING_ENABLE, state(1))
    assert table.world.names()[-2:] == ["reset", "run_ring"]


def test_a_ring_of_another_size_is_no_pause() -> None:
    table = Table()
    table.start(size=16)
    table.world.stands_at = 3
    table.stop()
    table.start(3, size=32)
    assert "reset" in table.world.names()


def test_first_start_resets_nothing() -> None:
    table = Table()
    table.start(5)
    assert "reset" not in table.world.names()


def test_reset_device_makes_everything_initial() -> None:
    table = Table()
    table.start()
    table.world.stands_at = 4
    table.tell(Request.RESET_DEVICE)
    assert table.world.names()[-3:] == ["stop_ring", "set_kick", "reset"]
    table.tell(Request.SET_VRING_ENABLE, state(1))
    assert table.world.names()[-1] == "reset", "size, addresses and kick are to be given again"
    table.world.did.clear()
    table.start(0)
    assert table.world.names().count("reset") == 0
    assert table.world.did[-1] == ("run_ring", setup(0))


def test_status_zero_is_a_reset() -> None:
    table = Table()
    table.tell(Request.SET_STATUS, u64(0))
    assert "reset" not in table.world.names(), "nothing had begun"
    table.tell(Request.SET_STATUS, u64(0xF))
    table.start()
    table.tell(Request.SET_STATUS, u64(0))
    assert table.world.names()[-1] == "reset"
    assert table.get(Request.GET_STATUS) == u64(0)


def test_status_is_kept_and_shows_a_lost_device() -> None:
    table = Table()
    table.tell(Request.SET_STATUS, u64(0xB))
    assert table.get(Request.GET_STATUS) == u64(0xB)
    table.world.needs_reset = True
    assert table.get(Request.GET_STATUS) == u64(0xB | 0x40)
    assert table.ack(Request.SET_STATUS, u64(0x100)) != 0


def test_disconnect_is_a_reset() -> None:
    table = Table()
    table.start()
    table.session.close()
    assert table.world.names()[-2:] == ["stop_ring", "reset"]
