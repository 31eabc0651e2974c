"""Made-up users: images that nobody owns are dealt out, to study what protecting users costs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def made_up_users(
    labels: npt.ArrayLike, users: int, *, concentration: float = 0.7, seed: int = 0
) -> npt.NDArray[np.int64]:
    """One user id for each image, from a Dirichlet draw for each class: users differ in size and in classes.

    **Edge cases**: nobody is left without an image.

    Args:
        labels: The images' classes.
        users: How many users there are, at most as many as images.
        concentration: Of the Dirichlet distribution; smaller ones make users more unequal.
        seed: Of the draw, which depends on nothing else.

    Raises:
        ValueError: There are more users than images.
    """
    classes = np.asarray(labels)
    if not 2 <= users <= len(classes):
        raise ValueError(f"users={users}: must lie between 2 and the {len(classes)} images")
    rng = np.random.default_rng(seed)
    ids = np.empty(len(classes), dtype=np.int64)
    for each in np.unique(classes):
        own = np.flatnonzero(classes == each)
        ids[own] = rng.choice(users, size=len(own), p=rng.dirichlet(np.full(users, concentration)))
    ids[rng.permutation(len(classes))[:users]] = np.arange(users)
    return ids
