"""Where the ranks run: on the GPUs if there are enough of them, else on the CPU."""

import os

import torch

from instep.demo.errors import DemoError
from instep.demo.job import Placement

DEFAULT_RANKS = 2


def place(ranks: int | None) -> Placement:
    """Find devices for ``ranks`` ranks; ``None`` for as many as suit the machine, one or two."""
    if ranks is not None and ranks < 1:
        raise DemoError(f"--ranks {ranks}: give 1 for one device, or 2 and more for data parallel training")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _on_gpus(ranks, gpus) if gpus else _on_cpu(ranks)


def _on_gpus(ranks: int | None, gpus: int) -> Placement:
    if ranks is None and gpus < DEFAULT_RANKS:
        return Placement("cuda", 1, f"one rank, as there is one GPU; CUDA_VISIBLE_DEVICES= runs {DEFAULT_RANKS} on CPU")
    ranks = ranks or DEFAULT_RANKS
    if ranks > gpus:
        raise DemoError(
            f"--ranks {ranks}: each rank takes a GPU, and there are {gpus}. "
            "With CUDA_VISIBLE_DEVICES= (empty) in the environment the ranks run on the CPU"
        )
    return Placement("cuda", ranks)


def _on_cpu(ranks: int | None) -> Placement:
    cores = os.cpu_count() or 1
    most = max(4, cores)
    if ranks is not None and ranks > most:
        raise DemoError(f"--ranks {ranks}: at most {most} on this machine, which has {cores} CPU cores")
    return Placement("cpu", ranks or DEFAULT_RANKS)
