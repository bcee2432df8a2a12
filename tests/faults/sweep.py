"""Every fault at every point: ``python -m tests.faults.sweep [--only TEXT] [--limit N] [--jobs N] [--list]``.

Prints each case that broke the contract, how many cases each row of it has, and a summary line. Exits with 1 if any
did.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from tests import missing
from tests.faults.cases import ALL, DIFFERS, LOSES_A_RANK, STAGED_SGD, TURNS, Case
from tests.faults.harness import BY_SEVERITY, NOT_REACHED, OK, Summary, Verdict, can_partition, run_cases
from tests.faults.program import DIFFERING

WAYS = ("backward", "undo", "forward")
NODES = {"Blocks": 27, "Chain": 16, "Recurrent": 16, "Sometimes": 9, "Tied": 13}
BUCKETS = {"local": 4, "ddp": 5, "fsdp2": 4}
UPDATED_BY = ("AdamW", "AdamW foreach", "AdamW for-loop", "SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor")


def staged(way: str) -> str:
    """The optimizer whose update may be stopped between state and parameter."""
    return STAGED_SGD if way == "forward" else "Staged"


def updates_that_raise() -> Iterator[Case]:
    """Row 1, on one device: each optimizer at operations spread over its update, and each bucket before and after."""
    for optimizer, way, where in product(UPDATED_BY, WAYS, (0, 1, 2, 5, 11, 23, 47)):
        yield Case(way=way, point="in the update", kind="raise", where=where, optimizer=optimizer)
    for way, point, where in product(WAYS, ("after completion", "after write"), range(BUCKETS["local"])):
        yield Case(way=way, point=point, kind="raise", where=where)
    for way, where in product(WAYS, range(0, 22, 3)):
        yield Case(way=way, point="between state and parameter", kind="raise", where=where, optimizer=staged(way))
    # With schedule="forward" this is done by step().
    for way, where in product(("backward", "undo"), range(BUCKETS["local"])):
        yield Case(way=way, point="before write", kind="raise", where=where)
        yield Case(way=way, point="before write", kind="interrupt", where=where)
    for kind, where in product(("raise", "interrupt"), range(BUCKETS["local"])):
        yield Case(way="forward", point="handing over", kind=kind, where=where)
    for way, point in product(WAYS, ("in step", "end of backward")):
        yield Case(way=way, point=point, kind="raise")


def models_that_raise() -> Iterator[Case]:
    """Row 2, on one device: every node of every graph, and interrupts at any time."""
    for (model, nodes), way in product(NODES.items(), WAYS):
        for where in range(nodes):
            kind = ("raise", "interrupt", "exit")[where % 3]
            yield Case(way=way, point="model", kind=kind, where=where, model=model, optimizer="SGD")
    for way, point, kind in product(WAYS, ("forward", "before step", "after step"), ("raise", "interrupt", "exit")):
        yield Case(way=way, point=point, kind=kind)
    for way, where in product(WAYS, range(TURNS)):
        yield Case(way=way, point="any time", kind="late interrupt", where=where, optimizer="AdamW for-loop")
    for way, where in product(WAYS, range(1, 22, 5)):
        yield Case(way=way, point="in the update", kind="interrupt", where=where, optimizer="AdamW foreach")


def updates_beside_backward() -> Iterator[Case]:
    """On one device, where a worker updates buckets while backward goes on."""
    for where in (0, 1, 2, 5, 11):
        yield Case(way="beside", point="in the update", kind="raise", where=where, optimizer="AdamW")
    for point, where in product(("after completion", "after write"), range(BUCKETS["local"])):
        yield Case(way="beside", point=point, kind="raise", where=where, optimizer="AdamW")
    for where in range(NODES["Blocks"]):
        kind = ("raise", "interrupt", "exit")[where % 3]
        yield Case(way="beside", point="model", kind=kind, where=where, optimizer="AdamW")
    for point, kind in product(("before step", "in step", "after step", "end of backward"), ("raise", "interrupt")):
        yield Case(way="beside", point=point, kind=kind, optimizer="AdamW")


def ranks_that_raise() -> Iterator[Case]:
    """Rows 1 to 3, with two ranks: on one of them, which leaves or tries again, and on both."""
    points = ("before launch", "in flight", "after completion", "before write", "in the update", "after write")
    for source, point, where, rank, then in product(("ddp", "fsdp2"), points, (0, 2, 3), (0, ALL), ("again", "leave")):
        yield Case(source, "backward", point, "raise", where, rank, then=then, world=2)
    for source, way, point, rank in product(("ddp", "fsdp2"), ("undo", "forward"), points, (1, ALL)):
        yield Case(source, way, point, "raise", 1, rank, world=2)
    for source, way, where, rank in product(("ddp", "fsdp2"), WAYS, (2, 14, 26), (1, ALL)):
        yield Case(source, way, "model", "raise", where, rank, world=2)
        yield Case(source, way, "model", "interrupt", where, rank, then="leave", world=2)
    for source, way, point, then in product(
        ("ddp", "fsdp2"),
        WAYS,
        ("forward", "end of backward", "before step", "in step", "after step"),
        ("again", "leave"),
    ):
        yield Case(source, way, point, "raise", 0, 1, then=then, world=2)
    for way, where, (rank, then) in product(WAYS, (0, 30, 60, 90), ((1, "leave"), (ALL, "again"))):
        yield Case("fsdp2", way, "in FSDP's forward", "interrupt", where, rank, then=then, world=2)
    # Under schedule="forward" the hook is DDP's own mean, in C++.
    for way, where, rank, then in product(("backward", "undo"), range(5), (0, 1), ("again", "leave")):
        yield Case("ddp", way, "in flight", "error", where, rank, then=then, world=2)
    for where in range(BUCKETS["fsdp2"]):
        yield Case("fsdp2", "backward", "in flight", "error", where, 1, world=2)


def ranks_that_are_lost() -> Iterator[Case]:
    """Row 4: at each point of each bucket, and between the buckets' and the next step's."""
    of_buckets = ("before launch", "in flight", "after completion", "between state and parameter", "after write")
    others = ("forward", "end of backward", "before step", "in step", "after step")
    for kind, source in product(("kill", "stop", "hang"), ("ddp", "fsdp2")):
        for point, where, rank in product(of_buckets, range(BUCKETS[source]), (0, 1)):
            optimizer = "Staged" if point.startswith("between") else "AdamW"
            # A kill costs no waiting; the others are tried on one rank, the next on the other.
            if kind == "kill" or rank == where % 2:
                yield Case(source, "backward", point, kind, where, rank, optimizer=optimizer, then="leave", world=2)
        for way, point, rank in product(("backward", "forward", "undo"), others, (0, 1)):
            if kind == "kill" or rank == 1:
                yield Case(source, way, point, kind, 0, rank, then="leave", world=2)
        for way, point in product(("undo", "forward"), of_buckets):
            optimizer = staged(way) if point.startswith("between") else "AdamW"
            yield Case(
                source, way, point, kind, 0 if way == "forward" else 1, 1, optimizer=optimizer, then="leave", world=2
            )
        if kind == "kill" and source == "fsdp2":
            for way, where in product(WAYS, (0, 30, 60, 90)):
                yield Case(source, way, "in FSDP's forward", kind, where, 1, then="leave", world=2)
        for point, where in product(("before launch", "in flight"), (0, 2)):
            yield Case(source, "backward", point, kind, where, 2, then="leave", world=3)


def cut_networks() -> Iterator[Case]:
    """Row 4: both sides are alive, and neither hears of the other."""
    for source, point, where in product(("ddp", "fsdp2"), ("before launch", "in flight", "after completion"), (0, 2)):
        yield Case(source, "backward", point, "partition", where, 1, then="leave", world=2)
    for source, way, point in product(("ddp", "fsdp2"), ("forward", "undo"), ("forward", "before step", "after step")):
        yield Case(source, way, point, "partition", 0, 1, then="leave", world=2)


def gradients_that_are_not_finite() -> Iterator[Case]:
    """Row 5: ``None`` is the plain loop, which trains on; the others are options of ``attach``."""
    kinds = ("nan", "inf", "-inf")
    options = [(nonfinite, way) for nonfinite in (None, "skip", "raise") for way in WAYS]
    options.remove(("skip", "backward"))  # refused by attach
    for (nonfinite, way), kind, where in product(options, kinds, (0, 7, 14, 21)):
        yield Case(way=way, point="gradient", kind=kind, where=where, nonfinite=nonfinite, then="leave")
    for (nonfinite, way), source, rank, where in product(options, ("ddp", "fsdp2"), (0, 1), (0, 11, 21)):
        yield Case(source, way, "gradient", kinds[where % 3], where, rank, nonfinite=nonfinite, then="leave", world=2)


def saves() -> Iterator[Case]:
    """Row 14: a checkpoint in the middle of a step is refused, or is that of a whole one."""
    for (model, nodes), way in product(NODES.items(), WAYS):
        for where in range(0, nodes, 2):
            yield Case(way=way, point="model", kind="save", where=where, model=model, optimizer="SGD")
    for source, way, point in product(("local", "ddp", "fsdp2"), WAYS, ("before step", "in step", "after step")):
        yield Case(source, way, point, "save", 0, ALL, world=1 if source == "local" else 2)
    # Not FSDP2 in backward: its state_dict() there puts the shards back that backward has gathered, attached or not.
    for way, where in product(WAYS, (2, 14, 26)):
        yield Case("ddp", way, "model", "save", where, ALL, world=2)


def votes() -> Iterator[Case]:
    """Rows 1 and 4: before the collective of the vote, and after it."""
    for source, way, kind, where in product(("ddp", "fsdp2"), WAYS, ("raise", "kill", "stop", "hang"), (0, 1)):
        yield Case(source, way, "vote", kind, where, 1, then="leave", world=2)


def on_two_dimensions() -> Iterator[Case]:
    """Rows 1, 4 and 5, on four ranks: rank 3 is in no process group with rank 0."""
    for way, point, rank in product(("backward", "undo"), ("after completion", "after write"), (0, 3)):
        yield Case("2d", way, point, "raise", 1, rank, then="leave", world=4)
    for way, kind, point in product(("backward", "forward"), ("kill", "hang"), ("in flight", "before step")):
        yield Case("2d", way, point, kind, 0, 0, then="leave", world=4)
    policies = (("skip", "default"), ("skip", "forward"), ("skip", "undo"), ("raise", "default"), ("raise", "backward"))
    for (nonfinite, way), rank, where in product(policies, (0, 3), (0, 11)):
        then = "leave" if nonfinite == "raise" else "again"
        yield Case("2d", way, "gradient", "nan", where, rank, then=then, world=4, nonfinite=nonfinite)


def after_join() -> Iterator[Case]:
    """Rows 1, 4 and 5, with ranks that have taken unequally many steps in DDP's ``join()``."""
    for way, point, rank in product(WAYS, ("in the update", "after write"), (0, 1)):
        yield Case("joined", way, point, "raise", 1, rank, then="leave", world=2)
    for way, kind, point in product(WAYS, ("raise", "kill", "hang"), ("vote", "before step", "after step")):
        yield Case("joined", way, point, kind, 0, 1, then="leave", world=2)
    for (nonfinite, way), rank in product((("skip", "forward"), ("skip", "undo"), ("raise", "default")), (0, 1)):
        then = "leave" if nonfinite == "raise" else "again"
        yield Case("joined", way, "gradient", "nan", 0, rank, then=then, world=2, nonfinite=nonfinite)


