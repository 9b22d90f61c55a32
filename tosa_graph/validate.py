"""Is a graph what TOSA 1.0 allows, for what a device offers? Validation, and what a graph needs.

Everything that can be known while loading is checked here: structure, profiles and extensions, supported types, shapes,
every ERROR_IF, the level's maxima, and a budget of bytes. Standard library only.
"""

from __future__ import annotations

from virtaccel.tosa_graph.graph import Graph, TosaError
from virtaccel.tosa_graph.target import (
    ALL_EXTENSIONS,
    ALL_PROFILES,
    BASE_PROFILE,
    EVERYTHING,
    LEVEL_8K,
    NO_EXTENSION,
    NO_LEVEL,
    NO_PROFILE,
    Profile,
    Target,
)
from virtaccel.tosa_graph.walk import DEFAULT_BUDGET, Budget, Walk


def validate(graph: Graph, target: Target = EVERYTHING, budget: Budget = DEFAULT_BUDGET) -> None:
    """Raise TosaError unless `graph` is valid and inside `target`; the text names operator and rule.

    Dimensions of -1 are admitted where they follow from an input's; rules that would need them are checked by
    `specialise` once they are known.
    """
    Walk(graph, target, budget).run([tensor.shape for tensor in graph.inputs])


def required(graph: Graph, budget: Budget = DEFAULT_BUDGET) -> Target:
    """The least target that admits `graph`. Where either profile would do, the one needed anyway, else PRO-INT.

    Raises TosaError if no target does.
    """
    shapes = [tensor.shape for tensor in graph.inputs]
    level = LEVEL_8K
    walk = Walk(graph, EVERYTHING, budget)
    try:
        walk.run(shapes)
    except TosaError:
        level = NO_LEVEL
        walk = Walk(graph, Target(ALL_PROFILES, ALL_EXTENSIONS, NO_LEVEL), budget)
        walk.run(shapes)
    profiles, extensions = NO_PROFILE, NO_EXTENSION
    for needs in walk.needs:
        if len(needs) == 1:
            profiles |= needs[0].profiles
            extensions |= needs[0].extensions
    for extension in extensions:
        profiles |= BASE_PROFILE.get(extension, NO_PROFILE)
    return Target(profiles or Profile.INTEGER, extensions, level)
