"""Arm's own conformance tools, found where the distribution `tosa-tools` is installed, and called.

Three of them: the generate library (the data of a test, from its seed), the reference model (the right answer, and how
far a dot product may be from it) and the verify library (whether an answer is right). Their C interfaces are those of
the distribution's headers generate.h, verify.h and types.h. Nothing here knows a device.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from virtaccel.guest_tools.errors import Unavailable
from virtaccel.tosa_graph.elements import Array, unpack
from virtaccel.tosa_graph.graph import DType, packed_bytes

DISTRIBUTION: Final = "tosa-tools"
REFERENCE_SECONDS: Final = 300.0
_WORTH_KEEPING_SECONDS: Final = 1.0  # below, reading it back saves nothing worth a file
_WORTH_KEEPING_BYTES: Final = 4 << 20  # larger ones would fill the user's cache
_KEPT: Final = "reference"

_BITS: Final = {DType.BF16: np.dtype("V2"), DType.FP8E4M3: np.dtype("V1"), DType.FP8E5M2: np.dtype(np.uint8)}
"""How the tools write types in .npy files that numpy has not; INT4 is int8 there, INT48 int64."""

_DESCRIPTIONS: Final = {DType.BF16: "<V2", DType.FP8E4M3: "<V1"}
"""What such files say of their type, with a byte order that numpy itself would not write."""

_TYPE_CODES: Final = {
    DType.BF16: 0,
    DType.BOOL: 1,
    DType.FP16: 2,
    DType.FP32: 3,
    DType.INT16: 4,
    DType.INT32: 5,
    DType.INT48: 6,
    DType.INT4: 7,
    DType.INT8: 8,
    DType.SHAPE: 11,
    DType.FP8E4M3: 12,
    DType.FP8E5M2: 13,
}
"""tosa_datatype_t of types.h."""
_FP64_CODE: Final = 99

Json = Mapping[str, Any]


class ToolFailed(Exception):
    """One of Arm's tools did not do its part; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Where the tools are."""

    site: Path
    version: str

    @property
    def reference_model(self) -> Path:
        return self.site / "bin" / "tosa_reference_model"

    @property
    def schema(self) -> Path:
        return self.site / "bin" / "tosa.fbs"

    @property
    def flatc(self) -> Path:
        return self.site / "bin" / "flatc"

    @property
    def verify_program(self) -> Path:
        return self.site / "bin" / "tosa_verify"

    @property
    def generate_library(self) -> Path:
        return self.site / "tosa_reference_model" / "libtosa_reference_generate_lib.so"

    @property
    def verify_library(self) -> Path:
        return self.site / "tosa_reference_model" / "libtosa_reference_verify_lib.so"

    @property
    def configurations(self) -> Path:
        return self.site / "conformance"

    def environment(self) -> dict[str, str]:
        """For tools that start others by name. Hashing is fixed, so that generating is repeatable."""
        path = os.pathsep.join([sysconfig.get_path("scripts"), str(self.site / "bin"), os.environ.get("PATH", "")])
        return {**os.environ, "PATH": path, "PYTHONHASHSEED": "0"}


def find_tools() -> Tools:
    """Raises Unavailable where tosa-tools is not installed."""
    try:
        release = version(DISTRIBUTION)
    except PackageNotFoundError:
        release = ""
    spec = find_spec("tosa_reference_model") if release else None
    if spec is None or spec.origin is None:
        raise Unavailable(f"the conformance suite needs Arm's tools: python3 -m pip install {DISTRIBUTION}")
    return Tools(Path(spec.origin).parents[1], release)


def storage(data: bytes | memoryview, dtype: DType, shape: Sequence[int]) -> Array:
    """Packed bytes as the array that the tools read and write. Raises ValueError if the byte count is wrong."""
    if dtype in _BITS:
        return np.frombuffer(data, _BITS[dtype]).reshape(shape)
    return unpack(data, dtype, shape)