def attached_in_other_ways() -> Iterator[Case]:
    """Row 15: what one rank is told, and the others are not."""
    for source, way, where, rank in product(("ddp", "fsdp2"), (*WAYS, "default"), range(len(DIFFERING)), (0, 1)):
        if not (way == "backward" and "clip" in DIFFERING[where]):  # which has to be told how, and is refused there
            yield Case(source, way, "attach", DIFFERS, where, rank, step=0, then="leave", world=2)


def ranks_that_update_for_others() -> Iterator[Case]:
    """Rows 1 to 4 with ``shard_state``, of an optimizer whose update of rows is bit for bit that of the whole. Backward
    has five buckets, and what is put off is sent in one. Three ranks add up in another order than DDP."""

    def case(way: str, point: str, kind: str, where: int, rank: int = 1, then: str = "leave") -> Case:
        return Case("zero", way, point, kind, where, rank, then=then, optimizer="AdamW foreach", world=2)

    of_rows = ("before rows", "rows in flight", "after completion", "in the update", "after write")
    others = ("forward", "model", "end of backward", "before step", "in step", "after step", "vote")
    of_each = (("backward", of_rows, (0, 2)), ("forward", of_rows, (0,)), ("backward", ("in flight",), (0, 2)))
    for kind, (way, points, places), rank in product(("raise", "kill", "stop", "hang"), of_each, (0, 1)):
        for point, where in product(points, places):
            if (kind == "raise" and point in of_rows[2:]) or kind == "kill" or (kind != "raise" and rank == 1):
                yield case(way, point, kind, where, rank)
    for kind, way, point in product(("raise", "interrupt", "kill", "stop"), ("backward", "forward"), others):
        yield case(way, point, kind, 14 if point == "model" else 0)
    for kind, way, where in product(("interrupt", "kill"), ("backward", "forward"), (1, 2, 3)):
        yield case(way, "vote", kind, where)
    for way, where in (("backward", 0), ("backward", 2), ("forward", 0)):
        yield case(way, "rows in flight", "error", where)
        yield case(way, "rows in flight", "partition", where)
    for way, point in product(("backward", "forward"), ("before step", "in step", "after step")):
        yield case(way, point, "save", 0, ALL, "again")


