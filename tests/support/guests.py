"""Judging a guest from the host: statuses, dead objects, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from virtaccel.vm.machine import GuestFailure, Machine


def status_of(guest: Machine, name: str, *arguments: int, **keywords: int) -> str:
    """The status that a command ends with."""
    try:
        guest.ask("call", name=name, arguments=list(arguments), keywords=keywords)
    except GuestFailure as failure:
        if failure.status is None:
            raise
        return failure.status
    return "OK"


def value_of(guest: Machine, name: str, *arguments: int, **keywords: int) -> Any:
    """What a command returns; it has to succeed."""
    return guest.ask("call", name=name, arguments=list(arguments), keywords=keywords)["value"]


def assert_dead(guest: Machine, loaded: dict[str, Any], events: Sequence[int] = ()) -> None:
    """No object of `loaded` can be named here, by any command that takes it."""
    for event in events:
        for command in ("poll_event", "cancel_event", "destroy_event"):
            assert status_of(guest, command, event) == "STALE_OBJECT"
    for buffer in loaded["buffers"]:
        assert status_of(guest, "free_buffer", buffer) == "STALE_OBJECT"
    commands = {"unload_program": "program", "destroy_queue": "queue", "create_queue": "context"}
    for command, kind in {**commands, "destroy_context": "context"}.items():
        assert status_of(guest, command, loaded[kind]) == "STALE_OBJECT", command


def assert_traffic(guest: Machine, *, commands: int = 1000, submissions: int = 20) -> dict[str, Any]:
    """So many commands with one and the same answer, so many right submissions; the objects that served."""
    loaded = guest.ask("load", model="/job/digits.tosa", check="/job/digits0.npz")
    done = guest.ask("commands", count=commands)
    assert (done["count"], done["answers"]) == (commands, 1)
    done = guest.ask("submissions", count=submissions)
    assert (done["count"], done["right"]) == (submissions, submissions)
    return loaded
