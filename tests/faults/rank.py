"""One process of a run. It trains, has its fault, and tells a file what became of it: the group may be gone by then."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import instep
from instep._torch.placeholders import Placeholder
from instep.errors import TornStepError
from tests.accelerator.backend import register
from tests.accelerator.recording import recorded
from tests.devices import let_go
from tests.faults import program
from tests.faults.cases import STEPS, TIMEOUT, Case
from tests.faults.inject import SEAMS, Trigger
from tests.inside import before_forward
from tests.judged import own_steps_are_proved
from tests.pace import Pace

QUIET = 1.0
"""Seconds after an error in which nothing may be written."""
ATTEMPTS = 3


class Run:
    """The loop of one rank.

    Attributes:
        at: what seams want to be called in the loop itself, by the name of the place.
        before_backward: what a seam does with the loss.
        phase: where in the loop this rank is.
    """

    def __init__(self, case: Case, rank: int, file: Path, interface: str, pace: Pace) -> None:
        self.case = case
        self.rank = rank
        self.interface = interface
        self.at: dict[str, Callable[[], Any]] = {}
        self.before_backward: Callable[[torch.Tensor], None] = lambda loss: None
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT)
        self.phase = "start"
        self._attempts = 0
        self._accepted = False
        self._count = 0
        self._found: list[str] = []
        self._found_at = -1
        self.model, self.optimizer = program.build(case)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._pace = pace
        self.overlap: instep.Attachment | None = None
        if case.way == "torch":
            self.kept = program.with_torchs_own_overlap(self.model)
        elif case.way != "plain":
            options = program.options(case, rank)
            with patch.dict(os.environ, {"INSTEP_DISABLE": "1"} if options.pop("disabled", False) else {}):
                self.overlap = instep.attach(self.model, self.optimizer, **options)
        program.before_the_faults(self.model, self.optimizer, case, rank)

    def note(self, what: str, **values: Any) -> None:
        """Written at once, and in one piece: this process may be killed or interrupted at any moment."""
        line = json.dumps({"what": what, "time": time.monotonic(), **values})
        os.write(self._file, f"{line}\n".encode())

    def train(self, trigger: Trigger) -> None:
        trigger.run = self
        step = 0
        while step < STEPS:
            trigger.begin(step)
            try:
                self._iterate(step, trigger)
            except BaseException as error:
                goes_on, step = self._after(error, step)
                if not goes_on:
                    return
            else:
                step += 1
        if self.overlap is not None:
            self.overlap.synchronize()
        self._whole(STEPS)

    def _iterate(self, step: int, trigger: Trigger) -> None:
        try:
            self._count = 0 if self.overlap is None else self.overlap.step_count
            self._reach("begin")
            self.phase = "forward"
            loss = program.loss_of(self.model, self.case, self.rank, step)
            # Whatever is to be written between two backwards has been written now, with either schedule.
            self._whole(step)
            self.before_backward(loss)
            self.phase = "backward"
            loss.backward()
            self.phase = "before step"
            self._reach("before step")
            self.phase = "step"
            if self.case.way != "torch" and not self._skips(step):
                self.optimizer.step()
            self.phase = "after step"
            self._reach("after step")
            self.optimizer.zero_grad()
        finally:
            self._reach("end")

    def _skips(self, step: int) -> bool:
        """What the plain loop does with a gradient that is not finite."""
        return self.case.way == "plain" and self.case.nonfinite == "skip" and step == self.case.step

    def _reach(self, place: str) -> None:
        self.at.get(place, _nothing)()

    @property
    def _rows_of(self) -> tuple[int, int] | None:
        return (self.rank, self.case.world) if self.case.source == "zero" else None

    def _fingerprint(self) -> tuple[str, str]:
        return program.fingerprint(self.optimizer, self._rows_of)

    def _whole(self, step: int) -> None:
        found = [program.digest([p]) for p in self.parameters]
        still = sum(map(str.__eq__, found, self._found)) if self._found and step == self._found_at + 1 else 0
        self._found, self._found_at = found, step
        self.note("whole", step=step, hash=self._fingerprint(), torn=self._accepted, still=still)

    def _after(self, error: BaseException, step: int) -> tuple[bool, int]:
        """What became of an error. Returns whether to go on, and with which step."""
        raised, ticks = time.monotonic(), self._pace.ticks()
        with suppress(RuntimeError):  # a collective of a rank that is gone
            let_go()
        found = self._fingerprint()
        self.note(
            "raised",
            raised=raised,
            ticks=ticks,
            step=step,
            phase=self.phase,
            type=type(error).__name__,
            text=str(error)[:300],
            chain=_chain(error),
            trace=traceback.format_exc(limit=-6)[-1500:],
            hash=found,
            state=self._state(),
            torn=self._accepted,
            left=self._left(),
            gathered=self._gathered(),
        )
        if self.overlap is not None and self._state() == "pending":
            # Of the step before, which was committed: its update is not due before somebody reads the weights.
            self._probe("synchronize", self.overlap.synchronize)
            found = self._fingerprint()
        time.sleep(QUIET)
        later = self._fingerprint()
        self.note("quiet", same=later == found, hash=later, before=found, step=step, torn=self._accepted)
        torn = self.overlap is not None and self._is_torn()
        self._attempts += 1
        self.note("settled", state=self._state(), whole=self._fingerprint(), torn=torn, step=step)
        if self.case.then == "leave" or self._attempts == ATTEMPTS or not (torn or self.rank in self.case.ranks):
            return False, step
        if torn and self.overlap is not None:
            self._probe("optimizer.step", self.optimizer.step)
            self.overlap.accept_torn()
            self._accepted = True
            self._found = []
            self.note("accepted", left=self._left())
        elif self.case.way in ("backward", "beside") and self.phase != "forward" and self._state() == "open":
            # All of it was applied in backward, and the loop was stopped before step() could say so.
            self._probe("optimizer.step", self.optimizer.step)
        done = self.phase == "after step" if self.overlap is None else self.overlap.step_count > self._count
        self.optimizer.zero_grad()
        return True, step + done

    def _is_torn(self) -> bool:
        # What an except clause would do, before it comes to a forward.
        uses: dict[str, Callable[[], object]] = {
            "model.state_dict": self.model.state_dict,
            "optimizer.state_dict": self.optimizer.state_dict,
        }
        if self.case.source == "zero" and self._state() != "torn":
            del uses["optimizer.state_dict"]  # all ranks must call it, where it is not refused
        said = [self._probe(name, use) for name, use in {**uses, "forward": self._forward}.items()]
        return any(said) or self._state() == "torn"

    def _forward(self) -> None:
        if self.case.source in ("fsdp2", "2d"):
            # Only what instep says before FSDP2 gathers weights, which would wait for ranks that are gone.
            assert self.overlap is not None
            before_forward(self.overlap)
        else:
            with torch.no_grad():
                program.loss_of(self.model, self.case, self.rank, 0)

    def _probe(self, name: str, use: Callable[[], object]) -> bool:
        """Whether ``use`` says that the step is torn."""
        try:
            use()
        except BaseException as error:
            self.note("probe", name=name, error=type(error).__name__, text=str(error)[:200])
            return isinstance(error, TornStepError)
        self.note("probe", name=name, error=None)
        return False

    def try_to_save(self) -> None:
        """What a checkpoint taken here would hold."""
        try:
            saved = self.model.state_dict()
            weights = program.digest(saved[name] for name, _ in self.model.named_parameters())
            states = self.optimizer.state_dict()["state"]
            mine = [states.get(i, {}) for i in range(len(self.parameters))]
            if self._rows_of is not None:  # the checkpoint has all of it
                mine = program.rows_of_states(mine, self.parameters, *self._rows_of)
            state = program.digest_of_states(mine)
        except RuntimeError as error:
            self.note("save", error=type(error).__name__, text=str(error)[:200])
        else:
            self.note("save", error=None, hash=(weights, state))

    def _state(self) -> str:
        return "plain" if self.overlap is None else self.overlap.state

    def _gathered(self) -> int:
        """How many of the attached model's parameters are not those that the optimizer has."""
        held = set(map(id, self.parameters))
        return 0 if self.overlap is None else sum(id(p) not in held for p in self.model.parameters())

    def _left(self) -> int:
        """How many parameters have a gradient that the next one would be added to."""
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [torch.Tensor.grad.__get__(p) for p in self.parameters]  # type: ignore[union-attr]  # a descriptor
        return sum(gradient is not None and not isinstance(gradient, Placeholder) for gradient in gradients)


