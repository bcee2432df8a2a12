"""Which card a peak fits."""

from instep_tools.output import GIB

CARDS = (16, 24, 48, 80)
"""In GB, of 10**9 bytes: a card of 24 GB that has 24 * 2**30 has 7% more."""
LEFT = GIB
"""What is left of a card to the CUDA context, the kernels' workspaces and gaps between blocks."""


def card_of(nbytes: int) -> int | None:
    """Return the smallest card, in GB, that a peak fits; ``None``: it fits none."""
    return next((one for one in CARDS if nbytes <= one * 10**9 - LEFT), None)


def said_of_card(nbytes: int) -> str:
    smallest = card_of(nbytes)
    return f"{smallest} GB" if smallest else f"more than {CARDS[-1]} GB"
