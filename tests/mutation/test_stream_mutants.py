"""Defects in the order of streams, and in what is kept for them. Each is caught on the emulated accelerator."""

from pathlib import Path

import pytest

from tests import net
from tests.accelerator.building import why_not
from tests.mutation.seeding import Mutant, require_caught, require_there


def _mutant(name: str, where: str, old: str, new: str | None = None) -> Mutant:
    return Mutant(name, where, old, new, "accelerator")


MUTANTS = [
    _mutant(
        "HSDP: a buffer goes while its all-reduce runs",
        "FSDP2Gradients.applied",
        "if gradient is None or (isinstance(gradient, Placeholder) and not isinstance(gradient, HeldGradient)):",
        "if True:",
    ),
    _mutant("in a graph: buckets go to the side stream", "StepStreams._on", "if is_captured(device):", "if False:"),
    _mutant("in a graph: the loop waits for the side stream", "StepStreams.join", "if is_captured(device)", "if False"),
    _mutant("in a graph: buckets wait for streams of before", "ProducerStreams.of", "not is_captured(device)", "True"),
    _mutant(
        "in a graph: an update that was put off before is a part of it",
        "DeferredBuckets._run",
        "if is_captured(bucket.device):",
        "if False:",
    ),
    _mutant("in a graph: undo keeps copies", "UndoCopies.around", "is_captured(update.tensors[0].device)", "False"),
    _mutant(
        "in a graph: prepared buckets are taken for none of it",
        "BucketSink.prepare",
        'bucket.devices[0].type != "cpu" and is_captured(bucket.devices[0])',
        "False",
    ),
    _mutant(
        "prepared: memory that an update gives back",
        "BucketSink._run_as_loop",
        "self._writes.let_go_of_memory(device)",
        "pass",
    ),
    _mutant("in a graph: step() may be outside of it", "BackwardCalls._prepare", "if writes.in_graph:", "if False:"),
    _mutant(
        "in a graph: kernels are called without asking torch",
        "Kernel._calls_of",
        "not on_cpu and is_captured(tensors[0].device)",
        "False",
    ),
    _mutant(
        "kernels: lists of two dtypes in one call",
        "KernelCall.is_one_group",
        "len(set(map(_DTYPE, alike))) == 1",
        "True",
    ),
    _mutant("the side stream does not wait for gradients", "Side.enter", "self.stream.wait_event(self._before)"),
    _mutant(
        "the side stream waits for the last gradient of a bucket alone",
        "Side.enter",
        "for stream in self._producers:",
        "for stream in (current,):",
    ),
    _mutant(
        "gradients are let go without those that have made them",
        "Side.hold",
        "for stream in self._producers:",
        "for stream in {torch.accelerator.current_stream(self._index)}:",
    ),
    _mutant(
        "forward: gradients are let go without those that have made them",
        "StepStreams.wait",
        "*readers, *side.producers)",
        "*readers)",
    ),
    _mutant(
        "a forward's stream is not seen",
        "BackwardSchedule.after_forward",
        "self.streams.see(self._step.members.all[0].spec.device)",
    ),
    _mutant(
        "the streams of modules that only read are not seen",
        "CheckedReaders._before_read",
        "schedule.streams.producers.note_current(parameters[0].spec.device)",
    ),
    _mutant(
        "the streams of a model's modules are not seen",
        "ReaderHook.__call__",
        "self._seen.add(torch.accelerator.current_stream(self._index))",
    ),
    _mutant(
        "the streams of modules are not seen",
        "ForwardSchedule.before_read",
        "step.streams.producers.note_current(parameters[0].spec.device)",
    ),
    _mutant(
        "the streams of gradients are not seen",
        "ProducerStreams.note_current",
        "self.note(torch.accelerator.current_stream(device))",
    ),
    _mutant(
        "norms are taken on the stream of a bucket's last gradient",
        "MeasuringSink.apply",
        "self.streams.producers.gather(device)",
    ),
    _mutant(
        "two passes: norms are taken on the stream of a bucket's last gradient",
        "Passes.measure",
        "with self._streams.on(device):",
        "if True:",
    ),
    _mutant(
        "two passes: a measured gradient is not held",
        "Passes.measure",
        "self._streams.hold(gradients)",
    ),
    _mutant(
        "two passes: the total is computed before the norms are there",
        "Passes.measuring",
        "self._streams.join()",
    ),
    _mutant(
        "replicated: a bucket is filled on the stream of its last gradient",
        "TransientBuckets._send",
        "self._producers.gather(bucket.members[0].device)",
    ),
    _mutant(
        "pinned state is copied while the device writes it",
        "_await_copies",
        "torch.accelerator.current_stream().synchronize()",
    ),
    _mutant(
        "the loop does not wait where backward ends",
        "StepStreams.join",
        "side.join(side.producers)",
        "side.join(())",
    ),
    _mutant("synchronize: the others do not wait", "StepStreams.join_all", "(device), *side.producers", "(device)"),
    _mutant("a read: the others do not wait", "StepStreams.wait", "*readers, *side.producers)", "*readers)"),
    _mutant(
        "the stream of a step is not seen",
        "Side.enter",
        "self._producers.add(current)",
    ),
    _mutant(
        "synchronize: the current stream does not wait",
        "StepStreams.join_all",
        "{torch.accelerator.current_stream(device), *side.producers}",
        "side.producers",
    ),
    _mutant(
        "a read: the current stream does not wait",
        "StepStreams.wait",
        "mark.order(torch.accelerator.current_stream(mark.device), *readers",
        "mark.order(*readers",
    ),
    _mutant("a read: the streams on which FSDP2 gathers do not wait", "StepStreams.wait", "self.readers()", "()"),
    _mutant(
        "a later read does not follow an earlier one",
        "StepStreams.follow",
        "torch.accelerator.current_stream(device).wait_event(side.ordered.event)",
    ),
    _mutant(
        "an earlier bucket is remembered in place of a later one",
        "StepStreams.wait",
        "if side.ordered is None or side.ordered.number < mark.number:",
        "if True:",
    ),
    _mutant("what was waited for is not remembered", "StepStreams.wait", "side.ordered = mark"),
    _mutant("nothing is held", "Side.hold", "self._held = tensors", "self._held = ()"),
    _mutant("what is held is let go before it was waited for", "Side.hold", "stream.wait_event(self._after)"),
    _mutant(
        "backward waits for each bucket at once",
        "Side.hold",
        "self._held = tensors",
        "self._held = tensors\n        for stream in self._producers:\n            stream.wait_event(self._after)",
    ),
    _mutant("prepared: a stepped bucket is not held", "BucketSink._run_as_loop", "side.hold(gradients)"),
    _mutant("a stepped bucket is not held", "FinalWrites.updated", "self._step.streams.hold(gradients)"),
    _mutant(
        "gradients that were handed over go where the host has stepped them",
        "Update.apply",
        'if self.device.type == "cpu":',
        "if True:",
    ),
    _mutant(
        "a mark is recorded before the update",
        "DeferredBuckets.finished",
        "with self.on_side(bucket):\n"
        "            bucket.finish()\n"
        "        bucket.look()\n"
        "        return self._step.streams.mark(bucket.device)",
        "with self.on_side(bucket):\n"
        "            mark = self._step.streams.mark(bucket.device)\n"
        "            bucket.finish()\n"
        "        return mark",
    ),
    _mutant(
        "nobody waits before memory that an update has given back is given out",
        "Writes.let_go_of_memory",
        "self._step.streams.let_go(device)",
    ),
    _mutant(
        "forward: nobody waits before memory that an update has given back is given out",
        "DeferredBuckets.on_side",
        "self._step.streams.let_go(bucket.device)",
    ),
    _mutant(
        "memory that is given back: not where a tensor is resized, or has other data",
        "StorageAddresses.were_left",
        "any(address_of(t) != place for t, place in self._all) or ",
        "",
    ),
    _mutant(
        "memory that is given back: not where state is replaced",
        "StorageAddresses.were_left",
        " or any(id(t) not in now for t in self._in_state)",
        "",
    ),
    _mutant(
        "memory that is given back: not that of weights and gradients",
        "StorageAddresses.__init__",
        "(*parameters, *gradients, *self._in_state)",
        "self._in_state",
    ),
    _mutant(
        "nobody is told of a write that raced with the update", "DeferredBuckets._run", "bucket.require_left_alone()"
    ),
    _mutant(
        "a step that was written into while it was under way is a whole one",
        "DeferredBuckets._run",
        "bucket.step.outcome.fails(error)",
    ),
    _mutant("nobody waits for buckets behind one that has failed", "Reductions._before_ddp_ends", "drain([in_flight])"),
    _mutant("the side stream stays the current one", "Side.leave", "torch.accelerator.set_stream(stream)"),
    _mutant(
        "the side stream's device stays the current one",
        "Side.leave",
        "torch.accelerator.set_device_index(index)",
    ),
    _mutant(
        "steps are on the loop's stream",
        "Side.enter",
        "torch.accelerator.set_stream(self.stream)",
    ),
    _mutant(
        "nobody waits for what a backward that raised has stepped",
        "BucketSink.backward_raised",
        "self._step.streams.finish()",
    ),
    _mutant(
        "what a backward that raised has stepped is let go before it is done",
        "Side.finish",
        "self.stream.synchronize()",
    ),
    _mutant(
        "what a backward that raised has stepped is held for ever",
        "Side.finish",
        "self._held = ()",
    ),
    _mutant(
        "do not wait for the engine to let go of a backward that raised",
        "Backwards.drain_failed",
        "if not self._tasks or graph_task() is not None:",
        "if True:",
    ),
    _mutant(
        "what the engine's own thread drops is told there",
        "EndOfBackward.drop",
        "if unsaid is not None and is_of_backward(threading.get_native_id()):",
        "if False:",
    ),
    _mutant("nobody tells what the engine's own thread has dropped", "Backwards.drain_failed", "unsaid.run()"),
    _mutant(
        "what the loop's thread drops is told late",
        "EndOfBackward.drop",
        "if unsaid is not None and is_of_backward(threading.get_native_id()):",
        "if unsaid is not None:",
    ),
    _mutant(
        "values are put back on the loop's stream",
        "Rollback._restore",
        "with step.streams.on(device):\n                self.copies.restore(device)",
        "self.copies.restore(device)",
    ),
    _mutant("nobody waits for what is put back", "Rollback._restore", "step.streams.join_all()"),
    _mutant("synchronize() waits for nothing", "BackwardSchedule.synchronize", "self._step.streams.join_all()"),
    _mutant("backward ends without a join", "LocalSource._close", "self._sink.join()"),
    _mutant(
        "a forward does not follow an earlier one",
        "ForwardSchedule.before_read",
        "step.streams.follow()  # the loop's stream has waited for buckets that this forward's may not have",
    ),
    _mutant(
        "synchronize() does not follow an earlier forward", "ForwardSchedule.synchronize", "self._step.streams.follow()"
    ),
    _mutant(
        "nobody waits for the steps of optimizers that are gone",
        "DeferredBuckets.abandon",
        "self._step.streams.wait(bucket.mark)",
    ),
    _mutant(
        "ZeRO: parts are sent on the loop's stream",
        "ZeroSource._communicating",
        ", self._sink.streams.on(members[0].spec.device):",
        ":",
    ),
    _mutant(
        "forward: parts are sent on the loop's stream",
        "ForwardCalls._begin",
        "with deferred.on_side(update):\n                    update.send(",
        "if True:\n                    update.send(",
    ),
    _mutant(
        "forward: buckets are finished on the loop's stream",
        "DeferredBuckets.finished",
        "with self.on_side(bucket):\n            bucket.finish()",
        "bucket.finish()",
    ),
    _mutant("replicated: backward ends without a join", "ReplicatedSource.ended", "self._sink.join()"),
    _mutant(
        "a hook's backward ends without a join",
        "StepAfterReduction._drop",
        "parameter.grad = None\n        self._streams.join()",
        "parameter.grad = None",
    ),
    _mutant(
        "a hook's step is not waited for where DDP ends",
        "StepAfterReduction._step",
        "in memory that an update has given back.\n        self._streams.join()",
        "in memory that an update has given back.",
    ),
    _mutant("FSDP1's backward ends without a join", "FSDP1Source._retire", "self._sink.join()"),
    _mutant(
        "DDP copies from a bucket that is being clipped",
        "DDPSource._step",
        "# clipped gradients there.\n        self._sink.join()",
        "# clipped gradients there.",
    ),
    _mutant(
        "DDP copies from a bucket in which parts are received",
        "ZeroSource._step",
        "self._receive()\n        self._sink.join()",
        "self._receive()",
    ),
    _mutant("an upcast ends without a join", "AllreduceUpcastHookState._after_ddp_ended", "self._streams.join()"),
    _mutant(
        "DDP's low-precision copies are made before the step",
        "_before_forward",
        "ddp._mp_stream.wait_stream(torch.accelerator.current_stream(device))",
    ),
    _mutant(
        "offload: a step does not wait for its state",
        "Copies.lend",
        "torch.accelerator.current_stream(self._device).wait_event(lent.there)",
    ),
    _mutant(
        "offload: state is copied back before it was stepped",
        "Copies.take_back",
        "self._out.wait_event(torch.accelerator.current_stream(self._device).record_event())",
    ),
    _mutant(
        "offload: state is copied in over state that is copied out", "Copies._let_go", "self._in.wait_event(there)"
    ),
    _mutant(
        "offload: new state is given back while it is copied out",
        "Copies._let_go",
        "torch.accelerator.current_stream(self._device).wait_event(there)",
    ),
    _mutant(
        "offload: what is copied out is not held", "Copies.take_back", "record_event(), used))", "record_event(), ()))"
    ),
    _mutant("offload: the host does not wait for what is copied out", "Copies.finish", "self._out.synchronize()"),
    _mutant(
        "offload: the host does not wait for what is copied in", "Copies.finish", "self._out.wait_stream(self._in)"
    ),
    _mutant("offload: a part is put back while its state is copied", "Stepper.step_part", "self.wait_for_state()"),
    _mutant("offload: a step is put back while its state is copied", "Rollback._restore", "stepper.wait_for_state()"),
    _mutant(
        "offload: a torn step leaves copies under way",
        "Writes.tear",
        "stepper.stops()  # its state is there to be read",
    ),
    _mutant("offload: all state stays on the device until the step ends", "Copies.lend", "self._let_go()"),
    _mutant("offload: nothing is copied ahead", "Copies.lend", "self._bring_next(tensors)"),
    _mutant(
        "offload: state that was written since is stepped as it was",
        "_Lent.is_of",
        " and versions_of(tensors) == self.versions",
        "",
    ),
    _mutant(
        "offload: state of the loop's goes back to its stream at once",
        "Copies.lend",
        "self._others += [tensor.detach() for tensor in large if not is_at_home(tensor)]",
    ),
    _mutant(
        "offload: load_state_dict goes by way of the device",
        "HostLoading.before",
        "if type(optimizer).load_state_dict is not Optimizer.load_state_dict:",
        "if True:",
    ),
    _mutant(
        "offload: what step() steps is left to torch",
        "Writes._rest_of",
        "not divided and not stepper.steps_every_parameter and not",
        "not divided and not",
    ),
    _mutant("offload: state may share memory", "_move_home", "memory.add(storage_of(value))"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_defect_can_still_be_put_in(mutant: Mutant) -> None:
    require_there(mutant)


@pytest.mark.nightly
@pytest.mark.timeout(4 * net.SECONDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    require_caught(mutant, tmp_path)
