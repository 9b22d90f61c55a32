"""The moves of target `vhost`: messages, descriptors, ring memory and connections, answers held to the rules.

One `Stream` is one input: a front end that now and then behaves.
"""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from struct import Struct
from typing import Final, Protocol, TypeAlias

from virtaccel.harness.fuzz import vhost_rules as rules
from virtaccel.harness.fuzz.target import Finding

PAGE: Final = 4096
BLOCK: Final = 4 * PAGE
# Apart, so that a guest's address taken for a front end's finds no memory.
GUEST: Final = 0x4000_0000
USER: Final = 0x7F00_0000_0000
RING: Final = 8  # small, so that indices come round within one input
AVAILABLE, USED, REQUEST, RESPONSE = 0x200, 0x400, PAGE, 2 * PAGE
PATIENCE: Final = 10.0  # seconds: somebody's back end may be on a busy machine
_STATE: Final = Struct("=II")
_ADDRESS: Final = Struct("=IIQQQQ")
_REGION: Final = Struct("=QQQQ")
_U64: Final = Struct("=Q")
_CONFIG_RANGE: Final = Struct("=III")
_COMMAND: Final = Struct("<HHIQ")
_DESCRIPTOR: Final = Struct("<QIHH")


SOUND_ADDRESSES: Final = _ADDRESS.pack(0, 0, USER, USER + USED, USER + AVAILABLE, 0)


class Gone(Exception):
    """The back end has ended the session."""


@dataclass(frozen=True, slots=True)
class Front:
    """What a front end has to show: memory, event descriptors, and descriptors of other sorts."""

    features: set[Hashable]
    memory_fd: int
    block: mmap.mmap
    kick: int
    call: int
    error: int
    odd: tuple[int, ...]


class BackEnd(Protocol):
    """The other side. `turn` lets it act where it does not by itself; `config` is its config space if it is known."""

    remote: bool
    config: bytes

    def connect(self) -> socket.socket: ...
    def turn(self) -> None: ...


