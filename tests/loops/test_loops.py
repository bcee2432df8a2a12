"""Every form of a loop, plain and with the line."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import instep
from instep._step import deferral as deferring
from instep.errors import (
    AccumulationError,
    AttachError,
    HyperparameterChangedError,
    SpentGradientError,
    StaleAttachmentError,
    UncommittedStepError,
    UnsupportedOptimizerError,
)
from tests.late import late_updates
from tests.loops.compare import logged, require_same, trained
from tests.loops.form import FIELDS, Form, forms
from tests.loops.line import LINE
from tests.loops.table import PAGE, rendered, written

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
    # Of torch's names, which Lightning uses.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]
SMALL = 2_000  # bytes: several buckets even in small models
FORMS = forms()


def cases() -> list[Any]:
    found = []
    for one in FORMS:
        marks = [pytest.mark.xfail(strict=True, reason=one.fails)] if one.fails else []
        found.append(pytest.param(one, marks=marks, id=f"{one.field}-{one.name}"))
    return found


@pytest.mark.parametrize("form", cases())
def test_a_loop_with_the_line_is_the_plain_loop(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(form, None)
    require_same(plain, trained(form, LINE))
    _put_off_in_turns(monkeypatch)
    # Only the loop itself looks at weights, and no update runs before somebody waits for it.
    late = trained(form, {**LINE, "bucket_bytes": SMALL}, every_step=False, during=late_updates())
    require_same(logged(plain), late)


def _put_off_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial begins with the first step, so that steps are put off in turns, whatever is known of the loop."""
    monkeypatch.setattr(deferring, "WARM_UP", 0)
    monkeypatch.setattr("instep._wiring.advice._prevented", lambda held: None)
    monkeypatch.setattr("instep._step.deferrable.runs_beside", lambda optimizer: True)


def test_some_steps_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare the plain loop with itself."""
    _put_off_in_turns(monkeypatch)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = ctypes.c_float.from_address(model.weight.data_ptr())  # read in a way of which nobody is told
    are_old = []
    with instep.attach(model, optimizer, **LINE), late_updates():
        for _ in range(8):
            model(torch.ones(2, 4)).sum().backward()
            before = weight.value
            optimizer.step()
            are_old.append(weight.value == before)
            optimizer.zero_grad()
    assert are_old == [False, True, True, False] * 2


IN_BACKWARD: dict[str, Any] = {"schedule": "backward", "bucket_bytes": SMALL}
# By what they raise: these loops use gradients or weights between backward() and step(), accumulate without a word,
# have an optimizer that cannot be stepped in parts, or hold parameters that no model has.
REFUSED: dict[type[Exception], str] = {
    SpentGradientError: "timm_ema timm_clip_value dino ppo recurrent_ppo random_network_distillation a2c ppo_policy "
    "dqn_policy dreamer stylegan min_gpt word_language_model mixture_of_experts dpo ppo_for_text reward_model "
    "ema_stored_and_restored dreambooth norms_now_and_then histograms never_zeroed flat_gradients sharpness_aware "
    "changed_gradients left_out consolidation compiled_blocks imagenet_amp accelerate_adapters",
    UncommittedStepError: "timm_agc projected_gradients dcgan biggan vqgan adversarial_training nano_gpt noam "
    "multiplied_gradients grpo ddpm guided_diffusion edm architecture_search retained accelerate_loop fabric_loop",
    AccumulationError: "pipeline",
    HyperparameterChangedError: "muon_and_adamw",
    StaleAttachmentError: "splatting",
    UnsupportedOptimizerError: "time_sequence lookahead stochastic_rounding",
    AttachError: "loose_parameters latents second_stage thawed",
    Unsupported: "compiled_norm",
}
ERRORS = {name: error for error, names in REFUSED.items() for name in names.split()}


@pytest.mark.parametrize(
    "form", [pytest.param(one, id=f"{one.field}-{one.name}") for one in FORMS if not one.fails and not one.by_itself]
)
def test_a_loop_that_steps_in_backward_is_the_plain_loop_or_is_refused(form: Form) -> None:
    plain = trained(form, None, gradients=False)
    if form.name in ERRORS:
        with pytest.raises(ERRORS[form.name], match=r"(?s)Or |Use schedule|[Aa]ttach|not in between|Dynamo"):
            trained(form, IN_BACKWARD, gradients=False)
    else:
        require_same(plain, trained(form, IN_BACKWARD, gradients=False))


def test_names_of_forms_are_unique_and_every_file_is_read() -> None:
    names = [one.name for one in FORMS]
    assert len(set(names)) == len(names)
    files = {path.stem for path in (Path(__file__).parent / "forms").glob("*.py")}
    assert files - {"__init__"} == set(FIELDS)


def test_the_table_of_the_page_is_that_of_the_forms() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, rendered(FORMS)), "make it anew: python -m tests.loops.table"
