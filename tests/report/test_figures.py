"""What counts as hidden."""

import pytest

from instep_tools.report.figures import figures
from tests.report.runs import GLOO, WORKER, run_of, span


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
    found = figures(run_of(spans, [(0.0, 1.0), (1.0, 3.0)]))
    assert found.step.total == found.step.hidden == pytest.approx(0.4)
    assert found.iteration == pytest.approx(2.0)
    assert figures(run_of(spans[:2], [(0.0, 1.0), (1.0, 3.0)])).iteration == pytest.approx(1.5), "none has a step"
