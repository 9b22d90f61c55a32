"""From a guest's artifact to something that runs: read, validate, lower, compile; shared, specialised, explained.

One `Source` stands for one artifact on one device, shared by every program loaded from the same bytes in this process;
its variants are compiled models, one for each set of concrete input shapes. A `Program` is what a guest holds: a source
and pools of infer requests of its own. TOSA artifacts: format 0x544F5341, slots are inputs, then outputs, then
VARIABLE tensors, each in order.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import openvino as ov

from virtaccel.backend_openvino import compile as runtime
from virtaccel.backend_openvino.bindings import (
    UNKNOWN,
    argument_of,
    arguments,
    buffer_of,
    guards_for,
    resolved,
    within,
)
from virtaccel.backend_openvino.loader import Job
from virtaccel.backend_openvino.lowering.builder import BUILT_IN, Builder, has_loops, lower, written_variables
from virtaccel.backend_openvino.lowering.ranges import FLOATS, bounded
from virtaccel.backend_openvino.lowering.registry import RECORDS, Refused
from virtaccel.backend_openvino.requests import Call, Executable, Range, Request, Shapes, Slot
from virtaccel.backend_openvino.store import Store
from virtaccel.device.backend import BackendError, Binding
from virtaccel.device.wire import Access, Status
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import Graph, Op, Tensor, TosaError, packed_bytes
from virtaccel.tosa_graph.specialise import specialise
from virtaccel.tosa_graph.target import ALL_EXTENSIONS, ALL_PROFILES, Extension, Target, from_words, to_words
from virtaccel.tosa_graph.validate import required, validate

log = logging.getLogger(__name__)

MAX_VARIANTS = 16
"""Compiled models kept for one source; the one used longest ago goes first."""
MAX_GUARDED_BYTES = 4 << 20
"""Inputs looked through before each submission; where they are larger, programs are compiled for any input at once."""
MAX_CALLS = 16
"""Sets of bindings that one program remembers."""

_CROWD = 2
"""With so many others under way, the time of one submission matters less than how many end in a second."""
_STEADY, _CROWDED = 32, 64
"""A count goes up by 1, to the second, for a submission in a crowd, and down for one that comes alone. From the first
on, the model for crowds is compiled and used: not for some runs of a crowd only, since the two models' runs would get
in each other's way."""
_ALONE = 4
"""By how much it goes down."""


class Variant(NamedTuple):
    """Which of a source's models: for these input shapes; for inputs within the source's limit only, or for any; for
    one run at a time on all threads, or for many at a time on a thread each."""

    shapes: Shapes
    within: bool
    crowded: bool = False


class Compiled(NamedTuple):
    """A model, and what the magnitudes of its inputs are bounded by, None if by nothing."""

    model: ov.CompiledModel
    limit: float | None


class Compiler(Protocol):
    """Compiles in another process, so that what goes wrong there is the end of that process alone."""

    def compile(self, payload: bytes, target_words: tuple[int, ...], variant: Variant, host: Host) -> Compiled:
        """As `compile_here` on what `payload` holds. Raises BackendError."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where programs are compiled, and how; in this process unless there is an `compiler`."""

    device: str
    tuning: runtime.Tuning
    offered: Target
    compiler: Compiler | None = field(default=None, compare=False, repr=False)
    store: Store | None = field(default=None, compare=False, repr=False)


_OFFERED = ALL_EXTENSIONS & ~(Extension.FP8E4M3 | Extension.FP8E5M2)


def offered(device: str) -> Target:
    """Profiles and extensions that programs may ask for on this device."""
    extensions = _OFFERED
    if runtime.runs_fp8(device):
        extensions |= Extension.FP8E4M3 | Extension.FP8E5M2
    return Target(ALL_PROFILES, extensions)


def admit(payload: bytes, target_words: tuple[int, ...], host: Host) -> tuple[Graph, Target]:
    """The graph, read and validated. Raises BackendError: INVALID_ARGUMENT for what is not a TOSA file, INCOMPATIBLE
    for a target not offered and for a graph that is not valid within it."""
    try:
        target = from_words(target_words)
    except TosaError as error:
        raise BackendError(Status.INCOMPATIBLE, str(error)) from error
    if not host.offered.covers(target.profiles, target.extensions):
        raise BackendError(Status.INCOMPATIBLE, f"this device offers {host.offered}, the program asks for {target}")
    try:
        graph = read(payload)
    except TosaError as error:
        raise BackendError(Status.INVALID_ARGUMENT, str(error)) from error
    try:
        validate(graph, target)
    except TosaError as error:
        raise BackendError(Status.INCOMPATIBLE, str(error)) from error
    return graph, target


