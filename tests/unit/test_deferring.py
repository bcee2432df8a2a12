"""Whether steps are put off: the trial of ``defer="auto"``, with a clock of its own."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._step.deferral import ASKED, PAIRS, WARM_UP, DeferralTrial, Deferring, OtherRanks
from instep._step.state import StepTimes
from instep._wiring.advice import deferring_of
from instep.errors import TornStepError
from instep.options import Options
from tests.cases import Blocks, batch
from tests.inside import schedule_of, trial_of

OF_ONE_RANK = WARM_UP + 2 * PAIRS + 2


def _free() -> None:
    """Nothing keeps the step from being put off."""


class Loop:
    """Iterations whose length depends on whether the step is put off.

    Args:
        seconds: of iteration ``i`` and of whether its step was put off.
        spent: of an iteration, on updates.
    """

    def __init__(
        self,
        seconds: Callable[[int, bool], float],
        prevented: Callable[[], str | None] = _free,
        others: OtherRanks | None = None,
        spent: float | None = None,
    ) -> None:
        self.now = 0.0
        self.put_off: list[bool] = []
        self._seconds = seconds
        times = StepTimes()
        times.exposed = spent
        self.trial = DeferralTrial(prevented, others, lambda: self.now, times=times)

    def run(self, steps: int = OF_ONE_RANK) -> "Loop":
        for _ in range(steps):
            self.trial.backward_begins()
            self.trial.step_begins()
            self.put_off.append(self.trial.puts_off)
            self.now += self._seconds(len(self.put_off), self.trial.puts_off)
        return self


def faster_by(share: float) -> Callable[[int, bool], float]:
    return lambda i, put_off: 1.0 - share if put_off else 1.0


def test_the_trial_has_as_many_of_each_and_favours_none() -> None:
    found = Loop(faster_by(0.0)).run().put_off
    assert found[:WARM_UP] == [False] * WARM_UP
    assert found[WARM_UP : WARM_UP + 4] == [False, True, True, False]
    assert sum(found) == PAIRS
    assert not any(found[WARM_UP + 2 * PAIRS :])


@pytest.mark.parametrize(("share", "gains"), [(-0.5, False), (0.0, False), (0.04, False), (0.06, True), (0.5, True)])
def test_a_clear_gain_decides(share: float, gains: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "instep"):
        trial = Loop(faster_by(share)).run().trial
    assert trial.decided
    assert trial.puts_off is gains
    assert trial.never is not gains
    assert f"in the median it was {abs(100 * share):.1f}% {'shorter' if share > 0 else 'longer'}" in trial.why
    (said,) = caplog.messages
    assert said.startswith("the step is put off" if gains else "the step is taken at once")


def test_pairs_that_disagree_decide_nothing() -> None:
    def seconds(i: int, put_off: bool) -> float:
        return 1.0 if not put_off else (0.5 if i % 8 < 4 else 1.2)

    trial = Loop(seconds).run().trial
    assert not trial.puts_off
    assert "8 of 16 pairs" in trial.why


def test_a_machine_that_slows_down_favours_none() -> None:
    trial = Loop(lambda i, put_off: 1.0 + i / 10).run().trial
    assert trial.decided
    assert not trial.puts_off


def test_a_few_long_iterations_are_no_reason() -> None:
    trial = Loop(lambda i, put_off: 100.0 if i in (20, 33) else 0.8 if put_off else 1.0).run().trial
    assert trial.puts_off


def test_what_prevents_a_gain_is_said_at_once() -> None:
    trial = Loop(faster_by(0.5), lambda: "there is one CPU core").run(1).trial
    assert trial.decided
    assert trial.never
    assert trial.why == "there is one CPU core"


def test_updates_that_take_less_than_is_to_be_gained_are_not_tried() -> None:
    loop = Loop(faster_by(0.5), spent=0.049)
    loop.run(WARM_UP)
    assert not loop.trial.decided
    loop.run(1)
    assert loop.trial.never
    assert loop.trial.why == "updates take 4.9% of an iteration, and a step is put off where that saves 5%"
    assert not any(loop.run().put_off)


def test_one_iteration_that_took_long_does_not_hide_what_is_to_be_gained() -> None:
    """Nor do the first ones, which make state, or are slow for another reason."""
    slow = {1, 2, 3, 4, 7}
    trial = Loop(lambda i, put_off: 100.0 if i in slow else 0.9 if put_off else 1.0, spent=0.1).run().trial
    assert trial.puts_off


@pytest.mark.parametrize("schedule", ["forward", "backward"])
@pytest.mark.parametrize(("seconds", "is_tried"), [(1e-9, True), (1e6, False)])
def test_a_loop_whose_updates_take_little_is_spared_the_trial(
    schedule: Any, seconds: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iteration takes ``seconds``, and updates as long as they do."""
    now = [0.0]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("instep._wiring.advice.DeferralTrial", partial(DeferralTrial, clock=lambda: now[0]))
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with instep.attach(model, optimizer, schedule=schedule) as overlap:
        for _ in range(WARM_UP + 1):
            now[0] += seconds
            iterate(model, optimizer)
        trial = trial_of(overlap)
        assert trial.never is not is_tried
        assert trial.why == "not decided yet" if is_tried else trial.why.startswith("updates take 0.0% of an iteration")


