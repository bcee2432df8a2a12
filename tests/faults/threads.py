"""Two threads in backward of one model: ``python threads.py plain|hook|instep``. Run as a process: it may crash."""

import sys
import threading

import torch
from torch import nn

import instep

STEPS = 400


def main(how: str) -> str:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if how == "instep":
        instep.attach(model, optimizer, schedule="backward")
    elif how == "hook":
        own: dict[torch.Tensor, torch.optim.SGD] = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            own[parameter].step()
            parameter.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
    said: list[str] = []

    both = threading.Barrier(2)

    def train() -> None:
        both.wait()
        for _ in range(50 * STEPS if how == "instep" else STEPS):
            if how == "instep" and said:  # until one of them is refused
                return
            try:
                model(torch.randn(8, 16)).square().mean().backward()
                if how == "instep":
                    optimizer.step()
                    optimizer.zero_grad()
            except RuntimeError as error:
                said.append(type(error).__name__)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said[0] if said else "no error"


if __name__ == "__main__":
    print(main(sys.argv[1]))
