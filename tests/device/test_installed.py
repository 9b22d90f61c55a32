"""Backends by name, and the options they are opened with."""

from __future__ import annotations

import pytest

from virtaccel.device import installed
from virtaccel.device.backend import ANY_OPTION, BackendUnavailable, Option, option_values
from virtaccel.device.reference import open_backend

OPTIONS = (Option("speed", "how fast", "7"),)


def test_the_project_s_own_backends_are_installed() -> None:
    assert {"isolated", "openvino", "reference"} <= set(installed.names())
    assert installed.find("reference") is open_backend


def test_a_function_is_a_backend_too() -> None:
    assert installed.find("virtaccel.device.reference:open_backend") is open_backend


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "no backend is called nothing; installed: .*reference"),
        ("virtaccel.device.nothing:open", "cannot be loaded.*install what it needs"),
        ("virtaccel.device.reference:nothing", "cannot be loaded.*nothing"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(name: str, text: str) -> None:
    with pytest.raises(BackendUnavailable, match=text) as caught:
        installed.find(name)
    assert "\n" not in str(caught.value)


def test_defaults_are_for_backends_that_know_them() -> None:
    defaults = {"speed": "3", "colour": "red"}
    assert installed.with_defaults(open_backend, {}, defaults) == {}
    assert installed.with_defaults(open_backend, {"speed": "1"}, defaults) == {"speed": "1"}
    known = {option.name for option in installed.options_of(installed.find("isolated"))}
    assert known == {"backend", ANY_OPTION}
    assert installed.with_defaults(installed.find("isolated"), {}, defaults) == defaults


def test_an_option_nobody_knows_is_refused_with_those_there_are() -> None:
    assert option_values("mine", OPTIONS, {}) == {"speed": "7"}
    assert option_values("mine", OPTIONS, {"speed": "9"}) == {"speed": "9"}
    with pytest.raises(BackendUnavailable, match="mine has no option 'sped'; its options are speed"):
        option_values("mine", OPTIONS, {"sped": "9"})
    for name in ("openvino", "reference"):
        with pytest.raises(BackendUnavailable, match=f"{name} has no option 'sped'"):
            installed.find(name)(None, {"sped": "9"})


def test_variables_stand_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in installed.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert installed.from_environment() == {}
    monkeypatch.setenv("VIRTACCEL_THREADS", "2")
    monkeypatch.setenv("VIRTACCEL_MODEL_CACHE", "")
    assert installed.from_environment() == {"threads": "2"}
    every = {option.name for option in installed.options_of(installed.find("openvino"))} | {"backend"}
    assert set(installed.VARIABLES) == every, "each option of the backend that variables were made for"


@pytest.mark.parametrize("text", ["threads", "=2", ""])
def test_what_is_no_option_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=VALUE"):
        installed.parse_option(text)


def test_a_value_may_hold_an_equals_sign() -> None:
    assert installed.parse_option("a=b=c") == ("a", "b=c")
