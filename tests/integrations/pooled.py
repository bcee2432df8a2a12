"""Lightning in a pool of ranks that has its process group already."""

import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment


class PooledRanks(LightningEnvironment):
    """Tells Lightning which of the pool's ranks this process is, and to start no others."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()