class Source:
    """One artifact on one device. Safe to use from several threads."""

    def __init__(
        self, graph: Graph, target: Target, host: Host, payload: bytes, target_words: tuple[int, ...], key: bytes
    ) -> None:
        self.graph = graph
        self._key = key
        self.host = host
        self.target = target
        self._artifact = (payload, target_words) if host.compiler is not None else None
        self.arguments = tuple(
            [argument_of(tensor, Access.READ) for tensor in graph.inputs]
            + [argument_of(tensor, Access.WRITE) for tensor in graph.outputs]
            + [argument_of(tensor, Access.READ_WRITE) for tensor in graph.variables]
        )
        self.inputs = len(graph.inputs)
        self.dynamic = any(argument.bytes < 0 for argument in self.arguments)
        self._variants: OrderedDict[Variant, Executable] = OrderedDict()
        self._lock = threading.Lock()

    def declared(self) -> Shapes:
        """Input shapes as the artifact has them."""
        return tuple(argument.shape for argument in self.arguments[: self.inputs])

    def ready(self, variant: Variant) -> Executable | None:
        """The model compiled for this variant, if there is one."""
        with self._lock:
            found = self._variants.get(variant)
            if found is not None and len(self._variants) > 1:
                self._variants.move_to_end(variant)
            return found

    def compile(self, variant: Variant) -> Executable:
        """Compile a variant. Takes long. Raises BackendError: INCOMPATIBLE, with a reason that names the operator, for
        what this device does not run as TOSA defines it."""
        found = self.ready(variant)
        if found is not None:
            return found
        graph = concrete(self.graph, self.target, variant)
        compiled, limit = self._compiled(graph, variant)
        slots = _slots(graph, compiled)
        guards = guards_for(slots[: len(graph.inputs)], limit) if limit is not None else ()
        steps = len(compiled.outputs) - 1 if has_loops(graph) else None
        executable = Executable(compiled, slots, guards, steps)
        with self._lock:
            self._variants[variant] = executable
            while len(self._variants) > MAX_VARIANTS:
                self._variants.popitem(last=False)
        return executable

    def _compiled(self, graph: Graph, variant: Variant) -> Compiled:
        """The variant's model, from the store if one is kept and has it. Raises BackendError."""
        host = self.host
        if variant.crowded:
            host = replace(host, tuning=replace(host.tuning, throughput=True))
        store = host.store
        path = store.path(self._key, repr(variant), host.device, host.tuning) if store is not None else None
        if store is not None and path is not None:
            kept = store.load(path, host.device, host.tuning)
            if kept is not None:
                return Compiled(*kept)
        if host.compiler is None or self._artifact is None:
            made = compile_here(graph, variant.within, host)
        else:
            made = host.compiler.compile(*self._artifact, variant, host)
        if store is not None and path is not None:
            store.save(path, *made)
        return made


def concrete(graph: Graph, target: Target, variant: Variant) -> Graph:
    """The graph with a variant's shapes. Raises BackendError: INCOMPATIBLE if it is not valid with them."""
    if all(UNKNOWN not in tensor.shape for tensor in (*graph.inputs, *graph.outputs, *graph.variables)):
        return graph
    try:
        return specialise(graph, variant.shapes, target)
    except TosaError as error:
        raise BackendError(Status.INCOMPATIBLE, str(error)) from error


def compile_here(graph: Graph, within: bool, host: Host) -> Compiled:
    """Lower and compile; for bounded inputs only if `within` and that is worth while. Raises BackendError."""
    try:
        bounds = bounded(graph) if within and _guarded_bytes(graph) <= MAX_GUARDED_BYTES else None
        model = lower(graph, bounds.tensors if bounds is not None else ())
        compiled = runtime.compile_model(model, host.device, host.tuning)
    except (BackendError, MemoryError):
        raise
    except (TosaError, runtime.PrecisionRefused) as error:
        raise BackendError(Status.INCOMPATIBLE, str(error)) from error
    except RuntimeError as error:
        raise BackendError(Status.INCOMPATIBLE, f"OpenVINO does not compile it: {error}") from error
    except Exception as error:  # a fault of ours that a guest's graph has found costs that graph, not the device
        log.exception("lowering failed")
        raise BackendError(Status.INTERNAL_ERROR, f"lowering failed: {error}") from error
    return Compiled(compiled, bounds.limit if bounds is not None else None)


def _guarded_bytes(graph: Graph) -> int:
    return sum(packed_bytes(tensor.dtype, math.prod(tensor.shape)) for tensor in graph.inputs if tensor.dtype in FLOATS)


