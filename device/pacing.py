"""How long to leave a program alone, and how to look for what has not come yet: eagerly first, then ever more rarely.

Sans-clock: seconds come in and go out; whoever asks has the clock and does the waiting. It must not know what is looked
at. Standard library only, since the driver's side runs it on a guest's bare python3. Every look takes a processor from
the work wherever both share one, and every sleep costs a wake-up of 5 to 50 us: these numbers stand between the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# A run may be shorter than those before it and is to be noticed all the same; beyond 4 ms a question costs less than a
# hundredth of the run.
LONGEST_PACE: Final = 4e-3
# How much sooner to look after a run that had ended by the first look: a tenth finds a shorter run within a few calls
# and wakes up too early only now and then.
SOONER: Final = 0.9


class Pace:
    """How long to leave a program alone before asking whether it has ended, in seconds: learnt from earlier runs.

    `seconds` is when the work was last known to be going on, and less by a tenth after each run that had ended by then.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, rested: float, pending: float) -> None:
        """A run that was left alone for `rested` seconds, and last found pending after `pending` (0 or less: never)."""
        self.seconds = min(max(pending, SOONER * rested), LONGEST_PACE)


class Looks(NamedTuple):
    """How somebody looks, in seconds: without a pause for `eager`, then with rests from `shortest` up to `longest`."""

    eager: float
    shortest: float
    longest: float

    def longer(self, rest: float) -> float:
        """The rest after one of `rest`: doubled, so that looks stay few and the delay below what was waited already."""
        return min(2 * rest, self.longest)

    def rest(self, age: float) -> float:
        """The rest for work that has gone on for `age`: an eighth of it, so that its end is noticed an eighth late."""
        return min(max(age / 8, self.shortest), self.longest)


# The driver's side, across a ring: small programs have ended within 100 us. A rest below 20 us would cost more than it
# lasts; one above 1 ms would be felt by a caller.
ACROSS_A_RING: Final = Looks(100e-6, 20e-6, 1e-3)
# The same beside a device that tells of changes: there is nothing to look for in between, a rest only bounds how late a
# lost word is noticed.
TOLD_OF_CHANGES: Final = Looks(100e-6, 0.25, 0.25)
# The worker looks at the runtime itself, which costs less than a question over a ring; small programs end within 50 us.
WORKER: Final = Looks(50e-6, 30e-6, 1e-3)
# Who waits in a backend looks for about as long as a sleep and a wake-up cost, so that it loses at most twice that. It
# sleeps up to 2 ms while nothing of its own has started: who holds what it needs tells nothing when it is done.
IN_A_BACKEND: Final = Looks(40e-6, 2e-3, 2e-3)

# Questions that a client asks without a pause before its first rest, when the last wait was short: small programs have
# ended by then, and a longer one loses no more than six round trips.
EAGER_QUESTIONS: Final = 6
# The rest of who writes a ring by hand and has asked for no interrupt: suites, which wait for thousands of answers.
BARE_RING_REST: Final = 200e-6


class Spin:
    """Whether to look for more work for a while instead of waiting for word of it: soon given up where looking finds
    nothing, and tried again now and then."""

    __slots__ = ("_luck", "_rounds")

    # Eight fruitless spins in a row are more than chance; then one in 64 costs less than 2 % and finds a driver that
    # has become busy within some milliseconds.
    MOST_LUCK: Final = 8
    SELDOM: Final = 64

    def __init__(self) -> None:
        self._luck = self.MOST_LUCK
        self._rounds = 0

    def worthwhile(self) -> bool:
        """Ask before each spin."""
        self._rounds += 1
        return bool(self._luck) or self._rounds % self.SELDOM == 0

    def ended(self, found: bool) -> None:
        """A spin has run out of its time, and had `found` work or not."""
        self._luck = min(self._luck + 1, self.MOST_LUCK) if found else max(self._luck - 1, 0)

    def kept_busy(self) -> None:
        """A spin has found work again and again, to its very end."""
        self._luck = self.MOST_LUCK