def everything() -> list[Case]:
    cases = [
        *updates_that_raise(),
        *models_that_raise(),
        *updates_beside_backward(),
        *ranks_that_raise(),
        *ranks_that_are_lost(),
        *gradients_that_are_not_finite(),
        *saves(),
        *votes(),
        *cut_networks(),
        *on_two_dimensions(),
        *after_join(),
        *attached_in_other_ways(),
        *ranks_that_update_for_others(),
    ]
    return list(dict.fromkeys(map(_without_going_on_alone, cases)))


def _without_going_on_alone(case: Case) -> Case:
    """After the fault of one rank of a sharded model the others may be in the middle of a forward or backward. Its
    collectives wait for those of that very iteration, with instep or without: nobody can do the step again."""
    alone = case.source in ("fsdp2", "2d") and len(case.ranks) < case.world
    return replace(case, then="leave") if alone and case.kind in ("raise", "error") else case


def permitted(cases: Iterable[Case]) -> list[Case]:
    """Without those that need what this machine does not let us do, or this torch has not got."""
    cuts = can_partition()
    shards = {"2d": "fsdp2"}
    return [
        case
        for case in cases
        if (cuts or case.kind != "partition") and missing.from_torch(shards.get(case.source, case.source)) is None
    ]


def on_accelerator() -> list[Case]:
    """On the emulated one. A rank that is lost, or goes on alone, is found out by the backend: NCCL's manners in that
    are not emulated. Ctrl-C reaches the loop where backward has returned, and the other ranks before or after it. What
    FSDP2 itself had under way when an error came is waited for by nobody, in the plain loop either."""

    def can_be_tried(case: Case) -> bool:
        alone = case.world > 1 and (case.then == "again" or case.kind == "interrupt")
        # There a side stream does what the worker does on the CPU.
        return case.kind not in LOSES_A_RANK and not alone and case.way != "beside"

    return [replace(case, device="emu") for case in everything() if can_be_tried(case)]


