"""Compiled models kept on disk from one process to the next; optional, bounded, and never more than a shortcut.

An entry is named by a digest of everything that decides what is compiled: artifact, target, variant, device and what it
calls itself, tuning, the runtime's version, and this project's own code that lowers. It holds a digest of its own
content, so that a torn or rotten file is only a miss; that digest is no signature. The folder belongs to the user that
runs the device and to nobody else: what lies in it is given to the runtime. A process that may not write there, as a
confined worker, reads only. It knows blobs; nothing of graphs, and nothing of the protocol.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import logging
import os
import struct
import tempfile
from pathlib import Path
from typing import IO, Final

import openvino as ov

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino.compile import Tuning

log = logging.getLogger(__name__)

DEFAULT_BYTES: Final = 1 << 30

_HEADER: Final = struct.Struct("<8s32s?d")
"""Magic, SHA-256 of what follows the header, whether the inputs are bounded, and by what."""
_MAGIC: Final = b"vaccel\0\1"
_SUFFIX: Final = ".model"
_NOT_OURS: Final = (errno.EPERM, errno.EACCES, errno.EROFS)
_PACKAGES: Final = ("backend_openvino", "tosa_graph")


@functools.cache
def code() -> bytes:
    """Digest of the code that reads and lowers: a model that other code lowered is another model."""
    digest = hashlib.sha256()
    top = Path(__file__).resolve().parent.parent
    for package in _PACKAGES:
        for path in sorted((top / package).rglob("*.py")):
            digest.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


class Store:
    """A folder of compiled models, at most `limit` bytes of them; those used longest ago go first.

    Raises OSError if the folder cannot be made, PermissionError if others may write to it.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{folder} has to belong to this user and be writable by nobody else")
        self.folder = folder
        self.limit = limit
        self._reads_only = False

    def path(self, artifact: bytes, variant: str, device: str, tuning: Tuning) -> Path:
        """Where the model of an artifact (a digest of it and its target) is or would be kept."""
        digest = hashlib.sha256(artifact + code())
        digest.update(repr((variant, device, runtime.full_name(device), tuning, ov.__version__)).encode())
        return self.folder / (digest.hexdigest() + _SUFFIX)

    def load(self, path: Path, device: str, tuning: Tuning) -> tuple[ov.CompiledModel, float | None] | None:
        """The model, and what its inputs are bounded by if by anything; None if it is not there or not whole."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            magic, digest, bounded, limit = _HEADER.unpack_from(data)
            blob = memoryview(data)[_HEADER.size :]
            if magic != _MAGIC or digest != _digest(bounded, limit, blob):
                raise ValueError("it is not whole")
            model = runtime.import_model(io.BytesIO(blob), device, tuning)
        except (struct.error, ValueError, RuntimeError, runtime.PrecisionRefused) as error:
            log.warning("kept model %s is of no use: %s", path.name, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now
        return model, limit if bounded else None

    def save(self, path: Path, model: ov.CompiledModel, limit: float | None) -> None:
        """Keep a model if that can be done; if not, nothing is lost but the shortcut."""
        if self._reads_only:
            return
        try:
            # Under another name first, so that no reader sees half of it; and before exporting, which takes a while.
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                try:
                    if self._write(file, model, limit):
                        Path(file.name).rename(path)
                    else:
                        os.unlink(file.name)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_OURS:
                self._reads_only = True
                log.info("no models are kept by this process: it may not write to %s", self.folder)
            else:
                log.warning("compiled model is not kept: %s", error)

    def _write(self, file: IO[bytes], model: ov.CompiledModel, limit: float | None) -> bool:
        """Fill the file; False if the model is larger than the store. Raises OSError, RuntimeError."""
        exported = io.BytesIO()
        model.export_model(exported)
        blob = exported.getbuffer()
        bounded = limit is not None, limit or 0.0
        if _HEADER.size + len(blob) > self.limit:
            return False
        self._make_room(_HEADER.size + len(blob))
        file.write(_HEADER.pack(_MAGIC, _digest(*bounded, blob), *bounded))
        file.write(blob)
        file.flush()
        return True

    def _make_room(self, wanted: int) -> None:
        entries = []
        for path in self.folder.glob("*" + _SUFFIX):
            with contextlib.suppress(OSError):
                found = path.stat()
                entries.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in entries) + wanted
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _digest(bounded: bool, limit: float, blob: memoryview) -> bytes:
    digest = hashlib.sha256(struct.pack("<?d", bounded, limit))
    digest.update(blob)
    return digest.digest()