def save(file: Path, data: bytes | memoryview, dtype: DType, shape: Sequence[int]) -> None:
    """Packed bytes as the .npy file that the tools read."""
    array = storage(data, dtype, shape)
    if dtype not in _DESCRIPTIONS:
        np.save(file, array)
        return
    with file.open("wb") as stream:
        header = {"descr": _DESCRIPTIONS[dtype], "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(stream, header)  # type: ignore[no-untyped-call]
        stream.write(array.tobytes())


class Generator:
    """The generate library: a tensor's data, from what a test's description says of it."""

    def __init__(self, tools: Tools) -> None:
        self._generate = ctypes.CDLL(str(tools.generate_library)).tgd_generate_data
        self._generate.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
        self._generate.restype = ctypes.c_bool

    def packed(self, description: Json, name: str) -> bytes:
        """The packed bytes of tensor `name`; `description` is the `data_gen` part of desc.json. Raises ToolFailed."""
        tensor = description["tensors"][name]
        dtype = DType[tensor["data_type"]]
        count = int(np.prod(tensor["shape"], dtype=np.int64))
        # The library writes shape values as int32.
        size = 4 * count if dtype == DType.SHAPE else packed_bytes(dtype, count)
        room = (ctypes.c_ubyte * size)()
        if not self._generate(json.dumps(description).encode(), name.encode(), room, size):
            raise ToolFailed(f"the generate library has no data for {name}")
        raw = bytes(room)
        return np.frombuffer(raw, "<i4").astype("<i8").tobytes() if dtype == DType.SHAPE else raw


class _CTensor(ctypes.Structure):
    """tosa_tensor_t of types.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int32)),
        ("num_dims", ctypes.c_int32),
        ("data_type", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    )


class Answer(NamedTuple):
    """The reference model's output in float64 where it is floating point, and the bound of its magnitude if asked."""

    right: Array
    bounds: Array | None


class Verifier:
    """The verify library: is an answer one that the standard allows, given the reference model's?"""

    def __init__(self, tools: Tools) -> None:
        self._verify = ctypes.CDLL(str(tools.verify_library)).tvf_verify_data
        pointer = ctypes.POINTER(_CTensor)
        self._verify.argtypes = [pointer, pointer, pointer, ctypes.c_char_p]
        self._verify.restype = ctypes.c_bool

    def accepts(self, description: Json, name: str, answer: Array, right: Array, bounds: Array | None) -> bool:
        """`description` is the `compliance` part of desc.json; arrays as `storage` gives them and the model wrote
        them. A difference is explained on this process's standard output, by the library itself."""
        dtype = DType[description["tensors"][name]["data_type"]]
        kept = [np.ascontiguousarray(array) for array in (right, bounds, answer) if array is not None]
        tensors = [_c_tensor(name, array, dtype) for array in kept]
        middle = ctypes.byref(tensors[1]) if bounds is not None else None
        text = json.dumps(description).encode()
        return bool(self._verify(ctypes.byref(tensors[0]), middle, ctypes.byref(tensors[-1]), text))


def _c_tensor(name: str, array: Array, dtype: DType) -> _CTensor:
    code = _FP64_CODE if array.dtype == np.float64 else _TYPE_CODES[dtype]
    shape = (ctypes.c_int32 * array.ndim)(*array.shape)
    pointer = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int32))
    return _CTensor(name.encode(), pointer, array.ndim, code, array.ctypes.data, array.nbytes)


class Reference:
    """The reference model in its precise mode. What took it long and is small is kept beside the test."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def outputs(self, description: Path, inputs: Callable[[Path], None], bounds: bool) -> list[Answer]:
        """The right answer of every output, and where `bounds` is set how large it could be.

        `description` is a test's desc.json; `inputs` puts its data and graph into a folder. Raises ToolFailed if the
        model calls the test an error or its result unpredictable.
        """
        wanted = json.loads(description.read_text())["ofm_file"]
        files = [*wanted, *(f"bounds_{name}" for name in wanted if bounds)]
        kept = description.parent / _KEPT
        if not all((kept / name).is_file() for name in files):
            with tempfile.TemporaryDirectory(prefix="virtaccel-") as name:
                folder = Path(name)
                inputs(folder)
                began = time.monotonic()
                self._run(folder, description)
                size = sum((folder / name).stat().st_size for name in files)
                if time.monotonic() - began < _WORTH_KEEPING_SECONDS or size > _WORTH_KEEPING_BYTES:
                    return _answers(folder, wanted, bounds)
                _keep(folder, kept, files)
        return _answers(kept, wanted, bounds)

    def _run(self, folder: Path, description: Path) -> None:
        command = [
            str(self._tools.reference_model),
            f"--test_desc={description}",
            f"--flatbuffer_dir={folder}",
            f"--output_dir={folder}",
            f"--operator_fbs={self._tools.schema}",
            "--tosa_level=EIGHTK",
            "--precise_mode=1",
        ]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=REFERENCE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ToolFailed(f"the reference model took more than {REFERENCE_SECONDS:.0f} s") from error
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise ToolFailed(f"the reference model ended with {done.returncode}: {' / '.join(lines[-3:])}")


def _answers(folder: Path, names: Sequence[str], bounds: bool) -> list[Answer]:
    return [Answer(np.load(folder / name), np.load(folder / f"bounds_{name}") if bounds else None) for name in names]


def _keep(folder: Path, kept: Path, files: Sequence[str]) -> None:
    """Files of one folder into another that appears complete or not at all."""
    work = Path(tempfile.mkdtemp(prefix=_KEPT, dir=kept.parent))
    for name in files:
        shutil.copyfile(folder / name, work / name)
    shutil.rmtree(kept, ignore_errors=True)
    work.rename(kept)
