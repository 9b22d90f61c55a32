"""Reproducers: a finding as a small JSON file that says which target, which input and what went wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from virtaccel.guest_tools.errors import InputError

VERSION = 1


class Reproducer(NamedTuple):
    """What `virtaccel fuzz replay` needs: the target's name, the way to a device (empty: none), the input."""

    target: str
    via: str
    data: bytes
    what: str

    def name(self) -> str:
        """File name: the same input gets the same one."""
        digest = hashlib.sha256(self.data).hexdigest()[:12]
        return f"virtaccel-fuzz-{self.target.rpartition(':')[2]}-{digest}.json"

    def save(self, folder: Path, trace: str = "") -> Path:
        """Write it into `folder`, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.name()
        content = {
            "version": VERSION,
            "target": self.target,
            "via": self.via,
            "what": self.what,
            "input": self.data.hex(),
            "trace": trace.splitlines(),
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def load(path: Path) -> Reproducer:
    """Raises InputError for a file that is no reproducer."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise InputError(f"{path}: a reproducer of version {content['version']}, this program knows {VERSION}")
        return Reproducer(content["target"], content["via"], bytes.fromhex(content["input"]), content["what"])
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no reproducer: {error}") from error
