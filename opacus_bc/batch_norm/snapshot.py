"""What a model holds besides its trained weights, as it was before training: compared before a release."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from opacus_bc.batch_norm.buffers import MovingBufferError, Owned, is_counter, owner, same, watched
from opacus_bc.mechanism.fingerprint import fingerprint

Left = frozenset[tuple[int, str]]  # (id of a module, name of its buffer)
_BACK = "it may hold private statistics. Set it back (or drop it) before the release"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Buffers, and fingerprints of the parameters that training does not move.

    **Formal guarantee**: a model that passes :meth:`check` with ``whole=True`` has, besides the parameters
    that were trained or released and the buffers that were left out, the very entries that it had when the
    snapshot was taken. One kind of entry may differ: a whole number may have grown by the number of steps.

    **Edge cases**: spectral norm's vectors are functions of the weights and may move. Parameters in shards
    are not compared, and trained ones may have been written by others than the optimizer in between.
    """

    buffers: tuple[tuple[Owned, Tensor | None], ...]
    parameters: dict[str, str]
    trained: tuple[Tensor, ...]
    steps: int  # that had been made

    @classmethod
    def of(cls, module: nn.Module, trained: Collection[Tensor], *, steps: int = 0) -> Snapshot:
        """The model as it is now; ``trained`` are the parameters that releases will move."""
        return cls(
            buffers=tuple((o, None if v is None else v.detach().clone()) for o, v in _slots(module)),
            parameters={name: fingerprint(p.detach()) for name, p in _compared(module, trained)},
            trained=tuple(trained),
            steps=steps,
        )

    def check(
        self,
        module: nn.Module,
        *,
        leave_out: Left = frozenset(),
        released: Collection[Tensor] = (),
        steps: int | None = None,
        whole: bool = False,
    ) -> None:
        """Refuse a model that holds what nobody released, naming the first entry that differs.

        Args:
            module: The model of which this is a snapshot.
            leave_out: Buffers that somebody else answers for.
            released: Parameters that a release has moved.
            steps: How many steps have been made.
            whole: Whether counters and parameters are compared too, as before a release.

        Raises:
            MovingBufferError: A buffer or an untrained parameter is not what it was.
        """
        self._check_buffers(module, leave_out, None if steps is None else steps - self.steps, whole)
        if whole:
            self._check_parameters(module, [*self.trained, *released])

    def _check_buffers(self, module: nn.Module, leave_out: Left, steps: int | None, whole: bool) -> None:
        known = {(id(child), name) for (_, child, name), _ in self.buffers}
        for owned, value in _slots(module):
            if value is not None and (id(owned[1]), owned[2]) not in known | leave_out:
                raise MovingBufferError(f"{owner(owned)} was not there when training began: {_BACK}")
        for owned, before in self.buffers:
            _, child, name = owned
            after = getattr(child, name, None)  # individual clipping keeps a layer's buffers as attributes
            if (id(child), name) in leave_out or (before is None and after is None):
                continue
            if before is not None and after is not None:
                before = before.to(after.device)
                if is_counter(before):
                    moved = int(after) - int(before) if is_counter(after) else None
                    if not whole or moved in (0, steps):
                        continue
                elif same(before, after):
                    continue
            raise MovingBufferError(
                f"{owner(owned)} is not what it was when training began, and no release of this engine wrote "
                f"it: {_BACK}"
            )

    def _check_parameters(self, module: nn.Module, moved: Collection[Tensor]) -> None:
        for name, p in _compared(module, moved):
            before = self.parameters.get(name)
            if before is None:
                raise MovingBufferError(f"parameter {name!r} was not there when training began: {_BACK}")
            if before != fingerprint(p.detach()):
                raise MovingBufferError(
                    f"parameter {name!r} was never trained and is not what it was when training began: "
                    + _BACK
                )


def _slots(module: nn.Module) -> Iterator[tuple[Owned, Tensor | None]]:
    """All buffers that private data could move, those that are None included."""
    yield from watched(module, empty=True)


def _compared(module: nn.Module, moved: Collection[Tensor]) -> Iterator[tuple[str, nn.Parameter]]:
    left = {id(p) for p in moved}  # comparing tensors would compare their entries
    for name, p in module.named_parameters():
        if id(p) not in left and not is_lazy(p) and not isinstance(p.data, DTensor):
            yield name, p
