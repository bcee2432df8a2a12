"""What a recording sees of a pipeline: its runs, what this rank's stages compute in them, and the bubbles in between.

Which forward and which backward are of which micro-batch only the calls of the stages tell. Hooks of a module or of a
graph would not do: zero-bubble schedules compute the gradients of weights apart.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from torch import nn

from instep._torch.pipelining import LOSS, Around, Pipeline
from instep.target import name_parameters
from instep_tools.recording.inputs import described
from instep_tools.report.figures import COMPUTE
from instep_tools.report.spans import Interval, Span, intervals, outside


class StageClock:
    """A watch on the runs of a pipeline on this rank, until ``stop``. Times are ``perf_counter`` seconds.

    Args:
        run_begins: called when a run, that is ``schedule.step(…)``, is about to begin.

    Attributes:
        forwards: the forward of each micro-batch through a stage, and its loss.
        backwards: the backward of each micro-batch through a stage; of some schedules in two parts.
        runs: when each run began and ended.
        given: as ``Clock`` has it, of the first stage.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module, run_begins: Callable[[], None]) -> None:
        self.forwards: list[Span] = []
        self.backwards: list[Span] = []
        self.runs: list[Interval] = []
        self.given: set[str] = set()
        self._run_begins = run_begins
        modules = pipeline.stages
        self.stages: Sequence[int] = list(modules)
        stage_of = {id(p): stage for stage, module in modules.items() for p in module.parameters()}
        # The same names as instep has for the parameters of a bucket.
        self._stage_of = {
            places[0].name: stage_of[key] for key, (_, places) in name_parameters(model).items() if key in stage_of
        }
        self._calls = pipeline.around(self._run, self._around)

    def stop(self) -> None:
        """Take everything off the pipeline."""
        for call in self._calls:
            call.remove()
        self._calls = []

    def spans(self, seen: Sequence[Span]) -> list[Span]:
        """Return ``seen``, where steps are of a stage, with what the stages computed and the bubbles: in those no
        stage of this rank computed, nor was stepped, and a run was under way."""
        found = [one._replace(stage=self._stage_of.get((*one.parameters, "")[0])) for one in seen]
        found += self.forwards + self.backwards
        busy = intervals(span for span in found if span.kind in (*COMPUTE, "step"))
        thread = threading.get_native_id()
        return found + [Span("bubble", "bubble", *gap, thread) for gap in outside(self.runs, busy)]

    def _run(self, call: "partial[Any]", options: object) -> Any:
        self._run_begins()
        began = perf_counter()
        try:
            return call()
        finally:
            if self._calls:  # else the recording is over
                self.runs.append((began, perf_counter()))

    def _around(self, stage: int, method: str) -> Around:
        return partial(self._compute, stage, method)

    def _compute(self, stage: int, method: str, call: "partial[Any]", options: Mapping[str, Any]) -> Any:
        is_forward = method.startswith("forward")
        if is_forward:
            self.given |= described((call.args[1:], options))
        began = perf_counter()
        try:
            return call()
        finally:
            kind = "forward" if is_forward or method == LOSS else "backward"
            span = Span(kind, _name(method, call, options), began, perf_counter(), threading.get_native_id(), (), stage)
            (self.forwards if kind == "forward" else self.backwards).append(span)


def _name(method: str, call: "partial[Any]", options: Mapping[str, Any]) -> str:
    if method == LOSS:
        return "loss"
    micro_batch = f"micro-batch {call.args[0]}"
    if "weight" in method:
        return f"weights, {micro_batch}"
    return micro_batch if options.get("full_backward", True) else f"inputs, {micro_batch}"
