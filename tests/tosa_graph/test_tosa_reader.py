"""The bounded reader: good files as an independent reader (flatc) sees them, and hostile ones (H1, H3)."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import tempfile
import time
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tosa_reference_model
from graphs import Const, Dims, single

from virtaccel.tosa_graph.encoding import ReadLimits
from virtaccel.tosa_graph.flatbuffer import read
from virtaccel.tosa_graph.graph import DType, Graph, Op, TosaError
from virtaccel.tosa_graph.validate import validate
from virtaccel.tosa_graph.write import GraphWriter

FLATC = Path(tosa_reference_model.__file__).parents[1] / "bin" / "flatc"
SCHEMA = FLATC.with_name("tosa.fbs")
ADD = single(Op.ADD, [((2, 3), DType.FP32), Const(np.ones((2, 3), np.float32))], ((2, 3), DType.FP32))


def chain(count: int) -> bytes:
    writer = GraphWriter()
    value = writer.input("x", (2,), DType.FP32)
    for _ in range(count):
        value = writer.operator(Op.ABS, [value], ((2,), DType.FP32))
    writer.output(value)
    return writer.to_bytes()


@cache
def longest_admitted() -> float:
    """Seconds that a graph of as many operators as are admitted takes here, with its memory traced."""
    data = chain(10_000)
    tracemalloc.start()
    began = time.monotonic()
    validate(read(data))
    taken = time.monotonic() - began
    tracemalloc.stop()
    return taken


def expect_refused(data: bytes) -> str:
    """The reason why reading or validating fails; no later than good files are read, and within 100 MB."""
    bound = longest_admitted()
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(TosaError) as caught:
            validate(read(data))
        assert time.monotonic() - started < bound
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    return str(caught.value)


def survives(data: bytes) -> None:
    """A graph or TosaError, nothing else."""
    with contextlib.suppress(TosaError):
        graph = read(data)
        assert isinstance(graph, Graph)
        validate(graph)


def as_flatc_reads(path: Path, folder: Path) -> dict[str, object]:
    """The file as JSON, by Google's own FlatBuffers compiler."""
    command = [FLATC, "--json", "--strict-json", "--defaults-json", "--raw-binary", "-o", folder, SCHEMA, "--", path]
    subprocess.run(list(map(str, command)), check=True, timeout=60)
    loaded: dict[str, object] = json.loads((folder / path.with_suffix(".json").name).read_text())
    return loaded


def assert_same_as_flatc(graph: Graph, expected: dict) -> None:  # type: ignore[type-arg]
    for region, other in zip(graph.regions, expected["regions"], strict=True):
        (block,), (seen,) = region.blocks, other["blocks"]
        assert list(block.inputs) == seen["inputs"]
        assert list(block.outputs) == seen["outputs"]
        assert list(block.tensors) == [tensor["name"] for tensor in seen["tensors"]]
        for tensor, entry in zip(block.tensors.values(), seen["tensors"], strict=True):
            assert (list(tensor.shape), tensor.dtype.name) == (entry["shape"], entry["type"])
            assert (tensor.variable, tensor.variable_name) == (entry["variable"], entry.get("variable_name", ""))
            data = bytes(entry.get("data", []))
            assert data.startswith(tensor.data or b"")
            assert not any(data[len(tensor.data or b"") :])
        for shape, entry in zip(block.shapes.values(), seen.get("shapes", []), strict=True):
            assert (shape.name, shape.rank) == (entry["name"], entry["rank"])
            assert np.frombuffer(bytes(entry.get("data", [])), "<i8").tolist()[: shape.rank] == list(shape.values or ())
        for operator, entry in zip(block.operators, seen["operators"], strict=True):
            assert list(operator.inputs) == entry.get("inputs", [])
            assert list(operator.outputs) == entry.get("outputs", [])
            for name, value in operator.attributes.items():
                given = entry["attribute"].get(name)
                if isinstance(value, tuple | bytes):
                    assert list(value) == given
                elif isinstance(given, bool | int):
                    assert value == given


@pytest.mark.parametrize("folder", ["models", "fixtures/tosa"])
def test_reads_what_flatc_reads(shared: Path, tmp_path: Path, folder: str) -> None:
    paths = [path for path in sorted((shared / folder).glob("*.tosa")) if path.stat().st_size < 300_000]
    assert len(paths) >= 4  # flatc's JSON of a constant is ten times its size: the large models are left out
    for path in paths:
        assert_same_as_flatc(read(path.read_bytes()), as_flatc_reads(path, tmp_path))


