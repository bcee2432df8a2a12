"""What counts as hidden, and what is said about it."""

from dataclasses import replace
from typing import Any

import pytest

from instep_tools.report.figures import Compared, figures
from instep_tools.report.page import cards
from instep_tools.report.run import Run
from instep_tools.report.suggestions import suggestions, suggestions_beside
from tests.report.runs import GLOO, MAIN, MIB, WORKER, memory_of, pipelined, run_of, span

DDP = {"wrapper": "DistributedDataParallel", "ranks": 2}
ATTACHED = {"label": "instep, schedule='backward'", "options": {"schedule": "'backward'"}}
FORWARD = {"label": "instep, schedule='forward'", "options": {"schedule": "'forward'"}}


def test_a_step_inside_backward_on_its_thread_is_not_hidden() -> None:
    found = figures(run_of([span("backward", 0.0, 0.9), span("step", 0.2, 0.5)]))
    assert (found.step.total, found.step.exposed) == pytest.approx((0.3, 0.3))
    assert found.backward == pytest.approx(0.6), "what was stepped inside is not backward's"
    assert found.other == pytest.approx(0.1)


def test_a_step_is_hidden_while_gradients_are_on_their_way() -> None:
    spans = [span("backward", 0.0, 0.5), span("communication", 0.3, 0.8, GLOO), span("step", 0.6, 0.9)]
    found = figures(run_of(spans, ranks=2))
    assert found.step.exposed == pytest.approx(0.1)
    assert found.step.hidden == pytest.approx(0.2)
    assert found.communication.total == pytest.approx(0.5)
    assert found.communication.exposed == pytest.approx(0.1), "between backward and the step"


def test_a_step_is_hidden_while_another_thread_computes_but_not_while_that_waits() -> None:
    spans = [span("forward", 0.0, 0.8), span("waiting", 0.1, 0.4), span("step", 0.2, 0.6, WORKER)]
    found = figures(run_of(spans))
    assert found.step.exposed == pytest.approx(0.2)
    assert found.step.hidden == pytest.approx(0.2)
    assert found.forward == pytest.approx(0.5)
    assert found.waiting == pytest.approx(0.3)


def test_figures_are_medians_over_iterations_that_spans_are_cut_to() -> None:
    spans = [span("step", 0.9, 1.2), span("step", 2.0, 2.5), span("forward", 0.0, 3.0)]
    found = figures(run_of(spans, [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]))
    assert found.step.total == pytest.approx(0.2)
    assert found.iteration == pytest.approx(1.0)


def test_the_first_iteration_has_no_step_where_steps_are_put_off() -> None:
    spans = [span("forward", 0.0, 0.9), span("forward", 1.0, 3.0), span("step", 1.2, 1.6, WORKER, "a")]
    found = figures(run_of(spans, [(0.0, 1.0), (1.0, 3.0)], buckets=[["a"]]))
    assert found.step.total == found.step.hidden == pytest.approx(0.4)
    assert found.buckets[0].step == pytest.approx(0.4)
    assert found.iteration == pytest.approx(2.0)
    assert figures(run_of(spans[:2], [(0.0, 1.0), (1.0, 3.0)])).iteration == pytest.approx(1.5), "none has a step"


def test_what_is_stepped_together_is_shared_by_bytes() -> None:
    spans = [
        span("step", 0.0, 0.4, MAIN, "a", "b"),
        span("communication", 0.0, 0.2, GLOO),
        span("flight", 0.0, 0.3, GLOO, "b"),
    ]
    first, second = figures(run_of(spans, buckets=[["a"], ["b"]])).buckets
    assert (first.name, first.nbytes, second.nbytes) == ("a", 3 * MIB, MIB)
    assert (first.step, second.step) == pytest.approx((0.3, 0.1))
    assert (first.hidden, second.hidden) == pytest.approx((0.15, 0.05))
    assert first.flight is None
    assert second.flight == pytest.approx(0.3)


def test_bubbles_and_the_step_of_a_pipeline_are_of_each_rank() -> None:
    found, plain = figures(pipelined(0.1, 0.2, attached=True)), figures(pipelined(0.1, 0.05, attached=False))
    assert found.pipeline is not None
    assert plain.pipeline is not None
    assert found.pipeline.bubbles == pytest.approx([0.3, 0.2]), "a step fills them"
    assert found.pipeline.step_inside == pytest.approx([0.1, 0.2])
    assert found.pipeline.step_after == pytest.approx([0.05, 0.05])
    assert plain.pipeline.bubbles == pytest.approx([0.4, 0.4])
    assert plain.pipeline.step_inside == pytest.approx([0.0, 0.0])
    assert plain.pipeline.step_after == pytest.approx([0.15, 0.1])
    assert found.other == pytest.approx(1 - 0.8 - 0.05), "what the loop does beside: no bubble is in it"
    assert figures(run_of([])).pipeline is None