def _slots(graph: Graph, compiled: ov.CompiledModel) -> list[Slot]:
    """Slots in the order of `Source.arguments`; ports as `lower` orders them."""
    inputs, outputs = (*graph.inputs, *graph.variables), (*graph.outputs, *written_variables(graph))
    if len(compiled.inputs) != len(inputs) or len(compiled.outputs) != len(outputs) + has_loops(graph):
        raise BackendError(Status.INCOMPATIBLE, "the compiled model has other inputs or outputs than the graph")
    first = {tensor.name: port for port, tensor in enumerate(graph.variables, len(graph.inputs))}
    second = {tensor.name: port for port, tensor in enumerate(outputs) if tensor.variable}
    wanted: list[tuple[Tensor, int | None, int | None]] = [(one, port, None) for port, one in enumerate(graph.inputs)]
    wanted += [(tensor, None, port) for port, tensor in enumerate(graph.outputs)]
    wanted += [(tensor, first[tensor.name], second.get(tensor.name)) for tensor in graph.variables]
    slots = []
    for tensor, source, target in wanted:
        port = compiled.inputs[source] if source is not None else compiled.outputs[target or 0]
        size = packed_bytes(tensor.dtype, math.prod(tensor.shape))
        slots.append(Slot(tensor.dtype, size, source, target, port.get_element_type(), port.get_shape()))
    return slots


# ---- sharing

_sources: weakref.WeakValueDictionary[bytes, Source] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def digest(payload: bytes, target_words: tuple[int, ...], host: Host) -> bytes:
    """Key of an artifact on a device."""
    found = hashlib.sha256(repr((target_words, host)).encode() + b"\0")
    found.update(payload)
    return found.digest()


def shared(key: bytes) -> Source | None:
    """A source loaded already, and still in use, in this process."""
    with _sharing:
        return _sources.get(key)


def load(payload: bytes, target_words: tuple[int, ...], host: Host, key: bytes | None = None) -> Source:
    """Read, validate, lower and compile; a graph with unknown dimensions is lowered and compiled when they are known.
    `key` is the artifact's digest, if it has been made. Raises BackendError."""
    if key is None:
        key = digest(payload, target_words, host)
    known = shared(key)
    if known is not None:
        return known
    graph, target = admit(payload, target_words, host)
    source = Source(graph, target, host, payload, target_words, key)
    if source.dynamic:
        _refuse_unknown_operators(source.graph)
    else:
        source.compile(Variant(source.declared(), True))
    with _sharing:
        return _sources.setdefault(key, source)


def _refuse_unknown_operators(graph: Graph) -> None:
    for region in graph.regions:
        for block in region.blocks:
            for operator in block.operators:
                if operator.op not in RECORDS and operator.op not in BUILT_IN:
                    raise BackendError(Status.INCOMPATIBLE, f"{operator.op.name}: not run by this backend")


# ---- what a guest holds


