"""Target `tosa`: files against reader, validator, specialisation and lowering; nothing is compiled.

Files are graphs of every operator, damaged or not: words replaced, pieces cut and moved, pointers turned round. Each
must end as a graph or a TosaError, in a second and without eating memory. What is valid must read the same again when
it is written, what needs a target must be valid for it, and a lowered model must have the graph's inputs
and outputs. Without the OpenVINO backend installed the last part is left out.
"""

from __future__ import annotations

import resource
import time
import warnings
import zlib
from collections.abc import Callable
from random import Random
from struct import Struct
from typing import Any, Final, NamedTuple

from virtaccel.harness.fuzz import tosa_graphs
from virtaccel.harness.fuzz.engine import gist
from virtaccel.harness.fuzz.target import WORDS, Finding, TargetBase, damaged
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Graph, Tensor, TosaError
from virtaccel.tosa_graph.specialise import specialise
from virtaccel.tosa_graph.validate import required, validate
from virtaccel.tosa_graph.write import encode

SECONDS: Final = 1.0  # of the processor; reading and lowering a file this small is far from it
MEMORY_KIB: Final = 100 << 10  # what grows beyond was not bounded by a file of a few kilobytes
SEEDS: Final = 400  # every operator once, and most of its types
UNKNOWN: Final = -1
_WORD: Final = Struct("<I")


class Lowering(NamedTuple):
    """The backend's lowering, and which variables of a graph become outputs of the model."""

    lower: Callable[[Graph], Any]
    written: Callable[[Graph], tuple[Tensor, ...]]


def find_lowering() -> Lowering | None:
    """What the OpenVINO backend has, if it is installed."""
    try:
        import virtaccel.backend_openvino.lowering  # noqa: F401 - registers the operators
        from virtaccel.backend_openvino.lowering.builder import lower, written_variables
    except ImportError:
        return None
    return Lowering(lower, written_variables)


class TosaTarget(TargetBase):
    """See the module."""

    name = "tosa"

    def __init__(self) -> None:
        super().__init__()
        self._lower = find_lowering()
        self._seeds: list[bytes] = []
        warnings.simplefilter("ignore")  # numpy's, while constants are folded

    def seeds(self) -> list[bytes]:
        """Sound files, made once."""
        if not self._seeds:
            random = Random(1)
            self._seeds = [tosa_graphs.single(op, random) for op in tosa_graphs.OPERATORS]
            self._seeds += [tosa_graphs.fresh(random) for _ in range(SEEDS - len(self._seeds))]
        return self._seeds

    def generate(self, random: Random) -> bytes:
        if random.random() < 0.05:
            return tosa_graphs.fresh(random)
        return self._changed(random.choice(self.seeds()), random)

    def _changed(self, data: bytes, random: Random) -> bytes:
        """Mostly one or two words: a file of offsets that is cut anywhere is only ever refused for that."""
        if random.random() < 0.15 or len(data) < 64:
            return damaged(data, random)
        out = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            at = 4 * random.randrange(2, len(out) // 4)
            match random.randrange(6):
                case 0:
                    value = random.choice(WORDS) + random.randrange(-1, 2)
                case 1:
                    value = _WORD.unpack_from(out, at)[0] + random.choice((-8, -4, -1, 1, 4, 8))
                case 2:
                    value = _WORD.unpack_from(out, 4 * random.randrange(len(out) // 4))[0]
                case 3:
                    value = random.choice(tosa_graphs.EDGES)
                case 4:
                    out[at + random.randrange(4)] = random.randrange(77)
                    continue
                case _:
                    value = _WORD.unpack_from(out, at)[0] ^ 1 << random.randrange(32)
            _WORD.pack_into(out, at, value & 0xFFFFFFFF)
        return bytes(out)

    def execute(self, data: bytes) -> int:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        self._judge(data)
        taken = time.process_time() - start
        if taken > SECONDS:
            raise Finding(f"a file of {len(data)} bytes takes more than {SECONDS} s of the processor")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        if grown > MEMORY_KIB:
            raise Finding(f"a file takes more than {MEMORY_KIB >> 10} MiB of memory")
        return 1

    def _judge(self, data: bytes) -> None:
        try:
            graph = read(data)
        except TosaError as error:
            self._note("read", error)
            return
        try:
            validate(graph)
        except TosaError as error:
            self._note("valid", error)
            self._refused_throughout(graph)
            return
        if zlib.crc32(data) & 3 == 0:
            self._reads_the_same(graph)
        try:
            validate(graph, required(graph))
        except TosaError as error:
            raise Finding(f"not valid for the target it needs: {error}") from error
        self._lowers(graph)

    def _note(self, where: str, error: Exception) -> None:
        self.features.add((where, gist(error)))

    def _reads_the_same(self, graph: Graph) -> None:
        if any(len(region.blocks) != 1 for region in graph.regions):
            return
        try:
            written = encode(graph)
        except (TosaError, ValueError, KeyError, OverflowError, TypeError) as error:
            raise Finding(f"what was read cannot be written: {error}") from error
        again = read(written)
        if again != graph:
            raise Finding("what was read does not read the same once it is written")

    def _refused_throughout(self, graph: Graph) -> None:
        """Other ways into a graph that is not valid end as orderly."""
        for act in (lambda: required(graph), lambda: specialise(graph, _known(graph))):
            try:
                act()
            except TosaError as error:
                self._note("other", error)

    def _lowers(self, graph: Graph) -> None:
        if any(UNKNOWN in tensor.shape for tensor in (*graph.inputs, *graph.outputs)):
            try:
                graph = specialise(graph, _known(graph))
            except TosaError as error:
                self._note("specialise", error)
                return
        if self._lower is None:
            return
        try:
            model = self._lower.lower(graph)
        except (TosaError, RuntimeError) as error:  # the runtime's own checks are RuntimeErrors, and refuse as well
            self._note("lower", error)
            return
        self.features.add(("lowered", tuple(sorted({operator.op for operator in graph.main.operators}))[:4]))
        inputs, outputs = (*graph.inputs, *graph.variables), (*graph.outputs, *self._lower.written(graph))
        for what, ports, tensors in (("input", model.inputs, inputs), ("output", model.outputs, outputs)):
            if len(ports) != len(tensors):
                raise Finding(f"a lowered model has {len(ports)} {what}s, the graph {len(tensors)}")
            for port, tensor in zip(ports, tensors, strict=True):
                # The runtime has no 48-bit integers: the backend makes three words of each.
                words = (3,) if tensor.dtype is DType.INT48 else ()
                if tuple(port.shape) != tensor.shape + words:
                    raise Finding(f"a lowered {what} has shape {tuple(port.shape)}, the graph's {tensor.shape}")


def _known(graph: Graph) -> list[tuple[int, ...]]:
    return [tuple(2 if size == UNKNOWN else size for size in tensor.shape) for tensor in graph.inputs]
