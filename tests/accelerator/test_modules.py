"""What runs on the emulated device has the CPU's bits, and leaves nothing to chance."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator.recording import recorded
from tests.cases import grad_of

pytestmark = pytest.mark.accelerator


class Attention(nn.Module):
    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.causal, self.dropout = causal, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)


class Rotations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real((x * self.turn).conj() * self.turn)


class Last(nn.Module):
    """Of a recurrent module's two results, the outputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def vectors() -> torch.Tensor:
    return torch.randn(3, 5, 8)


def images() -> torch.Tensor:
    return torch.randn(2, 4, 6, 6)


def tokens() -> torch.Tensor:
    return torch.randint(0, 16, (3, 5))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 4), vectors),
    "bilinear": (lambda: Applied(nn.Bilinear(8, 8, 3), lambda m, x: m(x, x)), vectors),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.SiLU()), vectors),
    "activations": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ELU(), nn.LeakyReLU(), nn.Softplus(), nn.Tanh(), nn.Mish()),
        vectors,
    ),
    "prelu": (lambda: nn.Sequential(nn.PReLU(5), nn.Sigmoid()), vectors),
    "glu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GLU()), vectors),
    "softmax": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LogSoftmax(-1), nn.Softmax(-1)), vectors),
    "layer norm": (lambda: nn.LayerNorm(8), vectors),
    "rms norm": (lambda: nn.RMSNorm(8), vectors),
    "group norm": (lambda: nn.GroupNorm(2, 4), images),
    "batch norm": (lambda: nn.BatchNorm2d(4), images),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), images),
    "conv1d": (lambda: nn.Conv1d(5, 4, 3), vectors),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), images),
    "conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2, bias=False), images),
    "conv transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), images),
    "pools": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
        images,
    ),
    "upsample": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")), images),
    "embedding": (lambda: nn.Embedding(16, 8, padding_idx=0), tokens),
    "embedding bag": (lambda: nn.EmbeddingBag(16, 8, mode="mean"), tokens),
    "lstm": (lambda: Last(nn.LSTM(8, 6, 2, batch_first=True)), vectors),
    "gru": (lambda: Last(nn.GRU(8, 6, bidirectional=True)), vectors),
    "rnn": (lambda: Last(nn.RNN(8, 6)), vectors),
    "attention": (lambda: Attention(causal=False), vectors),
    "causal attention": (lambda: Attention(causal=True), vectors),
    "multi-head attention": (lambda: Applied(nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0]), vectors),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), vectors),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Dropout(0.1, inplace=True)), vectors),
    "attention with dropout": (lambda: Attention(causal=True, dropout=0.2), vectors),
    "complex": (Rotations, vectors),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), vectors),
}


# torch has the CPU's recurrent layers computed in an order of their own, or by a library.
ROUNDED_OTHERWISE = {"lstm", "gru", "rnn"}


class Applied(nn.Module):
    """A module that is called with more than its input."""

    def __init__(self, inner: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


def run(name: str, device: str) -> list[torch.Tensor]:
    make, batch = MODULES[name]
    torch.manual_seed(0)
    module, x = make().to(device), batch().to(device)
    x.requires_grad_(x.is_floating_point())
    torch.manual_seed(1)
    y = module(x)
    y.square().sum().backward()
    found: list[Any] = [y, x.grad, *(p.grad for p in module.parameters()), *module.buffers()]
    return [t.detach().cpu() for t in found if t is not None]


@pytest.mark.parametrize("name", MODULES)
def test_bits_of_the_cpu(name: str) -> None:
    with recorded() as log:
        emulated = run(name, "emu")
    plain = run(name, "cpu")
    assert len(emulated) == len(plain)
    for ours, theirs in zip(emulated, plain, strict=True):
        if name in ROUNDED_OTHERWISE:
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs), (ours - theirs).abs().max()
    log.assert_ordered()


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda x: nn.functional.cross_entropy(x, torch.arange(6, device=x.device), label_smoothing=0.1),
    "mse": lambda x: nn.functional.mse_loss(x, torch.ones_like(x)),
    "bce": lambda x: nn.functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "kl": lambda x: nn.functional.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    "ctc": lambda x: nn.functional.ctc_loss(
        x.log_softmax(-1).unsqueeze(1), torch.tensor([[1, 2]]).to(x.device), torch.tensor([6]), torch.tensor([2])
    ),
    "huber": lambda x: nn.functional.huber_loss(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(6, 8).to(device).requires_grad_()
        loss = LOSSES[name](x)
        loss.backward()
        return [loss.detach().cpu(), grad_of(x).cpu()]

    assert all(map(torch.equal, run("emu"), run("cpu")))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw, capturable": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
        make = OPTIMIZERS[name]
        if device == "cpu" and name == "adamw, capturable":
            make = lambda p: torch.optim.AdamW(p, lr=0.1)  # noqa: E731  # the CPU has none
        optimizer = make(list(model.parameters()))
        for i in range(4):
            torch.manual_seed(i)
            model(torch.randn(4, 8).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    with recorded() as log:
        emulated = run("emu")
    log.assert_ordered()
    plain = run("cpu")
    if name == "adamw, capturable":  # its step is a tensor, whose powers round in another way
        torch.testing.assert_close(emulated, plain)
    else:
        assert all(map(torch.equal, emulated, plain))


def test_to_keeps_parameters_and_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weight = model[0].weight
    model.to("emu")
    assert model[0].weight is model[1].weight is weight
    assert weight.device == torch.device("emu", 0)
    model.cpu()
    assert model[1].weight is weight
    assert weight.device.type == "cpu"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients() -> None:
    def run(device: str, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Embedding(16, 4, sparse=True).to(device)
        optimizer = make(module.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            x = torch.randint(0, 16, (5,)).to(device)
            (module(x) + module(x * 0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in module.parameters()]

    for make in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        with recorded() as log:
            emulated = run("emu", make)
        log.assert_ordered()
        assert all(map(torch.equal, emulated, run("cpu", make))), make
