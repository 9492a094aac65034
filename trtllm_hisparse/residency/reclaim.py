"""Which requests give up their optional history (equation 4)."""

from collections.abc import Sequence


def covering_prefix(order: Sequence[int], held: Sequence[int], deficit: int) -> list[int] | None:
    """The shortest prefix of the reclaim order whose optional pages cover the deficit.

    order: requests, first to be reclaimed first; held: optional pages of each.
    Returns [] for no deficit, None when all of them together would not cover it: then nothing is reclaimed.
    Requests that hold nothing are skipped, they would be disturbed in vain.
    """
    if deficit <= 0:
        return []
    chosen, total = [], 0
    for request, pages in zip(order, held, strict=True):
        if pages == 0:
            continue
        chosen.append(request)
        total += pages
        if total >= deficit:
            return chosen
    return None
