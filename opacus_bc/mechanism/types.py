"""Names for types that torch leaves open: what a loader yields and what a state dict holds are the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

Loader = DataLoader[Any]
State = dict[str, Any]  # what ``state_dict`` returns and ``load_state_dict`` takes
Memo = dict[int, Any]  # what ``__deepcopy__`` hands on
Loss = Callable[..., Tensor]