def _nothing() -> None:
    pass


def _chain(error: BaseException) -> list[str]:
    """The classes of ``error``, of what caused it, and what is told in its text of an error from another thread."""
    found: list[str] = []
    one: BaseException | None = error
    while one is not None and len(found) < 10:
        found += [type(one).__name__, *(name for name in ("InjectedError",) if name in str(one))]
        one = one.__cause__ or one.__context__
    return found


def serve(case: Case, rank: int, folder: str, namespace: str | None) -> None:
    """Be rank ``rank`` of ``case``; the report is ``folder/rank``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = open(Path(folder) / f"stderr{rank}", "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    interface = "lo"
    if namespace is not None:
        interface = f"node{rank}"
        _enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if case.device == "emu":
        register()
    if case.world > 1 or case.source != "local":
        timeout = timedelta(seconds=TIMEOUT)
        method = f"file://{folder}/store"
        backend = "emu" if case.device == "emu" else "gloo"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=case.world, timeout=timeout)
    trigger = Trigger(case, rank)
    with ExitStack() as stack:
        log = stack.enter_context(recorded()) if case.device == "emu" else None
        stack.enter_context(own_steps_are_proved())  # "Staged" has its fault where an update runs later, too
        run = Run(case, rank, Path(folder) / str(rank), interface, stack.enter_context(Pace()))
        if case.point:
            stack.enter_context(SEAMS[case.point](trigger, run))
        run.train(trigger)
    for finding in log.findings if log is not None else ():
        run.note("unordered", text=str(finding)[:1500])
    run.note("end")
    # Without the process group's own end, which waits for ranks that are gone; and without the other's of Python.
    os._exit(0)


def _enter(namespace: str) -> None:
    import ctypes

    with open(f"/var/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")