@pytest.mark.parametrize("spent", [None, 0.0])
def test_a_clock_that_stands_still_decides_nothing(spent: float | None) -> None:
    """As where a test of the loop's has stopped it."""
    assert Loop(lambda i, put_off: 0.0, spent=spent).run().trial.never


def test_what_is_spent_on_updates() -> None:
    """In ``step()``, of waiting, and in hooks of backward."""
    times = StepTimes()
    assert times.spent is None  # no step yet
    times.exposed, times.outside = 0.25, 0.125
    assert times.spent == 0.375


@pytest.mark.parametrize("schedule", ["forward", "backward"])
@pytest.mark.parametrize(("device", "is_tried"), [("cpu", False), ("meta", True)])
def test_the_hosts_clock_does_not_show_what_an_accelerator_does(schedule: Any, device: str, is_tried: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device=device))]
    refs: Any = SimpleNamespace(optimizers=lambda: [torch.optim.SGD(parameters)])
    times = StepTimes()
    times.exposed = 0.0
    trial = deferring_of(Options(schedule=schedule), refs, None, times)
    for _ in range(WARM_UP + 1):
        trial.step_begins()
    assert trial.never is not is_tried


def test_a_loop_that_cannot_be_followed_any_more() -> None:
    loop = Loop(faster_by(0.5)).run()
    assert loop.trial.puts_off
    loop.trial.cannot("a parameter was replaced")
    assert loop.trial.never
    assert loop.trial.why == "a parameter was replaced"
    loop.trial.cannot("and again")
    assert loop.trial.why == "a parameter was replaced"


class Ranks:
    """The others, which have all said what they found when they are asked for the ``answers``-th time.

    Args:
        found: what comes of it then.
    """

    def __init__(self, found: bool, answers: int = 1) -> None:
        self.said: list[bool] = []
        self.asked = 0
        self._found = found
        self._answers = answers

    def say(self, found: bool) -> None:
        self.said.append(found)

    def all_found(self) -> bool | None:
        self.asked += 1
        return self._found if self.asked >= self._answers else None


KNOWN = WARM_UP + 2 * PAIRS + 1
"""The steps after which a rank knows whether it gains."""


@pytest.mark.parametrize(("answers", "after"), [(1, 1), (2, 2), (3, 4), (4, 8)])
@pytest.mark.parametrize("gains", [True, False])
def test_all_ranks_decide_alike(gains: bool, answers: int, after: int) -> None:
    ranks = Ranks(gains, answers)
    loop = Loop(faster_by(0.5), others=ranks).run(KNOWN + after - 1)
    assert not loop.trial.decided
    assert not any(loop.put_off[KNOWN - 1 :])
    loop.run(1)
    assert loop.trial.decided
    assert loop.trial.puts_off is gains
    assert ranks.said == [True] + [False] * (not gains)
    loop.run(max(ASKED))
    assert ranks.asked == answers


def test_ranks_that_never_say_anything() -> None:
    ranks = Ranks(True, answers=100)
    loop = Loop(faster_by(0.5), others=ranks).run(KNOWN + max(ASKED))
    assert loop.trial.decided
    assert not loop.trial.puts_off
    assert ranks.said == [True, False]
    assert ranks.asked == len(ASKED)


def test_a_rank_that_cannot_gain_says_so_and_asks_nobody() -> None:
    ranks = Ranks(True)
    loop = Loop(faster_by(0.5), lambda: "fused=False", ranks).run(1)
    assert loop.trial.decided
    assert loop.trial.never
    assert ranks.said == [False]
    assert ranks.asked == 0
    assert loop.trial.why == "fused=False"


