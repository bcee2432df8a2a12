"""The keys of ``random="keyed"``: what each parameter's random numbers of one step are drawn from."""

import hashlib


def draw_key(seed: int, step: int, name: str, shard: int | None = None) -> int:
    """What torch's default generators are seeded with for the update of one parameter, with ``random="keyed"``.

    The key is made of the first 8 bytes of ``blake2b`` over the UTF-8 text ``"{seed}/{step}/{shard}/{name}"``, read as
    a number with the highest byte first, without its highest bit: ``0 <= key < 2**63``. Of a parameter that is updated
    as a whole, ``{shard}`` is empty: ``"1234/0//layers.0.weight"``.

    Args:
        seed: what ``attach`` was given.
        step: how many steps had been committed before this one: 0 in the first.
        name: of the parameter, in the model without any wrapper.
        shard: which part of the parameter this rank updates, counted from 0 along the dimensions of the device mesh
            over which it is sharded; ``None``: all of it.
    """
    part = "" if shard is None else str(shard)
    digest = hashlib.blake2b(f"{seed}/{step}/{part}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63