def spread(cases: Sequence[Case], number: int) -> list[Case]:
    """``number`` of them, evenly."""
    return [cases[i * len(cases) // number] for i in range(min(number, len(cases)))]


def run(cases: Iterable[Case], jobs: int, said: "Show") -> Summary:
    summary = Summary()
    for verdict in run_cases(cases, jobs):
        summary.verdicts.append(verdict)
        said(summary, verdict)
    return summary


class Show:
    """Prints what is against the contract, and now and then how far it is."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._started = time.monotonic()

    def __call__(self, summary: Summary, verdict: Verdict) -> None:
        if verdict.outcome not in (OK, NOT_REACHED):
            print(verdict, flush=True)
        done = len(summary.verdicts)
        if done % 50 == 0:
            print(f"-- {done} of {self._number} in {time.monotonic() - self._started:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.sweep", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose description contains this text")
    parser.add_argument("--limit", type=int, help="so many of them, evenly spread")
    parser.add_argument("--jobs", type=int, default=8, help="cases at a time; most of their time is waiting")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    chosen = parser.parse_args()
    cases = [case for case in everything() if chosen.only in str(case)]
    cases = cases if chosen.limit is None else spread(cases, chosen.limit)
    if chosen.list:
        print(*cases, sep="\n")
        print(len(cases))
        return 0
    cases = permitted(cases)
    summary = run(cases, chosen.jobs, Show(len(cases)))
    print(summary.table())
    print(summary.line())
    return int(any(summary.count(outcome) for outcome in BY_SEVERITY))


if __name__ == "__main__":
    sys.exit(main())