def test_advice_on_a_pipeline_says_its_bubbles_and_how_to_fill_them() -> None:
    plain, attached = pipelined(0.1, 0.05, attached=False), pipelined(0.1, 0.2, attached=True)
    (said,) = suggestions(plain, figures(plain))
    assert said.startswith("By rank, an iteration has bubbles of 400.0 ms, 400.0 ms. Of the step, 0.0 ms, 0.0 ms lie")
    assert "after it: with instep.attach(model, optimizer, schedule='backward', pipeline=schedule)" in said
    (said,) = suggestions(attached, figures(attached))
    assert said.endswith("100.0 ms, 200.0 ms lie inside schedule.step(), and 50.0 ms, 50.0 ms after it.")


BACKWARD = span("backward", 0.0, 0.5)


@pytest.mark.parametrize(
    ("spans", "memory", "setup", "said"),
    [
        pytest.param(
            [BACKWARD, span("communication", 0.1, 0.5, GLOO), span("step", 0.5, 0.7)],
            {},
            DDP,
            ["next to nothing to hide the step of 200.0 ms behind"],
            id="plain, communication ends with backward",
        ),
        pytest.param(
            [BACKWARD, span("communication", 0.1, 0.7, GLOO), span("step", 0.7, 0.8)],
            {},
            {**DDP, "bucket_view": False},
            [
                "Attach: 200.0 ms of communication stay exposed, and "
                "instep.attach(model, optimizer, schedule='backward') runs up to 100.0 ms",
                "gradient_as_bucket_view=True",
            ],
            id="plain, communication outlasts backward",
        ),
        pytest.param(
            [BACKWARD, span("communication", 0.1, 0.7, GLOO), span("step", 0.7, 0.8)],
            {"parameters": 4 * MIB, "gradients": 4 * MIB},
            {"wrapper": "DTensor", "ranks": 2},
            ["200.0 ms of communication stay exposed", "gradients are 4.0 MiB of the peak of 8.0 MiB"],
            id="plain, sharded",
        ),
        pytest.param(
            [BACKWARD, span("step", 0.5, 0.8)],
            {"parameters": 4 * MIB, "gradients": 4 * MIB},
            {"fused": False, "optimizer": "AdamW(foreach=True)"},
            ["schedule='backward') they are stepped bucket by bucket", "with fused=True"],
            id="plain, gradients set the peak",
        ),
        pytest.param(
            [BACKWARD, span("step", 0.5, 0.6)],
            {"parameters": 4 * MIB, "activations": 90 * MIB, "gradients": MIB},
            {"fused": False, "optimizer": "Muon"},
            ["1.0 MiB of gradients and 90.0 MiB of activations, which set it"],
            id="plain, activations set the peak",
        ),
        pytest.param(
            [BACKWARD, span("step", 0.1, 0.3)],
            {},
            ATTACHED,
            ["inside backward is not hidden, and is not meant to be"],
            id="attached, one device",
        ),
        pytest.param(
            [BACKWARD, span("step", 0.1, 0.3, WORKER)],
            {},
            ATTACHED,
            ["100% of the step is hidden, and 0.0 ms of an iteration are left"],
            id="attached, one device, beside backward",
        ),
        pytest.param(
            [BACKWARD, span("step", 0.0, 0.3, WORKER), span("step", 0.5, 0.9)],
            {},
            ATTACHED,
            ["On one device 400.0 ms of the step of 700.0 ms inside backward is not hidden"],
            id="attached, one device, some beside backward",
        ),
        pytest.param(
            [span("backward", 0.0, 0.2), span("backward", 0.3, 0.5), span("step", 0.6, 0.7)],
            {"parameters": MIB, "gradients": 4 * MIB},
            {"gradients": {"a": 4 * MIB}, "nbytes": {"gradients": 4 * MIB}},
            ["An iteration has 2 backwards, whose gradients add up until the last"],
            id="plain, micro-batches",
        ),
        pytest.param(
            [BACKWARD, span("step", 0.5, 0.8)],
            {},
            {**ATTACHED, "options": {"schedule": "'forward'"}},
            ["300.0 ms of the step stay exposed: it is taken at once"],
            id="attached, taken at once",
        ),
        pytest.param(
            [BACKWARD, span("communication", 0.1, 0.75, GLOO), span("step", 0.5, 0.6)],
            {},
            {**ATTACHED, **DDP, "buckets": [["a"], ["b"]]},
            ["100% of the step is hidden", "150.0 ms of communication stay exposed: docs/slow-networks.md"],
            id="attached, hidden",
        ),
        pytest.param(
            [BACKWARD, span("communication", 0.1, 0.5, GLOO), span("step", 0.5, 0.8)],
            {},
            {**ATTACHED, **DDP, "gradients": dict.fromkeys("abcd", MIB), "buckets": [["a", "b", "c"], ["d"]]},
            ["nothing to hide them behind", "One bucket holds 75% of the gradients (3.0 MiB): a smaller bucket_cap_mb"],
            id="attached, nothing to hide behind",
        ),
        pytest.param(
            [BACKWARD, span("communication", 0.1, 0.7, GLOO), span("step", 0.7, 0.9)],
            {},
            {**ATTACHED, **DDP, "options": {"schedule": "'backward'", "comm_hook": "f"}},
            ["smaller buckets (bucket_cap_mb) arrive"],
            id="attached, late, and sent by a hook",
        ),
        pytest.param(
            [span("forward", 0.0, 0.5), span("step", 0.1, 0.3, WORKER)],
            {"parameters": 4 * MIB, "gradients": 4 * MIB},
            FORWARD,
            ["100% of the step is hidden", "schedule='forward' keeps all gradients until they are applied: 4.0 MiB"],
            id="forward",
        ),
        pytest.param([span("forward", 0.0, 0.5)], {}, FORWARD, ["Nothing to change."], id="nothing"),
    ],
)
def test_advice(spans: list[Any], memory: dict[str, int], setup: dict[str, Any], said: list[str]) -> None:
    run = run_of(spans, memory=memory_of(**memory), **setup)
    found = suggestions(run, figures(run))
    assert len(found) == len(said), found
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def looked(before: str, after: str, **setup: Any) -> Run:
    """A recording of one iteration between weights with these digests."""
    run = run_of([span("forward", 0.0, 0.5)], **setup)
    return replace(run, ranks=[replace(rank, weights=[before, after]) for rank in run.ranks])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (looked("a", "b"), "equal, bit for bit"),
        (looked("a", "c"), "different"),
        (looked("c", "b"), "not compared: the loops began with different weights"),
        (run_of([span("forward", 0.0, 0.5)]), "not compared"),
        (replace(looked("a", "b"), ranks=[*looked("a", "b").ranks] * 2), "not compared"),
    ],
)
def test_whether_the_weights_are_equal(other: Run, said: str) -> None:
    runs = [looked("a", "b"), other]
    (card,) = (card for card in cards(Compared(runs)) if card.name == "weights")
    assert list(card.values) == [said]