def test_a_rank_that_finds_no_gain_asks_nobody() -> None:
    ranks = Ranks(True)
    loop = Loop(faster_by(0.0), others=ranks).run(KNOWN + 1)
    assert loop.trial.decided
    assert (ranks.said, ranks.asked) == ([False], 0)


def test_a_rank_whose_others_gain_nothing_says_so() -> None:
    trial = Loop(faster_by(0.5), others=Ranks(False)).run(KNOWN + 1).trial
    assert not trial.puts_off
    assert "on all ranks" in trial.why


class Gone(Ranks):
    def say(self, found: bool) -> None:
        raise RuntimeError("the process that has the store has ended")

    def all_found(self) -> bool | None:
        raise RuntimeError("the process that has the store has ended")


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_others_that_are_gone(share: float) -> None:
    trial = Loop(faster_by(share), others=Gone(True)).run(KNOWN + 1).trial
    assert trial.decided
    assert not trial.puts_off


def test_asked_for() -> None:
    for asked, puts_off in ((Deferring("defer=True", asked=True), True), (Deferring("defer=False"), False)):
        for _ in range(OF_ONE_RANK):
            asked.backward_begins()
            asked.step_begins()
            assert asked.puts_off is puts_off
        asked.cannot("follow")
        assert asked.puts_off is puts_off
        assert asked.never is not puts_off
        assert asked.why == f"defer={puts_off}"


# Modules are watched for as long as there may be something to wait for.


def watched(model: nn.Module) -> int:
    """The modules that have hooks, without the model itself."""
    return sum(bool(part._forward_pre_hooks) for part in model.modules() if part is not model)


def resting() -> tuple[nn.Module, torch.optim.Optimizer, instep.Attachment]:
    torch.manual_seed(0)
    model = Blocks(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, defer=False)
    return model, optimizer, overlap


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_hooks_rest_while_no_step_is_put_off() -> None:
    model, optimizer, overlap = resting()
    assert watched(model) > 3
    iterate(model, optimizer)
    assert watched(model) == 0
    overlap.detach()


def test_hooks_stay_while_steps_are_put_off() -> None:
    torch.manual_seed(0)
    model = Blocks(depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, defer=True):
        for _ in range(2):
            iterate(model, optimizer)
        assert watched(model) > 3


def test_a_module_that_is_watched_while_they_rest() -> None:
    model, optimizer, overlap = resting()
    iterate(model, optimizer)
    schedule, part = schedule_of(overlap), model.get_submodule("inner")
    later = schedule.watch_reader(part, [])
    assert len(part._forward_pre_hooks) == 1
    schedule._step.tear_last(RuntimeError("another rank"))
    assert len(part._forward_pre_hooks) == 2  # its own, which has rested, and the later one
    overlap.accept_torn()
    overlap.detach()
    later.remove()
    assert watched(model) == 0


def test_a_torn_step_wakes_them() -> None:
    """A module that is called by itself tells, too; and they rest again when the loop has accepted it."""
    model, optimizer, overlap = resting()
    iterate(model, optimizer)
    schedule_of(overlap)._step.tear_last(RuntimeError("another rank"))
    with pytest.raises(TornStepError):
        model.get_submodule("inner")(batch(0)[0])
    overlap.accept_torn()
    iterate(model, optimizer)
    assert watched(model) == 0
    schedule_of(overlap)._step.tear_last(RuntimeError("another rank"))
    overlap.accept_torn()
    overlap.detach()
    assert watched(model) == 0
    schedule_of(overlap)._step.ledger.when_torn()
    assert watched(model) == 0


