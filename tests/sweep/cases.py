"""What the sweep runs, as a table: package, class, options, model. What was left out stands at the end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from tests.sweep import made, models

MAIN, TIMM, TRITON = "main", "timm", "triton"
"""Names of environments. timm needs torchvision, which is not to be where transformers looks for it; kron-torch and
flashoptim bring triton, with which optimi's StableAdamW raises on a CPU."""


@dataclass(frozen=True)
class Case:
    """One optimizer, over one model."""

    name: str
    pins: tuple[str, ...]
    """What has to be installed, the package that is meant first; nothing for what is torch's or ``made.py``'s."""
    optimizer: Callable[[Any], Any]
    """Of the model, which is on its device and sharded already."""
    net: Callable[[], nn.Module] = models.Net
    imports: tuple[str, ...] = ()
    """Modules that are imported before processes are forked."""
    beside: Callable[[nn.Module], tuple[nn.Module, Callable[[], None]]] | None = None
    """Of the model: a module that is compared, too, and what the loop calls after each step."""
    environment: str = MAIN


def _of(path: str, options: Mapping[str, Any], model: nn.Module) -> Any:
    return resolve_name(path)([p for p in model.parameters() if p.requires_grad], **options)


def kind(pin: str, path: str, options: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """``path`` is ``module:class``, called with a list of the parameters that are trained, and ``options``."""
    module, name = path.split(":")
    label = more.pop("label", "")
    title = f"{module}.{name}" + (f", {label}" if label else "")
    more.setdefault("optimizer", partial(_of, path, options or {"lr": 1e-3}))
    return Case(title, (pin,), imports=(module,), **more)


def matrices(options: Mapping[str, Any], others: Mapping[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: the weights of linear layers, and the rest."""
    of = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if id(p) in of], **options},
        {"params": [p for p in trained if id(p) not in of], **others},
    ]


def grouped(path: str, options: Mapping[str, Any], others: Mapping[str, Any], **more: Any) -> Callable[[Any], Any]:
    return lambda model: resolve_name(path)(matrices(options, others, model), **more)


def _wrapped(path: str, inner: Callable[[Any], Any], **more: Any) -> Callable[[Any], Any]:
    return lambda model: resolve_name(path)(inner(model), **more)


def _trains(optimizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Schedule-free optimizers have to be told that they train."""

    def make(model: Any) -> Any:
        found = optimizer(model)
        found.train()
        return found

    return make


def _heavyball(path: str, **options: Any) -> Callable[[Any], Any]:
    """Not compiled, which would take minutes."""

    def make(model: Any) -> Any:
        utils = resolve_name("heavyball.utils")
        utils.compile_mode = utils.compile_mode_recommended_to_none = None
        return resolve_name(path)(list(model.parameters()), **options)

    return make


def _riemannian(model: Any) -> Any:
    return resolve_name("peft.optimizers:create_riemannian_optimizer")(model, torch.optim.AdamW, lr=1e-3)


def _lora_plus(model: Any) -> Any:
    make = resolve_name("peft.optimizers:create_loraplus_optimizer")
    return make(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)


def _lora_fa(model: Any) -> Any:
    return resolve_name("peft.optimizers:create_lorafa_optimizer")(model, r=4, lora_alpha=8, lr=1e-3)


def _adam_mini(model: Any) -> Any:
    return resolve_name("adam_mini:Adam_mini")(
        model.named_parameters(), lr=1e-3, dim=models.WIDTH, n_heads=1, verbose=False
    )


def _average(model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    """A moving average of all weights, as ema-pytorch keeps it."""
    ema = resolve_name("ema_pytorch:EMA")(model, beta=0.9, update_after_step=2, update_every=1)
    return ema, ema.update


def _adamw(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _sgd(model: Any) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)


PO = "pytorch-optimizer==4.1.0"
AO = "torchao==0.18.0"
BNB = "bitsandbytes==0.50.2"
PEFT = ("peft==0.21.2", "transformers==5.24.0", "accelerate==1.15.0")
ADV = "adv-optm==2.5.16"
EIGHT_BIT = {"lr": 1e-3, "min_8bit_size": 64}
LOW_RANK = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}


def timm(name: str) -> Case:
    return Case(
        *(f"timm.optim.{name}", ("timm==1.0.31", "torchvision==0.28.0")),
        optimizer=partial(_of, f"timm.optim:{name}", {"lr": 1e-3}),
        imports=("tests.sweep.torchvision_kernels", "timm.optim"),
        environment=TIMM,
    )


PYTORCH_OPTIMIZER = [
    kind(PO, f"pytorch_optimizer:{name}")
    for name in (
        *("Lion", "AdamP", "AdaBelief", "Ranger", "StableAdamW", "Shampoo", "ScalableShampoo", "SOAP"),
        *("CAME", "Prodigy", "MADGRAD", "ScheduleFreeAdamW", "Lamb", "Kron", "Tiger", "GrokFastAdamW", "SWATS"),
    )
]
BY_NAME = [
    *PYTORCH_OPTIMIZER,
    kind(PO, "pytorch_optimizer:Ranger21", {"lr": 1e-3, "num_iterations": 10}),
    kind(PO, "pytorch_optimizer:AdaFactor", {"lr": None, "relative_step": True}),
    kind(
        PO,
        "pytorch_optimizer:Muon",
        optimizer=grouped("pytorch_optimizer:Muon", {"use_muon": True}, {"use_muon": False}),
    ),
    kind(PO, "pytorch_optimizer:Lookahead", optimizer=_wrapped("pytorch_optimizer:Lookahead", _adamw, k=3)),
    kind(
        *(PO, "pytorch_optimizer:ScheduleFreeWrapper"),
        optimizer=_trains(_wrapped("pytorch_optimizer:ScheduleFreeWrapper", _sgd)),
    ),
    kind("torch-optimi==0.3.3", "optimi:AdamW"),
    kind("torch-optimi==0.3.3", "optimi:StableAdamW"),
    kind("torch-optimi==0.3.3", "optimi:Lion", {"lr": 1e-3, "foreach": True}, label="foreach"),
    kind("torch-optimi==0.3.3", "optimi:AdamW", label="bfloat16, Kahan sums", net=models.half),
    kind(
        "schedulefree==1.4.1",
        "schedulefree:AdamWScheduleFree",
        optimizer=_trains(partial(_of, "schedulefree:AdamWScheduleFree", {"lr": 1e-3})),
    ),
    kind(
        "schedulefree==1.4.1",
        "schedulefree:ScheduleFreeWrapper",
        optimizer=_trains(_wrapped("schedulefree:ScheduleFreeWrapper", _sgd)),
    ),
    kind(BNB, "bitsandbytes.optim:AdamW8bit", EIGHT_BIT),
    kind(BNB, "bitsandbytes.optim:PagedAdamW8bit", EIGHT_BIT),
    kind(BNB, "bitsandbytes.optim:Lion8bit", EIGHT_BIT),
    kind(BNB, "bitsandbytes.optim:AdEMAMix8bit", EIGHT_BIT),
    kind(AO, "torchao.optim:AdamW8bit"),
    kind(AO, "torchao.optim:AdamW4bit"),
    kind(AO, "torchao.optim:AdamWFp8"),
    kind(
        *(AO, "torchao.optim:_AdamW", {"lr": 1e-3, "bf16_stochastic_round": True}),
        label="stochastic rounding to bfloat16",
        net=models.half,
    ),
    kind(
        *(AO, "torch.optim:SGD", {"lr": 1e-2}),
        label="over torchao's int8 weights",
        net=models.int8,
    ),
    kind(
        *(AO, "torch.optim:AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
        label="over torchao's int8 weights",
        net=models.int8,
    ),
    kind("prodigyopt==1.1.2", "prodigyopt:Prodigy", {"lr": 1.0}),
    kind("dadaptation==3.2", "dadaptation:DAdaptAdam", {"lr": 1.0}),
    kind("dadaptation==3.2", "dadaptation:DAdaptLion", {"lr": 1.0}),
    kind("lion-pytorch==0.2.5", "lion_pytorch:Lion"),
    kind("came-pytorch==0.1.3", "came_pytorch:CAME", {"lr": 1e-3}),
    kind("adabelief-pytorch==0.2.1", "adabelief_pytorch:AdaBelief", {"lr": 1e-3, "print_change_log": False}),
    kind(ADV, "adv_optm:AdamW_adv"),
    kind(ADV, "adv_optm:AdamW_adv", label="bfloat16", net=models.half),
    kind(ADV, "adv_optm:Lion_adv"),
    kind(ADV, "adv_optm:Adopt_adv"),
    kind(ADV, "adv_optm:Prodigy_adv", {"lr": 1.0}),
    kind(
        *(ADV, "adv_optm:Muon_adv"),
        optimizer=grouped("adv_optm:Muon_adv", {"use_muon": True}, {"use_muon": False}, lr=1e-3),
    ),
    kind("heavyball==3.2.1", "heavyball:AdamW", optimizer=_heavyball("heavyball:AdamW", lr=1e-3)),
    kind(
        "heavyball==3.2.1",
        "heavyball:SOAP",
        optimizer=_heavyball("heavyball:SOAP", lr=1e-3),
    ),
    kind("heavyball==3.2.1", "heavyball:PSGDKron", optimizer=_heavyball("heavyball:PSGDKron", lr=1e-3)),
    kind(
        "kron-torch==0.3.3",
        "kron_torch:Kron",
        environment=TRITON,
    ),
    kind(
        "muon-optimizer==0.1.0",
        "muon:SingleDeviceMuonWithAuxAdam",
        optimizer=grouped("muon:SingleDeviceMuonWithAuxAdam", {"use_muon": True}, {"use_muon": False}),
    ),
    kind(
        "muon-fsdp2==0.3.0",
        "muon_fsdp2:Muon",
        optimizer=grouped("muon_fsdp2:Muon", {"use_muon": True, "lr": 1e-3}, {"use_muon": False, "lr": 1e-3}),
    ),
    kind(
        "galore-torch==1.0",
        "galore_torch:GaLoreAdamW",
        optimizer=grouped("galore_torch:GaLoreAdamW", LOW_RANK, {}, lr=1e-3),
    ),
    kind(
        "apollo-torch==1.0.3",
        "apollo_torch:APOLLOAdamW",
        optimizer=grouped(
            "apollo_torch:APOLLOAdamW", {**LOW_RANK, "proj": "random", "scale_type": "channel"}, {}, lr=1e-3
        ),
    ),
    kind(
        "fira==1.0.2",
        "fira:FiraAdamW",
        optimizer=grouped(
            "fira:FiraAdamW", {"rank": 4, "update_proj_gap": 3, "alpha": 1.0, "proj_type": "std"}, {}, lr=1e-3
        ),
    ),
    kind("torch_optimizer==0.3.0", "torch_optimizer:DiffGrad"),
    kind("torch_optimizer==0.3.0", "torch_optimizer:Shampoo", {"lr": 1e-2}),
    kind("torch_optimizer==0.3.0", "torch_optimizer:Yogi"),
    kind("adam-mini==1.1.1", "adam_mini:Adam_mini", optimizer=_adam_mini),
    kind(
        "flashoptim==0.1.4",
        "flashoptim:FlashAdamW",
        {"lr": 1e-3, "fused": False, "quantize": False},
        environment=TRITON,
    ),
    kind("sophia-opt==0.2.2", "sophia_opt:SophiaG"),
    kind("torchastic==0.1.2", "torchastic:AdamW", net=models.half),
    kind("opteon==0.1.0", "opteon:Opteon", {"lr": 1e-2}),
    kind("adafactor8bit==0.4.6", "adafactor8bit:Adafactor8Bit"),
    kind("transformers==5.24.0", "transformers.optimization:Adafactor", {"lr": None}, label="relative step"),
    kind(
        "transformers==5.24.0",
        "transformers.optimization:Adafactor",
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
    ),
    kind(
        "geoopt==0.5.1",
        "geoopt:optim.RiemannianAdam",
        {"lr": 1e-3, "stabilize": 3},
        net=models.Spherical,
    ),
    Case("peft: LoRA with torch's AdamW", PEFT, _adamw, models.adapted, ("peft",)),
    Case("peft: DoRA with torch's AdamW", PEFT, _adamw, partial(models.adapted, use_dora=True), ("peft",)),
    Case("peft: LoRA+", PEFT, _lora_plus, models.adapted, ("peft",)),
    Case(
        "peft: Riemannian AdamW",
        PEFT,
        _riemannian,
        models.adapted,
        ("peft",),
    ),
    Case("peft: LoRA-FA", PEFT, _lora_fa, models.adapted, ("peft",)),
    Case(
        "lora_pro.LoRAProAdamW",
        ("lora-pro-adamw==0.2.1", *PEFT),
        lambda m: resolve_name("lora_pro:LoRAProAdamW")(m, lr=1e-3),
        models.adapted,
        ("lora_pro", "peft"),
    ),
    Case(
        "ema_pytorch.EMA beside torch's AdamW",
        ("ema-pytorch==0.8.3",),
        _adamw,
        imports=("ema_pytorch",),
        beside=_average,
    ),
    *(timm(name) for name in ("Lamb", "NAdamW", "AdamP", "LaProp", "Adopt", "MADGRAD", "Lion")),
]
MADE = [
    Case("made: a function over itself", (), lambda m: made.Warmed(m.parameters())),
    Case("made: a compiled function over itself", (), lambda m: made.Warmed(m.parameters(), keeps="compiled")),
    Case("made: a function over a group", (), lambda m: made.Warmed(m.parameters(), keeps="group")),
    Case("made: a finalizer with a handle", (), lambda m: made.Native(m.parameters())),
    Case("made: compiled for each shape", (), lambda m: made.Compiled(m.parameters())),
    Case("made: couples in every third step", (), lambda m: made.Late(m.parameters())),
    Case("made: counts in a generator", (), lambda m: made.Counted(m.parameters())),
    Case("made: by the place in its group", (), lambda m: made.OfPosition(m.parameters())),
]
CASES = [*BY_NAME, *MADE]

LEFT_OUT = {
    "deepspeed 0.19.8 (DeepSpeedCPUAdam)": "it compiles a kernel when it is made",
    "distributed-shampoo": "the index has no package of this name",
    "q-galore-torch 1.0": "it steps weights that quantized layers of its own hold",
    "galore-torch 1.0 (GaLoreAdamW8bit)": "it needs a GPU, as flashoptim's quantized state does",
    "dion": "the index has no package of this name",
}
