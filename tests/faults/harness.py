"""Runs cases in processes of their own, and judges what the ranks report against the plain loop."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests import net, pace
from tests.faults.cases import ALL, DIFFERS, LIMIT, LOSES_A_RANK, NONFINITE, RAISES, ROWS, STEPS, Case
from tests.forking import forking

TRIES = 3
AFTER_FAULT_SECONDS = net.SECONDS / 5
"""For everything after a fault: raising, being watched, and doing the step again. Who is not through then hangs."""

OK = "ok"
SILENT = "SILENT"
HANG = "HANG"
LATE_WRITE = "LATE WRITE"
WRONG_ERROR = "WRONG ERROR"
NOT_REFUSED = "NOT REFUSED"
STUCK = "CANNOT GO ON"
NOT_REACHED = "not reached"
NOT_BUILT = "not built"
CRASH = "CRASH"
BROKEN = "BROKEN CASE"
UNORDERED = "UNORDERED"
DDP_GIVES_UP = ("Expected to have finished reduction in the prior iteration", "!unmarked_param_indices.empty()")
"""What DDP raises for ever once its backward or its hook was interrupted, attached or not. Nothing is written."""
NONFINITE_ERROR = "NonFiniteGradientError"
BY_SEVERITY = (SILENT, LATE_WRITE, UNORDERED, HANG, CRASH, NOT_REFUSED, WRONG_ERROR, STUCK, BROKEN)

OUT_OF_TIME = re.compile("time(d )?out", re.IGNORECASE)

ALL_TRAIN = ("Blocks", "Chain")
"""Models of which every step moves every parameter."""

Report = list[dict[str, Any]]
Hash = tuple[str, str]
Oracle = Sequence[Sequence[Hash]]
"""Of each rank, before each step and after the last: the fingerprint of the plain loop."""


@dataclass
class Verdict:
    """What became of one case.

    Attributes:
        found: every way in which it broke the contract, with its outcome; empty if it did not.
        outcome: the worst of them, or ``ok``, ``not reached``, ``not built``.
        seconds: from the fault to the last surviving rank's error, by the clock of ``tests.pace``; ``None`` if none had
            reason to raise.
        said: what each rank saw, in words.
        traces: where the errors came from.
        torn: whether a rank said that the step is torn, and was asked for what that refuses.
    """

    case: Case
    found: list[tuple[str, str]] = field(default_factory=list)
    outcome: str = OK
    seconds: float | None = None
    said: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    torn: bool = False

    def settle(self) -> "Verdict":
        outcomes = {outcome for outcome, _ in self.found}
        self.outcome = next((outcome for outcome in BY_SEVERITY if outcome in outcomes), self.outcome)
        return self

    def __str__(self) -> str:
        first: dict[tuple[str, str], str] = {}  # of each rank the first of its kind: the others follow from it
        for outcome, detail in self.found:
            first.setdefault((outcome, detail[:7]), f"{outcome}: {detail}")
        where = "".join(self.traces[:1]) if self.outcome in (SILENT, LATE_WRITE, HANG) else ""
        return "\n    ".join([f"{self.outcome:12} {self.case}", *first.values(), " | ".join(self.said), where]).rstrip()


class _Running:
    """The processes of one case."""

    def __init__(self, case: Case, stack: ExitStack) -> None:
        self.case = case
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="instep-fault-")))
        spaces: Sequence[str | None] = [None] * case.world
        if case.kind == "partition":
            spaces = stack.enter_context(namespaces(case.world))
        context = forking()
        from tests.faults.rank import serve

        self._processes: list[BaseProcess] = []
        for rank in range(case.world):
            process = context.Process(target=serve, args=(case, rank, str(self.folder), spaces[rank]), daemon=True)
            process.start()
            self._processes.append(process)
        self._deadline = time.monotonic() + net.SECONDS / 2
        self._faulty = False
        self._continued = False
        self.killed: set[int] = set()

    def is_over(self) -> bool:
        alive = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        if not alive:
            return True
        if not self._faulty and (fault := fault_in(self.reports())) is not None:
            self._faulty = True
            self._deadline = fault + AFTER_FAULT_SECONDS
        if self._faulty and not self._continued and self.case.kind == "stop" and set(alive) <= set(self.case.ranks):
            # The others are through. One that comes back must not train on as if nothing had been.
            self._continued = True
            self._deadline = time.monotonic() + AFTER_FAULT_SECONDS
            for rank in alive:
                os.kill(self._processes[rank].pid or 0, signal.SIGCONT)
        if time.monotonic() > self._deadline:
            self.killed = set(alive)
            for rank in alive:
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)  # it writes where it stands
            time.sleep(0.3)
            return True
        return False

    def reports(self) -> list[Report]:
        found = []
        for rank in range(self.case.world):
            file = self.folder / str(rank)
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            found.append([json.loads(line) for line in lines if line.endswith("}")])
        return found

    def ran_late(self) -> bool:
        """Whether a collective ran out of time before any fault: the timeout is short, and this machine was busy."""
        reports = self.reports()
        never_met = not all(reports) and any("init_process_group" in self.said(r) for r in range(self.case.world))
        errors = (one["text"] for report in reports for one in report if one["what"] == "raised")
        return fault_in(reports) is None and (never_met or any(OUT_OF_TIME.search(text) for text in errors))

    def said(self, rank: int) -> str:
        file = self.folder / f"stderr{rank}"
        return file.read_text(encoding="utf-8", errors="replace")[-4000:] if file.exists() else ""

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._stack.close()


def fault_in(reports: Iterable[Report]) -> float | None:
    """When the first fault was injected, in seconds of the clock that all processes share."""
    return min((one["time"] for report in reports for one in report if one["what"] == "fault"), default=None)


def run_cases(cases: Iterable[Case], jobs: int = 4) -> Iterator[Verdict]:
    """Run ``cases``, some at a time: most of a fault's time is waiting. Verdicts come in the order of their ends."""
    cases = list(cases)
    oracles: dict[Case, Oracle] = {}
    for one in _run(dict.fromkeys(map(plain_twin, cases)), jobs):
        oracles[one.case] = [[tuple(o["hash"]) for o in report if o["what"] == "whole"] for report in one.reports()]
        complete = all(len(hashes) == STEPS + 1 for hashes in oracles[one.case])
        assert complete, (str(one.case), one.reports(), [one.said(rank) for rank in range(one.case.world)])
    for one in _run(cases, jobs):
        yield judge(one.case, one.reports(), oracles[plain_twin(one.case)], one.killed, one.said)