@pytest.mark.parametrize("folder", ["models", "fixtures/tosa"])
def test_good_files_are_valid(shared: Path, folder: str) -> None:
    for path in sorted((shared / folder).glob("*.tosa")):
        validate(read(path.read_bytes()))


def test_variable_accesses_written_as_identity(shared: Path) -> None:
    graph = read((shared / "models" / "okay_nabu.tosa").read_bytes())
    ops = [operator.op for operator in graph.main.operators]
    assert ops.count(Op.VARIABLE_READ) == ops.count(Op.VARIABLE_WRITE) == len(graph.variables) == 6


def test_accepts_any_buffer() -> None:
    assert read(bytearray(ADD)) == read(memoryview(ADD)) == read(ADD)


def test_h1_truncated_at_every_length() -> None:
    for length in range(len(ADD)):
        survives(ADD[:length])
    for length in range(200):
        with pytest.raises(TosaError):
            read(ADD[:length])


def test_h1_every_byte_flipped() -> None:
    for position in range(len(ADD)):
        for mask in (0xFF, 0x01, 0x80, 0x04):
            flipped = bytearray(ADD)
            flipped[position] ^= mask
            survives(bytes(flipped))


def root_table(data: bytes) -> int:
    return int(struct.unpack_from("<I", data)[0])


def patched(data: bytes, position: int, form: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, position, value)
    return bytes(changed)


@pytest.mark.parametrize("offset", [2**31 - 1, -(2**31), 1 << 20, -(1 << 20)])
def test_h1_vtable_outside(offset: int) -> None:
    assert "outside" in expect_refused(patched(ADD, root_table(ADD), "<i", offset))


@pytest.mark.parametrize("root", [0, 3, 0xFFFFFFFF, 0x7FFFFFFF, len(ADD), len(ADD) - 3])
def test_h1_root_outside(root: int) -> None:
    assert "outside" in expect_refused(patched(ADD, 0, "<I", root))


@pytest.mark.parametrize("length", [2**31, 2**32 - 1, 2**30, 100_000])
def test_h1_vector_of_2_to_the_31(length: int) -> None:
    root = root_table(ADD)
    vtable = root - struct.unpack_from("<i", ADD, root)[0]
    field = root + struct.unpack_from("<H", ADD, vtable + 4 + 2)[0]  # regions
    vector = field + struct.unpack_from("<I", ADD, field)[0]
    assert "vector's end" in expect_refused(patched(ADD, vector, "<I", length))


def shared_operators(count: int) -> bytes:
    """A file with a vector of operators that all lie at one place: written by hand, no library would."""
    writer = GraphWriter()
    writer.constant(np.zeros(1, np.float32))
    data = writer.to_bytes()
    root = root_table(data)
    field = root + struct.unpack_from("<H", data, root - struct.unpack_from("<i", data, root)[0] + 6)[0]
    regions = field + struct.unpack_from("<I", data, field)[0]
    region = regions + 4 + struct.unpack_from("<I", data, regions + 4)[0]
    blocks_field = region + struct.unpack_from("<H", data, region - struct.unpack_from("<i", data, region)[0] + 6)[0]
    blocks = blocks_field + struct.unpack_from("<I", data, blocks_field)[0]
    block = blocks + 4 + struct.unpack_from("<I", data, blocks + 4)[0]
    slot = block + struct.unpack_from("<H", data, block - struct.unpack_from("<i", data, block)[0] + 6)[0]
    vector = slot + struct.unpack_from("<I", data, slot)[0]
    operator = vector + 4 + struct.unpack_from("<I", data, vector + 4)[0]
    # Forward offsets only: copy everything from the operator on behind the new vector.
    tail = data[operator - 64 :]
    pad = b"\0" * (-len(data) % 8)
    new_vector = len(data) + len(pad)
    target = new_vector + 4 + 4 * count + 64
    entries = b"".join(struct.pack("<I", target - (new_vector + 4 + 4 * index)) for index in range(count))
    grown = data + pad + struct.pack("<I", count) + entries + tail
    return patched(grown, slot, "<I", new_vector - slot)


