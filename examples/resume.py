"""Training that is killed and goes on, on two ranks:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --max-restarts 3 --nproc-per-node 2 examples/resume.py --kill-at 7 12

A small byte model learns English (Python's own help texts), and saves a checkpoint into ``--path`` every few steps, by
``torch.distributed.checkpoint``. At its start it takes up the newest. In each step named by ``--kill-at`` a rank kills
itself, and torchrun starts all of them again. The last line is a checksum of all weights: the same as without any kill.
``python examples/resume.py`` is one process; end it at any moment, and start it again.
"""

import argparse
import hashlib
import os
import pydoc_data.topics
import shutil
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import instep

WIDTH, LENGTH, ROWS = 64, 32, 8


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)  # so that the state of the random numbers matters
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.memory(self.embedding(text))[0]))


class Training:
    """All that goes on after a kill, but the attachment, which DCP takes as it is."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: CosineAnnealingLR) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        # Entries of one name are taken for copies: what each rank has of its own has the rank in its name.
        self.random = f"random of rank {dist.get_rank() if dist.is_initialized() else 0}"

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        others = {"scheduler": self.scheduler.state_dict(), self.random: torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, **others}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state[self.random])


def save(folder: Path, state: dict, step: int) -> None:
    """Into a folder of its own, which gets its name once it is whole. All ranks call this."""
    state["overlap"].require_committed()  # raises in the middle of a step, or after half of one
    alone = not dist.is_initialized()
    unfinished = folder / f"unfinished-{step}"
    dcp.save(state, checkpoint_id=unfinished)
    if alone or dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step:06}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    if not alone:
        dist.barrier()


def load(folder: Path, state: dict) -> int:
    """The newest. Returns the number of its step."""
    if not (found := sorted(folder.glob("step-*"))):
        return 0
    dcp.load(state, checkpoint_id=found[-1])
    return state["overlap"].step_count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()) / "instep-resume")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--kill-at", type=int, nargs="*", default=[])
    parser.add_argument("--schedule", default="backward", choices=["backward", "forward"])
    arguments = parser.parse_args()
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    kill_at = (arguments.kill_at[restarts:] or [0])[0]  # one kill at each start
    kills = distributed and rank == restarts % dist.get_world_size()

    torch.manual_seed(0)
    model: nn.Module = ByteModel()
    torch.manual_seed(1 + rank)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, arguments.steps)
    overlap = instep.attach(model, optimizer, schedule=arguments.schedule)
    state = {"training": Training(model, optimizer, scheduler), "overlap": overlap}
    arguments.path.mkdir(parents=True, exist_ok=True)

    text = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    if step := load(arguments.path, state):
        print(f"rank {rank} goes on after step {step}", flush=True)
    while step < arguments.steps:
        seed = torch.Generator().manual_seed(1000 * step + rank)
        rows = text[torch.randint(len(text) - LENGTH, (ROWS, 1), generator=seed) + torch.arange(LENGTH + 1)].long()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        if kills and step + 1 == kill_at:
            print(f"rank {rank} kills itself in step {step + 1}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step % arguments.save_every == 0:
            save(arguments.path, state, step)
    overlap.detach()
    checksum = hashlib.sha256()
    for parameter in model.parameters():
        checksum.update(parameter.detach().numpy().tobytes())
    if rank == 0:
        print(f"weights after step {step}: {checksum.hexdigest()}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
