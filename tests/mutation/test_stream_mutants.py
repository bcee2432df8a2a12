"""Defects in the order of streams, and in what is kept for them. Each is caught on the emulated accelerator."""

from pathlib import Path

import pytest

from tests import net
from tests.accelerator.building import why_not
from tests.mutation.seeding import Mutant, require_caught, require_there

ONE_DEVICE = "tests/accelerator/test_one_device.py"
ORDERS = "tests/accelerator/test_orders.py"
ZERO = "tests/distributed/test_zero.py"
STREAMS = "_core/streams.py"


def _mutant(name: str, file: str, old: str, new: str, tests: str, picks: str) -> Mutant:
    return Mutant(name, file, old, new, tests, picks, "accelerator")


MUTANTS = [
    _mutant(
        "the side stream does not wait for gradients",
        STREAMS,
        "        side.stream.wait_stream(current)\n",
        "",
        ONE_DEVICE,
        "test_accumulation and blocks",
    ),
    _mutant(
        "the loop does not wait where backward ends",
        STREAMS,
        "            side.loop.wait_stream(side.stream)\n",
        "",
        ORDERS,
        "test_backward_is_called",
    ),
    _mutant(
        "synchronize: the current stream does not wait",
        STREAMS,
        "{torch.accelerator.current_stream(device), side.loop or side.home, side.home}",
        "{side.loop or side.home, side.home}",
        ORDERS,
        "test_synchronize_on",
    ),
    _mutant(
        "synchronize: the loop's stream does not wait",
        STREAMS,
        "{torch.accelerator.current_stream(device), side.loop or side.home, side.home}",
        "{torch.accelerator.current_stream(device), side.home}",
        ORDERS,
        "test_put_back_by",
    ),
    _mutant(
        "synchronize: the stream of a running backward does not wait",
        STREAMS,
        "{torch.accelerator.current_stream(device), side.loop or side.home, side.home}",
        "{torch.accelerator.current_stream(device), side.loop or side.home}",
        ORDERS,
        "test_put_back_in",
    ),
    _mutant(
        "a read: the loop's stream does not wait",
        STREAMS,
        "        for stream in {self.home, *streams}:\n",
        "        for stream in {*streams} or {self.home}:\n",
        ORDERS,
        "test_two_streams",
    ),
    _mutant(
        "a read: the current stream does not wait",
        STREAMS,
        "mark.order(torch.accelerator.current_stream(device), *(s",
        "mark.order(*(s",
        ONE_DEVICE,
        "test_readers and tied and forward",
    ),
    _mutant(
        "a read: the streams on which FSDP2 gathers do not wait",
        STREAMS,
        "for s in self.readers() if s.device == device",
        "for s in ()",
        "tests/distributed/test_fsdp2.py",
        "test_models and forward",
    ),
    _mutant(
        "a later read does not follow an earlier one",
        STREAMS,
        "                current.wait_event(side.ordered.event)\n",
        "                pass\n",
        ONE_DEVICE,
        "test_readers and tied and forward",
    ),
    _mutant(
        "an earlier bucket is remembered in place of a later one",
        STREAMS,
        "        if side.ordered is None or side.ordered.number < mark.number:\n",
        "        if True:\n",
        "tests/accelerator/test_limits.py",
        "in_another_order",
    ),
    _mutant(
        "what was waited for is not remembered",
        STREAMS,
        "            side.ordered = mark\n",
        "            pass\n",
        ONE_DEVICE,
        "test_readers and tied and forward",
    ),
    _mutant(
        "nothing is held",
        STREAMS,
        "        self._held = self.mark(), tensors\n",
        "        self._held = self.mark(), ()\n",
        ONE_DEVICE,
        "test_accumulation and blocks and backward",
    ),
    _mutant(
        "what is held is let go before it was waited for",
        STREAMS,
        "            held[0].order()\n",
        "            pass\n",
        ONE_DEVICE,
        "test_accumulation and blocks and backward",
    ),
    _mutant(
        "the next bucket takes the place of what is held",
        STREAMS,
        "        self.let_go()\n        self._held = self.mark(), tensors\n",
        "        self._held = self.mark(), tensors\n",
        ONE_DEVICE,
        "test_accumulation and blocks and backward",
    ),
    _mutant(
        "join drops what is held",
        STREAMS,
        "            side.loop.wait_stream(side.stream)\n            side.let_go()\n",
        "            side.loop.wait_stream(side.stream)\n            side.drop()\n",
        ORDERS,
        "test_backward_is_called",
    ),
    _mutant(
        "backward waits for each bucket at once",
        STREAMS,
        "        self._held = self.mark(), tensors\n",
        "        self._held = self.mark(), tensors\n        self.let_go()\n",
        ORDERS,
        "test_backward_does_not_wait",
    ),
    _mutant(
        "a stepped bucket is not held",
        "_core/transaction.py",
        "                self.streams.hold(gradients)  # as they were: some optimizers replace .grad\n",
        "                pass\n",
        ONE_DEVICE,
        "test_accumulation and blocks and backward",
    ),
    _mutant(
        "gradients that were handed over go where the host has stepped them",
        "_core/deferral.py",
        '        if self.device.type == "cpu":\n            self.gradients = []',
        "        if True:\n            self.gradients = []",
        ONE_DEVICE,
        "test_accumulation and blocks and forward",
    ),
    _mutant(
        "a mark is recorded before the update",
        "_core/deferral.py",
        "            due.finish()\n        return self.streams.mark(due.device)\n",
        "            mark = self.streams.mark(due.device)\n            due.finish()\n        return mark\n",
        ONE_DEVICE,
        "test_accumulation and blocks and forward",
    ),
    _mutant(
        "the side stream is taken for the loop's",
        STREAMS,
        "        side.home = current\n",
        "",
        ONE_DEVICE,
        "test_accumulation and blocks",
    ),
    _mutant(
        "the side stream's own use is taken for the loop's",
        STREAMS,
        "        if current == side.stream:\n",
        "        if False:\n",
        ORDERS,
        "test_put_back_in",
    ),
    _mutant(
        "the side stream stays the current one",
        STREAMS,
        "            torch.accelerator.set_stream(current)\n            if index",
        "            if index",
        ONE_DEVICE,
        "test_accumulation and blocks and forward",
    ),
    _mutant(
        "the side stream's device stays the current one",
        STREAMS,
        "            if index != device.index:\n                torch.accelerator.set_device_index(index)\n",
        "",
        ONE_DEVICE,
        "test_two_devices and nothing",
    ),
    _mutant(
        "steps are on the loop's stream",
        STREAMS,
        "        torch.accelerator.set_stream(side.stream)  # and",
        "        torch.accelerator.set_stream(current)  # and",
        ONE_DEVICE,
        "test_models_and_optimizers and blocks and AdamW",
    ),
    _mutant(
        "nobody waits for what a backward that raised has stepped",
        "_core/transaction.py",
        "            self.streams.finish()\n",
        "            pass\n",
        ONE_DEVICE,
        "test_what_happens and raises",
    ),
    _mutant(
        "what a backward that raised has stepped is let go before it is done",
        STREAMS,
        "            side.stream.synchronize()\n",
        "",
        ONE_DEVICE,
        "test_what_happens and raises",
    ),
    _mutant(
        "what a backward that raised has stepped is held for ever",
        STREAMS,
        "            side.stream.synchronize()\n            side.drop()\n",
        "            side.stream.synchronize()\n",
        ORDERS,
        "test_a_backward_that_raised",
    ),
    _mutant(
        "do not wait for the engine to let go of a backward that raised",
        "_core/engine.py",
        "        if not self._tasks or graph_task() is not None:\n",
        "        if True:\n",
        ONE_DEVICE,
        "test_what_happens and raises",
    ),
    _mutant(
        "values are put back on the loop's stream",
        "_core/transaction.py",
        "            with self.streams.on(device):\n                undo.restore(device)\n",
        "            undo.restore(device)\n",
        ONE_DEVICE,
        "test_what_happens and raises and undo",
    ),
    _mutant(
        "nobody waits for what is put back",
        "_core/transaction.py",
        "                undo.restore(device)\n        self.streams.join_all()\n",
        "                undo.restore(device)\n",
        ORDERS,
        "test_put_back_by",
    ),
    _mutant(
        "synchronize() waits for nothing",
        "_core/transaction.py",
        "        self.streams.join_all()\n        self._hear(wait=True)\n",
        "        self._hear(wait=True)\n",
        ORDERS,
        "test_synchronize_on",
    ),
    _mutant(
        "backward ends without a join",
        "sources/local.py",
        "        self._sink.streams.join()\n",
        "",
        ONE_DEVICE,
        "test_accumulation and blocks and backward",
    ),
    _mutant(
        "a forward does not follow an earlier one",
        "_core/deferral.py",
        "        self.streams.follow()  # what the loop's stream has waited for, this forward's may not have\n",
        "",
        ONE_DEVICE,
        "test_readers and tied and forward",
    ),
    _mutant(
        "synchronize() does not follow an earlier forward",
        "_core/deferral.py",
        "        self._finish(self._dues())\n        self.streams.follow()\n",
        "        self._finish(self._dues())\n",
        ORDERS,
        "test_synchronize_after",
    ),
    _mutant(
        "nobody waits for the steps of optimizers that are gone",
        "_core/deferral.py",
        "                self.streams.wait(due.mark)\n        if",
        "                pass\n        if",
        ORDERS,
        "test_the_optimizer_is_gone",
    ),
    _mutant(
        "ZeRO: parts are sent on the loop's stream",
        "sources/zero.py",
        "            with self._sink.streams.on(members[0].spec.device):\n"
        "                gathered = self._shards.gather(members, self._rooms.get(reduction.index))\n",
        "            gathered = self._shards.gather(members, self._rooms.get(reduction.index))\n",
        ZERO,
        "test_models and backward",
    ),
    _mutant(
        "forward: parts are sent on the loop's stream",
        "_core/deferral.py",
        "                with self.streams.on(due.device):\n                    due.send(",
        "                if True:\n                    due.send(",
        ZERO,
        "test_loops and forward and evaluated",
    ),
    _mutant(
        "forward: buckets are finished on the loop's stream",
        "_core/deferral.py",
        "        with self.streams.on(due.device):\n            due.finish()\n",
        "        due.finish()\n",
        ONE_DEVICE,
        "test_models_and_optimizers and blocks and AdamW and forward",
    ),
    _mutant(
        "replicated: backward ends without a join",
        "sources/replicated.py",
        "        self._sink.streams.join()\n",
        "",
        "tests/distributed/test_replicated.py",
        "test_unused and backward",
    ),
    _mutant(
        "a hook's backward ends without a join",
        "functional/comm_hooks.py",
        "        self._streams.join()\n",
        "",
        "tests/functional/test_comm_hooks.py",
        "test_some_parameters",
    ),
    _mutant(
        "FSDP1's backward ends without a join",
        "sources/fsdp.py",
        "        self._sink.streams.join()\n",
        "",
        "tests/accelerator/test_sources.py",
        "test_sources and fsdp1-backward-AdamW",
    ),
    _mutant(
        "DDP copies from a bucket that is being clipped",
        "sources/ddp.py",
        "        # DDP's own end of backward is next, and may copy from the buckets, in which gradients are clipped.\n"
        "        self._sink.streams.join()\n",
        "",
        "tests/accelerator/test_sources.py",
        "test_clipped_by_value and copies-backward and not shard_state",
    ),
    _mutant(
        "DDP copies from a bucket in which parts are received",
        "sources/zero.py",
        "goes through its buckets\n        self._sink.streams.join()\n",
        "goes through its buckets\n",
        "tests/accelerator/test_sources.py",
        "test_sources and copies-backward-AdamW and shard_state",
    ),
    _mutant(
        "an upcast ends without a join",
        "functional/upcast.py",
        "            self._streams.join()\n",
        "",
        "tests/functional/test_upcast.py",
        "test_two_ranks",
    ),
    _mutant(
        "DDP's low-precision copies are made before the step",
        "functional/upcast.py",
        "        ddp._mp_stream.wait_stream(torch.accelerator.current_stream(device))\n",
        "        pass\n",
        "tests/functional/test_upcast.py",
        "test_two_ranks",
    ),
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
