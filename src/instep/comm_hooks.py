"""Building blocks for DDP communication hooks. Useful without the rest of instep."""

import torch
import torch.distributed as dist


def mean_allreduce(tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> torch.futures.Future[torch.Tensor]:
    """Sum ``tensor / divisor`` over ``group`` in place, and return the future of that same tensor.

    Divides as DDP's reducer does without a hook (``torch/csrc/distributed/c10d/reducer.cpp``): a dense bucket is
    multiplied by ``1 / divisor`` and a sparse one divided, before the reduction. torch's ``allreduce_hook`` divides
    dense buckets too, which differs in the last bit when ``divisor`` is not a power of two.

    Since 0.1.0.

    Example:
        ```python
        import torch.distributed as dist

        def hook(state, bucket):  # DDP's own
            return instep.comm_hooks.mean_allreduce(bucket.buffer(), dist.group.WORLD, dist.get_world_size())

        instep.attach(ddp, optimizer, schedule="backward", comm_hook=(None, hook))
        ```
    """
    if divisor == 1:
        pass
    elif tensor.is_sparse:
        tensor.div_(divisor)
    else:
        tensor.mul_(1.0 / divisor)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def cast_mean_allreduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int, dtype: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """``mean_allreduce`` computed and sent in ``dtype``: cast, divided, summed, cast back.

    The future is that of ``tensor``, which holds the result; of a new tensor when it is sparse. ``dtype=None`` is
    ``tensor``'s own.

    Since 0.1.0.

    Example:
        ```python
        import torch.distributed as dist

        def hook(dtype, bucket):  # half the bytes of float32
            ranks = dist.get_world_size()
            return instep.comm_hooks.cast_mean_allreduce(bucket.buffer(), dist.group.WORLD, ranks, dtype)

        instep.attach(ddp, optimizer, schedule="backward", comm_hook=(torch.bfloat16, hook))
        ```
    """
    if dtype is None or dtype == tensor.dtype:
        return mean_allreduce(tensor, group, divisor)

    def cast_back(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        reduced = done.value()
        return reduced.to(tensor.dtype) if tensor.is_sparse else tensor.copy_(reduced)

    return mean_allreduce(tensor.to(dtype), group, divisor).then(cast_back)
