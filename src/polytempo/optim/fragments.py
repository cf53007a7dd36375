"""A model cut into fragments: runs of parameters in their order, about equal in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.errors import UsageError


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut parameters of these bytes into fragments, none of them empty.

    Args:
        sizes: Bytes of each parameter.
        fragments: Their number.

    Returns:
        The parameters of each fragment.

    Raises:
        UsageError: There are fewer parameters than fragments.
    """
    if len(sizes) < fragments:
        raise UsageError(f"expected at most {len(sizes)} fragments, one a parameter, got {fragments}; use fewer")
    cuts: list[range] = []
    start, left = 0, sum(sizes)
    for rest in range(fragments, 0, -1):
        wanted, stop, taken = left / rest, start + 1, sizes[start]
        last = len(sizes) - (rest - 1)  # each of the others needs one
        while stop < last and (rest == 1 or taken + sizes[stop] / 2 <= wanted):
            taken += sizes[stop]
            stop += 1
        cuts.append(range(start, stop))
        start, left = stop, left - taken
    return cuts