def test_h1_operators_share_a_table() -> None:
    assert "share a table" in expect_refused(shared_operators(10_000))


def test_h1_union_type_and_value_disagree() -> None:
    writer = GraphWriter()
    x = writer.input("x", (2,), DType.FP32)
    y = writer.tensor("y", (2,), DType.FP32)
    writer.place(Op.ABS, [x], [y], attribute_type=Op.CEIL)
    writer.output(y)
    assert "ABS carries the attributes of operator number 34" in expect_refused(writer.to_bytes())


@pytest.mark.parametrize("length", [0, 23, 25, 32, 4096])
def test_h1_data_of_another_length_than_the_shape(length: int) -> None:
    writer = GraphWriter()
    writer.output(writer.constant(np.zeros((2, 3), np.float32), data=b"\1" * length))
    assert "data" in expect_refused(writer.to_bytes())


def test_padding_of_constants_is_dropped() -> None:
    writer = GraphWriter()
    writer.output(writer.constant(np.array([1, 2, 3], np.int8), name="c", data=b"\1\2\3\0\0\0\0\0"))
    assert read(writer.to_bytes()).main.tensors["c"].data == b"\1\2\3"


def test_h1_a_mebibyte_of_zeros() -> None:
    assert "identifier" in expect_refused(bytes(1 << 20))
    assert "outside" in expect_refused(b"\0\0\0\0TOSA" + bytes(1 << 20))


def test_h1_tensors_share_one_large_constant() -> None:
    """A thousand constants of one mebibyte each, all over the same two mebibytes of the file."""
    writer = GraphWriter()
    writer.tensor("t0", (1 << 21,), DType.INT8, bytes(1 << 21))
    for index in range(1, 1000):
        writer.tensor(f"t{index}", (1 << 20,), DType.INT8, b"\x5a")
    data = writer.to_bytes().replace(struct.pack("<IB", 1, 0x5A), struct.pack("<IB", 1 << 20, 0x5A))
    assert data.count(struct.pack("<IB", 1 << 20, 0x5A)) == 999
    assert "overlap" in expect_refused(data)


@pytest.mark.parametrize(
    ("version", "draft"),
    [
        ((0, 80, 0), False),
        ((0, 80, 0), True),
        ((1, 1, 0), False),
        ((1, 2, 0), True),
        ((2, 0, 0), False),
        ((-1, 0, 0), True),
    ],
)
def test_h3_unknown_version(version: tuple[int, int, int], draft: bool) -> None:
    writer = GraphWriter(version, draft)
    writer.output(writer.input("x", (1,), DType.FP32))
    assert "version" in expect_refused(writer.to_bytes())


@pytest.mark.parametrize(("version", "draft"), [((1, 0, 0), False), ((1, 0, 2), True), ((1, 1, 0), True)])
def test_h3_known_versions(version: tuple[int, int, int], draft: bool) -> None:
    writer = GraphWriter(version, draft)
    writer.output(writer.input("x", (1,), DType.FP32))
    stamp = read(writer.to_bytes()).version
    assert (stamp.major, stamp.minor, stamp.patch, stamp.draft) == (*version, draft)


@pytest.mark.parametrize("number", [0, 77, 80, 101, 0xFFFFFFFF])
def test_h3_operators_of_a_later_draft(number: int) -> None:
    writer = GraphWriter()
    x = writer.input("x", (2,), DType.FP32)
    writer.place(number, [x], [writer.tensor("y", (2,), DType.FP32)], attribute_type=number & 0xFF)
    writer.output("y")
    assert f"operator number {number}" in expect_refused(writer.to_bytes())


@pytest.mark.parametrize("number", [0, 13, 17, 255])
def test_h3_element_types_of_a_later_draft(number: int) -> None:
    writer = GraphWriter()
    writer.tensor("x", (2,), number)  # type: ignore[arg-type]
    assert f"element type {number}" in expect_refused(writer.to_bytes())


def test_h3_const_shape_lives_in_the_shapes_table() -> None:
    graph = read(single(Op.RESHAPE, [((2, 3), DType.FP32), Dims((3, 2))], ((3, 2), DType.FP32)))
    (shape,) = graph.main.shapes.values()
    assert (shape.rank, shape.values) == (2, (3, 2))
    assert shape.name not in graph.main.tensors