def _run(cases: Iterable[Case], jobs: int) -> Iterator[_Running]:
    waiting = deque(cases)
    running: list[_Running] = []
    tries: Counter[Case] = Counter()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Running(waiting.popleft(), ExitStack()))
            time.sleep(0.03)
            for one in [one for one in running if one.is_over()]:
                if one.ran_late() and tries[one.case] < TRIES:
                    tries[one.case] += 1
                    waiting.append(one.case)
                else:
                    yield one
                running.remove(one)
                one.close()
    finally:
        for one in running:
            one.close()


def run_case(case: Case) -> Verdict:
    return next(iter(run_cases([case], jobs=1)))


def plain_twin(case: Case) -> Case:
    """The plain loop that ``case`` is compared with. A gradient that is not finite is part of what it computes."""
    kept = case.kind in NONFINITE
    return replace(
        case,
        way="plain",
        point=case.point if kept else "",
        kind=case.kind if kept else "",
        where=case.where if kept else 0,
        rank=case.rank if kept else 0,
        step=case.step if kept else 0,
        then="again",
        nonfinite=case.nonfinite if kept and case.nonfinite == "skip" else None,
    )


def judge(
    case: Case, reports: Sequence[Report], plain: Oracle, killed: set[int], said: Callable[[int], str]
) -> Verdict:
    """Compare what the ranks have told with the plain loop and with the contract."""
    verdict = Verdict(case)
    fault = fault_in(reports)
    if any("unexpected keyword argument 'nonfinite'" in said(rank) for rank in range(case.world)):
        verdict.outcome = NOT_BUILT
        return verdict
    if fault is None:
        verdict.outcome = NOT_REACHED
        if not all(report and report[-1]["what"] == "end" for report in reports):
            verdict.found.append((BROKEN, "; ".join(said(rank)[-600:] for rank in range(case.world))))
        return verdict.settle()
    for rank in killed:
        verdict.traces.append(said(rank))
    for rank, report in enumerate(reports):
        judge_rank(verdict, rank, report, plain[rank], fault, rank in killed)
        if (
            rank not in killed
            and not (report and report[-1]["what"] == "end")
            and not (case.kind == "kill" and rank in case.ranks)
        ):
            outcome = CRASH if "terminate called" in said(rank) else BROKEN
            verdict.found.append((outcome, f"rank {rank} ended by itself: {said(rank)[-600:]}"))
    judge_survivors(verdict, reports, plain)
    if case.rank == ALL and not all(fault_in([report]) for report in reports):
        # Another rank was told of the fault before its own: it is the fault of one rank, which other cases have. With
        # ``again`` that one does its step again alone, and how that ends says nothing.
        verdict.outcome = NOT_REACHED
        verdict.found = [one for one in verdict.found if one[0] not in (WRONG_ERROR, STUCK, CRASH, BROKEN)]
    return verdict.settle()


