"""Drawn programs: whatever the combination, the attached loop is the plain loop."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from tests.parity.programs import Program, Step, programs, run

# A GradScaler that skips the first step leaves the scheduler first, in the plain loop too.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
EVERYTHING = settings(deadline=None, suppress_health_check=list(HealthCheck))


@example(Program("AdamW-0-fused", 1, 1, (Step(((True,), (True,))),), dtype=torch.bfloat16))
@given(programs())
@settings(EVERYTHING, max_examples=400, derandomize=True)
def test_drawn_programs(program: Program) -> None:
    run(program)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(programs())
@settings(EVERYTHING, max_examples=20_000)
def test_many_drawn_programs(program: Program) -> None:
    run(program)