class Stream:
    """One input: a front end that now and then behaves."""

    def __init__(self, target: Front, back: BackEnd) -> None:
        self.target = target
        self.back = back
        self.remote = back.remote
        self.features = target.features
        self.messages = 0
        self.socket: socket.socket | None = None
        self.acks = self.sound = self.may_end = False
        self.index = 0

    # -- the wire

    def connect(self) -> socket.socket:
        if self.socket is None:
            self.socket = self.back.connect()
        return self.socket

    def disconnect(self) -> None:
        self.acks = self.sound = self.may_end = False
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def put(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.connect().sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise Gone from error

    def take(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises Gone at the end of the session."""
        given, got = self.connect(), b""
        while len(got) < size:
            try:
                piece = given.recv(size - len(got))
            except BlockingIOError:
                raise Finding("no answer where one must come") from None
            except TimeoutError:
                raise Finding(f"no answer within {PATIENCE:.0f} s") from None
            except OSError as error:
                raise Gone from error
            if not piece:
                raise Gone
            got += piece
        return got

    def quiet_or_gone(self) -> None:
        """Nothing may lie there unasked for. Only to be seen for certain where turns are ours."""
        if self.remote or self.socket is None:
            return
        try:
            extra = self.socket.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone from error
        if extra:
            raise Finding(f"the back end said {extra.hex()} unasked")
        raise Gone

    def send(self, request: int, payload: bytes = b"", fds: Sequence[int] = (), flags: int = 0, cut: int = 0) -> bytes:
        """One whole message, and its answer held to the rules; the answer's payload. Raises Gone where the session may
        end."""
        self.messages += 1
        expected = rules.expect(request, flags, payload, len(fds), self.acks)
        if request == rules.SET_PROTOCOL_FEATURES and len(payload) == 8 and not fds:
            acks = bool(_U64.unpack(payload)[0] & rules.REPLY_ACK)
            answer = rules.ACK if acks and flags & rules.NEED_REPLY else rules.NONE
            expected = expected._replace(answer=answer)
            self.acks = acks
        self.may_end = self.may_end or expected.may_end
        data = rules.HEADER.pack(request, rules.VERSION | flags, len(payload)) + payload
        try:
            if cut and cut < len(data):
                self.put(data[:cut], fds)
                self.back.turn()
                self.put(data[cut:])
            else:
                self.put(data, fds)
            self.back.turn()
            if expected.answer == rules.NONE:
                self.quiet_or_gone()
                return b""
            return self._answer(request, payload, expected)
        except Gone:
            self.ended(f"request {request} of {len(payload)} bytes with {len(fds)} descriptors")
            raise

    def _answer(self, request: int, payload: bytes, expected: rules.Expectation) -> bytes:
        got, flags, size = rules.HEADER.unpack(self.take(12))
        if got != request or flags != rules.VERSION | rules.REPLY or size > 300:
            raise Finding(f"request {request} was answered with {got}, flags {flags:#x}, {size} bytes")
        answer = self.take(size)
        self.features.add((request, expected.answer, len(answer), answer[:1]))
        if expected.answer == rules.OWN:
            if expected.good is False and request != rules.GET_CONFIG:
                raise Finding(f"request {request}: a bad message was answered with {answer.hex()}")
            wrong = rules.judge_own(request, payload, answer, self.back.config) if self.back.config else None
            if wrong:
                raise Finding(wrong)
            return answer
        if size != 8:
            raise Finding(f"an acknowledgement of {size} bytes")
        refused = answer != bytes(8)
        if expected.good is not None and refused is expected.good:
            raise Finding(f"request {request} was {'refused' if refused else 'granted'}: {payload.hex()}")
        return answer

    def ended(self, by: str) -> None:
        allowed = self.may_end
        self.disconnect()
        self.back.turn()
        if not allowed:
            raise Finding(f"the session was ended by {by}")
        self.features.add("ended")

    # -- moves

    def move(self, kind: int, given: bytes) -> None:
        with suppress(Gone):
            MOVES[kind % len(MOVES)](self, given)

    def ask(self, given: bytes) -> None:
        request = (1, 15, 17, 36, 40, 24, 24, 3)[given[0] % 8]
        payload = b""
        if request == rules.GET_CONFIG:
            offset, size = (
                (0, 6, 1, 15, 16, 0xFFFFFFFF, 0)[given[1] % 7],
                (16, 2, 3, 1, 4, 0, 17, 0xFFFFFFFF)[given[2] % 8],
            )
            payload = _CONFIG_RANGE.pack(offset, size, 0) + bytes(min(size, 16))
        self.send(request, payload, flags=self._flags(given[3]), cut=given[4] % 20 if given[5] < 0x40 else 0)

    def _flags(self, choice: int) -> int:
        return rules.NEED_REPLY if choice & 1 else 0

    def vring(self, given: bytes) -> None:
        """A message about the ring, with numbers at the edges."""
        self.sound = False
        flags = self._flags(given[1])
        index = (0, 0, 0, 0, 0, 0, 1, 0xFF)[given[2] % 8]
        number = (0, 1, 8, 8, 256, 3, 32768, 65536, 0xFFFFFFFF, 1024, 0xFFFF)[given[3] % 11]
        parts = [USER + (0, PAGE, 1, BLOCK - 64, BLOCK, 1 << 40, 0x210)[given[at] % 7] for at in (3, 4, 5)]
        rows = (
            (rules.SET_VRING_NUM, _STATE.pack(index, number)), (rules.SET_VRING_BASE, _STATE.pack(index, number)),
            (rules.SET_VRING_ENABLE, _STATE.pack(index, given[3] % 3)), (rules.GET_VRING_BASE, _STATE.pack(index, 0)),
            (rules.SET_VRING_ADDR, _ADDRESS.pack(index, 0, *parts, 0)), (rules.SET_VRING_ADDR, SOUND_ADDRESSES),
        )  # fmt: skip
        self.send(*rows[given[0] % 6], flags=flags)

    def descriptor(self, given: bytes) -> None:
        """Kick, call, error, or the back end's channel, with a descriptor of any sort."""
        self.sound = False
        request = (rules.SET_VRING_KICK, rules.SET_VRING_CALL, rules.SET_VRING_ERR, rules.SET_BACKEND_REQ_FD)[
            given[0] % 4
        ]
        fds = [self.target.odd[given[1] % len(self.target.odd)]] * (1, 1, 1, 0, 2)[given[2] % 5]
        if given[3] < 0xA0:
            fds = [(self.target.kick, self.target.call, self.target.error, self.target.kick)[given[0] % 4]]
        word = (0, 0, 0, 0x100, 0x100, 1, 0x200, 0xFFFFFFFFFFFFFFFF)[given[4] % 8] if given[3] & 3 == 0 else 0
        payload = b"" if request == rules.SET_BACKEND_REQ_FD else _U64.pack(word)
        self.send(request, payload, fds, self._flags(given[5]))

    def memory(self, given: bytes) -> None:
        self.sound = False
        target = self.target
        flags = self._flags(given[1])
        guest = GUEST + (0, 0, PAGE, BLOCK, 1 << 63, 0xFFFF_FFFF_FFFF_F000 - GUEST)[given[2] % 6]
        size = (BLOCK, BLOCK, PAGE, 0, BLOCK + 1, 1 << 62)[given[3] % 6]
        region = _REGION.pack(
            guest, size, USER + (0, 0, PAGE, 1 << 40)[given[4] % 4], (0, 0, PAGE, 1, 1 << 63)[given[5] % 5]
        )
        good = _REGION.pack(GUEST, BLOCK, USER, 0)
        memory, odd = target.memory_fd, target.odd[given[5] % len(target.odd)]
        count, some = (0, 1, 2, 8, 65, 0xFFFFFFFF)[given[2] % 6], [memory] * (given[4] % 3)
        one, two, several = (_STATE.pack(number, 0) for number in (1, 2, count))
        rows: tuple[tuple[int, bytes, list[int]], ...] = (
            (rules.SET_MEM_TABLE, one + region, [memory]), (rules.SET_MEM_TABLE, two + good + region, [memory, odd]),
            (rules.SET_MEM_TABLE, several + good * (given[3] % 3), some),
            (rules.ADD_MEM_REG, bytes(8) + region, [odd]), (rules.ADD_MEM_REG, bytes(8) + region, [memory]),
            (rules.REM_MEM_REG, bytes(8) + (good if given[2] & 1 else region), [target.odd[0]] * (given[4] & 1)),
        )  # fmt: skip
        self.send(*rows[given[0] % 6], flags)

    def other(self, given: bytes) -> None:
        """Features, status, resets, and requests that this device does not serve."""
        every, both = (1 << 64) - 1, rules.VIRTIO_F_VERSION_1 | rules.PROTOCOL_FEATURES_BIT
        features = (both, rules.VIRTIO_F_VERSION_1, 1 << 28, every)[given[2] % 4]
        unserved = (0, 6, 7, 19, 20, 22, 23, 26, 31, 33, 35, 41, 44, 255, 0xFFFFFFFF)[given[2] % 15]
        rows: tuple[tuple[int, bytes], ...] = (
            (rules.SET_FEATURES, _U64.pack(features)),
            (rules.SET_PROTOCOL_FEATURES, _U64.pack((0x1A20D, 8, 0, every)[given[2] % 4])),
            (rules.SET_STATUS, _U64.pack((0, 1, 0xF, 0x40, 0x100, 1 << 63)[given[2] % 6])),
            ((rules.RESET_DEVICE, rules.RESET_OWNER, rules.SET_OWNER)[given[2] % 3], b""),
            (rules.SET_CONFIG, _CONFIG_RANGE.pack(0, 4, 0) + bytes(4)), (unserved, b""),
        )  # fmt: skip
        # Configuration cannot be written, so that a session is as sound after it as before.
        self.sound = self.sound and rows[given[0] % 6][0] == rules.SET_CONFIG
        self.send(*rows[given[0] % 6], flags=self._flags(given[1]))

    def misshapen(self, given: bytes) -> None:
        """A payload of another length, or descriptors that do not belong there."""
        self.sound = False
        request = 1 + given[0] % 43
        fds = [self.target.odd[given[2] % len(self.target.odd)]] * (0, 1, 2, 5)[given[3] % 4]
        payload = bytes(given * 8)[: given[1] % 57]
        self.send(request, payload, fds, self._flags(given[4]))

    def garbage(self, given: bytes) -> None:
        """A header that is none, or a message that stops in the middle: the session ends."""
        self.sound = False
        self.messages += 1
        self.may_end = True
        with suppress(Gone):
            match given[0] % 4:
                case 0:
                    self.put(rules.HEADER.pack(given[1], given[2] & ~1 & 0xFF, 0))
                case 1:
                    self.put(rules.HEADER.pack(given[1], rules.VERSION, 4097 + (given[2] << 20)))
                case 2:
                    self.put(
                        rules.HEADER.pack(rules.SET_FEATURES, rules.VERSION, 8) + given[:5],
                        [self.target.odd[given[1] % 7]],
                    )
                case 3:
                    self.put(given[: 1 + given[1] % 7], [self.target.odd[given[2] % 7]] * (1 + given[3] % 3))
            self.back.turn()
        self.disconnect()
        self.back.turn()

    def chaos(self, given: bytes) -> None:
        """Anything at all in the ring's memory, and a kick."""
        self.sound = False
        random = Random(given)
        block = self.target.block
        block[:0x600] = random.randbytes(0x600)
        Struct("<HH").pack_into(block, AVAILABLE, 0, self.index + given[0] % 12 & 0xFFFF)
        for index in range(RING):
            if random.random() < 0.7:
                flags = random.choice((1, 2, 3, 0))
                _DESCRIPTOR.pack_into(block, 16 * index, GUEST + random.choice((REQUEST, RESPONSE, BLOCK - 8)),
                                      random.choice((16, 24, 92, 400)), flags, random.randrange(RING))  # fmt: skip
        self.kick()

    def kick(self) -> None:
        os.eventfd_write(self.target.kick, 1)
        self.back.turn()
        self.back.turn()

    def leave(self, given: bytes) -> None:
        if given[0] < 0x40:
            self.disconnect()
            self.back.turn()

    def negotiate(self, given: bytes) -> None:
        """Everything a sound front end says before its ring runs, from whatever state the session is in."""
        target, reply = self.target, rules.REPLY_ACK | 0x1A200
        both = _U64.pack(rules.VIRTIO_F_VERSION_1 | rules.PROTOCOL_FEATURES_BIT)
        self._sound(rules.GET_FEATURES)
        self._sound(rules.SET_PROTOCOL_FEATURES, _U64.pack(reply))
        self._sound(rules.GET_VRING_BASE, _STATE.pack(0, 0))
        self._sound(rules.RESET_DEVICE)
        # Only now does nobody write the ring any more.
        target.block[:] = bytes(BLOCK)
        with suppress(BlockingIOError):
            os.eventfd_read(target.kick)
        table = _STATE.pack(1, 0) + _REGION.pack(GUEST, BLOCK, USER, 0)
        self._sound(rules.SET_FEATURES, both)
        self._sound(rules.SET_MEM_TABLE, table, (target.memory_fd,))
        self._sound(rules.SET_VRING_NUM, _STATE.pack(0, RING))
        self._sound(rules.SET_VRING_BASE, _STATE.pack(0, 0))
        self._sound(rules.SET_VRING_ADDR, SOUND_ADDRESSES)
        self._sound(rules.SET_VRING_CALL, _U64.pack(0), (target.call,))
        self._sound(rules.SET_VRING_ERR, _U64.pack(0), (target.error,))
        self._sound(rules.SET_VRING_KICK, _U64.pack(0), (target.kick,))
        self._sound(rules.SET_VRING_ENABLE, _STATE.pack(0, 1))
        self.index, self.sound = 0, True

    def _sound(self, request: int, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        """A message that no back end has reason to refuse."""
        answer = self.send(request, payload, fds, rules.NEED_REPLY)
        if request not in (rules.GET_FEATURES, rules.GET_VRING_BASE) and answer != bytes(8):
            raise Finding(f"request {request} of a sound front end was refused")

    def traffic(self, given: bytes) -> None:
        """A command through the ring, which must be answered if nothing was done to it."""
        if not self.sound:
            return
        block, index = self.target.block, self.index
        request_id = index + 1
        block[REQUEST : REQUEST + 16] = _COMMAND.pack(1, 0, 0, request_id)
        block[RESPONSE : RESPONSE + 96] = b"\xc5" * 96
        _DESCRIPTOR.pack_into(block, 0, GUEST + REQUEST, 16, 1, 1)
        _DESCRIPTOR.pack_into(block, 16, GUEST + RESPONSE, 96, 2, 0)
        Struct("<H").pack_into(block, AVAILABLE + 4 + 2 * (index % RING), 0)
        self.index = index + 1 & 0xFFFF
        Struct("<H").pack_into(block, AVAILABLE + 2, self.index)
        with suppress(BlockingIOError):
            os.eventfd_read(self.target.call)
        self.kick()
        if self.remote:
            select.select([self.target.call], [], [], PATIENCE)
        used = Struct("<H").unpack_from(block, USED + 2)[0]
        element = Struct("<II").unpack_from(block, USED + 4 + 8 * (index % RING))
        answer = bytes(block[RESPONSE : RESPONSE + 96])
        if used != self.index or element != (0, 92):
            raise Finding(f"a command through a sound ring was not answered: used index {used}, element {element}")
        if answer[:16] != _COMMAND.pack(0, 0, 76, request_id) or answer[92:] != b"\xc5" * 4:
            raise Finding(f"a command through a sound ring was answered with {answer.hex()}")

    def proves_alive(self) -> None:
        """Whatever came before: the next sound front end is served."""
        if self.socket is not None and self.may_end:
            self.disconnect()
            self.back.turn()
        try:
            self.negotiate(b"")
            self.traffic(b"")
        except Gone:
            raise Finding("a sound front end was turned away") from None


_Move: TypeAlias = Callable[[Stream, bytes], None]
MOVES: Final[tuple[_Move, ...]] = (
    Stream.ask, Stream.vring, Stream.descriptor, Stream.memory, Stream.other, Stream.negotiate, Stream.traffic,
    Stream.misshapen, Stream.vring, Stream.descriptor, Stream.traffic, Stream.memory, Stream.garbage,
    Stream.chaos, Stream.leave, Stream.traffic, Stream.negotiate,
)  # fmt: skip
