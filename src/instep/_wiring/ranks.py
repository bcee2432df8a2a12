"""Which ranks step together, what must be the same on all of them, and DDP's ``join()``."""

import weakref
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from instep._ranks.comparison import digest_of
from instep._ranks.process_groups import world
from instep._ranks.step_ranks import StepRanks, neighbours_of
from instep._ranks.votes import StepVotes
from instep._step.schedule import Schedule
from instep._torch.hooks import StandIn
from instep.options import Communication, Options
from instep.target import Target


def rank() -> int:
    """Of this process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of(target: Target, options: Options) -> StepRanks | None:
    """The ranks that share the model; ``None``: there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    pipeline = options.communication.pipeline
    stages = None if pipeline is None else pipeline.group or world()
    neighbours = neighbours_of([*target.wrapped, *target.fsdp1], target.optimized, stages)
    if neighbours is None:
        return None
    # By default the ranks of a pipeline wait for none that has nothing to attach; but a norm is of all of them.
    usual = Communication(pipeline=pipeline)
    meets = options.votes or options.communication != usual or (pipeline is not None and options.clip is not None)
    if pipeline is not None:
        # Each rank has parameters of its own. The pipelines that data is divided among have one name.
        return StepRanks(neighbours, [options.in_words()], digest_of(repr(pipeline)), waits=meets, matters=meets)
    # Of each parameter of the model its shape on all ranks together, and its dtype. Where torch takes the steps, each
    # rank may have another optimizer for it: some loops divide the optimizer by hand.
    stepped_by = {
        id(p): f", in optimizer {number}"
        for number, optimizer in enumerate(target.optimizers if meets else ())
        for group in optimizer.param_groups
        for p in group["params"]
    }
    model, own = dict[str, str](), dict[str, str]()
    for parameter, places in target.names.values():
        name, dtype = f"parameter {places[0].name!r}", str(parameter.dtype).removeprefix("torch.")
        # FSDP1's parameters are what a rank has of them.
        shape = "" if target.fsdp1 or is_lazy(parameter) else f"{tuple(parameter.shape)} "
        model[name] = f"{shape}{dtype}"
        own[name] = f"{shape}{dtype}{stepped_by.get(id(parameter), '')}"
    # The model has one name, whatever this rank's options are.
    return StepRanks(
        neighbours,
        [options.in_words(), own],
        digest_of(model),
        waits=meets,
        matters=meets or not options.asks_for_nothing,
    )


# DDP's ``join()``: a rank that has no data left votes with those that have, and all count steps alike afterwards.
#
# In ``join()`` a rank that is through calls a hook for each iteration of the others, in which it matches their
# collectives. torch asks the DDP instance for that hook (``join_hook``, public); here the instance is given one that
# does the same and matches the votes, too. torch has no other way to say that ``join()`` is over: it leaves its own
# note of it (``_join_config``) as it is.


_NAME = "join_hook"


class Joining(StandIn):
    """What one DDP instance answers ``join_hook()``, until it is removed. Copies of the instance do without.

    Attributes:
        joins: whether ``join()`` runs, as far as is known.
    """

    __slots__ = ("_schedule", "_votes", "joins")

    def __init__(self, ddp: DistributedDataParallel, votes: StepVotes, schedule: Schedule) -> None:
        super().__init__(ddp, _NAME, type(ddp).join_hook)
        self.joins = bool(ddp._join_config.enable)  # attached in the middle of it, or after one that is over
        self._votes = votes
        self._schedule = weakref.ref(schedule)

    def __call__(self, *args: Any, **options: Any) -> JoinHook:
        assert self._call is not None, "nobody asks one that was removed"
        theirs = self._call(self._owner(), **options)
        self.joins = True
        # A rank without any data runs no forward, and others may wait in their first one to hear what it trains.
        self._votes.begin_forward()
        return _Shadow(theirs, self)

    @property
    def steps(self) -> int:
        """How many were taken here."""
        schedule = self._schedule()
        return 0 if schedule is None else schedule.step_count


def in_join(ddp: DistributedDataParallel) -> bool:
    """Whether ``join()`` of ``ddp``, which is attached, runs: as far as is known, after an error in one."""
    joining = vars(ddp).get(_NAME)
    return joining.joins if isinstance(joining, Joining) else bool(ddp._join_config.enable)


class _Shadow(JoinHook):
    """One ``join()`` on a rank that has no data left; ``theirs`` is what DDP itself does."""

    def __init__(self, theirs: JoinHook, joining: Joining) -> None:
        self._theirs = theirs
        self._joining = joining
        self._meeting: Thread | None = None

    def main_hook(self) -> None:
        """The other ranks run an iteration."""
        joining, votes = self._joining, self._joining._votes
        ddp = joining._owner()
        assert ddp is not None, "it runs this"
        if votes.ranks is not None and not votes.ranks.has_met:
            # They wait for this rank before they reduce anything, and it is not known yet whether they will reduce: so
            # this rank does not wait for them here.
            self._meeting = Thread(target=votes.meet, name="instep joins", daemon=True)
            self._meeting.start()
        self._theirs.main_hook()
        if not ddp.require_forward_param_sync:
            return  # in no_sync(): there is no vote
        if self._meeting is not None:
            self._meeting.join()
            self._meeting = None
        votes.abstain(joining.steps)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks are through."""
        self._theirs.post_hook(is_last_joiner)
        self._joining.joins = False
        self._joining._votes.joined(self._joining.steps)
