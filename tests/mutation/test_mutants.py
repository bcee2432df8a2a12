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
COMM_HOOKS = "tests/distributed/test_comm_hooks.py"
MIXED_PRECISION = "tests/distributed/test_mixed_precision.py"
PROGRAMS = "tests/parity/test_programs.py"
READERS = "tests/parity/test_readers.py"
CLIPPING = "tests/parity/test_clipping.py"
LOSS_SCALE = "tests/parity/test_loss_scale.py"
UNDO = "tests/parity/test_undo.py"
SCHEDULES = "tests/distributed/test_schedules.py"
REPLICATED = "tests/distributed/test_replicated.py"
REPLICATED_LIFE = "tests/distributed/test_replicated_life.py"
FSDP2 = "tests/distributed/test_fsdp2.py"
FSDP_ERRORS = "tests/distributed/test_fsdp_errors.py"
ZERO = "tests/distributed/test_zero.py"
CHECKPOINT = "tests/checkpoint/"
CROSSING = "tests/distributed/test_crossing.py"
ORDER = "tests/unit/test_order.py"
VOTES = "tests/distributed/test_votes.py"
NONFINITE = "tests/parity/test_nonfinite.py"
IN_BACKWARD = "tests/functional/test_in_backward.py"

MUTANTS = [
    Mutant(
        "skip the last bucket",
        "sources/local.py",
        "if self._sink.apply(members):",
        "if number == len(self._members) - 1 or self._sink.apply(members):",
        PARITY,
    ),
    Mutant(
        "step every bucket twice",
        "_core/transaction.py",
        "call.step(stepper)\n            except",
        "(call.step(stepper), call.step(stepper))\n            except",
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
        "                    parameter.grad = attached.spent\n                    if attached.spent is not None",
        "                    if attached.spent is not None",
        PARITY,
    ),
    Mutant(
        "free the gradient without leaving a spent one",
        "_core/transaction.py",
        "                    parameter.grad = attached.spent\n                    if attached.spent is not None",
        "                    parameter.grad = None\n                    if attached.spent is not None",
        REFUSALS,
    ),
    Mutant(
        "clear spent gradients for good in step()",
        "_core/transaction.py",
        "            for attached in applied:\n                attached.get().grad = attached.spent\n            if",
        "            if",
        REFUSALS,
    ),
    Mutant(
        "step within accumulate()",
        "_core/accumulation.py",
        "return self._held > 0 or any(",
        "return any(",
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
        "            if applied:\n                stepper.require_unchanged()\n            for attached",
        "            for attached",
        REFUSALS,
    ),
    Mutant(
        "do not look at the parameters before a forward",
        "attachment.py",
        "require_unchanged(self._step.parameters)",
        "pass",
        REFUSALS,
    ),
    Mutant(
        "let the user's step hooks run after ours",
        "_core/hooks.py",
        "        hooks.move_to_end(number)\n",
        "        pass\n",
        "tests/parity/test_odd_optimizers.py",
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
        "weakref.ref(parameter) if mesh is None else",
        "",
        "tests/unit/test_life.py",
    ),
    Mutant(
        "leave a hook behind",
        "attachment.py",
        "for handle in self._handles:",
        "for handle in self._handles[:-1]:",
        "tests/unit/test_attach.py",
    ),
    Mutant(
        "take the slices of gradients() whatever the strides",
        "sources/reductions.py",
        "if layout.is_contiguous() or torch.empty_like",
        "if True or torch.empty_like",
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
        "if require_separable(stepper.optimizer())",
        "",
        "tests/unit/test_attach.py",
    ),
    Mutant(
        "raise before DDP is done",
        "sources/local.py",
        "at_end_of_backward(self._sink.raise_failure, self._sink.backward_raised)",
        "self._sink.raise_failure()",
        DDP_LIFE,
    ),
    Mutant(
        "do not look whether a weight was written before step()",
        "_core/transaction.py",
        "if memory_of(parameter)._version != attached.version:",
        "if False:",
        REFUSALS,
    ),
    Mutant(
        "ignore the future's error",
        "sources/reductions.py",
        "        result = self._future.value()\n",
        "        result = torch.ones(sum(p.numel() for p in self._members))\n",
        DDP_LIFE,
    ),
    Mutant(
        "decay unused parameters",
        "sources/reductions.py",
        "for i, parameter in enumerate(self._members) if parameter.grad is not None]",
        "for i, parameter in enumerate(self._members)]",
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
        "sources/reductions.py",
        "        return self._active\n",
        "        return dist.get_world_size(ddp.process_group)\n",
        DDP_LIFE,
    ),
    Mutant(
        "step a rank that has joined",
        "sources/reductions.py",
        "        if graph_task() is None:\n            return None\n",
        "        if False:\n            return None\n",
        DDP_LIFE,
    ),
    Mutant(
        "spend gradients before DDP is done with them",
        "sources/reductions.py",
        "        at_end_of_backward(self._after_ddp_ended, self._failed)\n",
        "        self._after_ddp_ended()\n",
        DDP,
    ),
    Mutant(
        "step from something else than the hook answers",
        "sources/reductions.py",
        "        slices = [result] if self._sparse",
        "        result = result * 0.5\n        slices = [result] if self._sparse",
        COMM_HOOKS,
    ),
    Mutant(
        "leave buckets in flight when the step was given up",
        "sources/reductions.py",
        "            reduction.drain()",
        "            reduction.arrived",
        "tests/functional/test_comm_hooks.py",
    ),
    Mutant(
        "cast each use of a tied parameter by itself",
        "_core/precision.py",
        "                    if id(parameter) not in copies:\n",
        "                    if True:\n",
        MIXED_PRECISION,
    ),
    Mutant(
        "keep the copies when a forward raises",
        "_core/precision.py",
        "BoundHook(self._leave), always_call=True)",
        "BoundHook(self._leave))",
        MIXED_PRECISION,
    ),
    Mutant(
        "send in full precision",
        "comm_hooks.py",
        "    if dtype is None or dtype == tensor.dtype:\n",
        "    if True:\n",
        MIXED_PRECISION,
    ),
    Mutant(
        "leave the gradient of an in-backward step that raised",
        "functional/in_backward.py",
        "    finally:\n",
        "    except KeyError:\n",
        IN_BACKWARD,
    ),
    Mutant(
        "step managed parameters from their local gradient",
        "functional/in_backward.py",
        "if (ddp is not None and ddp() is not None) or not _registered(parameter)",
        "if not _registered(parameter)",
        IN_BACKWARD,
    ),
    Mutant(
        "forget optimizers when fully_shard replaces a parameter",
        "functional/stand_in.py",
        "        moved(param, self.sharded_param)\n",
        "        pass\n",
        IN_BACKWARD,
    ),
    Mutant(
        "run the last registered optimizer only",
        "functional/step.py",
        "for optimizer in tuple(getattr(parameter, OPTIMIZERS, ())):",
        "for optimizer in getattr(parameter, OPTIMIZERS, ())[-1:]:",
        IN_BACKWARD,
    ),
    Mutant(
        "leave what only other ranks used",
        "functional/comm_hooks.py",
        "for reduction in reductions if error is None else ():",
        "for reduction in ():",
        "tests/functional/test_comm_hooks.py",
    ),
    Mutant(
        "step by oneself inside no_sync",
        "attachment.py",
        'if self._step.state == "open" or any(reduced):',
        "if True:",
        "tests/functional/test_overlapped.py",
    ),
    Mutant(
        "do not wait for a parameter that is used",
        "_core/deferral.py",
        "        self._finish([self._due.get(id(parameter))])\n",
        "",
        READERS,
    ),
    Mutant(
        "do not wait for what a module reads",
        "_core/deferral.py",
        "if self._due:\n            # Without",
        "if False:\n            # Without",
        "tests/parity/test_structures.py",
    ),
    Mutant(
        "step later with the groups of then",
        "_core/deferral.py",
        "self._frozen = frozen(optimizer)",
        "self._frozen = optimizer",
        PROGRAMS,
    ),
    Mutant(
        "put off a fused update without its loss scale",
        "_core/stepper.py",
        "setattr(copied, name, value.detach().clone())",
        "delattr(copied, name)",
        LOSS_SCALE,
    ),
    Mutant(
        "let graphs with the old weights run after step()",
        "_core/deferral.py",
        "        torch.autograd.graph.increment_version(self.tensors)\n",
        "",
        READERS,
    ),
    Mutant(
        "write over a write through an alias",
        "_core/deferral.py",
        "            if found != version:",
        "            if False:",
        READERS,
    ),
    Mutant(
        "lose the gradients that nobody cleared",
        "_core/deferral.py",
        "tensor.grad = self._held(gradient) if id(tensor) in self._due else gradient",
        "pass",
        PROGRAMS,
    ),
    Mutant(
        "put off optimizers that keep values in their groups",
        "_core/probe.py",
        "contained = contained and not stepper.wrote_elsewhere",
        "contained = True",
        "tests/parity/test_odd_optimizers.py",
    ),
    Mutant(
        "clip only what is put off",
        "_core/deferral.py",
        "if clip is not None and len(later) < len(with_gradient):",
        "if False:",
        CLIPPING,
    ),
    Mutant(
        "take norms in the order of parameters",
        "_core/norms.py",
        "for ([_], places) in _grouped([like[m] for m in members]).values() for i in places]",
        "for i in range(len(members))]",
        "tests/unit/test_norms.py",
    ),
    Mutant(
        "keep the norm of a gradient that was changed",
        "_core/arrival.py",
        "        attached, _, _ = self._measured.pop(id(parameter))\n        self._clipping.forget(attached)\n",
        "        self._measured.pop(id(parameter))\n",
        CLIPPING,
    ),
    Mutant(
        "keep the norms of a step that was put back",
        "_core/transaction.py",
        "            self._clipping.forget_norms()\n",
        "",
        CLIPPING,
    ),
    Mutant(
        "leave out earlier micro-batches in the first pass",
        "_core/transaction.py",
        "gradients.append(gradient if earlier is None else earlier + gradient)",
        "gradients.append(gradient)",
        CLIPPING,
    ),
    Mutant(
        "step DDP's buckets before the norm is known",
        "_core/transaction.py",
        'return self._pass == "all"',
        "return False",
        SCHEDULES,
    ),
    Mutant(
        "put parameters back without their state",
        "_core/undo.py",
        "                _put_back(value, saved)\n",
        "",
        UNDO,
    ),
    Mutant(
        "keep state that the step had made",
        "_core/undo.py",
        "self._mapping.pop(self._parameter, None)",
        "pass",
        UNDO,
    ),
    Mutant(
        "let a trial step stand though the loss scale is still on",
        "_core/transaction.py",
        "if self._scale is None or self._scale.taken_off:",
        "if True:",
        LOSS_SCALE,
    ),
    Mutant(
        "let a trial step stand though its gradient was changed",
        "_core/transaction.py",
        "gradient._version in (version, version + taken_off)",
        "True",
        CLIPPING,
    ),
    Mutant(
        "step on the rank's own gradients",
        "_core/accumulation.py",
        "if done and self._wrapped():",
        "if False:",
        SCHEDULES,
    ),
    Mutant(
        "communicate in every micro-batch",
        "_core/accumulation.py",
        "        if (self._backwards + 1) % self.steps:\n",
        "        if False:\n",
        SCHEDULES,
    ),
    Mutant(
        "multiply what the reducer divides",
        "sources/hook_slot.py",
        "self._views.get(id(p)) == storage for p",
        "False for p",
        SCHEDULES,
    ),
    Mutant(
        "let nobody know that weights are new between backward and step()",
        "_core/transaction.py",
        "            self._watch.start(watched)\n",
        "",
        REFUSALS,
    ),
    Mutant(
        "let nobody keep the optimizer that steps by itself",
        "attachment.py",
        "self._kept = list(optimizers) if options.steps_itself else []",
        "self._kept = [weakref.proxy(o) for o in optimizers]",
        "tests/functional/test_overlapped.py",
    ),
    Mutant(
        "divide the sum, not what is summed",
        "sources/transient.py",
        "                torch.mul(gradient, factor, out=part)\n",
        "                torch.div(gradient, dist.get_world_size(self.group), out=part)\n",
        REPLICATED,
    ),
    Mutant(
        "keep the buckets of the first backward",
        "sources/transient.py",
        "            if not backward.layout.agreed:\n",
        "            if False:\n",
        REPLICATED,
    ),
    Mutant(
        "lay out the buckets in this rank's own order",
        "sources/transient.py",
        "        broadcast([order], self.group)\n",
        "",
        REPLICATED,
    ),
    Mutant(
        "let any number of buckets be on their way",
        "sources/transient.py",
        "IN_FLIGHT = 2\n",
        "IN_FLIGHT = 1000\n",
        REPLICATED_LIFE,
    ),
    Mutant(
        "hold on to a bucket that was handed over",
        "sources/transient.py",
        "        flight.future = torch.futures.Future()\n",
        "        self.last = [*getattr(self, 'last', []), flight]\n",
        REPLICATED_LIFE,
    ),
    Mutant(
        "take what was not used here for used by nobody",
        "sources/transient.py",
        "if somewhere[number]]",
        "if number not in flight.unused]",
        REPLICATED,
    ),
    Mutant(
        "take what was not used here for used elsewhere",
        "sources/transient.py",
        "if somewhere[number]]",
        "]",
        REPLICATED,
    ),
    Mutant(
        "count what no_sync has left as unused",
        "sources/transient.py",
        "        self._fresh.add(number)\n        if not self._reduces:\n            return\n",
        "        if not self._reduces:\n            return\n        self._fresh.add(number)\n",
        REPLICATED,
    ),
    Mutant(
        "average what nobody has touched since",
        "sources/transient.py",
        "if i not in self._fresh or _gradient",
        "if _gradient",
        REPLICATED,
    ),
    Mutant(
        "wait for a gradient before backward is told of",
        "sources/transient.py",
        "                node.register_prehook(partial(self._reached, node))\n",
        "                pass\n",
        REPLICATED,
    ),
    Mutant(
        "communicate for autograd.grad too",
        "sources/transient.py",
        " or not _leads_to(node, mine)",
        " or True",
        REPLICATED,
    ),
    Mutant(
        "send a bucket before it is full",
        "sources/transient.py",
        "self.missing[self.sent] == 0",
        "self.missing[self.sent] <= 1",
        REPLICATED,
    ),
    Mutant(
        "leave what else is on its way after a failure",
        "sources/transient.py",
        "                    if future is not None:\n",
        "                    if False:\n",
        REPLICATED_LIFE,
    ),
    Mutant(
        "keep a bucket for one gradient that stays",
        "sources/replicated.py",
        "                    parameter.grad = parameter.grad.clone()\n",
        "                    pass\n",
        REPLICATED_LIFE,
    ),
    Mutant(
        "step in a second backward of a step",
        "sources/replicated.py",
        "        self._writes = False\n        self._sink.streams",
        "        self._sink.streams",
        REPLICATED,
    ),
    Mutant(
        "broadcast buffers before every forward",
        "sources/replicated.py",
        "if self._sync_buffers_next and self.broadcast_buffers and",
        "if self.broadcast_buffers and",
        REPLICATED,
    ),
    Mutant(
        "never broadcast buffers",
        "sources/replicated.py",
        "        self._sync_buffers_next = reduces\n",
        "        self._sync_buffers_next = False\n",
        REPLICATED,
    ),
    Mutant(
        "send in the gradients' own dtype",
        "sources/replicated.py",
        "        self.reduce_dtype = reduce_dtype\n",
        "        self.reduce_dtype = None\n",
        REPLICATED,
    ),
    Mutant(
        "leave the first weights as they are",
        "sources/agreement.py",
        "            for tensor, part in zip",
        "            for tensor, part in () and zip",
        REPLICATED,
    ),
    Mutant(
        "keep the state of local shards as it was made",
        "_shards.py",
        "if not isinstance(value, torch.Tensor) or value.shape != self._local_shape:",
        "if True:",
        FSDP2,
    ),
    Mutant(
        "do not look who reads a local tensor",
        "_core/watch.py",
        "if _LOCAL in vars(cls):",
        "if False:",
        FSDP2,
    ),
    Mutant(
        "clip shards by the norm of this rank's",
        "_core/norms.py",
        "total.full_tensor() if hasattr",
        "total.to_local() * 0.5 if hasattr",
        FSDP2,
    ),
    Mutant(
        "step what FSDP1 has reduced once for each parameter",
        "sources/fsdp.py",
        "self._reduced_now = {a.spec.index for a in members if a is not attached}",
        "self._reduced_now = set()",
        "tests/distributed/test_fsdp1.py",
    ),
    Mutant(
        "sum where the mean is asked for",
        "sources/state_shards.py",
        "            sent.mul_(1.0 / divisor)\n            received",
        "            received",
        ZERO,
    ),
    Mutant(
        "leave the other ranks' rows as they are",
        "sources/state_shards.py",
        "_copy([(rows, flat) for flat, rows in _in_rows(received, members)])",
        "_copy([(rows, flat) for flat, rows in _in_rows(received, members[:-1])])",
        ZERO,
    ),
    Mutant(
        "leave the parameters of other ranks as they are",
        "sources/state_shards.py",
        "            if owner != self._rank:\n",
        "            if False:\n",
        ZERO,
    ),
    Mutant(
        "step whole parameters on every rank",
        "sources/state_shards.py",
        "self.here = mesh.get_local_rank() == owner",
        "self.here = True",
        ZERO,
    ),
    Mutant(
        "save the rows of one rank as the whole state",
        "sources/state_shards.py",
        "v.full_tensor() if isinstance(v, DTensor) else v",
        "v.to_local() if isinstance(v, DTensor) else v",
        ZERO,
    ),
    Mutant(
        "keep the whole of a state that is loaded",
        "sources/zero.py",
        "        loaded = BoundHook(lambda optimizer: _shard(optimizer, parameters()))\n",
        "        loaded = BoundHook(lambda optimizer: None)\n",
        ZERO,
    ),
    Mutant(
        "do not hear the other ranks",
        "_core/ranks.py",
        "        return vote.verdict().error()\n",
        "        return None\n",
        VOTES,
    ),
    Mutant(
        "keep a failure to oneself",
        "_core/ranks.py",
        "                self.voting.cast(step, failed=True)\n",
        "                self.voting.cast(step)\n",
        VOTES,
    ),
    Mutant(
        "vote only where a step is taken",
        "_core/ranks.py",
        "            if self._owes:\n",
        "            if False:\n",
        VOTES,
    ),
    Mutant(
        "leave a step out on one rank alone",
        "_core/finite.py",
        "    return verdict.nonfinite_on\n",
        "    return None if finite else ranks.rank()\n",
        VOTES,
    ),
    Mutant(
        "take a norm that overflows for infinity",
        "_core/finite.py",
        "    return all(bool(v.isfinite().all()) for v in values)\n",
        "    return False\n",
        NONFINITE,
    ),
    Mutant(
        "keep what a step that was left out counts",
        "_core/stepper.py",
        "                    place[key] = value\n",
        "                    pass\n",
        NONFINITE,
    ),
    Mutant(
        "write the other buckets after one that is not finite",
        "_core/transaction.py",
        "            if self._failure is not None:\n                return False  # so has",
        "            if False:\n                return False  # so has",
        NONFINITE,
    ),
    Mutant(
        "let a second thread in",
        "attachment.py",
        '            self._require_one_thread(thread, "backward")\n',
        "",
        "tests/unit/test_threads.py",
    ),
    Mutant(
        "take a clip of another bucket for a write of the user's",
        "_core/deferral.py",
        "            due._versions = due._found()\n",
        "            pass\n",
        SCHEDULES,
    ),
    Mutant(
        "average in no_sync too",
        "sources/replicated.py",
        "        self.require_backward_grad_sync = False\n",
        "",
        REPLICATED,
    ),
    Mutant(
        "leave FSDP's state as a failed backward left it",
        "attachment.py",
        "        self._after_errors.backward_failed()\n",
        "",
        FSDP_ERRORS,
    ),
    Mutant(
        "go on counting micro-batches that are gone",
        "attachment.py",
        "        self._accumulation.stepped()  # what the micro-batches before had added up is gone, too\n",
        "",
        FSDP_ERRORS,
    ),
    Mutant(
        "leave FSDP's state as a failed forward left it",
        "_fsdp_state.py",
        "always_call=True",
        "always_call=False",
        FSDP_ERRORS,
    ),
    Mutant(
        "miss an interrupted forward",
        "_fsdp_state.py",
        "        elif running is not None:\n",
        "        elif False:\n",
        FSDP_ERRORS,
    ),
    Mutant(
        "miss a failed backward of a part",
        "_fsdp_state.py",
        "        if any(map(_is_in_backward,",
        "        if False and any(map(_is_in_backward,",
        FSDP_ERRORS,
    ),
    Mutant(
        "keep FSDP2's gradients that are not reduced",
        "_fsdp_state.py",
        "                parameter._unsharded_param.grad = None\n",
        "                pass\n",
        FSDP_ERRORS,
    ),
    Mutant(
        "drop FSDP2's gradients after a failed forward",
        "_fsdp_state.py",
        '            if hasattr(parameter, "_unsharded_param"):',
        '        if True:\n            if hasattr(parameter, "_unsharded_param"):',
        FSDP_ERRORS,
    ),
    Mutant(
        "keep FSDP1's hooks of a failed forward",
        "_fsdp_state.py",
        "    if hooks is not None and id(flat) not in awaited:",
        "    if hooks is not None and False:",
        FSDP_ERRORS,
    ),
    Mutant(
        "drop FSDP1's hooks of the forward before",
        "_fsdp_state.py",
        "    if hooks is not None and id(flat) not in awaited:",
        "    if hooks is not None:",
        FSDP_ERRORS,
    ),
    Mutant(
        "save while a step is open",
        "attachment.py",
        'if self._step.state == "open" or (self._accumulation.holding and gradients):',
        "if self._accumulation.holding and gradients:",
        CHECKPOINT + "test_refusals.py",
    ),
    Mutant(
        "save a torn step",
        "attachment.py",
        "        self._step.synchronize()\n        self._step.require_whole()\n        gradients =",
        "        self._step.synchronize()\n        gradients =",
        CHECKPOINT + "test_refusals.py",
    ),
    Mutant(
        "save between micro-batches",
        "attachment.py",
        'if self._step.state == "open" or (self._accumulation.holding and gradients):',
        'if self._step.state == "open":',
        CHECKPOINT + "test_refusals.py",
    ),
    Mutant(
        "compare no digest",
        "checkpoint/files.py",
        "if digest and _digest_of(file) != record.sha256:",
        "if False:",
        CHECKPOINT + "test_damage.py",
    ),
    Mutant(
        "compare no digest of the manifest",
        "checkpoint/manifest.py",
        "if read_small(directory / DIGEST, 1024) != digest_line(digest_of(text)):",
        "if False:",
        CHECKPOINT + "test_damage.py",
    ),
    Mutant(
        "follow links out of the directory",
        "checkpoint/files.py",
        '    """Raise ``DamagedCheckpointError`` unless the file is the one that was written.\n',
        '    path = path.resolve()\n    """Raise\n',
        CHECKPOINT + "test_damage.py",
    ),
    Mutant(
        "take a file's name as a path",
        "checkpoint/manifest.py",
        "if not _FILE.fullmatch(name):",
        "if False:",
        CHECKPOINT + "test_damage.py",
    ),
    Mutant(
        "flush no file",
        "checkpoint/files.py",
        "        os.fsync(file)\n",
        "",
        CHECKPOINT + "test_kills.py",
    ),
    Mutant(
        "rename before the flush",
        "checkpoint/files.py",
        "    flush_directory(unfinished)\n",
        "",
        CHECKPOINT + "test_kills.py",
    ),
    Mutant(
        "forget the rest of a short write",
        "checkpoint/files.py",
        "rest = rest[written:]",
        "rest = rest[:0]",
        CHECKPOINT + "test_kills.py",
    ),
    Mutant(
        "write under the final name",
        "checkpoint/files.py",
        'unfinished = directory / f"{_UNFINISHED}{step}-{secrets.token_hex(4)}"',
        'unfinished = directory / f"step-{step:012d}"',
        CHECKPOINT + "test_kills.py",
    ),
    Mutant(
        "remove the last one first",
        "checkpoint/saving.py",
        "        _refuse_later(directory, number)\n",
        "        remove_older(directory, number, 0)\n",
        CHECKPOINT + "test_kills.py",
    ),
    Mutant(
        "write weights before the optimizer is compared",
        "checkpoint/staging.py",
        "        staged.copies.append((local_of(one.tensor), values))\n",
        "        local_of(one.tensor).copy_(values)\n",
        CHECKPOINT + "test_refusals.py",
    ),
    Mutant(
        "groups by position",
        "checkpoint/staging.py",
        "same = [record for record in left if set(record.parameters) == mine]",
        "same = left[:1]",
        CHECKPOINT + "test_round_trips.py",
    ),
    Mutant(
        "take any class",
        "checkpoint/staging.py",
        "of_class = [r for r in same if r.cls == class_of(optimizer)]",
        "of_class = same",
        CHECKPOINT + "test_refusals.py",
    ),
    Mutant(
        "take what is not finite",
        "checkpoint/staging.py",
        "if (values.is_floating_point() or values.is_complex()) and not bool(torch.isfinite(values).all()):",
        "if False:",
        CHECKPOINT + "test_damage.py",
    ),
    Mutant(
        "leave the step torn",
        "attachment.py",
        "        self._step.forget(gradients=True)\n        self._step.step_count = step_count\n",
        "        self._step.step_count = step_count\n",
        CHECKPOINT + "test_round_trips.py",
    ),
    Mutant(
        "the failure of another rank is no failure",
        "checkpoint/ranks.py",
        "failed = [(rank, told) for rank, told in enumerate(everyone) if told[:1] == kind]",
        "failed = [(rank, told) for rank, told in enumerate(everyone) if told[:1] == kind and error]",
        CHECKPOINT + "test_ranks.py",
    ),
    Mutant(
        "read every rank's rows from the beginning",
        "checkpoint/reading.py",
        "into[common.within(box)] = part[common.within(chunk)]",
        "into[common.within(box)] = part[common.within(common)]",
        CHECKPOINT + "test_ranks.py",
    ),
    Mutant(
        "rank 0's extra for all",
        "checkpoint/staging.py",
        "extra = manifest.extra[rank if rank < manifest.world_size else 0]",
        "extra = manifest.extra[0]",
        CHECKPOINT + "test_ranks.py",
    ),
    Mutant(
        "forget gradients that were noted and not announced",
        "sources/local.py",
        "        self._open_in = None\n        self._announce()\n        self._close()",
        "        self._open_in = None\n        self._close()",
        REFUSALS,
    ),
    Mutant(
        "step a bucket that has not arrived",
        "_core/deferral.py",
        "            flight.wait()\n",
        "",
        CROSSING,
    ),
    Mutant(
        "say that a bucket is reduced where DDP needs the mean",
        "sources/crossing.py",
        "if not self._same or buffer.is_sparse or any(p.grad is None for p in members):",
        "if not self._same or buffer.is_sparse:",
        CROSSING,
    ),
    Mutant(
        "read a gradient that has not arrived",
        "sources/crossing.py",
        "        self.land()\n\n    def _drain",
        "        pass\n\n    def _drain",
        CROSSING,
    ),
    Mutant(
        "go on after buckets were not all reduced",
        "sources/crossing.py",
        "if self._lane is not None and self._lane.failure is not None:",
        "if self._lane is None and False:",
        CROSSING,
    ),
    Mutant(
        "leave the half of a gradient",
        "sources/crossing.py",
        "                parameter.grad = None  # nobody must find half of it",
        "                pass",
        CROSSING,
    ),
    Mutant(
        "keep an order that was made for other buckets",
        "sources/lane.py",
        "self._order = [*self._order[:turn], *before]",
        "pass",
        ORDER,
    ),
    Mutant(
        "send as they come",
        "sources/lane.py",
        "sent = self._ready.pop(self._order[self._next], None)",
        "sent = self._ready.pop(min(self._ready, default=-1), None)",
        ORDER,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_defect_can_still_be_put_in(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, "write this defect anew"
    assert (ROOT / mutant.tests).exists()


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
        [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", mutant.tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "INSTEP_TEST_ALL_CASES": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == SOME_TESTS_FAILED, done.stdout[-3000:]