def judge_rank(verdict: Verdict, rank: int, report: Report, plain: Sequence[Hash], fault: float, killed: bool) -> None:
    case = verdict.case
    faulty = rank in case.ranks

    def broke(outcome: str, detail: str) -> None:
        verdict.found.append((outcome, f"rank {rank}: {detail}"))

    words = []
    raised: dict[str, Any] | None = None
    for one in report:
        what = one["what"]
        if what == "whole" and not one["torn"] and tuple(one["hash"]) != plain[one["step"]]:
            parts = [
                name
                for name, a, b in zip(("parameters", "state"), one["hash"], plain[one["step"]], strict=True)
                if a != b
            ]
            broke(SILENT, f"before step {one['step']} its {' and '.join(parts)} are not those of the plain loop")
        elif what == "whole" and one["torn"] and one["still"] and case.model in ALL_TRAIN:
            broke(SILENT, f"{one['still']} parameters did not move in step {one['step'] - 1}, after accept_torn()")
        elif what == "raised":
            if raised is None:
                judge_error(verdict, rank, one, fault, broke)
            # Between a forward and its backward FSDP2 leaves the weights of its root gathered.
            if one["phase"] in ("forward", "backward") and one.get("gathered"):
                broke(SILENT, f"{one['gathered']} parameters of the model are not the optimizer's")
            words.append(f"{one['type']} in {one['phase']} of step {one['step']} after {one['raised'] - fault:.2f} s")
            verdict.traces.append(one["trace"])
            own = any(text in one["text"] for text in DDP_GIVES_UP)
            if raised is not None and len(case.ranks) == case.world and not own:
                broke(STUCK, f"then {one['type']}: {one['text'][:160]}")
            raised = one
        elif what == "quiet" and not one["same"]:
            broke(LATE_WRITE, f"written in the second after the error in step {one['step']}")
        elif what == "settled":
            assert raised is not None
            judge_settled(verdict, rank, report, raised, one, plain, broke)
            words.append("torn" if one["torn"] else "whole")
        elif what == "unordered":
            broke(UNORDERED, one["text"])
        elif what == "accepted" and one["left"]:
            broke(SILENT, f"{one['left']} gradients were left after accept_torn()")
        elif what == "save":
            if one["error"] is not None:
                words.append(f"save refused: {one['error']}")
            elif tuple(one["hash"]) not in plain[case.step : case.step + 2]:
                broke(SILENT, "a checkpoint was saved that holds no step's weights and state")
            else:
                words.append("saved")
    if killed and not (faulty and case.kind in ("stop", "hang")):
        broke(HANG, f"not through {AFTER_FAULT_SECONDS:.0f} s after the fault")
    elif killed:
        broke(HANG, "did not raise when it came back")
    elif report and report[-1]["what"] == "end" and raised is None:
        words.append("no error")
    verdict.said.append(f"rank {rank}: {', '.join(words)}")


