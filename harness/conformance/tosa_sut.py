"""A device as the system under test of Arm's own runner:

    tosa_verif_run_tests --sut-module virtaccel.harness.conformance.tosa_sut --test-list FILE ...

The runner generates data, asks the reference model, calls `TosaSUTRunner` here for each test, and verifies what it
leaves in the test's folder. One device is kept alive for each of the runner's threads. It is another device than one in
this process with `--sut-module-args virtaccel.harness.conformance.tosa_sut:via=vhost-user:PATH` (also `device=NAME`).
Knows desc.json through `conformance.case`, and the runner's class through its public face.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from runner.tosa_test_runner import TosaTestRunner

from virtaccel.guest_tools.arrays import accelerator
from virtaccel.guest_tools.errors import Unavailable
from virtaccel.harness.conformance import case as cases
from virtaccel.harness.conformance.judge import Failure, Outputs, Refusal
from virtaccel.harness.conformance.suite import entry_of
from virtaccel.harness.conformance.system import DeviceSystem
from virtaccel.harness.conformance.tools import Generator, find_tools, storage

PATIENCE_SECONDS: Final = 120.0
_OPTIONS: Final = ("via", "device")

_of_thread = threading.local()


def _system(options: dict[str, str]) -> DeviceSystem:
    """This thread's device. Raises Unavailable, TransportError."""
    if not hasattr(_of_thread, "system"):
        opened = accelerator.open(options.get("via", "in-process"), options.get("device"), PATIENCE_SECONDS)
        _of_thread.system = DeviceSystem(opened, PATIENCE_SECONDS)
        _of_thread.generator = Generator(find_tools())
    system: DeviceSystem = _of_thread.system
    return system


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """`via=...` and `device=...`. Raises Unavailable for anything else."""
    options = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = options.keys() - set(_OPTIONS)
    if unknown:
        raise Unavailable(f"no argument {min(unknown)!r}; there are {', '.join(_OPTIONS)}")
    return options


class TosaSUTRunner(TosaTestRunner):  # type: ignore[misc]
    """One test of the official runner. A program that the device does not admit is an error of the graph, as the
    standard has it; the runner cannot tell one that is not supported from one that is not valid."""

    def __init__(self, args: Any, runnerArgs: Sequence[str], testDirPath: Path) -> None:
        super().__init__(args, runnerArgs, testDirPath)
        self._options = _options(runnerArgs)

    def runTestGraph(self) -> tuple[Any, str | None]:
        """The runner's graph result, and a message."""
        system = _system(self._options)
        folder = Path(self.testDir)
        case = cases.load(folder, entry_of(folder / "desc.json", folder), _of_thread.generator)
        answer = system.run(case, load_only=case.negative)
        results = TosaTestRunner.TosaGraphResult
        if isinstance(answer, Refusal):
            return results.TOSA_ERROR, answer.reason
        if isinstance(answer, Failure):
            return results.OTHER_ERROR, answer.reason
        if not case.negative:
            self._leave(folder, case, answer)
        return results.TOSA_VALID, None

    def _leave(self, folder: Path, case: cases.Case, answer: Outputs) -> None:
        """Output files where the runner looks for them."""
        files = dict(case.outputs)
        for tensor, data in zip(case.concrete_outputs(), answer.data, strict=True):
            np.save(folder / files[tensor.name], storage(data, tensor.dtype, tensor.shape))