class Program:
    """A loaded program: the source, and what it was bound to lately. `later` runs work off the loop."""

    def __init__(self, context: object, source: Source, later: Callable[[Callable[[], Executable]], Job[Executable]]):
        self.context = context
        self.source = source
        self._later = later
        self._calls: OrderedDict[tuple[Binding, ...], Call] = OrderedDict()
        self._latest: tuple[Sequence[Binding], Call] | None = None
        self._spare: Request | None = None
        self._jobs: dict[Variant, Job[Executable]] = {}
        tuning = source.host.tuning
        self._crowds = not tuning.throughput and tuning.threads != 1
        self._crowd = 0

    def call(self, bindings: Sequence[Binding]) -> Call:
        """The program bound like this. Raises BackendError if the bindings do not fit."""
        latest = self._latest
        if latest is not None and latest[0] is bindings and not latest[1].dead:
            return latest[1]
        key = tuple(bindings)
        call = self._calls.get(key)
        if call is None or call.dead:
            call = self._calls[key] = self._bound(key)
            if len(self._calls) > MAX_CALLS:
                self._retire()
        elif len(self._calls) > 1:
            self._calls.move_to_end(key)
        self._latest = (key, call)
        return call

    def _retire(self) -> None:
        """Forget the bindings used longest ago; one idle request of theirs is kept to be bound anew."""
        _, call = self._calls.popitem(last=False)
        if call.idle:
            self._spare = call.idle.popitem()[1]
        call.let_go()

    def _bound(self, bindings: tuple[Binding, ...]) -> Call:
        ordered, reads, writes = arguments(self.source.arguments, bindings)
        sizes = tuple([binding.bytes for binding in ordered])
        shapes = self._shapes(sizes)
        ranges = tuple([Range(buffer_of(binding), binding.offset) for binding in ordered])
        return Call(ranges, sizes, shapes, reads, writes)

    def _shapes(self, sizes: tuple[int, ...]) -> Shapes:
        """Concrete input shapes for slots bound to ranges of these sizes (bytes). Raises BackendError INCOMPATIBLE."""
        shapes: list[tuple[int, ...]] = []
        for argument, size in zip(self.source.arguments, sizes, strict=True):
            if argument.bytes >= 0 and size != argument.bytes:
                reason = f"slot of {argument.bytes} bytes ({argument.dtype.name} {argument.shape}) bound to {size}"
                raise BackendError(Status.INCOMPATIBLE, reason)
            if len(shapes) < self.source.inputs:
                shapes.append(resolved(argument, size))
        return tuple(shapes)

    def prepare(self, call: Call, beside: int) -> Request | None:
        """A request bound to the call's ranges; None while its model is being compiled, or runs and the call has no
        request yet: making one would block until that run ends. `beside` are the submissions under way, of any program.
        Raises BackendError."""
        executable = call.executable
        if executable is None:
            executable = self._executable(Variant(call.shapes, True))
            if executable is None:
                return None
            if any(slot.bytes != size for slot, size in zip(executable.slots, call.sizes, strict=True)):
                raise BackendError(Status.INCOMPATIBLE, "an output's binding has another size than the output")
            call.executable = executable
        if self._crowds:
            executable = self._for_crowd(executable, call, beside)
        if executable not in call.idle and self._spare is None and executable.at_work():
            return None  # before inputs are looked at, which a later try would have to do again
        if executable.guards and not within(executable, call):
            executable = self._executable(Variant(call.shapes, False))
            if executable is None:
                return None
        request = call.idle.pop(executable, None)
        return request if request is not None else self._request(executable, call)

    def _for_crowd(self, executable: Executable, call: Call, beside: int) -> Executable:
        """The model for crowds, if there has been one for a while; else the other."""
        if beside >= _CROWD:
            self._crowd = min(self._crowd + 1, _CROWDED)
        elif not beside and self._crowd:
            self._crowd = max(self._crowd - _ALONE, 0)
        if self._crowd < _STEADY:
            return executable
        try:
            return self._executable(Variant(call.shapes, True, True)) or executable
        except BackendError as error:
            log.warning("no model for many submissions at a time: %s", error)
            self._crowds = False
            return executable

    def _request(self, executable: Executable, call: Call) -> Request | None:
        spare = self._spare
        fits = spare is not None and spare.executable is executable
        if not fits and executable.at_work():
            return None
        self._spare = None
        request = spare if spare is not None and fits else Request(executable)
        request.bind(call.ranges)
        return request

    def _executable(self, variant: Variant) -> Executable | None:
        """The model, or None while it is being compiled off the loop."""
        found = self.source.ready(variant)
        if found is not None:
            return found
        job = self._jobs.get(variant)
        if job is None:
            source = self.source
            job = self._jobs[variant] = self._later(lambda: source.compile(variant))
        if not job.done:
            return None
        del self._jobs[variant]
        return job.result()

    def unload(self) -> None:
        """Let idle requests go; running ones go when they end."""
        for job in self._jobs.values():
            job.abandon()
        for call in self._calls.values():
            call.let_go()
        self._calls.clear()
        self._latest = self._spare = None


# ---- telling people


class Verdict(NamedTuple):
    """What the device says of one operator; `reason` is None if it is run."""

    op: Op
    outputs: tuple[str, ...]
    reason: str | None
    how: str


def explain(payload: bytes, target_words: tuple[int, ...] | None, host: Host) -> list[Verdict]:
    """A verdict for each operator of the main block, in order; None stands for the least target that would do.

    Unknown dimensions are taken as 1. Raises BackendError if the artifact is refused as a whole.
    """
    if target_words is None:
        try:
            target_words = to_words(required(read(payload)))
        except TosaError as error:
            raise BackendError(Status.INVALID_ARGUMENT, str(error)) from error
    graph, target = admit(payload, target_words, host)
    if any(UNKNOWN in tensor.shape for tensor in graph.inputs):
        shapes = [tuple(1 if size == UNKNOWN else size for size in tensor.shape) for tensor in graph.inputs]
        graph = specialise(graph, shapes, target)
    builder = Builder(graph, graph.main)
    builder.parameters()
    verdicts = []
    for operator in graph.main.operators:
        reason = None
        try:
            builder.emit(operator)
        except Refused as error:
            reason = str(error)
            builder.stand_in(operator)
        how = RECORDS[operator.op].how if operator.op in RECORDS else ""
        verdicts.append(Verdict(operator.op, operator.outputs, reason, how))
    return verdicts
