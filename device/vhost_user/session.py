"""What each vhost-user message means: the state of one front end, without I/O.

A message and its descriptors come in, calls on the `Guest` port and a reply go out. This module knows negotiation, the
vring states and who must be answered how (Vhost-user Protocol: "Ring states", "Front-end message types", REPLY_ACK); it
never touches a socket, memory or a descriptor: those it only counts and passes on.

A refusal is told in the way the request allows. GET_CONFIG answers with no payload; a request that asked for an
acknowledgement gets a nonzero one; a refused value in any other SET_* is logged and leaves the ring unable to run; a
request whose answer cannot say no, or whose very shape is wrong with nobody to tell, ends the session.

Reset and pause. A front end that resets the device may say so (RESET_DEVICE, status 0), but QEMU's generic device only
stops the ring and starts it again, exactly as for a pause. After a pause the ring starts at the base that it was
stopped at; after a reset at 0. So the same base again (and, where it is 0, the same ring addresses) resumes with every
object alive, and anything else is a protocol reset (specification.md 4.11).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from virtaccel.device.front_end import MemoryRegion, RequestRefused, RingSetup
from virtaccel.device.vhost_user import message as m
from virtaccel.device.vhost_user.message import Message, ProtocolFeature, Request

# No ring feature beyond the basic split ring (virtqueue.md 1), no IOMMU, no dirty log (VHOST_F_LOG_ALL).
FEATURES = m.VIRTIO_F_VERSION_1 | m.VHOST_USER_F_PROTOCOL_FEATURES

# INFLIGHT_SHMFD is not offered: its promise is that a restarted back end finishes what was in flight, and a restarted
# device has lost the objects that commands in flight name. After a restart the guest has to reset the device.
PROTOCOL_FEATURES = sum(ProtocolFeature)

# Protocol 1.0 has one command queue (wire-abi.md 2).
QUEUES = 1
COMMAND_QUEUE = 0
# virtio 1.3, 2.7.
MAX_RING_SIZE = 32768
# virtio 1.3, 2.1: the device's own bit, which no front end sets.
STATUS_NEEDS_RESET = 0x40


class EndSession(Exception):
    """This connection cannot go on; the text is for the log."""


class Descriptors(Protocol):
    """File descriptors that came with a message. Whoever takes one owns it; the rest is closed after the message."""

    def __len__(self) -> int: ...
    def take(self) -> int:
        """The first descriptor that nobody has taken."""


class Guest(Protocol):
    """What a session does to the world: guest memory, the ring and the engine behind it. May raise RequestRefused."""

    @property
    def config_space(self) -> bytes: ...
    @property
    def max_ring_size(self) -> int: ...
    @property
    def needs_reset(self) -> bool: ...

    def replace_memory(self, regions: tuple[MemoryRegion, ...], fds: Descriptors) -> None: ...
    def add_memory(self, region: MemoryRegion, fds: Descriptors) -> None: ...
    def remove_memory(self, region: MemoryRegion) -> None: ...

    def check_ring(self, setup: RingSetup) -> None:
        """Refuses parts that are misaligned or outside the memory, if there is memory yet."""

    def run_ring(self, setup: RingSetup) -> None:
        """Process the ring from now on, starting with what is available already."""

    def stop_ring(self) -> int:
        """Neither read nor publish any more; the next available index that would have been read."""

    def set_kick(self, fd: int | None, *, poll: bool = False) -> None: ...
    def set_call(self, fd: int | None) -> None: ...
    def set_error(self, fd: int | None) -> None: ...
    def set_backend_channel(self, fd: int) -> None: ...

    def reset(self, why: str) -> None:
        """Protocol reset: every object and every unfinished command is gone. Only called with the ring stopped."""


@dataclass(slots=True)
class Vring:
    """What the front end has said about the ring. `held` is how the ring was when it last stopped."""

    size: int | None = None
    base: int = 0
    address: m.VringAddress | None = None
    kick: bool = False
    started: bool = False
    enabled: bool = False
    running: bool = False
    held: RingSetup | None = None

    def setup(self) -> RingSetup | None:
        if self.size is None or self.address is None:
            return None
        where = self.address
        return RingSetup(self.size, where.descriptors, where.available, where.used, self.base)


class FrontEndSession:
    """One front end from its first message to its last."""

    def __init__(self, guest: Guest, log: logging.Logger) -> None:
        self._guest = guest
        self._log = log
        self.features: int | None = None
        self.protocol_features = 0
        self.status = 0
        self.vring = Vring()

    def handle(self, message: Message, fds: Descriptors) -> bytes | None:
        """Act on one message; the bytes to answer with, if any. Raises EndSession."""
        rule = m.RULES.get(message.request)
        if rule is None:
            return self._refuse(message, "not served", structural=False)
        self._log.debug("%s, %d bytes, %d descriptors", message.name, len(message.payload), len(fds))
        try:
            m.check(message, len(fds))
            body = HANDLERS[message.request](self, message.payload, fds)
        except m.PayloadError as error:
            return self._refuse(message, str(error), structural=True)
        except RequestRefused as error:
            return self._refuse(message, str(error), structural=False)
        if rule.replies:
            return m.encode_reply(message.request, body or b"")
        return m.encode_ack(message.request, failed=False) if self._wants_ack(message) else None

    def kicked(self) -> None:
        """The kick descriptor was readable while the ring did not run: that starts the ring ("Ring states")."""
        self.vring.started = True
        self._settle_or_log()

    def close(self) -> None:
        """The connection is gone. A disconnect is a protocol reset (nobody is left to resume)."""
        self._stop()
        self._guest.reset("front end disconnected")

    # -- answering

    def _wants_ack(self, message: Message) -> bool:
        return message.need_reply and bool(self.protocol_features & ProtocolFeature.REPLY_ACK)

    def _refuse(self, message: Message, why: str, structural: bool) -> bytes | None:
        self._log.warning("refused %s: %s", message.name, why)
        if message.request == Request.GET_CONFIG:
            return m.encode_reply(message.request, b"")
        rule = m.RULES.get(message.request)
        if (rule is not None and rule.replies) or message.request in m.WAITS_FOR_REPLY:
            raise EndSession(f"{message.name} cannot be answered: {why}")
        if self._wants_ack(message):
            return m.encode_ack(message.request, failed=True)
        if structural:
            raise EndSession(f"{message.name}: {why}")
        return None

    # -- the ring's states

    def _settle(self) -> None:
        """Run the ring if it may run, stop it if it must not. Raises RequestRefused if it should run and cannot."""
        vring = self.vring
        setup = vring.setup()
        if setup is None or not (vring.kick and vring.started and vring.enabled):
            self._stop()
            return
        if vring.running:
            return
        if vring.held is not None and not _resumes(setup, vring.held):
            self._guest.reset(f"ring starts at {vring.base}, was stopped at {vring.held.base}")
            vring.held = None
        self._guest.run_ring(setup)
        vring.running = True

    def _settle_or_log(self) -> None:
        try:
            self._settle()
        except RequestRefused as error:
            self._log.warning("ring cannot run: %s", error)

    def _stop(self) -> None:
        vring = self.vring
        if vring.running:
            vring.running = False
            vring.base = self._guest.stop_ring()
            # What a later start is compared with, to tell a pause from a reset.
            vring.held = vring.setup()

    def _reset(self, why: str) -> None:
        """The whole device to its initial state. Memory, call and error descriptors belong to the connection."""
        self._stop()
        # Before the reset: a kick that was under way must not start the ring of the old driver.
        self._guest.set_kick(None)
        self._guest.reset(why)
        self.vring = Vring(enabled=self._always_enabled())

    def _always_enabled(self) -> bool:
        """Without protocol features no SET_VRING_ENABLE comes: "the ring starts directly in the enabled state"."""
        return self.features is not None and not self.features & m.VHOST_USER_F_PROTOCOL_FEATURES

    def _must_stand(self) -> Vring:
        if self.vring.running:
            raise RequestRefused("the ring is running")
        return self.vring

    # -- one method a request; each returns the reply's payload where there is one

    def _get_features(self, _payload: bytes, _fds: Descriptors) -> bytes:
        return m.U64.pack(FEATURES)

    def _set_features(self, payload: bytes, _fds: Descriptors) -> None:
        acked = m.decode_u64(payload)
        # Logged and masked, not refused: SET_FEATURES has no answer that could say no.
        if acked & ~FEATURES:
            self._log.warning("features %#x were acknowledged and never offered; ignored", acked & ~FEATURES)
        self.features = acked & FEATURES
        if self._always_enabled():
            self.vring.enabled = True
            self._settle_or_log()

    def _get_protocol_features(self, _payload: bytes, _fds: Descriptors) -> bytes:
        return m.U64.pack(PROTOCOL_FEATURES)

    def _set_protocol_features(self, payload: bytes, _fds: Descriptors) -> None:
        acked = m.decode_u64(payload)
        if acked & ~PROTOCOL_FEATURES:
            self._log.warning("protocol features %#x were never offered; ignored", acked & ~PROTOCOL_FEATURES)
        self.protocol_features = acked & PROTOCOL_FEATURES

    def _get_queue_num(self, _payload: bytes, _fds: Descriptors) -> bytes:
        return m.U64.pack(QUEUES)

    def _get_max_mem_slots(self, _payload: bytes, _fds: Descriptors) -> bytes:
        return m.U64.pack(m.MAX_MEMORY_SLOTS)

    def _set_owner(self, _payload: bytes, _fds: Descriptors) -> None:
        """Says only that a session starts, which the connection has said already."""

    def _reset_owner(self, _payload: bytes, _fds: Descriptors) -> None:
        """Deprecated; "either ignore this message, or use it to disable all rings"."""
        self.vring.enabled = False
        self._settle()

    def _reset_device(self, _payload: bytes, _fds: Descriptors) -> None:
        self._reset("RESET_DEVICE")

    def _set_status(self, payload: bytes, _fds: Descriptors) -> None:
        status = m.decode_u64(payload)
        if status > 0xFF:
            raise RequestRefused(f"device status {status:#x} does not fit its byte")
        if status == 0 and self.status != 0:
            self._reset("status 0")
        self.status = status & ~STATUS_NEEDS_RESET

    def _get_status(self, _payload: bytes, _fds: Descriptors) -> bytes:
        return m.U64.pack(self.status | (STATUS_NEEDS_RESET if self._guest.needs_reset else 0))

    def _get_config(self, payload: bytes, _fds: Descriptors) -> bytes:
        access = m.decode_config(payload)
        # Both bounds before a byte is taken: offset and size are the front end's.
        space = self._guest.config_space
        if not 0 < access.size <= len(space) - access.offset:
            raise RequestRefused(f"{access.size} bytes of config space at {access.offset}, of {len(space)} in all")
        return m.encode_config(access.offset, space[access.offset : access.offset + access.size], access.flags)

    def _set_config(self, _payload: bytes, _fds: Descriptors) -> None:
        raise RequestRefused("the config space is read-only")

    def _set_mem_table(self, payload: bytes, fds: Descriptors) -> None:
        self._guest.replace_memory(m.decode_table(payload, len(fds)), fds)
        self._settle_or_log()

    def _add_mem_reg(self, payload: bytes, fds: Descriptors) -> None:
        self._guest.add_memory(m.decode_single_region(payload), fds)
        self._settle_or_log()

    def _rem_mem_reg(self, payload: bytes, _fds: Descriptors) -> None:
        self._guest.remove_memory(m.decode_single_region(payload))

    def _set_backend_req_fd(self, _payload: bytes, fds: Descriptors) -> None:
        self._guest.set_backend_channel(fds.take())

    def _set_vring_num(self, payload: bytes, _fds: Descriptors) -> None:
        state = _command_queue(m.decode_vring_state(payload))
        vring = self._must_stand()
        vring.size = None
        if not 0 < state.num <= self._guest.max_ring_size or state.num & (state.num - 1):
            raise RequestRefused(f"{state.num} descriptors: a power of two up to {self._guest.max_ring_size} is served")
        vring.size = state.num

    def _set_vring_base(self, payload: bytes, _fds: Descriptors) -> None:
        state = _command_queue(m.decode_vring_state(payload))
        vring = self._must_stand()
        if state.num > 0xFFFF:
            raise RequestRefused(f"base {state.num}: an index of a split ring has 16 bits")
        vring.base = state.num

    def _set_vring_addr(self, payload: bytes, _fds: Descriptors) -> None:
        address = m.decode_vring_address(payload)
        _command_queue(m.VringState(address.vring, 0))
        vring = self.vring
        if vring.running and vring.address is not None and vring.address[2:5] == address[2:5]:
            return
        # A ring must not go on with addresses that the guest has given up: out they go, whatever comes of the new.
        moved = vring.running
        self._stop()
        vring.address = None
        if address.descriptors % 16 or address.available % 2 or address.used % 4:
            raise RequestRefused("ring parts are not aligned to 16, 2 and 4 bytes (virtio 2.7)")
        vring.address = address
        setup = vring.setup()
        if setup is not None:
            try:
                self._guest.check_ring(setup)
            except RequestRefused:
                vring.address = None
                raise
        if moved:
            vring.held = setup  # the same ring, at another place from now on
        self._settle()

    def _get_vring_base(self, payload: bytes, _fds: Descriptors) -> bytes:
        state = _command_queue(m.decode_vring_state(payload))
        self._stop()
        self.vring.kick = self.vring.started = False
        self._guest.set_kick(None)
        return m.encode_vring_state(state.vring, self.vring.base)

    def _set_vring_enable(self, payload: bytes, _fds: Descriptors) -> None:
        state = _command_queue(m.decode_vring_state(payload))
        if state.num > 1:
            raise RequestRefused(f"enable is 0 or 1, not {state.num}")
        self.vring.enabled = bool(state.num)
        self._settle()

    def _set_vring_kick(self, payload: bytes, fds: Descriptors) -> None:
        has_fd = _vring_fd(payload, fds)
        self._guest.set_kick(fds.take() if has_fd else None, poll=not has_fd)
        self.vring.kick = True
        if not has_fd or not self._always_enabled():
            # SET_VRING_ENABLE is the gate then. Not to wait for a kick as well loses no work that was published, and
            # its kick taken, before a pause.
            self.vring.started = True
        self._settle()

    def _set_vring_call(self, payload: bytes, fds: Descriptors) -> None:
        self._guest.set_call(fds.take() if _vring_fd(payload, fds) else None)

    def _set_vring_err(self, payload: bytes, fds: Descriptors) -> None:
        self._guest.set_error(fds.take() if _vring_fd(payload, fds) else None)


def _resumes(setup: RingSetup, held: RingSetup) -> bool:
    """Whether a ring that starts so is the one that was stopped so (see this module's introduction)."""
    return setup == held or (setup.base == held.base != 0 and setup.size == held.size)


def _command_queue(state: m.VringState) -> m.VringState:
    if state.vring != COMMAND_QUEUE:
        raise RequestRefused(f"there is no vring {state.vring}")
    return state


def _vring_fd(payload: bytes, fds: Descriptors) -> bool:
    word = m.decode_vring_fd(payload, len(fds))
    _command_queue(m.VringState(word.vring, 0))
    return word.has_fd


# One method a request, named for it: a request in `RULES` without a method fails here, when the module is imported.
HANDLERS: Mapping[int, Callable[[FrontEndSession, bytes, Descriptors], bytes | None]] = {
    request: getattr(FrontEndSession, f"_{Request(request).name.lower()}") for request in m.RULES
}
