"""Giving back everything one guest owned: a bounded pass, children before parents (specification.md 4.11).

Knows the order of teardown and what each object may cost: an event at most two polls, one cancel and one release,
anything else one release; no waiting. What cannot be given back for certain is quarantined, together with everything
that depends on it, and then the whole backend instance has to be discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from virtaccel.device.backend import BackendError, Released, ReleaseIndeterminate, ReleaseOutcome
from virtaccel.device.commands import CANCELLATION, PENDING_PAYLOAD, observe
from virtaccel.device.objects import Table
from virtaccel.device.state import Counts, Event, Retained, State
from virtaccel.device.wire import Status


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What a reset did. `reason` says why the backend instance has to be discarded, None if it may be used again.

    Bytes are the charges of the objects counted. `abandoned_loads` are programs that were still being loaded; they are
    counted nowhere else, and their charge is in `released_bytes` or `quarantined_bytes`.
    """

    released: Counts
    quarantined: Counts
    released_bytes: Retained
    quarantined_bytes: Retained
    abandoned_loads: int
    reason: str | None

    @property
    def discard(self) -> bool:
        return self.reason is not None


class _Stop(Exception):
    """The backend must not be asked again."""


class _Pass:
    """One teardown. The first trouble is the reason that is reported."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.reason: str | None = None

    def run(self) -> None:
        state = self.state
        try:
            self._abandon_loads()
            for object_id, event in list(state.events.live.items()):
                self._event(object_id, event)
            self._children(state.queues, state.backend.destroy_queue, state.remove_queue)
            self._children(state.programs, state.backend.unload_program, state.remove_program)
            self._children(state.buffers, state.backend.free_buffer, state.remove_buffer)
            for object_id, context in list(state.contexts.live.items()):
                if not context.has_children:
                    self._release(state.backend.destroy_context, context.handle, object_id, state.remove_context)
        except _Stop:
            pass
        except BackendError as error:
            self.blame(f"backend failed: {error}")

    def blame(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason

    def _abandon_loads(self) -> None:
        for load in list(self.state.loads):
            self.state.backend.abandon_load(load.ticket)
            self.state.remove_load(load)

    def _event(self, object_id: int, event: Event) -> None:
        if not self._terminal(event):
            self.blame("a pending event could not be cancelled")
            return
        self._release(self.state.backend.destroy_event, event.handle, object_id, self.state.remove_event)

    def _terminal(self, event: Event) -> bool:
        state = self.state
        if observe(state, event) is not PENDING_PAYLOAD:
            return True
        if not state.info.capabilities & CANCELLATION:
            return False
        try:
            state.backend.cancel_event(event.handle)
        except BackendError as error:
            if error.status is Status.DEVICE_LOST:
                raise
            return observe(state, event) is not PENDING_PAYLOAD  # completion may have won
        return True

    def _children(
        self, table: Table[Any], release: Callable[[Any], ReleaseOutcome], remove: Callable[[int], None]
    ) -> None:
        for object_id, record in list(table.live.items()):
            if not record.references:
                self._release(release, record.handle, object_id, remove)

    def _release(
        self, release: Callable[[Any], ReleaseOutcome], handle: object, object_id: int, remove: Callable[[int], None]
    ) -> None:
        outcome = release(handle)
        if isinstance(outcome, Released):
            remove(object_id)
            return
        self.blame(f"{release.__name__}: {outcome}")
        if isinstance(outcome, ReleaseIndeterminate) or outcome.status is Status.DEVICE_LOST:
            raise _Stop


def tear_down(state: State, reason: str | None) -> ResetReport:
    """Empty `state` and say what became of everything.

    With a `reason` to discard the backend it is not called at all. A failure that is not the contract's (any other
    exception) counts as one more reason.
    """
    live, earlier, retained = state.counts, state.quarantine.counts, state.retained
    loads = len(state.loads)
    work = _Pass(state)
    if reason is not None:
        work.blame(reason)
    else:
        try:
            work.run()
        except Exception as error:  # a backend outside its contract: nobody knows what it did
            work.blame(f"backend raised {error!r}")
    state.quarantine_everything()
    quarantined, lost = state.quarantine.counts, state.quarantine.retained
    if state.retained != lost:
        work.blame(f"accounts do not balance: {state.retained} charged, {lost} quarantined")
    elif any(quarantined):
        work.blame(f"objects without a known owner: {quarantined}")
    return ResetReport(
        released=Counts(*(a + b - c for a, b, c in zip(live, earlier, quarantined, strict=True))),
        quarantined=quarantined,
        released_bytes=Retained(*(a - b for a, b in zip(retained, lost, strict=True))),
        quarantined_bytes=lost,
        abandoned_loads=loads,
        reason=work.reason,
    )
