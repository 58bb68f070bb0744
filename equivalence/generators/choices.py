"""Define the source of a generator's choices: Hypothesis, which draws short lists and shrinks what differs, or plain random numbers, 30 times as fast.

A generator of layouts is written once, as a function of `Choices`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from hypothesis import strategies as st


class Choices(Protocol):
    """A source of choices."""

    def integer(self, least: int, most: int) -> int:
        """Draw a number from `least` to `most`, both included."""
        ...

    def integers(self, least: int, most: int, *, fewest: int, longest: int) -> list[int]:
        """Draw from `fewest` to `longest` such numbers."""
        ...

    def decimal(self, least: float, most: float) -> float:
        """Draw a number that need not be whole."""
        ...

    def one_of[Value](self, values: Sequence[Value]) -> Value:
        """Draw one of the values; the first is the simplest."""
        ...

    def order[Value](self, values: Sequence[Value]) -> list[Value]:
        """Draw an order of all values."""
        ...

    def rarely(self, one_in: int) -> bool:
        """Return True for one draw in `one_in`: for cases that take as long as a hundred others."""
        ...


class RandomChoices:
    """Choices of the draw number `place` from a seed, each as likely as the others."""

    def __init__(self, seed: int, place: int) -> None:
        self._place = place
        self._random = random.Random(f"{seed}/{place}")  # noqa: S311 - not for secrets
        self.integer = self._random.randint
        self.decimal = self._random.uniform

    def integers(self, least: int, most: int, *, fewest: int, longest: int) -> list[int]:
        """See `Choices`; long lists are as likely as short ones."""
        integer = self._random.randint
        return [integer(least, most) for _ in range(integer(fewest, longest))]

    def one_of[Value](self, values: Sequence[Value]) -> Value:
        """See `Choices`."""
        return self._random.choice(values)

    def order[Value](self, values: Sequence[Value]) -> list[Value]:
        """See `Choices`."""
        return self._random.sample(values, len(values))

    def rarely(self, one_in: int) -> bool:
        """Return True by the position of the draw, so that the number of such draws does not depend on the seed. See `Choices`."""
        return self._place % one_in == one_in - 1


class HypothesisChoices:
    """Choices of a Hypothesis strategy's `draw`."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, least: int, most: int) -> int:
        """See `Choices`."""
        return self._draw(st.integers(least, most))

    def integers(self, least: int, most: int, *, fewest: int, longest: int) -> list[int]:
        """See `Choices`; short lists are the likelier."""
        return self._draw(st.lists(st.integers(least, most), min_size=fewest, max_size=longest))

    def decimal(self, least: float, most: float) -> float:
        """See `Choices`."""
        return self._draw(st.floats(least, most))

    def one_of[Value](self, values: Sequence[Value]) -> Value:
        """See `Choices`."""
        return self._draw(st.sampled_from(values))

    def order[Value](self, values: Sequence[Value]) -> list[Value]:
        """See `Choices`."""
        return list(self._draw(st.permutations(values)))

    def rarely(self, one_in: int) -> bool:
        """See `Choices`; never, since Hypothesis' draws are the short ones."""
        del one_in
        return False


_NOTHING = st.just(None)


def drawn[Case](make: Callable[[Choices], Case]) -> st.SearchStrategy[Case]:
    """Return the Hypothesis strategy of what `make` draws."""

    @st.composite
    def strategy(draw: st.DrawFn) -> Case:
        draw(_NOTHING)  # Hypothesis warns of a composite that never draws itself
        return make(HypothesisChoices(draw))

    return strategy()
