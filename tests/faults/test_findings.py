"""What goes wrong in torch's own overlap, or in plain FSDP2, when something fails; and beside it what instep does.

torch's side is observed, not assumed: where torch changes, these tests say so.
"""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import StaleAttachmentError, TornStepError
from tests import net
from tests.cases import Blocks, batch, weights
from tests.distributed.pool import RankPool
from tests.faults import program
from tests.faults.cases import ALL, TIMEOUT, Case
from tests.faults.harness import HANG, LATE_WRITE, SILENT, STUCK, Verdict, run_cases

HERE = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def side_by_side(torchs: Case, *insteps: Case) -> tuple[Verdict, list[Verdict]]:
    verdicts = {verdict.case: verdict for verdict in run_cases([torchs, *insteps])}
    return verdicts[torchs], [verdicts[case] for case in insteps]


def require_sound(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        assert not {SILENT, HANG, LATE_WRITE, STUCK} & {outcome for outcome, _ in verdict.found}, str(verdict)
        assert verdict.seconds is not None, "the fault was noticed"


@pytest.mark.parametrize("kind", ["kill", pytest.param("hang", marks=pytest.mark.nightly)])
def test_d1_a_lost_peer(kind: str) -> None:
    """torch: backward returns normally, steps with half of the local gradient, and trains on alone."""

    def case(way: str) -> Case:
        return Case("ddp", way, "in flight", kind, 1, 1, optimizer="plain SGD", then="leave", world=2)

    torchs, insteps = side_by_side(case("torch"), case("backward"))
    assert (SILENT, "rank 0 was never told of the fault") in torchs.found
    assert any(o == SILENT and "rank 0: before step 3 its parameters" in detail for o, detail in torchs.found)
    require_sound(insteps)


def half_failing_update() -> tuple[str, bool, bool]:
    """torch's own: the update of the first bucket raises, and those behind it arrive once backward has raised. Returns
    what backward raised, whether weights had changed by then, and whether they changed after."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _hook_then_optimizer,
        _OptimizerHookState,
    )

    torch.manual_seed(0)
    model = DistributedDataParallel(Blocks(), bucket_cap_mb=program.BUCKET_MB)
    fails, raised, written = (threading.Event() for _ in range(3))

    class Update:
        def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            if fails.is_set() and not raised.is_set():
                raise ZeroDivisionError("the update")
            with torch.no_grad():
                parameter.sub_(gradient, alpha=0.1)
            if raised.is_set():
                written.set()

    def behind(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent = allreduce_hook(state, bucket)
        if not (fails.is_set() and bucket.is_last()):
            return sent
        # In a thread of its own: what is to be called when `sent` arrives would be called here if it had by then.
        late: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def arrive() -> None:
            gradient = sent.wait()
            assert raised.wait(net.SECONDS / 4)
            late.set_result(gradient)

        threading.Thread(target=arrive, daemon=True).start()
        return late

    state = _OptimizerHookState.__new__(_OptimizerHookState)
    state.functional_optimizer = Update()
    state.params_to_optimize = None  # type: ignore[assignment]  # as its __init__ does
    model.register_comm_hook(None, _hook_then_optimizer(behind, state))
    error = "none"
    for seed in range(4):
        x, y = batch(seed)
        model.zero_grad()
        before = weights(model)
        if seed == 3:
            fails.set()
        try:
            nn.functional.cross_entropy(model(x), y).backward()
        except RuntimeError as failed:
            error = str(failed)
    at_once = weights(model)
    raised.set()
    written.wait(net.SECONDS / 4)
    changed = [not all(map(torch.equal, a, b)) for a, b in ((before, at_once), (at_once, weights(model)))]
    dist.barrier()  # who ends resets the connection, over which the other rank may still be getting its last bucket
    return error, changed[0], changed[1]


def test_d2_writes_after_backward_raised() -> None:
    """torch: callbacks of later buckets go on in another thread. A checkpoint in ``except:`` is a race."""
    ranks = RankPool(2, group_seconds=TIMEOUT)
    answers = ranks.run(half_failing_update)
    ranks.stop()
    for error, _, later in answers:
        assert "ZeroDivisionError: the update" in error
        assert later
    how: dict[str, Any] = {"optimizer": "AdamW for-loop", "world": 2}
    require_sound(
        list(run_cases([Case("ddp", "backward", "in the update", "raise", n, ALL, **how) for n in (0, 3, 40)]))
    )


def restarted(way: str, folder: Path, fault: bool) -> str:
    """The weights' hash at the end of a job that torchrun starts, and starts again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "4", str(HERE / "restarted.py"), way, str(folder), str(int(fault))]
    environment = {**os.environ, **ENVIRONMENT}
    # Stores, like ranks, are on this machine: gloo asks for the address of the host's name unless told.
    environment["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, said = agent.communicate(timeout=net.SECONDS)
    finally:
        agent.terminate()  # one that is only killed leaves its ranks behind
        agent.wait(net.SECONDS)
    assert agent.returncode == 0, said[-3000:]
    return next(line for line in out.splitlines() if line.startswith("weights "))


@pytest.mark.nightly
@pytest.mark.timeout(6 * net.SECONDS)
def test_d3_a_restart_resumes_from_right_weights(tmp_path: Path) -> None:
    """torch: the surviving rank saves what it trained alone, and the job goes on from that, and exits with 0."""
    folders = {
        name: tmp_path / name for name in ("plain", "torch 0", "torch 1", "torch 2", "instep", "plain and a fault")
    }
    for folder in folders.values():
        folder.mkdir()
    right = restarted("plain", folders["plain"], fault=False)
    assert restarted("plain", folders["plain and a fault"], fault=True) == right
    # Unless torchrun ends the survivor before it has saved anything.
    assert any(restarted("torch", folders[f"torch {number}"], fault=True) != right for number in range(3))
    assert restarted("instep", folders["instep"], fault=True) == right


def test_d4_fsdp2_after_an_error_that_was_caught() -> None:
    """Plain FSDP2: later iterations raise nothing, and most parameters never move again."""
    plain, insteps = side_by_side(
        Case("fsdp2", "plain", "model", "raise", 14, ALL, world=2),
        *(Case("fsdp2", way, "model", "raise", 14, ALL, world=2) for way in ("backward", "undo", "forward")),
    )
    assert {outcome for outcome, _ in plain.found} == {SILENT}
    require_sound(insteps)


class FailsOnce(torch.optim.SGD):
    """Plain SGD whose second update of a matrix of 3 rows raises."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.shape[0] == 3 for p in given):
            FailsOnce.updates += 1
            if FailsOnce.updates == 2:
                raise ZeroDivisionError("the update")
        return super().step(closure)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=next(model.parameters()).dtype)
    model(x).square().mean().backward()


def gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """Of the weights as they are now."""
    copied = two_layers()
    copied.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
    backward(copied, seed)
    return [p.grad for p in copied.parameters() if p.grad is not None]


@pytest.fixture
def in_backward() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    return _apply_optimizer_in_backward


def test_d5_the_gradient_of_a_step_that_failed(in_backward: Any) -> None:
    """torch: it stays, and the next backward steps with the sum of both."""
    model = two_layers()
    FailsOnce.updates = 0
    in_backward(FailsOnce, model.parameters(), {"lr": 0.1})
    backward(model, 0)
    stale = gradients(model, 1)[0]
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    before, fresh = weights(model)[0], gradients(model, 2)[0]
    backward(model, 2)
    assert torch.equal(weights(model)[0], before.sub(stale + fresh, alpha=0.1))

    model = two_layers()
    optimizer = FailsOnce(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, bucket_bytes=1, schedule="backward")
    FailsOnce.updates = 0  # it was tried
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    with pytest.raises(TornStepError):
        backward(model, 2)
    overlap.accept_torn()
    assert all(p.grad is None for p in model.parameters())
    before, fresh = weights(model)[0], gradients(model, 2)[0]
    backward(model, 2)
    optimizer.step()
    assert torch.equal(weights(model)[0], before.sub(fresh, alpha=0.1))
    overlap.detach()


@pytest.mark.parametrize("convert", ["to", "half", "bfloat16"])
def test_d6_a_model_that_is_converted(in_backward: Any, convert: str) -> None:
    """torch: no weight is ever stepped again, and nothing says so."""

    def converted(model: nn.Module) -> nn.Module:
        return model.to(torch.float64) if convert == "to" else getattr(model, convert)()

    model = two_layers()
    in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    backward(model, 0)
    converted(model)
    before = weights(model)
    for seed in range(1, 4):
        backward(model, seed)
    assert all(map(torch.equal, before, weights(model)))

    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward"):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        converted(model)
        with pytest.raises(StaleAttachmentError):
            backward(model, 1)


def two_threads(how: str) -> tuple[int, str]:
    """The exit status and last line of a process in which two threads train one model."""
    environment = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, str(HERE / "threads.py"), how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=net.SECONDS / 3, check=False, env=environment
    )
    return done.returncode, (done.stdout.splitlines() or [""])[-1]


@pytest.mark.nightly
@pytest.mark.timeout(4 * net.SECONDS)
def test_d7_two_threads_in_backward_of_one_model() -> None:
    """torch: the process dies, in most runs."""
    assert any(two_threads("hook")[0] < 0 for _ in range(4))
    assert two_threads("plain")[0] == 0
    for _ in range(4):
        status, error = two_threads("instep")
        assert status == 0
        # Which one depends on where the threads meet. A forward that was under way when the other thread's backward
        # updated a weight is told so where it reads it; a backward that comes after the other's is told by instep that
        # gradients are spent, or by torch (RuntimeError) that a weight was written since the forward.
        assert error in ("ConcurrentBackwardError", "UncommittedStepError", "SpentGradientError", "RuntimeError")