def test_a_row_of_verdicts_says_what_has_changed() -> None:
    plain = run_of([span("step", 0.0, 0.2)], [(0.0, 1.0), (1.0, 2.1)], memory_of(parameters=4 * MIB, gradients=8 * MIB))
    attached = run_of([span("step", 0.0, 0.1)], [(0.0, 0.5), (0.5, 1.1)], memory_of(parameters=4 * MIB, gradients=MIB))
    runs = [plain, attached]
    found = {card.name: card for card in cards(Compared(runs))}
    assert found["peak memory"].change == found["gradients at once"].change == "7.0 MiB less"
    assert found["iteration"].change == "48% shorter"
    assert found["exposed step"].change == "100.0 ms to 50.0 ms"
    assert "weights" not in {card.name for card in cards(Compared(runs[:1]))}


def test_durations_that_overlap_may_be_chance() -> None:
    runs = [run_of([], [(0.0, 1.0), (1.0, 2.5)]), run_of([], [(0.0, 1.2), (1.2, 2.4)])]
    (card,) = (card for card in cards(Compared(runs)) if card.name == "iteration")
    assert card.change == "4% shorter here; too noisy to tell (0.80 to 1.20)"


def test_advice_on_a_plain_loop_is_what_was_measured_beside_it() -> None:
    """A guess from the plain recording alone may contradict the table."""
    plain = run_of([span("step", 0.0, 0.2)], memory=memory_of(parameters=4 * MIB, gradients=8 * MIB))
    attached = run_of(
        [span("step", 0.0, 0.2)],
        memory=memory_of(parameters=4 * MIB, gradients=MIB),
        label="instep",
        options={"schedule": "'backward'"},
    )
    runs = [plain, attached]
    said, its = suggestions_beside(runs, [figures(run) for run in runs])
    time = "as long here; too noisy to tell (1.00 to 1.00)"
    assert said == [f"instep, as recorded here: peak memory: 7.0 MiB less; iteration: {time}."]
    assert its == suggestions(attached, figures(attached))
    assert suggestions_beside(runs[:1], [figures(plain)]) == [suggestions(plain, figures(plain))]
