"""One conformance test, ready for a device: an artifact with its constants in it, target words, input data, what to
expect.

The suite is generated with data left out: desc.json says how the generate library makes each tensor, or names a file.
Inputs of the program stay inputs; a named tensor that a CONST produces belongs into the artifact (which then is what a
model converter would have written).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from virtaccel.harness.conformance.suite import EXTENSIONS, PROFILES, Entry
from virtaccel.harness.conformance.tools import Generator, ToolFailed, save
from virtaccel.tosa_graph.elements import pack
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Graph, Op, Tensor, TosaError
from virtaccel.tosa_graph.specialise import fill_constants, specialise
from virtaccel.tosa_graph.target import ALL_PROFILES, NO_EXTENSION, NO_PROFILE, Target, to_words
from virtaccel.tosa_graph.validate import validate
from virtaccel.tosa_graph.write import encode

_UNKNOWN_VERSION: Final = (1, 0, 0)


class BadTest(Exception):
    """The test cannot be run as its description says."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test. `graph` is None where the file cannot be read, which a negative test may intend; `data` are packed bytes
    of every tensor that desc.json names, by name; `unconstant` says why constants could not be put into `artifact`."""

    folder: Path
    description: dict[str, Any]
    artifact: bytes
    graph: Graph | None
    target: Target
    data: dict[str, bytes]
    unconstant: str | None = None

    @property
    def negative(self) -> bool:
        return bool(self.description["expected_failure"])

    @property
    def expected_failure(self) -> str:
        """What is wrong with a negative test, in the suite's words."""
        details = self.description.get("test_details", {})
        return str(details.get("ERRORIF") or self.description.get("expected_failure_desc") or "an error")

    @property
    def words(self) -> tuple[int, ...]:
        """Target words of LOAD_PROGRAM: what the test is for, and nothing more."""
        version = self.graph.version if self.graph is not None else None
        numbers = _UNKNOWN_VERSION if version is None else (version.major, version.minor, version.patch)
        return to_words(self.target, numbers)

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """Name and file name of each output."""
        return list(zip(self.description["ofm_name"], self.description["ofm_file"], strict=True))

    def rule(self) -> str | None:
        """The rule of the standard that the artifact breaks, as this project's validation sees it."""
        if self.graph is None or self.unconstant is not None:
            return self.unconstant or "not a TOSA file"
        try:
            validate(self.graph, self.target)
        except TosaError as error:
            return str(error)
        return None

    def write_inputs(self, folder: Path) -> None:
        """Put every named tensor's data, and the graph, where the reference model finds them."""
        (folder / self.description["tosa_file"]).write_bytes((self.folder / self.description["tosa_file"]).read_bytes())
        for name, file in zip(self.description["ifm_name"], self.description["ifm_file"], strict=True):
            tensor = self._declared(name)
            save(folder / file, self.data[name], tensor.dtype, tensor.shape)

    def _declared(self, name: str) -> Tensor:
        assert self.graph is not None, "only a test that can be read has inputs"
        tensor = next((t for r in self.graph.regions for t in (r.blocks[0].tensors.get(name),) if t is not None), None)
        if tensor is None:
            raise BadTest(f"the graph has no tensor {name}")
        shape = tuple(self._shape(name) or tensor.shape)
        return replace(tensor, shape=shape)

    def _shape(self, name: str) -> list[int] | None:
        """The shape of the data, where the description says: the graph's may have unknown dimensions."""
        tensors = self.description.get("meta", {}).get("data_gen", {}).get("tensors", {})
        shape: list[int] | None = tensors.get(name, {}).get("shape")
        return shape

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the program's inputs, in order, every dimension known."""
        assert self.graph is not None
        return tuple(self._declared(tensor.name).shape for tensor in self.graph.inputs)

    def concrete_outputs(self) -> tuple[Tensor, ...]:
        """The program's outputs for the inputs' shapes, every dimension known."""
        assert self.graph is not None
        dynamic = any(-1 in tensor.shape for tensor in (*self.graph.inputs, *self.graph.outputs))
        return (specialise(self.graph, self.input_shapes()) if dynamic else self.graph).outputs


def load(folder: Path, entry: Entry, generator: Generator) -> Case:
    """Read a test's folder. Raises BadTest."""
    description = json.loads((folder / "desc.json").read_text())
    artifact = (folder / description["tosa_file"]).read_bytes()
    target = target_of(entry)
    try:
        graph = read(artifact)
    except TosaError as error:
        if not description["expected_failure"]:
            raise BadTest(f"the test's graph cannot be read: {error}") from error
        return Case(folder, description, artifact, None, target, {})
    constants = _constants(graph) & set(description["ifm_name"])
    wanted = constants if description["expected_failure"] else set(description["ifm_name"])
    try:
        data = {name: _data(folder, description, name, graph, generator) for name in wanted}
    except (ToolFailed, KeyError, ValueError, OSError) as error:
        raise BadTest(f"no data for the test: {error}") from error
    case = Case(folder, description, artifact, graph, target, data)
    if constants:
        case = _with_constants(case, constants)
    return _with_profiles(case)


def _with_profiles(case: Case) -> Case:
    """Loops of floating-point tests count in INT32, which takes the other profile too, though the suite names only one.
    A negative test is to fail for its own rule, not for want of a profile; a few are of a type that only their profile
    lacks."""
    wide = replace(case, target=replace(case.target, profiles=ALL_PROFILES))
    if case.negative:
        return case if wide.rule() is None else wide
    return case if case.rule() is None else wide


def _with_constants(case: Case, constants: set[str]) -> Case:
    assert case.graph is not None
    try:
        filled = fill_constants(case.graph, {name: case.data[name] for name in constants})
    except TosaError as error:
        if not case.negative:
            raise BadTest(str(error)) from error
        return replace(case, unconstant=str(error))
    return replace(case, graph=filled, artifact=encode(filled))


def _constants(graph: Graph) -> set[str]:
    """Names of what CONST operators produce, in any region."""
    return {
        name
        for region in graph.regions
        for operator in region.blocks[0].operators
        if operator.op == Op.CONST
        for name in operator.outputs
    }


def _data(folder: Path, description: dict[str, Any], name: str, graph: Graph, generator: Generator) -> bytes:
    """Packed bytes of a named tensor: from its file if there is one, else made."""
    file = folder / description["ifm_file"][description["ifm_name"].index(name)]
    if not file.is_file():
        return generator.packed(description["meta"]["data_gen"], name)
    dtype = next(r.blocks[0].tensors[name].dtype for r in graph.regions if name in r.blocks[0].tensors)
    array = np.load(file)
    if array.dtype.kind == "V" or dtype in (DType.FP8E4M3, DType.FP8E5M2):
        return bytes(array.tobytes())
    return pack(array, dtype)


def target_of(entry: Entry) -> Target:
    """The least that a device must offer for a test: one profile of those it is for, all extensions it needs."""
    profiles = NO_PROFILE
    for name in entry.profiles[:1]:
        profiles |= PROFILES[name]
    extensions = NO_EXTENSION
    for name in entry.extensions:
        extensions |= EXTENSIONS[name]
    return Target(profiles or ALL_PROFILES, extensions)