def judge_error(
    verdict: Verdict, rank: int, one: Mapping[str, Any], fault: float, broke: Callable[[str, str], None]
) -> None:
    case = verdict.case
    seconds = pace.seconds(one["ticks"], fault, one["raised"])
    mine = rank in case.ranks
    if case.kind in RAISES:
        wrong = mine and RAISES[case.kind] not in one["chain"]
    elif case.kind == "error":
        wrong = mine and "InjectedError" not in one["chain"]
    elif case.kind in NONFINITE:
        # In backward nobody waits for the others: a rank whose shards are finite is told later, as of any other error.
        told_later = case.way == "backward" and case.source in ("fsdp2", "2d")
        wrong = case.nonfinite != "raise" or not (one["type"] == NONFINITE_ERROR or told_later)
    elif case.kind == DIFFERS:
        wrong = one["type"] != "StepMismatchError"
    else:
        wrong = case.kind == "save"
    if wrong:
        broke(WRONG_ERROR, f"{one['type']}: {one['text'][:160]}")
    if mine and case.kind in ("stop", "hang"):
        return  # its own time begins when it comes back
    verdict.seconds = max(verdict.seconds or 0.0, seconds)
    if seconds > LIMIT:
        broke(HANG, f"raised after {seconds:.1f} s")


def judge_settled(
    verdict: Verdict,
    rank: int,
    report: Report,
    raised: Mapping[str, Any],
    one: Mapping[str, Any],
    plain: Sequence[Hash],
    broke: Callable[[str, str], None],
) -> None:
    """After an error: the weights are those of a step, or the step is torn and everything says so."""
    step = one["step"]
    if raised["torn"]:
        return  # torn weights were accepted: there is nothing left to compare with
    if not one["torn"]:
        quiet = next(q for q in report if q["what"] == "quiet" and q["time"] > raised["time"])
        for when, found in (("right after the error", quiet["before"]), ("once it had settled", one["whole"])):
            if tuple(found) not in plain[step : step + 2]:
                broke(SILENT, f"{when} its weights are no step's, and nothing says that step {step} is torn")
                return
        undone = verdict.case.way == "undo" and raised["phase"] in ("forward", "backward")
        if undone and tuple(one["whole"]) != plain[step]:
            broke(SILENT, f"step {step} was not put back")
        return
    verdict.torn = True
    if verdict.case.way == "undo" and verdict.case.world == 1:  # else it may have been committed here, and not there
        broke(STUCK, "torn in spite of undo=True")
    index = report.index(dict(one))
    probes = [p for p in report[:index] if p["what"] == "probe" and p["time"] > raised["time"]]
    for probe in probes:
        if probe["error"] is None and probe["name"] != "synchronize":
            broke(NOT_REFUSED, f"{probe['name']}() of a torn step")


def judge_survivors(verdict: Verdict, reports: Sequence[Report], plain: Oracle) -> None:
    """Whoever has lost a rank must know it, unless all of them ended with the weights of the plain loop."""
    case = verdict.case
    ended = [
        any(
            o["what"] == "whole" and o["step"] == STEPS and not o["torn"] and tuple(o["hash"]) == plain[rank][STEPS]
            for o in report
        )
        for rank, report in enumerate(reports)
    ]
    raised = [any(o["what"] == "raised" for o in report) for report in reports]
    if case.kind in ("save", *NONFINITE) or all(ended):
        types = {o["type"] for report in reports for o in report if o["what"] == "raised"}
        if case.nonfinite == "raise" and not (all(raised) and NONFINITE_ERROR in types):
            verdict.found.append((SILENT, "a gradient that was not finite was applied"))
        return
    for rank in range(case.world):
        gone = rank in case.ranks and case.kind == "kill"
        if not raised[rank] and not gone and not any(o == HANG and f"rank {rank}" in d for o, d in verdict.found):
            verdict.found.append((SILENT, f"rank {rank} was never told of the fault"))


