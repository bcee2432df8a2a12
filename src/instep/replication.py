"""``replicate``: data parallelism whose gradients are never all in memory."""

import torch.distributed as dist
from torch import nn

from instep._arguments import require_model
from instep.attachment import attached_parameters
from instep.errors import AttachError
from instep.sources.replicate.source import Replicated


def replicate(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
) -> Replicated:
    """Data parallelism in place of ``DistributedDataParallel(model)``, without its permanent buckets.

    After ``backward()`` every ``.grad`` is the mean over all ranks, bit for bit DDP's from the second step on (with two
    ranks from the first). A bucket exists only while it is on its way, and at most two are. With
    ``instep.attach(replicated, optimizer)`` a bucket is stepped as soon as it has arrived, and freed, so that gradients
    take the memory of about three buckets: two on their way, and one that fills. Without ``attach`` the gradients stay,
    in the memory of one model, where DDP takes two (one with ``gradient_as_bucket_view``).

    A parameter that no rank has used keeps the gradient it has, usually ``None``; one that some have used gets the
    mean on all. That is DDP with ``find_unused_parameters=True``, and needs no option.

    Collective: every rank of the group must call it, with the same model. Parameters and buffers are then those of the
    group's first rank.

    Args:
        model: any module, on one device and in its dtype. Frozen parameters are left alone until they are thawed, on
            all ranks alike.
        process_group: the ranks that train together; the default group unless told.
        bucket_cap_mb: MiB of gradients in a bucket, as for DDP: 25 unless told, the first one 1. A parameter is never
            split: the largest one may make a larger bucket.
        broadcast_buffers: whether buffers are made those of the first rank before each forward that follows a
            training one.

    Raises:
        AttachError: about the model, an option or the process group, named in the message; a ``ValueError``.

    Since 0.1.0.

    Example:
        ```python
        model = instep.replicate(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        instep.attach(model, optimizer, schedule="backward")
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    attached = attached_parameters()
    for name, parameter in require_model(model, AttachError).named_parameters():
        if id(parameter) in attached:
            raise AttachError(
                f"replicate: parameter {name!r} is already attached ({attached[id(parameter)]!r}): its gradients would "
                "be those of this rank alone. Call instep.attached(model).detach(), replicate the model, and attach "
                "what that returns"
            )
    return Replicated(
        model, process_group=process_group, bucket_cap_mb=bucket_cap_mb, broadcast_buffers=broadcast_buffers
    )
