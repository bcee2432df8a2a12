"""Defects put in by hand, each of which the tests must catch. Run with ``pytest -m nightly tests/mutation``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import instep

ROOT = Path(__file__).parents[2]
SOURCE = Path(instep.__file__).parent
SOME_TESTS_FAILED = 1


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


PARITY = "tests/parity/test_one_device.py"
REFUSALS = "tests/unit/test_refusals.py"
DDP = "tests/distributed/test_ddp_parity.py"
DDP_LIFE = "tests/distributed/test_ddp_life.py"

MUTANTS = [
    Mutant(
        "skip the last bucket",
        "sources/local.py",
        "if self._transaction.apply(members):",
        "if number == len(self._members) - 1 or self._transaction.apply(members):",
        PARITY,
    ),
    Mutant(
        "step every bucket twice",
        "_core/transaction.py",
        "stepper.step(mine)",
        "(stepper.step(mine), stepper.step(mine))",
        PARITY,
    ),
    Mutant(
        "read the learning rate when the optimizer was built",
        "_core/stepper.py",
        "group = {k: _private(v) for k, v in live.items()",
        "group = {k: _private(v) for k, v in {**live, **optimizer.defaults}.items()",
        PARITY,
    ),
    Mutant(
        "use another group's hyper-parameters",
        "_core/stepper.py",
        "group = {k: _private(v) for k, v in live.items()",
        "group = {k: _private(v) for k, v in optimizer.param_groups[0].items()",
        PARITY,
    ),
    Mutant(
        "forget what the update wrote into its groups",
        "_core/stepper.py",
        "optimizer.param_groups[index].update(values)",
        "pass",
        PARITY,
    ),
    Mutant(
        "leave the state in the order of the buckets",
        "_core/stepper.py",
        "self._sort_new_state(optimizer)",
        "pass",
        PARITY,
    ),
    Mutant(
        "run the global step hooks once per bucket",
        "_core/stepper.py",
        'return step.__wrapped__ if getattr(step, "hooked", False) else step',
        "return step",
        PARITY,
    ),
    Mutant(
        "keep the gradient after it was applied",
        "_core/transaction.py",
        "        for attached in bucket:\n            attached.get().grad = attached.spent",
        "        return",
        PARITY,
    ),
    Mutant(
        "free the gradient without leaving a spent one",
        "_core/transaction.py",
        "        for attached in bucket:\n            attached.get().grad = attached.spent",
        "        for attached in bucket:\n            attached.get().grad = None",
        REFUSALS,
    ),
    Mutant(
        "clear spent gradients for good in step()",
        "_core/transaction.py",
        "            self.spend(applied)\n",
        "",
        REFUSALS,
    ),
    Mutant(
        "step within accumulate()",
        "_core/transaction.py",
        "if self.accumulating or (self.in_no_sync",
        "if (self.in_no_sync",
        PARITY,
    ),
    Mutant(
        "do not notice a backward that raised",
        "_core/transaction.py",
        "            self._failure = None\n            self._stop(None, False)",
        "            self._failure = None",
        REFUSALS,
    ),
    Mutant(
        "swallow an error in the update",
        "_core/transaction.py",
        "        if error is not None:\n            raise error",
        "        return",
        REFUSALS,
    ),
    Mutant(
        "leave the version counter to the kernel",
        "_core/stepper.py",
        "torch.autograd.graph.increment_version(parameters)",
        "pass",
        REFUSALS,
    ),
    Mutant(
        "do not compare hyper-parameters in step()",
        "_core/transaction.py",
        "stepper.require_unchanged()",
        "pass",
        REFUSALS,
    ),
    Mutant(
        "do not look at the parameters before a forward",
        "attachment.py",
        "require_unchanged(self._transaction.parameters)",
        "pass",
        REFUSALS,
    ),
    Mutant(
        "let the user's step hooks run after ours",
        "attachment.py",
        "    def _begin_step(self) -> None:\n        self._register_pre_hooks()",
        "    def _begin_step(self) -> None:",
        REFUSALS,
    ),
    Mutant(
        "let a copy drive the original",
        "_core/hooks.py",
        '    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundHook":\n        return BoundHook(None)',
        '    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundHook":\n        return self',
        REFUSALS,
    ),
    Mutant(
        "hold the parameters strongly",
        "_core/parameters.py",
        "self._ref = weakref.ref(parameter)",
        "self._ref = lambda: parameter",
        "tests/unit/test_life.py",
    ),
    Mutant(
        "leave a hook behind",
        "attachment.py",
        "for handle in (*self._handles, *self._pre_hooks):",
        "for handle in self._handles:",
        "tests/unit/test_attach.py",
    ),
    Mutant(
        "take the slices of gradients() whatever the strides",
        "sources/ddp.py",
        "if all(parameter.is_contiguous() and not parameter.is_complex() for parameter in parameters):",
        "if not any(parameter.is_complex() for parameter in parameters):",
        DDP,
    ),
    Mutant(
        "step under the autocast of backward",
        "_core/stepper.py",
        "return torch.autocast(device_type, enabled=False) if enabled else nullcontext()",
        "return nullcontext()",
        PARITY,
    ),
    Mutant(
        "take every optimizer to be separable",
        "attachment.py",
        "require_separable(one)",
        "pass",
        "tests/unit/test_attach.py",
    ),
    Mutant(
        "raise before DDP is done",
        "sources/local.py",
        "at_end_of_backward(self._transaction.raise_failure, self._transaction.backward_raised)",
        "self._transaction.raise_failure()",
        DDP_LIFE,
    ),
    Mutant(
        "do not look whether a weight was written before step()",
        "_core/transaction.py",
        "if parameter._version != attached.version:",
        "if False:",
        REFUSALS,
    ),
    Mutant(
        "ignore the future's error",
        "sources/ddp.py",
        "        flight.future.wait()\n",
        "        try:\n            flight.future.wait()\n        except RuntimeError:\n            pass\n",
        DDP_LIFE,
    ),
    Mutant(
        "decay unused parameters",
        "sources/ddp.py",
        "if attached is not None and parameter.grad is not None",
        "if attached is not None",
        DDP,
    ),
    Mutant(
        "divide as allreduce_hook does",
        "comm_hooks.py",
        "tensor.mul_(1.0 / divisor)",
        "tensor.div_(divisor)",
        DDP,
    ),
    Mutant(
        "divide by the world size when ranks have joined",
        "sources/ddp.py",
        "        return self._active\n",
        "        return dist.get_world_size(ddp.process_group)\n",
        DDP_LIFE,
    ),
    Mutant(
        "step a rank that has joined",
        "sources/ddp.py",
        "        if graph_task() is None:\n            return  # a joined",
        "        if False:\n            return  # a joined",
        DDP_LIFE,
    ),
    Mutant(
        "spend gradients before DDP is done with them",
        "sources/ddp.py",
        "        at_end_of_backward(self._settle, self._raised)\n",
        "        self._settle()\n",
        DDP,
    ),
]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "instep", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "instep" / mutant.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, "the code has changed: write this defect anew"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", mutant.tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == SOME_TESTS_FAILED, done.stdout[-3000:]