@contextmanager
def namespaces(number: int) -> Iterator[list[str]]:
    """Network namespaces on one bridge, rank ``r`` with the interface ``node{r}``.

    Raises ``OSError`` or ``CalledProcessError`` where that is not permitted.
    """
    unique = f"{os.getpid() % 100000}x{next(_serial)}"
    with ExitStack() as stack:
        bridge = f"ib{unique}"
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        names = []
        for rank in range(number):
            name = f"instep{unique}r{rank}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            outer = f"iv{unique}{rank}"
            ip("link", "add", outer, "type", "veth", "peer", "name", f"node{rank}", "netns", name)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", f"node{rank}")
            ip("-n", name, "link", "set", f"node{rank}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            names.append(name)
        yield names


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def can_partition() -> bool:
    try:
        with namespaces(1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


_serial = iter(range(10**6))


@dataclass
class Summary:
    """Counts over verdicts."""

    verdicts: list[Verdict] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(any(o == outcome for o, _ in v.found) or v.outcome == outcome for v in self.verdicts)

    @property
    def injected(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.outcome not in (NOT_REACHED, NOT_BUILT, BROKEN)]

    @property
    def rows(self) -> Mapping[int, tuple[int, int]]:
        """By row of the contract: how many faults were injected, and how many of them broke it. What is saved of a torn
        step, whatever tore it, is of row 14."""
        counts = {}
        for row in ROWS:
            mine = [v for v in self.injected if v.case.row == row]
            bad = sum(any(outcome != NOT_REFUSED for outcome, _ in v.found) for v in mine)
            if row == 14:
                torn = [v for v in self.injected if v.torn]
                mine, bad = mine + torn, bad + sum(any(o == NOT_REFUSED for o, _ in v.found) for v in torn)
            counts[row] = len(mine), bad
        return counts

    @property
    def hollow(self) -> list[str]:
        """Points that none of several cases has passed, of one source and way: there nothing was tried."""
        places: dict[str, list[bool]] = {}
        for verdict in self.verdicts:
            case = verdict.case
            place = f"{case.source}/{case.way}: {case.kind}, {case.point}"
            places.setdefault(place, []).append(verdict.outcome != NOT_REACHED)
        return sorted(place for place, reached in places.items() if not any(reached))

    def line(self) -> str:
        longest = max((v.seconds for v in self.injected if v.seconds is not None), default=0.0)
        others = "".join(
            f", {o.lower()} {n}"
            for o in (UNORDERED, CRASH, NOT_REFUSED, WRONG_ERROR, STUCK, BROKEN)
            if (n := self.count(o))
        )
        return (
            f"faults injected {len(self.injected)}, silent corruptions {self.count(SILENT)}, hangs {self.count(HANG)}, "
            f"late writes {self.count(LATE_WRITE)}, longest time to raise {longest:.1f} s (limit {LIMIT:.1f} s){others}"
        )

    def table(self) -> str:
        """Of every row its cases, and of what was not injected how many."""
        lines = [
            f"  {row:2} {ROWS[row]:50} {n:4} cases, {bad} against the contract" for row, (n, bad) in self.rows.items()
        ]
        for outcome in (NOT_REACHED, NOT_BUILT):
            if number := self.count(outcome):
                lines.append(f"     {outcome:50} {number:4} cases")
        lines += [f"     never reached: {place}" for place in self.hollow]
        return "\n".join(lines)


__all__ = ["ALL", "LOSES_A_RANK", "Summary", "Verdict", "run_case", "run_cases"]
