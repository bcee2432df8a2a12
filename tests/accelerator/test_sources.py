"""Every source of gradients on ranks of the emulated accelerator: the plain loop's bits, and nothing left to chance.

Nobody compares before the end: who does has the host wait, and with it all that is launched later.
"""

from itertools import product

import pytest

from tests.accelerator.loops import CLIP, READERS, WAYS
from tests.accelerator.sources import ALONE, HAPPENS, SOURCES, SURVIVE, on_device
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator


ALL = [(source, way) for source, (_, ways) in SOURCES.items() for way in ways]


@pytest.mark.parametrize(
    ("source", "way", "optimizer"),
    [
        (source, way, optimizer)
        for (source, way), optimizer in product(ALL, ["AdamW", "fused", "SGD"])
        if optimizer == "AdamW" or source in ("ddp", "fsdp2") or (source == "shard_state" and optimizer == "SGD")
    ],
)
def test_sources(two_emulated_ranks: RankPool, source: str, way: str, optimizer: str) -> None:
    two_emulated_ranks.run(on_device, source, way, "nothing", "the next forward", False, optimizer)


@pytest.mark.parametrize(
    ("source", "way", "reader"),
    [
        (source, way, reader)
        for (source, way), reader in product(ALL, READERS)
        if "," not in source
        and reader not in ("the next forward", "the host")
        # FSDP2 gathers weights for one stream, and frees them: of two forwards the second is torch's own affair.
        and not (source == "fsdp2" and reader == "forwards on both")
    ],
)
def test_who_reads_next(two_emulated_ranks: RankPool, source: str, way: str, reader: str) -> None:
    two_emulated_ranks.run(on_device, source, way, "nothing", reader, True, "AdamW")


@pytest.mark.parametrize(
    ("source", "way", "happening"),
    [
        (source, way, happening)
        for (source, way), happening in product(ALL, HAPPENS)
        if way in HAPPENS[happening]
        and not ("shard" in source and happening in ALONE)
        and not (source == "fsdp1" and happening == "detach after the step")  # can be attached to once
    ],
)
def test_what_happens(two_emulated_ranks: RankPool, source: str, way: str, happening: str) -> None:
    two_emulated_ranks.run(on_device, source, way, happening, "another stream", False, "AdamW")


@pytest.mark.parametrize("happening", ["a backward that raises", "a backward that raises, and a forward"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SURVIVE)
def test_a_backward_that_raises(two_emulated_ranks: RankPool, source: str, way: str, happening: str) -> None:
    two_emulated_ranks.run(on_device, source, way, happening, "another stream", True, "AdamW")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", ["ddp", "replicate", "fsdp2"])
def test_accumulation(two_emulated_ranks: RankPool, source: str, way: str) -> None:
    two_emulated_ranks.run(on_device, source, way, "nothing", "the next allocation", False, "AdamW", micro_batches=2)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "backward"])
@pytest.mark.parametrize("source", ["ddp", "replicate", "fsdp2"])
def test_the_loop_clips(two_emulated_ranks: RankPool, source: str, way: str) -> None:
    two_emulated_ranks.run(on_device, source, way, "nothing", "the next allocation", False, "SGD", clip=CLIP)


@pytest.mark.parametrize(
    ("source", "way"),
    [
        *product(["ddp", "ddp, copies", "shard_state, copies", "fsdp1", "replicate", "fsdp2"], ["backward"]),
        ("ddp, copies", "undo"),
        ("ddp, copies", "forward"),
    ],
)
def test_clipped_by_value(two_emulated_ranks: RankPool, source: str, way: str) -> None:
    """In place: also where DDP is about to copy the same bucket."""
    two_emulated_ranks.run(on_device, source, way, "nothing", "the next forward", False, "SGD", clip_value=1e-3)
