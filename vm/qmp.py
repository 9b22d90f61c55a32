"""QEMU's control protocol over its Unix socket (QEMU: docs/interop/qmp-spec.rst): commands, and waiting for events."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

CONNECT_S = 20.0
ANSWER_S = 20.0


class QmpError(Exception):
    """QEMU refused a command, or is gone."""


class Qmp:
    """One connection, used from one thread."""

    def __init__(self, path: Path, timeout: float = CONNECT_S) -> None:
        self._socket = connect(path, timeout)
        self._lines = self._socket.makefile("rb")
        self.events: list[str] = []
        self._read()
        self.execute("qmp_capabilities")

    def execute(self, command: str, **arguments: Any) -> Any:
        """Send a command and return its answer; events that come first are remembered by name."""
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            message = self._read()
            if "error" in message:
                raise QmpError(f"{command}: {message['error'].get('desc')}")
            if "return" in message:
                return message["return"]

    def _read(self) -> dict[str, Any]:
        self._socket.settimeout(ANSWER_S)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise QmpError(f"no answer from QEMU: {error}") from error
        if not line:
            raise QmpError("QEMU closed its control socket")
        message: dict[str, Any] = json.loads(line)
        if "event" in message:
            self.events.append(message["event"])
        return message

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def connect(path: Path, timeout: float) -> socket.socket:
    """Connect to a Unix socket that may not be there yet. Raises QmpError."""
    limit = time.monotonic() + timeout
    while True:
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            endpoint.connect(str(path))
            return endpoint
        except OSError as error:
            endpoint.close()
            if time.monotonic() > limit:
                raise QmpError(f"cannot connect to {path.name}: {error.strerror}") from error
            time.sleep(0.02)
