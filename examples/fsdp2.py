"""torch's recipe for ``fully_shard``, and the one line: ``torchrun --standalone --nproc-per-node 2 examples/fsdp2.py``.

A small byte model learns English (Python's own help texts). It is built on the meta device; each layer is sharded, then
the rest. ``--plain`` leaves out the line, ``--schedule forward`` moves the step behind the next forward, and
``--checkpoint DIRECTORY`` writes a distributed checkpoint half-way, reads it back and trains on from there. The last
line is a checksum of all weights: the same in each of these, and on two nodes of one rank (``torchrun --nnodes 2 …``).
"""

import argparse
import hashlib
import pydoc_data.topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import instep

WIDTH, LENGTH, ROWS, LAYERS = 128, 64, 8, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.outer(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = ByteModel()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=low)
    fully_shard(model, mesh=mesh, mp_policy=low)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--schedule", default="backward", choices=["backward", "forward"])
    parser.add_argument("--checkpoint")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    model = sharded(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if not arguments.plain:
        instep.attach(model, optimizer, schedule=arguments.schedule)
    text = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    random = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=random)
        rows = text[starts + torch.arange(LENGTH + 1)].long().to(device)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.checkpoint and step == arguments.steps // 2:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=arguments.checkpoint)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=arguments.checkpoint)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    checksum = hashlib.sha256()
    for value in get_model_state_dict(model).values():
        checksum.update(value.full_tensor().cpu().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"weights {checksum.hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
