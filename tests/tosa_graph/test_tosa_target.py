"""Target words of a TOSA artifact: twelve numbers from a guest."""

from __future__ import annotations

import pytest

from virtaccel.tosa_graph.graph import TosaError
from virtaccel.tosa_graph.target import (
    ALL_PROFILES,
    LEVEL_8K,
    NO_LEVEL,
    Extension,
    Profile,
    Target,
    from_words,
    to_words,
)

GOOD = (0x544F5341, 1, 1, 0, 0, 3, 1, 0x7FF, 0, 0, 0, 0)


def test_good_words() -> None:
    target = from_words(GOOD)
    assert target == Target(ALL_PROFILES, Extension(0x7FF), LEVEL_8K)
    assert to_words(target) == GOOD
    assert from_words((0x544F5341, 1, 1, 0, 2, 1, 0, 1, 0, 0, 0, 0)) == Target(
        Profile.INTEGER, Extension.INT16, NO_LEVEL
    )


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 0x544F5342), (1, 0), (1, 2), (2, 0), (2, 2), (3, 2), (3, 0xFFFFFFFF), (5, 0), (5, 4), (5, 7), (6, 2),
        (7, 0x800), (7, 0xFFFFFFFF), (8, 1), (9, 1), (10, 1), (11, 1), (5, 1), (5, 2),
    ],
)  # fmt: skip
def test_bad_word(position: int, value: int) -> None:
    words = (*GOOD[:position], value, *GOOD[position + 1 :])
    with pytest.raises(TosaError):
        from_words(words)


@pytest.mark.parametrize("words", [(), GOOD[:-1], (*GOOD, 0)])
def test_wrong_number_of_words(words: tuple[int, ...]) -> None:
    with pytest.raises(TosaError):
        from_words(words)


def test_an_extension_needs_the_profile_it_extends() -> None:
    for extension, profile in ((Extension.BF16, Profile.INTEGER), (Extension.DOUBLEROUND, Profile.FLOATING_POINT)):
        with pytest.raises(TosaError, match="without profile"):
            from_words(to_words(Target(profile, extension)))
    assert from_words(to_words(Target(Profile.INTEGER, Extension.VARIABLE))).extensions == Extension.VARIABLE
