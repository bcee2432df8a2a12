"""Gradients of ``torch.distributed.pipelining``: those of a stage are final when its last micro-batch is through.

A run of the pipeline is a call of ``schedule.step(…)``. In it each stage runs one backward for each micro-batch, whose
gradients only add up. After the last one torch reduces them over the ranks of FSDP, and divides them by the number of
micro-batches: from then on they are what the plain loop finds, and the stage is stepped, bucket by bucket. What it has
to send to the stage before it is on its way by then, so that the update fills the bubble behind a stage's last
backward. An update inside of that backward would hold up all stages before it.

An error of an update waits until the run is over on this rank: the other ranks need what this one still has to send.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from instep._optim.parameters import AttachedParameters
from instep._step.accumulation import Accumulation
from instep._step.schedule import Schedule
from instep._torch.lifetime import weakly
from instep._torch.pipelining import BACKWARDS, FINISHES, MEETS, Pipeline, StageCall
from instep.buckets import Bucket, fill_buckets
from instep.errors import InstepError
from instep.sources import ErrorsKept, Sink, Source, as_bucket


class PipelineSource(Source):
    """The runs of one pipeline on this rank.

    Args:
        sink: takes final gradients; ``None``: ``optimizer.step()`` finds them in ``.grad``.

    Attributes:
        begin_run: does once for all micro-batches of a run what is done before a forward of the model.
        end_run: the same, after it.
    """

    def __init__(
        self,
        steps: Schedule,
        sink: Sink | None,
        pipeline: Pipeline,
        accumulation: Accumulation,
        bucket_bytes: int | None,
    ) -> None:
        self._steps = steps
        self._sink = sink
        self._pipeline = pipeline
        self._accumulation = accumulation
        self._parameters = {a.spec.index: a for a in steps.parameters}
        # Of each stage, by its place, the indices of its parameters. One of two stages is final when both are through.
        index = {id(attached.get()): attached.spec.index for attached in steps.parameters}
        self._of_each = {
            place: {index[id(p)] for p in stage.parameters() if id(p) in index}
            for place, stage in pipeline.stages.items()
        }
        self._members = {place: self._buckets_of(place, bucket_bytes) for place in self._of_each}
        self._calls: list[StageCall] = []
        self.begin_run: Callable[[], object] = bool
        self.end_run: Callable[[], object] = bool
        self._has_heard = False  # in this run, whether the last step stands on all ranks
        # Of the running step: whether one of its stages is through, and which are not.
        self._has_begun = False
        self._left = set(self._of_each)
        self._ended: list[int] = []  # in this run: stages after their last backward, which are not through yet

    def _buckets_of(self, place: int, bucket_bytes: int | None) -> list[AttachedParameters]:
        """Of a stage without the parameters that it shares with another one of this rank, last layer first."""
        members = [self._parameters[i] for i in sorted(self._of_each[place], reverse=True) if not self._is_shared(i)]
        specs = [attached.spec for attached in members]
        # All gradients of a stage are there by then: smaller buckets would free none of them earlier.
        size = bucket_bytes or sum(spec.nbytes for spec in specs)
        buckets = fill_buckets("pipeline", specs, size)
        return [AttachedParameters(self._parameters[spec.index] for spec in bucket.parameters) for bucket in buckets]

    def _is_shared(self, index: int) -> bool:
        return sum(index in of_stage for of_stage in self._of_each.values()) > 1

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The last stage's first, which is through first."""
        stages = reversed(self._members.values())
        return tuple(as_bucket("pipeline", members) for buckets in stages for members in buckets)

    def connect(self) -> None:
        tells = dict.fromkeys(MEETS, self._meet) | dict.fromkeys(BACKWARDS, self._backward)
        tells |= dict.fromkeys(FINISHES, self._finish)
        # Weakly: a stage is the model's, and must not keep parameters.
        self._calls = self._pipeline.around(weakly(self._run), tells, lambda place, name: weakly(tells[name], place))

    def disconnect(self) -> None:
        for call in self._calls:
            call.remove()
        self._calls.clear()

    # What the stages' own calls tell (``_torch/pipelining.py``).

    def _run(self, call: Callable[[], Any], options: object) -> Any:
        """Make ``call``, which is one run, and return what it returns."""
        self._has_heard = False
        try:
            self.begin_run()
        except InstepError:
            self._steps.cast_owed()
            raise
        try:
            with self._accumulation.in_run():  # gradients only add up
                result = call()
        except BaseException as error:
            self._forget()
            self._steps.run_failed()  # what the stages before the error have written is put back, or torn
            if isinstance(error.__cause__, InstepError) and not isinstance(error, InstepError):
                raise error.__cause__ from None  # torch has put an error of its own around what a stage raised
            raise
        self.end_run()
        ended, self._ended = self._ended, []
        for place in ended:  # with an earlier torch, which says of no stage that it has finished
            self._is_through(place)
        if self._sink is not None:
            self._sink.join()
            self._sink.raise_failure()
        return result

    def _meet(self, place: int, call: Callable[[], Any], options: object) -> Any:
        result = call()
        if result and not self._has_heard:  # else the run goes on without another rank
            self._has_heard = True
            self._steps.hear_of_last_step()
        return result

    def _backward(self, place: int, call: Callable[[], Any], options: Mapping[str, Any]) -> Any:
        result = call()
        if options.get("last_backward") and self._pipeline.has_backward(place):
            self._ended.append(place)
        return result

    def _finish(self, place: int, call: Callable[[], Any], options: object) -> Any:
        result = call()  # may call another one of ``FINISHES``, which is the last that it does
        if place in self._ended:
            self._ended.remove(place)
            self._is_through(place)
        return result

    def _is_through(self, place: int) -> None:
        """The gradients of this rank's stage at ``place`` are final, unless the loop goes on to add to them."""
        kept = nullcontext() if self._sink is None else ErrorsKept(self._sink)
        with self._accumulation.in_run(stages=False), kept:
            if self._accumulation.is_in_hold:
                return  # the loop adds up the gradients of several runs
            if not self._has_begun:
                # The first stage of this rank is through: all ranks know of the step by now, since each has sent
                # something to its neighbours.
                self._has_begun = True
                self._steps.end_micro_batches()
            for members in self._end(place):
                if self._sink is not None:
                    self._step(self._sink, members)

    def _end(self, place: int) -> list[AttachedParameters]:
        """Returns the buckets that are final now."""
        self._left.discard(place)
        waited_for = {index for other in self._left for index in self._of_each[other]}
        shared = [self._parameters[i] for i in self._of_each[place] if self._is_shared(i) and i not in waited_for]
        if not self._left:
            self._forget()
        return [*self._members[place], *([AttachedParameters(shared)] if shared else [])]

    def _step(self, sink: Sink, members: AttachedParameters) -> None:
        there = AttachedParameters(a for a in members if a.get().grad is not None)
        for device in {attached.spec.device for attached in there}:
            sink.streams.producers.note_current(device)  # torch has scaled them on the loop's stream
        if there and sink.arrive(there):
            sink.apply_and_free(there)

    def _forget(self) -> None:
        """The step's gradients are complete, or an error has ended the run."""
        self._has_begun = False
        self._left = set(self._of_each)
        self._ended.clear()
