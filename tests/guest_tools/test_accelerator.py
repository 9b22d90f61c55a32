"""The API through a whole device with the OpenVINO backend: arrays in, arrays out, checks, reuse, giving back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from graphs import Const, Dims, single

from virtaccel.device.wire import Status
from virtaccel.guest_tools.arrays import accelerator
from virtaccel.guest_tools.arrays.accelerator import Accelerator
from virtaccel.guest_tools.arrays.program import Array, TensorInfo
from virtaccel.guest_tools.client import DeviceError
from virtaccel.guest_tools.errors import ExecutionFailed, InputError, ModelError, Refused, Unavailable
from virtaccel.guest_tools.transport.in_process import InProcessTransport
from virtaccel.tosa_graph.graph import DType, Op
from virtaccel.tosa_graph.write import GraphWriter

VECTOR = ((8,), DType.FP32)
A = np.arange(8, dtype=np.float32)
B = np.full(8, 0.5, np.float32)


@pytest.fixture(scope="module")
def device() -> Iterator[Accelerator]:
    with accelerator.open() as opened:
        yield opened


def two_operators() -> bytes:
    """outputs ADD(left, right) and SUB(left, right)."""
    writer = GraphWriter()
    left, right = writer.input("left", *VECTOR), writer.input("right", *VECTOR)
    writer.output(writer.operator(Op.ADD, [left, right], VECTOR), writer.operator(Op.SUB, [left, right], VECTOR))
    return writer.to_bytes()


def live_objects(device: Accelerator) -> tuple[int, ...]:
    transport = device.session.transport
    assert isinstance(transport, InProcessTransport)
    return tuple(transport.device.engine.state.counts)


def test_outputs_in_declared_order_by_position_and_by_name(device: Accelerator) -> None:
    program = device.load(two_operators())
    for total, difference in (program(A, B), program(left=A, right=B), program(A, right=B)):
        np.testing.assert_array_equal(total, A + B)
        np.testing.assert_array_equal(difference, A - B)
    named = program.run({"right": B, "left": A})
    assert list(named) == [tensor.name for tensor in program.outputs]


def test_results_stay_when_the_program_runs_again(device: Accelerator) -> None:
    program = device.load(two_operators())
    first, _ = program(A, B)
    kept = first.copy()
    program(B, B)
    np.testing.assert_array_equal(first, kept)


def test_arrays_of_any_memory_layout_are_taken(device: Accelerator) -> None:
    program = device.load(single(Op.EXP, [((4, 6), DType.FP32)], ((4, 6), DType.FP32)))
    wide = np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8)
    (result,) = program(wide[:, ::2].T)
    np.testing.assert_allclose(result, np.exp(wide[:, ::2].T), rtol=1e-6)


@pytest.mark.parametrize(
    ("left", "complaint"),
    [
        (A.astype(np.float64), r"input 'left' takes float32 of shape \[8\] \(FP32\), got float64 of shape \[8\]"),
        (A[:7], r"got float32 of shape \[7\]"),
        (A.reshape(2, 4), r"got float32 of shape \[2, 4\]"),
        (A.astype(np.int32), "got int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_one_line(left: Array, complaint: str, device: Accelerator) -> None:
    program = device.load(two_operators())
    with pytest.raises(InputError, match=complaint) as caught:
        program(left, B)
    assert "\n" not in str(caught.value)


def test_wrong_names_and_counts_are_refused(device: Accelerator) -> None:
    program = device.load(two_operators(), "model.tosa")
    with pytest.raises(InputError, match=r"model.tosa takes 2 inputs, 1 given"):
        program(A)
    with pytest.raises(InputError, match=r"no input 'rigth'; inputs are 'left', 'right'"):
        program(A, rigth=B)
    with pytest.raises(InputError, match="input 'right' is missing"):
        program.run({"left": A})


def test_element_types_keep_their_values(device: Accelerator) -> None:
    arrays: list[tuple[DType, Array]] = [
        (DType.INT8, np.array([-128, -1, 0, 127], np.int8)),
        (DType.INT32, np.array([-(2**31), 2**24 + 1, 0, 2**31 - 1], np.int32)),
        (DType.FP16, np.array([0.1, -0.0, np.inf, 6e-8], np.float16)),
        (DType.BOOL, np.array([True, False, True, True])),
    ]
    for dtype, array in arrays:
        program = device.load(single(Op.IDENTITY, [((4,), dtype)], ((4,), dtype)))
        (result,) = program(array)
        assert result.dtype == array.dtype
        assert result.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("dtype", "values", "packed"),
    [
        # TOSA packs two INT4 a byte, low nibble first; an odd count leaves the last high nibble empty.
        (DType.INT4, np.array([-8, 7, -1, 0, 3], np.int8), bytes([0x78, 0x0F, 0x03])),
        (DType.INT48, np.array([-1, 2**40], np.int64), b"\xff" * 6 + b"\0\0\0\0\0\1"),
        (DType.BF16, np.array([1.0, -2.0], np.float32), bytes.fromhex("803f 00c0")),
        (DType.FP32, np.array([1.0, -2.0], np.float32), bytes.fromhex("0000803f 000000c0")),
    ],
)
def test_elements_travel_packed_as_the_schema_says(dtype: DType, values: Array, packed: bytes) -> None:
    tensor = TensorInfo("x", values.shape, dtype)
    tensor.check(values)
    assert bytes(tensor.encode(values)) == packed
    assert tensor.bytes == len(packed)


def test_what_one_program_wrote_another_reads_with_no_transfer(device: Accelerator) -> None:
    add = device.load(single(Op.ADD, [VECTOR, Const(B)], VECTOR))
    double = device.load(single(Op.ADD, [VECTOR, VECTOR], VECTOR))
    shared = device.buffer(32)
    first = add.new_invocation(buffers={add.outputs[0].name: shared})
    second = double.new_invocation(buffers={tensor.name: shared for tensor in double.inputs})
    first.write([A])
    first.submit().wait()
    second.submit().wait()
    np.testing.assert_array_equal(second.read()[0], (A + B) * 2)
    first.close()
    second.close()
    result = np.empty(8, np.float32)
    shared.read(result)
    np.testing.assert_array_equal(result, A + B)
    shared.free()


def test_buffer_of_the_wrong_size_is_refused(device: Accelerator) -> None:
    program = device.load(two_operators())
    small = device.buffer(31)
    with pytest.raises(InputError, match="takes 32 bytes, the given buffer has 31"):
        program.new_invocation(buffers={"left": small})
    small.free()


def test_many_runs_at_once_each_with_its_own_buffers(device: Accelerator) -> None:
    program = device.load(two_operators())
    runs = [program.new_invocation() for _ in range(20)]
    for index, run in enumerate(runs):
        run.write([A, np.full(8, index, np.float32)])
    pending = [run.submit() for run in runs]
    for index, (run, one) in enumerate(zip(runs, pending, strict=True)):
        one.wait()
        assert one.done()
        np.testing.assert_array_equal(run.read()[0], A + np.float32(index))
        run.close()


def test_dynamic_dimensions_take_their_size_from_the_arrays(device: Accelerator, shared: Path) -> None:
    program = device.load(shared / "models" / "sine_float.tosa")
    assert program.inputs[0].shape == (-1, 1)
    points = np.linspace(0, 6, 7, dtype=np.float32).reshape(-1, 1)
    (together,) = program(points)
    assert together.shape == (7, 1)
    one_by_one = np.concatenate([program(point[None])[0] for point in points])
    np.testing.assert_allclose(together, one_by_one, atol=1e-5)
    np.testing.assert_allclose(together, np.sin(points), atol=0.15)
    with pytest.raises(InputError, match=r"shape \[-1, 1\]"):
        program(points.reshape(1, 7, 1))


def test_refused_program_says_which_operator_and_leaves_nothing(device: Accelerator) -> None:
    before = live_objects(device)
    refused = single(Op.CUSTOM, [VECTOR], VECTOR, {"operator_name": "x", "domain_name": "y"})
    with pytest.raises(Refused, match="CUSTOM") as caught:
        device.load(refused, "custom.tosa")
    assert "custom.tosa" in str(caught.value)
    assert caught.value.status != Status.OK
    assert live_objects(device) == before


@pytest.mark.parametrize("data", [b"", b"hello, I am no model", bytes(100)])
def test_bytes_that_are_no_model_are_refused_before_the_device_sees_them(data: bytes, device: Accelerator) -> None:
    with pytest.raises(ModelError, match="is not a TOSA model"):
        device.load(data)


def test_cut_model_is_refused(device: Accelerator) -> None:
    data = two_operators()
    for length in range(0, len(data), 97):
        with pytest.raises(ModelError):
            device.load(data[:length])


def test_missing_file_is_one_line(device: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        device.load(tmp_path / "none.tosa")


def test_time_limit_that_cannot_be_kept_fails_the_run_not_the_device(device: Accelerator) -> None:
    size = 1024
    spec = ((1, size, size), DType.FP32)
    zero = Const(np.zeros(1, np.float32))
    program = device.load(single(Op.MATMUL, [spec, spec, zero, zero], spec))
    square = np.ones((1, size, size), np.float32)
    with pytest.raises(ExecutionFailed, match="DEADLINE_EXPIRED"):
        program(square, square, timeout=1e-9)
    small = device.load(two_operators())
    np.testing.assert_array_equal(small(A, B)[0], A + B)


def test_closing_a_program_gives_its_objects_back(device: Accelerator) -> None:
    before = live_objects(device)
    program = device.load(single(Op.RESHAPE, [VECTOR, Dims((2, 4))], ((2, 4), DType.FP32)))
    program(A)
    assert live_objects(device) != before
    program.close()
    program.close()
    assert live_objects(device) == before
    with pytest.raises(ModelError, match="unloaded"):
        program.new_invocation()


def test_closing_an_accelerator_gives_everything_back() -> None:
    with accelerator.open() as opened:
        program = opened.load(two_operators())
        program(A, B)
        program.new_invocation().submit()
        opened.buffer(100)
        transport = opened.session.transport
        assert isinstance(transport, InProcessTransport)
        state = transport.device.engine.state
    assert not any(state.counts)
    opened.close()


def test_freed_buffer_is_stale(device: Accelerator) -> None:
    buffer = device.buffer(16)
    buffer.free()
    buffer.free()
    with pytest.raises(DeviceError) as caught:
        buffer.write(A[:4])
    assert caught.value.status == Status.STALE_OBJECT


@pytest.mark.parametrize(
    ("via", "device_name", "complaint"),
    [
        ("carrier-pigeon", None, "no way to a device called 'carrier-pigeon'"),
        ("in-process:nothing", None, "no backend is called nothing"),
        ("in-process", "TOASTER", "TOASTER"),
    ],
)
def test_devices_that_are_not_there(via: str, device_name: str | None, complaint: str) -> None:
    with pytest.raises(Unavailable, match=complaint) as caught:
        accelerator.open(via, device_name)
    assert "\n" not in str(caught.value)


def test_digits_are_recognised(device: Accelerator, root: Path) -> None:
    held_back = np.load(root / "examples/digits/held_back.npz")
    program = device.load(root / "examples/digits/digits.tosa")
    labels = [program(image.astype(np.float32).reshape(1, 8, 8, 1))[1][0] for image in held_back["images"]]
    assert np.mean(np.array(labels) == held_back["labels"]) >= 0.975
