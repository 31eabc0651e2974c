"""Who answers for running statistics while a model trains: one keeper for each policy."""

from __future__ import annotations

from opacus_bc.mechanism.types import Memo, State


class Keeper:
    """Keeps nothing and owes nothing: the answers of policies under which nobody writes statistics."""

    def __init__(self, words: str) -> None:
        self._words = words
        self.written: set[int] = set()  # ids of the layers whose statistics were released or are public

    @property
    def owes_release(self) -> bool:
        """Whether statistics at the current weights must still be released with noise."""
        return False

    def start(self) -> None:
        """The layers obey the policy from now on; raises if they cannot."""

    def before_evaluation(self) -> None:
        """A layer is about to normalise with its running statistics."""

    def before_saving(self) -> None:
        """The running statistics are about to be written somewhere."""

    def copied(self, memo: Memo) -> Keeper | None:
        """The keeper of a deep copy of the model, or None if only a part of it is copied."""
        return self

    def after_step(self) -> None:
        """The weights have moved."""

    def finish(self) -> None:
        """Training is over: bring the statistics up to date, and raise if they are not what they must be."""

    def state_dict(self) -> State:
        """What an exact resume needs besides buffers; all of it is released or public."""
        return {}

    def load_state_dict(self, state: State | None) -> None:
        """Go on where :meth:`state_dict` was taken; None if the checkpoint has none. Buffers are loaded."""

    def describe(self) -> str:
        """What a privacy statement says of the running statistics."""
        return self._words