def by_flatc(source: str) -> bytes:
    """A file as flatc writes it from JSON: what our writer cannot express."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "graph.json"
        path.write_text(source)
        subprocess.run([str(FLATC), "-b", "-o", name, str(SCHEMA), str(path)], check=True, timeout=60)
        return (Path(name) / "graph.tosa").read_bytes()


def one_tensor(fields: str) -> str:
    return (
        '{"version":{"_major":1,"_minor":1,"_patch":0},"regions":[{"name":"main","blocks":[{"name":"main",'
        '"tensors":[{"name":"x","shape":[1],"type":"INT8",' + fields + "}]}]}]}"
    )


@pytest.mark.parametrize("fields", ['"offset":64,"size":1', '"offset":64', '"size":1'])
def test_data_outside_the_file_are_refused(fields: str) -> None:
    assert "outside the FlatBuffer" in expect_refused(by_flatc(one_tensor(fields)))


@pytest.mark.parametrize(
    "fields", ['"scale_type":"FP8E4M3"', '"block_shape":"BLOCK_SHAPE_32"', '"scale_data":[1]', '"scale_size":3']
)
def test_block_scaling_is_refused(fields: str) -> None:
    assert "block scaling" in expect_refused(by_flatc(one_tensor(fields)))


def test_features_of_a_later_draft_are_refused() -> None:
    source = (
        '{"version":{"_major":1,"_minor":1,"_patch":0},"compatibility":{"features":2},'
        '"regions":[{"name":"main","blocks":[{"name":"main"}]}]}'
    )
    assert "features" in expect_refused(by_flatc(source))


@pytest.mark.parametrize(
    ("regions", "reason"),
    [
        ("[]", "no region"),
        ('[{"name":"main"}]', "no block"),
        ('[{"name":"a","blocks":[{}]},{"name":"a","blocks":[{}]}]', "two regions"),
        ('[{"name":"a","blocks":[{"inputs":["x"]}]}]', "'x', which is no tensor"),
        ('[{"name":"a","blocks":[{"tensors":[{"type":"INT8"}]}]}]', "no name"),
        ('[{"name":"a","blocks":[{"tensors":[{"name":"x","type":3},{"name":"x","type":3}]}]}]', "two tensors"),
        ('[{"name":"a","blocks":[{"tensors":[{"name":"x","type":3}],"shapes":[{"name":"x"}]}]}]', "two values"),
        ('[{"name":"a","blocks":[{"shapes":[{"name":"s","rank":2,"data":[1,2,3]}]}]}]', "rank 2"),
        ('[{"name":"a","blocks":[{"shapes":[{"name":"s","rank":4000000000}]}]}]', "rank"),
        ('[{"name":"a","blocks":[{"operators":[{"op":"ABS"}]}]}]', "ABS carries"),
    ],
)
def test_malformed_contents(regions: str, reason: str) -> None:
    source = '{"version":{"_major":1,"_minor":0,"_patch":0,"_draft":false},"regions":' + regions + "}"
    assert reason in expect_refused(by_flatc(source))


def test_h2_chained_operators_are_bounded() -> None:
    with pytest.raises(TosaError, match="more than 10000 operators"):
        read(chain(10_001))
    with pytest.raises(TosaError, match="more than 5 operators"):
        read(chain(6), ReadLimits(max_operators=5))
    assert len(read(chain(5), ReadLimits(max_operators=5)).main.operators) == 5


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ReadLimits(max_file_bytes=100), "100 bytes"),
        (ReadLimits(max_tensors=2), "2 tensors"),
        (ReadLimits(max_operands=1), "1 operands"),
        (ReadLimits(max_operator_operands=1), "1 operands"),
        (ReadLimits(max_block_operands=0), "0 operands"),
        (ReadLimits(max_rank=1), "more than 1 numbers"),
        (ReadLimits(max_name_bytes=3), "3 bytes"),
    ],
)
def test_limits(limits: ReadLimits, reason: str) -> None:
    with pytest.raises(TosaError, match=reason):
        read(ADD, limits)


def test_names_in_messages_are_bounded_and_printable() -> None:
    writer = GraphWriter()
    name = "\x1b[31m\n" * 500
    writer.tensor(name, (1,), DType.INT8)
    writer.tensor(name, (1,), DType.INT8)
    reason = expect_refused(writer.to_bytes())
    assert len(reason) < 300
    assert reason.isprintable()
