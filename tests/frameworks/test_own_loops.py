"""Frameworks with a loop of their own, which runs as it is: the line stands where model and optimizer are there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import instep
from tests.cases import Blocks
from tests.frameworks.comparing import Trained, optional, require_equal

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "forward": {"schedule": "forward", "defer": True, "bucket_bytes": 2_000},
    "backward": {"schedule": "backward", "bucket_bytes": 2_000},
    "undo": {"schedule": "backward", "undo": True, "bucket_bytes": 2_000},
}
in_every_way = pytest.mark.parametrize("way", WAYS)
clipping_ways = pytest.mark.parametrize("way", ["default", "forward", "undo"])


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 16, generator=generator), torch.randint(10, (8,), generator=generator)) for _ in range(count)
    ]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[], Any], way: str | None) -> Trained:
    """Let ``run`` train, attached in a ``way``; ``None``: as it is."""
    overlap = None if way is None else instep.attach(model, optimizer, **WAYS[way])
    logged = run()
    steps = None
    if overlap is not None:
        steps = overlap.step_count
        overlap.detach()
    return Trained(model, optimizer, [] if logged is None else list(logged), steps)


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@in_every_way
def test_ignite(way: str) -> None:
    engine = optional("ignite.engine")

    def run(attached: bool) -> Trained:
        model, optimizer = small()
        losses: list[float] = []
        trainer = engine.create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
        trainer.add_event_handler(engine.Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output))
        return trained(
            model, optimizer, lambda: (trainer.run(batches(), max_epochs=2), losses)[1], way if attached else None
        )

    require_equal(run)


@in_every_way
def test_ignite_accumulates(way: str) -> None:
    """Its own accumulation, of which ``"backward"`` is told."""
    engine = optional("ignite.engine")

    def run(attached: bool) -> Trained:
        model, optimizer = small()
        trainer = engine.create_supervised_trainer(
            model, optimizer, nn.functional.cross_entropy, gradient_accumulation_steps=2
        )
        options: dict[str, Any] = {"accumulation_steps": 2} if way == "backward" else {}
        overlap = instep.attach(model, optimizer, **WAYS[way], **options) if attached else None
        trainer.run(batches(), max_epochs=2)
        steps = None if overlap is None else overlap.step_count
        if overlap is not None:
            overlap.detach()
        return Trained(model, optimizer, [], steps)

    require_equal(run)


@in_every_way
def test_monai(way: str) -> None:
    engines = optional("monai.engines", "ignite", "monai.engines")

    def run(attached: bool) -> Trained:
        model, optimizer = small()
        rows = [{"image": x, "label": y} for x, y in batches()]
        trainer = engines.SupervisedTrainer(
            device=torch.device("cpu"),
            max_epochs=2,
            train_data_loader=rows,
            network=model,
            optimizer=optimizer,
            loss_function=nn.functional.cross_entropy,
        )
        return trained(model, optimizer, trainer.run, way if attached else None)

    require_equal(run)


@clipping_ways
def test_mmengine(tmp_path: Path, way: str) -> None:
    """Its ``Runner`` with an ``OptimWrapper`` that accumulates and clips."""
    base, optim, runner_of = optional("mmengine.model"), optional("mmengine.optim"), optional("mmengine.runner")

    class Model(base.BaseModel):  # type: ignore[misc, name-defined]  # it may not be there
        def __init__(self) -> None:
            super().__init__()
            self.net = Blocks()

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "loss") -> Any:
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            generator = torch.Generator().manual_seed(i)
            return torch.randn(16, generator=generator), torch.randint(10, (), generator=generator)

    def run(attached: bool) -> Trained:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapper = optim.OptimWrapper(optimizer, accumulative_counts=2, clip_grad={"max_norm": 0.5})
        runner = runner_of.Runner(
            model=model,
            work_dir=str(tmp_path / str(attached)),
            train_dataloader=DataLoader(Rows(), batch_size=4),
            train_cfg={"by_epoch": True, "max_epochs": 2},
            optim_wrapper=wrapper,
            experiment_name=f"{way}{attached}",
            randomness={"seed": 0},
            log_level="ERROR",
        )
        return trained(model, optimizer, lambda: (runner.train(), None)[1], way if attached else None)

    require_equal(run)


@clipping_ways
@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "SAC"])
def test_stable_baselines3(way: str, algorithm: str) -> None:
    """It clips the norm in ``train()``. SAC steps an actor, a critic and an entropy coefficient in turn."""
    found = optional("stable_baselines3")

    def run(attached: bool) -> Trained:
        torch.manual_seed(0)
        settings: dict[str, Any] = {"seed": 0, "device": "cpu", "policy_kwargs": {"net_arch": [16, 16]}}
        if algorithm == "SAC":
            made = found.SAC("MlpPolicy", "Pendulum-v1", learning_starts=20, **settings)
            pairs = [(made.actor, made.actor.optimizer), (made.critic, made.critic.optimizer)]
        else:
            made = getattr(found, algorithm)("MlpPolicy", "CartPole-v1", n_steps=16, **settings)
            pairs = [(made.policy, made.policy.optimizer)]
        overlaps = [instep.attach(*pair, **WAYS[way]) for pair in pairs] if attached else []
        made.learn(64)
        steps = min((overlap.step_count for overlap in overlaps), default=None)
        for overlap in overlaps:
            overlap.detach()
        return Trained(made.policy, pairs[-1][1], [p.detach() for p in pairs[0][0].parameters()], steps)

    require_equal(run)


@clipping_ways
def test_timm(way: str) -> None:
    """A model, an optimizer with layer decay, a schedule, an average of the weights and its own clipping."""
    timm = optional("timm")
    optim, utils, schedulers = optional("timm.optim"), optional("timm.utils"), optional("timm.scheduler")

    def run(attached: bool) -> Trained:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=10, drop_path_rate=0.1)
        optimizer = optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
        schedule = schedulers.CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, t_in_epochs=False)
        average = utils.ModelEmaV3(model, decay=0.9)

        def train() -> list[torch.Tensor]:
            losses = []
            generator = torch.Generator().manual_seed(1)
            for step in range(4):
                images = torch.randn(2, *model.default_cfg["input_size"], generator=generator)
                loss = nn.functional.cross_entropy(model(images), torch.tensor([step, step + 1]))
                optimizer.zero_grad()
                loss.backward()
                utils.dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
                optimizer.step()
                average.update(model, step=step)
                schedule.step_update(step + 1)
                losses.append(loss.detach())
            return [*losses, *(p.clone() for p in average.module.parameters())]

        return trained(model, optimizer, train, way if attached else None)

    require_equal(run)


@in_every_way
def test_torchvision(way: str) -> None:
    """The loop of its reference for classification: an average of the weights every second step, label smoothing."""
    models, utils = optional("torchvision.models"), optional("torch.optim.swa_utils")

    def run(attached: bool) -> Trained:
        torch.manual_seed(0)
        model = models.resnet18(num_classes=10, norm_layer=lambda width: nn.BatchNorm2d(width, momentum=0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
        average = utils.AveragedModel(model, avg_fn=utils.get_ema_avg_fn(0.9))

        def train() -> list[torch.Tensor]:
            losses = []
            generator = torch.Generator().manual_seed(1)
            for step in range(3):
                images, targets = torch.randn(2, 3, 64, 64, generator=generator), torch.tensor([step, step + 1])
                loss = nn.functional.cross_entropy(model(images), targets, label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 2 == 0:
                    average.update_parameters(model)
                losses.append(loss.detach())
            return [*losses, *(p.detach().clone() for p in average.parameters())]

        return trained(model, optimizer, train, way if attached else None)

    require_equal(run)


@pytest.mark.parametrize("way", ["default", "forward", "undo"])
def test_ultralytics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A detector: warm-up, accumulation that changes, clipping and an average of the weights are its trainer's own."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    optional("ultralytics")
    detect, images = optional("ultralytics.models.yolo.detect"), optional("PIL.Image")
    for part in ("train", "val"):
        (tmp_path / "images" / part).mkdir(parents=True)
        (tmp_path / "labels" / part).mkdir(parents=True)
        for number in range(6):
            images.new("RGB", (64, 64), (40 * number, 90, 30)).save(tmp_path / "images" / part / f"{number}.png")
            (tmp_path / "labels" / part / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames: {{0: box}}\n")

    def run(attached: bool) -> Trained:
        settings = {"model": "yolov8n.yaml", "data": str(data), "epochs": 2, "imgsz": 64, "batch": 2, "workers": 0}
        quiet = {
            "device": "cpu",
            "plots": False,
            "val": False,
            "save": False,
            "verbose": False,
            "project": str(tmp_path),
        }
        trainer = detect.DetectionTrainer(overrides={**settings, **quiet, "nbs": 4, "optimizer": "AdamW", "seed": 0})
        overlaps: list[Any] = []
        if attached:  # where model and optimizer are there
            trainer.add_callback(
                "on_pretrain_routine_end", lambda t: overlaps.append(instep.attach(t.model, t.optimizer, **WAYS[way]))
            )
        trainer.train()
        steps = None
        for overlap in overlaps:
            steps = overlap.step_count
            overlap.detach()
        average = [value.clone() for value in trainer.ema.ema.state_dict().values()]
        return Trained(trainer.model, trainer.optimizer, average, steps)

    require_equal(run)
