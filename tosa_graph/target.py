"""What a TOSA implementation offers or a graph asks for: profiles, extensions, level (TOSA 1.0, sections 1.6 and 1.7).

Bits are those of the target words of a TOSA artifact. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

from virtaccel.tosa_graph.graph import TosaError

ARTIFACT_FORMAT: Final = 0x544F5341
ARTIFACT_ABI: Final = 1
TARGET_WORDS: Final = 12


class Profile(IntFlag):
    """PRO-INT and PRO-FP."""

    INTEGER = 1
    FLOATING_POINT = 2


class Extension(IntFlag):
    """EXT-INT16 and so on."""

    INT16 = 1 << 0
    INT4 = 1 << 1
    BF16 = 1 << 2
    FP8E4M3 = 1 << 3
    FP8E5M2 = 1 << 4
    FFT = 1 << 5
    VARIABLE = 1 << 6
    CONTROLFLOW = 1 << 7
    DYNAMIC = 1 << 8
    DOUBLEROUND = 1 << 9
    INEXACTROUND = 1 << 10


ALL_PROFILES: Final = Profile.INTEGER | Profile.FLOATING_POINT
ALL_EXTENSIONS: Final = Extension((1 << len(Extension)) - 1)
NO_PROFILE: Final = Profile(0)
NO_EXTENSION: Final = Extension(0)

BASE_PROFILE: Final[dict[Extension, Profile]] = {
    Extension.INT16: Profile.INTEGER,
    Extension.INT4: Profile.INTEGER,
    Extension.BF16: Profile.FLOATING_POINT,
    Extension.FP8E4M3: Profile.FLOATING_POINT,
    Extension.FP8E5M2: Profile.FLOATING_POINT,
    Extension.FFT: Profile.FLOATING_POINT,
    Extension.DOUBLEROUND: Profile.INTEGER,
    Extension.INEXACTROUND: Profile.INTEGER,
}
"""The profile that an extension extends; those not listed extend either."""


PROFILE_NAMES: Final = {Profile.INTEGER: "PRO-INT", Profile.FLOATING_POINT: "PRO-FP"}


def names(profiles: Profile, extensions: Extension) -> tuple[str, ...]:
    """What the standard calls them, in the order of their bits."""
    return (
        *(name for profile, name in PROFILE_NAMES.items() if profile & profiles),
        *(f"EXT-{extension.name}" for extension in Extension if extension & extensions),
    )


@dataclass(frozen=True, slots=True)
class Level:
    """Maxima of operator arguments (table of levels)."""

    number: int
    name: str
    max_rank: int
    max_kernel: int
    max_stride: int
    max_scale: int
    max_log2_size: int
    max_nesting: int
    max_tensor_list_size: int
    max_shape_len: int


NO_LEVEL: Final = Level(0, "none", 32, 2**31 - 1, 2**31 - 1, 2048, 63, 256, 256, 64)
LEVEL_8K: Final = Level(1, "8K", 6, 8192, 8192, 256, 31, 6, 64, 16)
LEVELS: Final = {level.number: level for level in (NO_LEVEL, LEVEL_8K)}


@dataclass(frozen=True, slots=True)
class Target:
    """Profiles, extensions and level; whatever is outside them is refused."""

    profiles: Profile
    extensions: Extension = NO_EXTENSION
    level: Level = LEVEL_8K

    def covers(self, profiles: Profile, extensions: Extension) -> bool:
        return profiles & self.profiles == profiles and extensions & self.extensions == extensions

    def __str__(self) -> str:
        return ", ".join((*names(self.profiles, self.extensions), f"level {self.level.name}"))


EVERYTHING: Final = Target(ALL_PROFILES, ALL_EXTENSIONS)
"""Both profiles and all extensions of TOSA 1.0, at level 8K."""


def from_words(words: Sequence[int]) -> Target:
    """The target that the twelve words of an artifact name.

    Raises TosaError for words that are not TOSA's, an unknown version, profile, extension or level, an extension
    without the profile it extends, or a reserved word that is not zero.
    """
    if len(words) != TARGET_WORDS:
        raise TosaError(f"{len(words)} target words, not {TARGET_WORDS}")
    tag, abi, major, minor, patch, profiles, level, low, high, *reserved = words
    if tag != ARTIFACT_FORMAT or abi != ARTIFACT_ABI:
        raise TosaError(f"target words of {tag:#010x}, ABI {abi}, are not TOSA's ABI {ARTIFACT_ABI}")
    if any(reserved):
        raise TosaError("reserved target words are not zero")
    if (major, minor) != (1, 0) and (major, minor, patch) != (1, 1, 0):
        raise TosaError(f"target version {major}.{minor}.{patch} is neither 1.0 nor the 1.1 draft")
    if not profiles or profiles & ~int(ALL_PROFILES):
        raise TosaError(f"target profiles {profiles:#x}")
    if level not in LEVELS:
        raise TosaError(f"target level {level}")
    extensions = low | high << 32
    if extensions & ~int(ALL_EXTENSIONS):
        raise TosaError(f"target extensions {extensions:#x}")
    for extension, profile in BASE_PROFILE.items():
        if extensions & extension and not profiles & profile:
            raise TosaError(f"target extension {extension.name} without profile {profile.name}")
    return Target(Profile(profiles), Extension(extensions), LEVELS[level])


def to_words(target: Target, version: tuple[int, int, int] = (1, 0, 0)) -> tuple[int, ...]:
    """The twelve words that name a target."""
    extensions = int(target.extensions)
    return (
        ARTIFACT_FORMAT,
        ARTIFACT_ABI,
        *version,
        int(target.profiles),
        target.level.number,
        extensions & 0xFFFFFFFF,
        extensions >> 32,
        0,
        0,
        0,
    )
