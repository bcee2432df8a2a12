"""accelerate's own loop, attached after ``accelerator.prepare``: bit for bit as without instep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep import ClipNorm
from instep.errors import AttachError, SpentGradientError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks
from tests.distributed.pool import RankPool
from tests.integrations.ranks import as_torchrun

MICRO_BATCHES, LIMIT, SMALL = 3, 0.9, 2_000
ROWS = 4 * 7  # seven micro-batches on one rank, four on each of two: the last step of an epoch has fewer
Entry = tuple[torch.Tensor, ...]


class Run:
    """A model, its optimizer and scheduler, prepared, and attached with ``options`` unless these are ``None``."""

    def __init__(self, options: Mapping[str, Any] | None, **settings: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # one Accelerator after the other, in one process
        self.accelerator = Accelerator(cpu=True, **{"gradient_accumulation_steps": MICRO_BATCHES, **settings})
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        generator = torch.Generator().manual_seed(1)
        rows = TensorDataset(
            torch.randn(ROWS, 16, generator=generator), torch.randint(10, (ROWS,), generator=generator)
        )
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(rows, 4), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        assert isinstance(self.optimizer, AcceleratedOptimizer)
        self.overlap = None
        self.clips, self.together = True, False
        if options is not None:
            self.clips = "clip" not in options
            options = dict(options)
            self.together = options.pop("together", False)
            alone: dict[str, Any] = {"bucket_bytes": SMALL} if self.accelerator.num_processes == 1 else {}
            if options.get("schedule") != "forward" and not self.together:
                # Where there is no DDP, no_sync() tells nobody that gradients only add up.
                alone |= {"accumulation_steps": MICRO_BATCHES} if alone else {}
            self.overlap = instep.attach(self.model, self.optimizer, **alone, **options)

    def epoch(self) -> list[Entry]:
        """What each micro-batch has to log."""
        found: list[Entry] = []
        for inputs, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                if self.together and self.overlap is not None:
                    loss_of_step = loss / self.accelerator.gradient_accumulation_steps
                    self.overlap.backward(loss_of_step, more=not self.accelerator.sync_gradients)
                else:
                    self.accelerator.backward(loss)
                norm = torch.zeros(())
                if self.accelerator.sync_gradients and self.clips:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), LIMIT)
                self.optimizer.step()
                if self.accelerator.sync_gradients and not self.clips:
                    assert self.overlap is not None
                    assert self.overlap.grad_norm is not None
                    norm = self.overlap.grad_norm
                self.scheduler.step()
                self.optimizer.zero_grad()
                found.append((loss.detach(), norm.clone()))
        return found

    def state(self) -> Any:
        if self.overlap is not None:
            self.overlap.synchronize()
        return training_state(self.accelerator.unwrap_model(self.model), self.optimizer.optimizer)

    def close(self) -> None:
        if self.overlap is not None:
            self.overlap.detach()


def require_same(plain: Run, other: Run) -> None:
    assert first_difference(plain.state(), other.state()) is None
    assert plain.scheduler.state_dict() == other.scheduler.state_dict()


def require_same_log(plain: list[Entry], other: list[Entry]) -> None:
    assert all(torch.equal(a, b) for one, two in zip(plain, other, strict=True) for a, b in zip(one, two, strict=True))


WAYS: Mapping[str, Mapping[str, Any]] = {
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True, "clip": ClipNorm(LIMIT)},
    "undo, clipped by the loop": {"schedule": "backward", "undo": True},
    "together": {"schedule": "backward", "clip": ClipNorm(LIMIT, mode="two_pass"), "together": True},
}
in_every_way = pytest.mark.parametrize("way", list(WAYS))
on_one_and_two_ranks = pytest.mark.parametrize("world", [1, 2])


def on_each(two_ranks: RankPool, world: int, body: Any, *args: Any) -> None:
    if world == 1:
        body(*args)
    else:
        two_ranks.run(as_torchrun, body, *args)


def trains_as_without(way: str, settings: Mapping[str, Any]) -> None:
    plain, other = Run(None, **settings), Run(WAYS[way], **settings)
    norms: list[float] = []
    for _ in range(2):
        log = plain.epoch()
        require_same_log(log, other.epoch())
        require_same(plain, other)
        norms += [float(norm) for _, norm in log if norm]
    assert min(norms) < LIMIT < max(norms)
    other.close()


@on_one_and_two_ranks
@in_every_way
def test_training(two_ranks: RankPool, way: str, world: int) -> None:
    on_each(two_ranks, world, trains_as_without, way, {})
    on_each(two_ranks, world, trains_as_without, way, {"mixed_precision": "bf16"})


def resumes_as_without(directory: Path, way: str) -> None:
    """``save_state`` in the middle, and ``load_state`` by one that is attached already, with and without instep."""
    kinds = {"plain": None, "instep": WAYS[way]}
    for written, options in kinds.items():
        run = Run(options)
        run.epoch()
        run.accelerator.save_state(str(directory / written))
        whole = run.epoch()
        for read in kinds.values():
            resumed = Run(read)
            resumed.accelerator.load_state(str(directory / written))
            require_same_log(whole, resumed.epoch())
            require_same(run, resumed)
            resumed.close()
        run.close()


@on_one_and_two_ranks
@in_every_way
def test_checkpoints(tmp_path: Path, two_ranks: RankPool, way: str, world: int) -> None:
    on_each(two_ranks, world, resumes_as_without, tmp_path, way)


def steps_during_backward() -> None:
    """Without clipping: the plain ``schedule="backward"``."""
    plain, other = Run(None), Run({"schedule": "backward"})
    plain.clips = other.clips = False
    for run in (plain, other):
        for inputs, labels in run.loader:
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(nn.functional.cross_entropy(run.model(inputs), labels))
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
    require_same(plain, other)
    other.close()


@on_one_and_two_ranks
def test_training_without_clipping(two_ranks: RankPool, world: int) -> None:
    on_each(two_ranks, world, steps_during_backward)


def test_a_loss_scale() -> None:
    """``fp16`` needs an accelerator. What it does to a step does not: one with an infinite gradient is left out."""
    runs, skipped = [], []
    each: tuple[dict[str, Any] | None, ...] = (None, {"schedule": "forward", "defer": True})
    for options in each:
        run = Run(None, gradient_accumulation_steps=1)
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        run.optimizer = run.accelerator.prepare_optimizer(run.optimizer.optimizer)
        if options is not None:
            run.overlap = instep.attach(run.model, run.optimizer.optimizer, **options)
        for _ in range(8):
            inputs, labels = next(iter(run.loader))
            run.accelerator.backward(16 * nn.functional.cross_entropy(run.model(inputs), labels))
            run.accelerator.clip_grad_norm_(run.model.parameters(), LIMIT)
            run.optimizer.step()
            run.optimizer.zero_grad()
            skipped.append(run.optimizer.step_was_skipped)
        runs.append(run)
    require_same(*runs)
    assert skipped[:8] == skipped[8:]
    assert set(skipped) == {True, False}
    runs[1].close()


class Adds(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate is not typed
    """A wrapper of somebody else's, which does more."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9


def test_a_prepared_optimizer_is_taken_and_an_unknown_wrapper_is_not() -> None:
    run = Run(None)
    with instep.attach(run.model, [AcceleratedOptimizer(run.optimizer)], schedule="backward"):
        pass
    with pytest.raises(UnsupportedOptimizerError, match=r"Adds holds another.*Attach the inner"):
        instep.attach(run.model, Adds(run.optimizer.optimizer), schedule="backward")


def test_mistakes() -> None:
    run = Run(None)
    with pytest.raises(AttachError, match="two_pass"):
        instep.attach(run.model, run.optimizer.optimizer, clip=ClipNorm(LIMIT), schedule="backward")
    run = Run({"schedule": "backward"})
    with pytest.raises(SpentGradientError):
        run.epoch()
    run.close()
