"""The command engine: one request frame in, one response frame out (specification.md 3.4; virtqueue.md 4 to 7).

Knows the order of checks, where each kind of failure ends, and when the device may not go on. Must not know rings,
guest addresses, clocks, sockets or threads: a chain arrives as pieces of memory and leaves as a number of bytes
written. One engine serves one guest and is called from one thread.

    preflight -> COMMANDS[opcode] -> decode -> room for the response -> handle -> respond
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from virtaccel.device import wire
from virtaccel.device.backend import Backend, BackendError
from virtaccel.device.commands import COMMANDS, Answer, InPlace, Parked, finish_load, room
from virtaccel.device.config import DeviceConfig, ResourcePolicy
from virtaccel.device.decode import PREFIX_BYTES
from virtaccel.device.errors import CommandError, NeedsReset
from virtaccel.device.reset import ResetReport, tear_down
from virtaccel.device.state import Load, State
from virtaccel.device.wire import Status
from virtaccel.virtqueue.segments import Chain, gather, scatter

HEADER_BYTES: Final = 16
_unpack_header: Final = wire.REQUEST_HEADER.unpack_from
_pack_header: Final = wire.RESPONSE_HEADER.pack
_command: Final = COMMANDS.get

# Plain numbers: packing an enumeration's member costs several times as much.
UNSUPPORTED: Final = int(Status.UNSUPPORTED)
INVALID_ARGUMENT: Final = int(Status.INVALID_ARGUMENT)
RESOURCE_LIMIT: Final = int(Status.RESOURCE_LIMIT)
DEVICE_LOST: Final = int(Status.DEVICE_LOST)


class Health(Enum):
    """RUNNING serves commands. In the other two every command gets DEVICE_LOST until a reset: NEEDS_RESET keeps the
    backend, which is known to be in order; DISCARD_REQUIRED does not call it again, and no reset changes that."""

    RUNNING = "running"
    NEEDS_RESET = "needs reset"
    DISCARD_REQUIRED = "discard required"


RUNNING: Final = Health.RUNNING


class _ParkedChain(NamedTuple):
    """A LOAD_PROGRAM whose response is still to come."""

    chain: Chain
    request_id: int
    load: Load


class Engine:
    """One guest's device: a backend under the rules of protocol 1.0.

    `namespace` yields a fresh object namespace for each reset epoch (objects.Namespaces). Raises ConfigError if the
    backend reports something that the protocol cannot carry.
    """

    __slots__ = ("_config", "_log", "_max_request", "_namespace", "_parked", "_policy", "_reason", "health", "state")

    def __init__(
        self,
        backend: Backend,
        config: DeviceConfig,
        policy: ResourcePolicy,
        namespace: Callable[[], int],
        log: logging.Logger | None = None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._namespace = namespace
        self._log = log if log is not None else logging.getLogger(__name__)
        self._max_request = config.wire.max_request_bytes
        self._parked: list[_ParkedChain] = []
        self._reason: str | None = None
        self.health = RUNNING
        self.state = State(backend, config.advertised(backend.info), policy, namespace())

    @property
    def parked(self) -> int:
        """How many chains wait for a program to load."""
        return len(self._parked)

    def process(self, chain: Chain) -> int | None:
        """Serve one chain. Returns the bytes written into it: 0 gives the head back with nothing in it; None means that
        the head must not be given back now, since `finished` will return it or truth was lost (see `health`)."""
        size = chain.readable_bytes
        if chain.broken is not None or size < HEADER_BYTES or chain.writable_bytes < HEADER_BYTES:
            return 0
        # The fixed part is copied once; whatever is decided from here on is decided on the copy.
        readable = chain.readable
        try:
            if len(readable) == 1:
                frame = readable[0].tobytes() if size <= PREFIX_BYTES else readable[0][:PREFIX_BYTES].tobytes()
            else:
                frame = gather(readable, 0, min(size, PREFIX_BYTES))
        except Exception:  # mappings went away under us: nothing has changed yet
            self._log.exception("a request could not be read")
            return 0
        opcode, flags, payload_bytes, request_id = _unpack_header(frame)
        if self.health is not RUNNING:
            return self._refuse(chain, request_id, DEVICE_LOST)
        if size > self._max_request:
            return self._refuse(chain, request_id, RESOURCE_LIMIT)
        if payload_bytes != size - HEADER_BYTES or not request_id:
            return self._refuse(chain, request_id, INVALID_ARGUMENT)
        command = _command(opcode)
        if command is None or flags:
            return self._refuse(chain, request_id, UNSUPPORTED)
        fixed, tail, decode, capacity, handle, mutates = command
        if payload_bytes != fixed and not (tail and payload_bytes > fixed):
            return self._refuse(chain, request_id, INVALID_ARGUMENT)
        try:
            state = self.state
            request = decode(frame, chain, state.limits)
            if chain.writable_bytes < (capacity or room(request, self._config.wire.max_response_bytes)):
                return 0
            reply = handle(state, request, chain)
        except Exception as error:
            return self._refuse(chain, request_id, self._verdict(error))
        if type(reply) is bytes:
            # `_respond` for the commonest answer, without the call.
            written = HEADER_BYTES + len(reply)
            first = chain.writable[0]
            if written <= len(first):
                try:
                    first[:written] = _pack_header(0, 0, written - HEADER_BYTES, request_id) + reply
                except Exception:
                    return self._lost(mutates)
                return written
        elif isinstance(reply, Parked):
            self._parked.append(_ParkedChain(chain, request_id, reply.load))
            return None
        return self._respond(chain, request_id, reply, mutates)

    def finished(self) -> list[tuple[Chain, int]]:
        """Parked chains that can go back now, with the bytes written into each. Never waits."""
        if not self._parked:
            return []
        parked, self._parked = self._parked, []
        done: list[tuple[Chain, int]] = []
        for item in parked:
            written: int | None
            try:
                if self.health is not RUNNING:
                    raise CommandError(Status.DEVICE_LOST)
                payload = finish_load(self.state, item.load)
            except Exception as error:
                written = self._refuse(item.chain, item.request_id, self._verdict(error))
            else:
                if payload is None:
                    self._parked.append(item)
                    continue
                written = self._respond(item.chain, item.request_id, payload, True)
            if written is not None:
                done.append((item.chain, written))
        return done

    def abandon(self, lost: Callable[[Chain], bool]) -> list[tuple[Chain, int]]:
        """Give up the parked chains that `lost` names, say because their memory is going away. Their programs are not
        loaded, so each goes back with nothing written, as after any failure to write before state changed."""
        done: list[tuple[Chain, int]] = []
        for item in [item for item in self._parked if lost(item.chain)]:
            self._parked.remove(item)
            if self.health is RUNNING:
                try:
                    self.state.backend.abandon_load(item.load.ticket)
                    self.state.remove_load(item.load)
                except Exception as error:
                    self._verdict(error)
            done.append((item.chain, 0))
        return done

    def reset(self) -> ResetReport:
        """End the epoch (specification.md 4.11): every ID dies, parked chains are forgotten, one bounded teardown.

        Unless the report says `discard`, the engine is RUNNING again with nothing in it. Once it does, the backend has
        been called for the last time, and so does every later report.
        """
        self._parked.clear()
        discarding = self.health is Health.DISCARD_REQUIRED
        report = tear_down(self.state, (self._reason or "discard required") if discarding else None)
        if report.discard:
            self._fall(Health.DISCARD_REQUIRED, report.reason or "")
            return report
        try:
            state = self.state
            self.state = State(state.backend, state.info, self._policy, self._namespace())
        except NeedsReset as error:
            self._fall(Health.DISCARD_REQUIRED, str(error))
            return report
        self.health = RUNNING
        self._reason = None
        return report

    def _verdict(self, error: Exception) -> int:
        """The one place where each kind of failure gets its status and its consequence."""
        if isinstance(error, CommandError):
            return int(error.status)
        if isinstance(error, BackendError):
            self._log.info("backend refused: %s", error)
            if error.status is Status.DEVICE_LOST:
                self._fall(Health.DISCARD_REQUIRED, f"device lost: {error}")
            return int(error.status) or int(Status.INTERNAL_ERROR)
        if isinstance(error, NeedsReset):
            self._fall(Health.DISCARD_REQUIRED if error.discard else Health.NEEDS_RESET, str(error))
            return DEVICE_LOST
        # Not a failure that anybody may raise here: nobody knows what the backend kept or the tables hold.
        self._log.error("unexpected failure", exc_info=error)
        self._fall(Health.DISCARD_REQUIRED, f"unexpected failure: {error!r}")
        return DEVICE_LOST

    def _fall(self, health: Health, reason: str) -> None:
        """Stop serving. Discard is the deeper state and never turns back into the other."""
        if self.health is Health.DISCARD_REQUIRED:
            return
        self._log.error("%s: %s", health.value, reason)
        self.health = health
        self._reason = reason

    def _refuse(self, chain: Chain, request_id: int, status: int) -> int | None:
        """A bare failure header. While running nothing has changed, so if it cannot be written the head goes back
        empty; otherwise it is withheld, as in `_respond`."""
        response = _pack_header(status, 0, 0, request_id)
        try:
            scatter(chain.writable, 0, response)
        except Exception:
            self._log.exception("a refusal could not be written")
            return 0 if self.health is RUNNING else None
        return HEADER_BYTES

    def _respond(self, chain: Chain, request_id: int, reply: Answer, mutates: bool) -> int | None:
        """Write the response as one unit. If that fails after state changed, the device needs a reset, and the head is
        withheld: giving it back empty would say that nothing had changed (virtqueue.md, section 6)."""
        if isinstance(reply, bytes):
            size = len(reply)
            written = HEADER_BYTES + size
            response = _pack_header(0, 0, size, request_id) + reply
        elif isinstance(reply, InPlace):
            written = HEADER_BYTES + reply.bytes
            response = _pack_header(0, 0, reply.bytes, request_id)
        else:
            written = HEADER_BYTES + len(reply.payload)
            response = _pack_header(reply.status, 0, len(reply.payload), request_id) + reply.payload
            if reply.status is Status.DEVICE_LOST:
                self._fall(Health.DISCARD_REQUIRED, "device lost while submitting")
        writable = chain.writable
        try:
            first = writable[0]
            if len(response) <= len(first):
                first[: len(response)] = response
            else:
                scatter(writable, 0, response)
        except Exception:
            return self._lost(mutates)
        return written

    def _lost(self, mutates: bool) -> int | None:
        """A response could not be written; called while handling why."""
        self._log.exception("a response could not be written")
        if not mutates:
            return 0
        self._fall(Health.NEEDS_RESET, "response lost after state changed")
        return None