def test_optimizers_that_take_turns_make_no_step_together() -> None:
    """Also where all steps are left to torch for good: a backward gives up what was owed to the one before it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    with instep.attach(model, [first, second], defer=False) as overlap:
        for i in range(20):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in (first, second) if i < 10 else ((first, second)[i % 2],):
                optimizer.step()
            model.zero_grad()
        assert overlap.step_count == 10


class CallsItsParentTwice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


def _raises(*_: object) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("cls", [torch.optim.SGD, CallsItsParentTwice])
def test_the_steps_of_a_default_that_rests_are_counted(cls: type[torch.optim.SGD]) -> None:
    model = nn.Linear(4, 4)
    optimizer = cls(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, defer=False) as overlap:

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 4)).sum()
            loss.backward()
            return loss

        def makes_steps(count: int, *closure: Callable[[], torch.Tensor] | None, raises: bool = False) -> None:
            assert schedule_of(overlap).rests
            before = overlap.step_count
            with pytest.raises(ZeroDivisionError) if raises else nullcontext():
                optimizer.step(*closure)
            assert overlap.step_count == before + count

        for _ in range(12):
            evaluate()
            optimizer.step()
        assert overlap.step_count == 12
        for _ in range(3):
            evaluate()
            makes_steps(1)
            assert overlap.stats()["exposed_ms"] > 0
        optimizer.zero_grad()
        makes_steps(0)
        makes_steps(1, evaluate)
        makes_steps(1)  # its gradients are still there
        makes_steps(0, _raises, raises=True)
        evaluate()
        makes_steps(1)
        makes_steps(1, evaluate)
        # A tool that asks for state, as DCP does, is none of the loop: that calls ``step(closure=None)``.
        optimizer.param_groups[0]["lr"] = 0.0
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        makes_steps(0, None)
        optimizer.param_groups[0]["lr"] = 0.1
        if cls is torch.optim.SGD:
            evaluate()
            handle = optimizer.register_step_post_hook(_raises)
            makes_steps(1, raises=True)  # instep's own hook stands before the user's
            handle.remove()
        evaluate()
        makes_steps(1)
        optimizer.zero_grad()
        overlap.backward(model(torch.ones(2, 4)).sum(), more=True)
        makes_steps(1)
        if cls is torch.optim.SGD:
            optimizer.register_step_post_hook(lambda *_: seen.append(overlap.step_count))
            optimizer.register_step_pre_hook(lambda *_: seen.append(len(optimizer.state_dict())))
            before, seen = overlap.step_count, list[int]()
            makes_steps(1)
            assert seen == [2, before + 1]


@pytest.mark.parametrize("with_closure", [False, True])
def test_no_gradient_is_asked_for_its_values_where_the_default_rests(
    with_closure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator the host would wait in each step. An optimizer without state, at a learning rate of 0."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).sum() * 0
        loss.backward()
        return loss

    with instep.attach(model, optimizer, defer=False) as overlap:
        for i in range(20):
            if i == 12:
                assert schedule_of(overlap).rests
                monkeypatch.setattr("instep._step.step.asks_for_state", _raises)
            if with_closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
        assert overlap.step_count == 20


@pytest.mark.parametrize("when", [3, 15])
def test_a_step_of_the_default_is_counted_when_it_has_returned(when: int) -> None:
    """Not before, whoever looks while it runs."""
    seen: list[int] = []

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if i == when:
                optimizer.state_dict()
                overlap.synchronize()
                seen.append(overlap.step_count)
            return super().step(closure)

    model = nn.Linear(4, 4)
    optimizer = Looks(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, defer=False) as overlap:
        for i in range(20):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert overlap.step_count == i + 1
    assert seen == [when]


@pytest.mark.parametrize("when", [3, 15])
@pytest.mark.parametrize("looks", [False, True])
def test_a_step_of_the_default_that_raises_stands(when: int, looks: bool) -> None:
    """As far as torch has come with it. It is counted at the next use, whether the loop is looked at still or not."""

    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.defaults["raises"]:
                raise ZeroDivisionError

    model = nn.Linear(4, 4)
    optimizer = Raises(model.parameters(), lr=0.1)
    optimizer.defaults["raises"] = False
    with instep.attach(model, optimizer, defer=False) as overlap:
        for i in range(20):
            optimizer.defaults["raises"] = i == when
            model(torch.ones(2, 4)).sum().backward()
            assert schedule_of(overlap).rests == (i > 9) or i in (8, 9)
            with pytest.raises(ZeroDivisionError) if i == when else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            assert overlap.step_count == i + (i != when)
            if looks:
                optimizer.state_dict()
                assert overlap.step_count == i + 1


@pytest.mark.parametrize("when", [3, 14])
def test_a_parameter_that_is_replaced_where_torch_steps(when: int) -> None:
    """As in Gaussian splatting: the old one is gone, and its state is the new one's."""
    ends = []
    for attached in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters())
        if attached:
            instep.attach(model, optimizer, defer=False)
        for i in range(20):
            if i == when:
                old, new = model[0].weight, nn.Parameter(model[0].weight.detach().clone())
                optimizer.state[new] = optimizer.state.pop(old)
                group = optimizer.param_groups[0]
                group["params"] = [new if p is old else p for p in group["params"]]
                model[0].weight = new
                del old
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
