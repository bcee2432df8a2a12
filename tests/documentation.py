"""The code blocks of the documentation: found, run with small stand-ins, and commands checked without running them."""

import argparse
import ast
import contextlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.recording import Recording

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
RECORDING = "instep_tools.recording.Recording"
HOOKS = ("comm_hooks.cast_mean_allreduce", "comm_hooks.mean_allreduce")
NOT_RUN = "not run: "
_FENCE = re.compile(r"```(\w+)(?: title=\"([^\"]*)\")?")
_COMMAND = re.compile(r"`((?:python|torchrun|taskset|instep|pytest|mkdocs|accelerate) [^`…]+)`")
_BACKWARD = re.compile(r"(?<!optimizer_in_)backward\(")
_ON_RANKS = re.compile(r"\b(ddp|DistributedDataParallel|fully_shard|replicate|comm_hook|shard_state|pipeline)\b")


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Attributes:
        page: a page, or the source of the docstring.
        number: its place among the blocks of the page, from 1. A name with the line in it would be another test after
            each change above it.
        of: the public name whose docstring it is in; empty on a page.
    """

    page: Path
    number: int
    language: str
    title: str
    code: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.of or self.page.relative_to(ROOT)}, block {self.number}"

    @property
    def not_run(self) -> bool:
        """Its title, which a reader sees too, says that it cannot be run in the tests, and why."""
        return self.title.startswith(NOT_RUN)


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page. ``ValueError`` for a fence that says no language, or is written in another way."""
    return _blocks_in(page.read_text(encoding="utf-8"), page)


def _blocks_in(text: str, page: Path, of: str = "") -> list[Block]:
    found: list[Block] = []
    begun: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if begun is None and line.lstrip().startswith("```"):
            match = _FENCE.fullmatch(line)
            if match is None:
                raise ValueError(f"{of or page}:{number}: {line!r} is not ```language, at the start of a line")
            begun, lines = (number, match[1], match[2] or ""), []
        elif begun is not None and line == "```":
            found.append(Block(page, len(found) + 1, *begun[1:], "\n".join(lines), of))
            begun = None
        else:
            lines.append(line)
    if begun is not None:
        raise ValueError(f"{of or page}:{begun[0]}: the block does not end")
    return found


def public_names() -> dict[str, Any]:
    """What the reference has, by its name: all functions and classes, and the errors."""
    names = [*instep.__all__, *HOOKS, *(f"errors.{name}" for name in instep.errors.__all__)]
    for name in names:
        import_module("instep." + name.rpartition(".")[0] if "." in name else "instep")
    return {**{f"instep.{name}": attrgetter(name)(instep) for name in names}, RECORDING: Recording}


def members_of(name: str, public: Any) -> dict[str, Any]:
    """``public``, and if it is a class what it defines for its users, by name."""
    members = vars(public) if isinstance(public, type) else {}
    shown = [key for key, one in members.items() if key[0] != "_" and (callable(one) or isinstance(one, property))]
    return {name: public, **{f"{name}.{key}": members[key] for key in shown}}


def examples_of(name: str, public: Any) -> list[Block]:
    """The blocks at the end of a docstring, under ``Example:``."""
    _, found, example = (inspect.getdoc(public) or "").partition("\n\nExample:\n")
    return _blocks_in(textwrap.dedent(example), Path(instep.__file__), name) if found else []


def commands_of(page: Path) -> Iterator[str]:
    """The commands of its ``sh`` blocks, and those within its text."""
    for block in blocks_of(page):
        if block.language == "sh" and not block.not_run:
            for line in block.code.replace("\\\n", " ").splitlines():
                yield from line.split(" && ")
    yield from (" ".join(command.split()) for command in _COMMAND.findall(text_of(page)))


def text_of(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


# Running a block.


class Model(nn.Module):
    """Two layers, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Names(dict[str, Any]):
    """A block's names. What it uses and does not make is made when it is first looked up, of what is there by then."""

    def __init__(self, code: str) -> None:
        super().__init__(__name__="__documentation__")
        self.code = code

    def __missing__(self, name: str) -> Any:
        if name not in _STAND_INS:
            raise KeyError(name)
        self[name] = made = _STAND_INS[name](self)
        return made


def _parameters(names: Names) -> list[nn.Parameter]:
    models = names["modules"] if "pipeline" in names.code else [names["model"]]
    return [p for model in models for p in model.parameters()]


def _model(names: Names) -> nn.Module:
    if "Trainer(model" in names.code:
        return _small_llama()
    if re.search(r"attach\(model\b.*comm_hook=", names.code):
        return DistributedDataParallel(Model())
    names["model"] = model = Model()
    if re.search(r"instep\.save\((?!.*step=)", names.code):  # only an attached model knows its step
        names["overlap"] = instep.attach(model, names["optimizer"], schedule="backward")
    return model


class Scheduler:
    """Lowers the learning rate, whenever it is made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"lr": [group["lr"] for group in self.optimizer.param_groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, lr in zip(self.optimizer.param_groups, state["lr"], strict=True):
            group["lr"] = lr


class _Writer:
    """In place of TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert isinstance(scalar_value, (int, float)), tag
        assert tag.startswith("instep/")


class _Run:
    """In place of a run of W&B, and of the module ``mlflow``."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        assert all(isinstance(value, (int, float)) for value in data.values()), data
        assert all(name.startswith("instep/") for name in data)

    log_metrics = log


def _train(names: Names) -> Callable[[int], None]:
    def train(step: int) -> None:
        names["model"](names["loader"][step % 4]).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    return train


def _stage(names: Names) -> Any:
    """This rank's, of a pipeline over all ranks, with its schedule and its loop."""
    from tests.distributed.pipelines import Kind, Loop, learn

    loop = Loop(Kind("Schedule1F1B", ranks=dist.get_world_size()))
    names["schedule"], (names["optimizer"],) = loop.pipeline, loop.optimizers
    names["train"] = lambda step: learn(loop, step)
    return loop.pipeline._stage


def _of(module: str, name: str) -> Callable[[Names], Any]:
    return lambda names: getattr(import_module(module), name)


def _batches(names: Names) -> list[torch.Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return list(torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(rank)))


def _small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))


def _arguments(names: Names) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments("runs", max_steps=2, report_to=[], save_strategy="no")


def _stages(names: Names) -> list[Any]:
    """Of this rank, in a pipeline with two stages on each."""
    from torch.distributed.pipelining import PipelineStage

    rank, ranks, here = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    return [PipelineStage(nn.Linear(16, 16), number, 2 * ranks, here) for number in (rank, rank + ranks)]


def _pipeline(names: Names) -> Any:
    made = names["ScheduleInterleaved1F1B"]
    return made(names["stages"], n_microbatches=8, loss_fn=names["loss_fn"])


_POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_STAND_INS: Mapping[str, Callable[[Names], Any]] = {
    "instep": lambda names: instep,
    "torch": lambda names: torch,
    "nn": lambda names: nn,
    "weakref": lambda names: weakref,
    "model": _model,
    "Model": lambda names: Model,
    "ddp": lambda names: DistributedDataParallel(names["model"], gradient_as_bucket_view=True),
    "optimizer": lambda names: torch.optim.AdamW(_parameters(names), lr=1e-2),
    "scheduler": lambda names: Scheduler(names["optimizer"]),
    "scaler": lambda names: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "loader": _batches,
    "batches": lambda names: list(zip(*[iter(names["loader"])] * 2, strict=True)),
    "batch": lambda names: names["loader"][0],
    "loss": lambda names: lambda output: output,
    "train": _train,
    "writer": lambda names: _Writer(),
    "run": lambda names: _Run(),
    "mlflow": lambda names: _Run(),
    "steps": lambda names: 4,
    "stage": _stage,
    "DistributedDataParallel": lambda names: DistributedDataParallel,
    "fully_shard": _of("torch.distributed.fsdp", "fully_shard"),
    "policy": lambda names: _of("torch.distributed.fsdp", "MixedPrecisionPolicy")(names)(param_dtype=torch.bfloat16),
    "state": lambda names: _of(_POWER_SGD, "PowerSGDState")(names)(None, start_powerSGD_iter=2),
    "powerSGD_hook": _of(_POWER_SGD, "powerSGD_hook"),
    "ScheduleInterleaved1F1B": _of("torch.distributed.pipelining", "ScheduleInterleaved1F1B"),
    "stages": _stages,
    "pipeline": _pipeline,
    "modules": lambda names: [stage.submod for stage in names["stages"]],
    "loss_fn": lambda names: nn.functional.mse_loss,
    "Trainer": _of("transformers", "Trainer"),
    "arguments": _arguments,
    "rows": lambda names: [{"input_ids": row, "labels": row} for row in torch.randint(8, (16, 4))],
}


def variants(code: str) -> list[str]:
    """A block that attaches more than once shows alternatives, and so does a comment ``# or: …``: each by itself."""
    imports = "\n".join(line for line in code.splitlines() if line.startswith(("import ", "from ")))
    others = [f"{imports}\n{line}" for line in re.findall(r"^# or: (.*)", code, re.MULTILINE)]
    tree = ast.parse(code)
    attaches = [one for one in tree.body if isinstance(one, ast.Assign) and ".attach(" in ast.unparse(one.value)]
    if len(attaches) < 2:
        return [code, *others]
    rest = (ast.Module([n for n in tree.body if n is one or n not in attaches], []) for one in attaches)
    return [*map(ast.unparse, rest), *others]


def sides(diff: str) -> tuple[str, str]:
    """A diff as the code before, and the code after."""
    lines = diff.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if not line.startswith(left_out)) for left_out in "+-")
    return before, after


def modules_of(code: str) -> set[str]:
    """The packages that ``code`` imports."""
    return set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))


def run(code: str, where: str, directory: str) -> list[torch.Tensor] | None:
    """Run ``code`` in ``directory``, then two steps if it does not train itself. The weights of its ``model``."""
    torch.manual_seed(0)
    before = os.getcwd()
    os.chdir(directory)
    names = Names(code)
    try:
        exec(compile(code, where, "exec"), names)
        if _BACKWARD.search(code) is None and "model" in names and "optimizer" in names:
            _train_for_two_steps(names)
    finally:
        os.chdir(before)
        for name in {"model", "ddp", "stage"} & names.keys():
            module = names[name].submod if name == "stage" else names[name]
            if (overlap := instep.attached(module)) is not None:
                overlap.detach()
    weights = [p.detach() for p in names["model"].parameters()] if "model" in names else None
    return weights and [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in weights]


def _train_for_two_steps(names: Names) -> None:
    model = names["ddp"] if "ddp" in names else names["model"]
    overlap = instep.attached(model)
    every = re.search(r"accumulation_steps=(\d+)", names.code)
    before = 0 if overlap is None else overlap.step_count
    for i in range(2):
        for _ in range(int(every[1]) if every else 1):
            loss = model(names["loader"][i]).float().mean()
            loss.backward() if overlap is None else overlap.backward(loss)
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    if overlap is not None:
        overlap.synchronize()
        assert overlap.step_count == before + 2


def needs_ranks(code: str) -> bool:
    return _ON_RANKS.search(code) is not None


# Checking a command.


class CommandError(Exception):
    """A command of the documentation would not run."""


class _ParsedError(Exception):
    pass


def check_command(command: str, markers: str) -> None:
    """That program, files, options and their values exist; nothing is run. ``markers``: those of pytest."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    if words[:2] == ["taskset", "-c"]:
        del words[:3]
    if not words:
        return
    program, *arguments = words
    if program not in _CHECKS:
        raise CommandError(f"{command}: nothing here knows how to check {program!r}")
    try:
        _CHECKS[program](arguments, markers)
    except CommandError as error:
        raise CommandError(f"{command}: {error}") from None


def _python(arguments: list[str], markers: str) -> None:
    if arguments[0] == "-m":
        found = importlib.util.find_spec(arguments[1])
        if found is None or found.origin is None:
            raise CommandError(f"there is no module {arguments[1]}")
        _script([found.origin, *arguments[2:]])
    else:
        _script(arguments)


def _torchrun(arguments: list[str], markers: str) -> None:
    parser = import_module("torch.distributed.run").get_args_parser()
    chosen = _parsed(parser.parse_args, arguments)
    _script([chosen.training_script, *chosen.training_script_args])


def _script(arguments: list[str]) -> None:
    path, options = ROOT / arguments[0], arguments[1:]
    if not path.is_file():
        raise CommandError(f"there is no {arguments[0]}")
    if "argparse" not in path.read_text(encoding="utf-8"):
        if options:
            raise CommandError(f"{arguments[0]} takes no options")
        return
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise _ParsedError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", only_parse),
        mock.patch.object(sys, "argv", [str(path), *options]),
        mock.patch.dict(os.environ),
        mock.patch.object(os, "execve"),  # some start themselves again, with other settings
        contextlib.suppress(_ParsedError),
    ):
        _parsed(runpy.run_path, str(path), run_name="__main__")


def _parsed(parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return parse(*args, **kwargs)
    except SystemExit as error:
        raise CommandError(f"its options do not parse ({error.code})") from None


def _click(load: Callable[[], Any]) -> Callable[[list[str], str], None]:
    def check(arguments: list[str], markers: str) -> None:
        command: Any = load()
        try:
            context = command.make_context(command.name, list(arguments))
            rest = [*context._protected_args, *context.args]
            if rest:
                name, command, rest = command.resolve_command(context, rest)
                if rest:  # else it is a name in the text
                    command.make_context(name, rest)
        except Exception as error:  # typer has a click of its own
            if type(error).__name__ != "Exit":
                raise CommandError(error) from None

    return check


def _instep() -> Any:
    import typer

    return typer.main.get_command(import_module("instep_tools.cli").app)


def _pytest(arguments: list[str], markers: str) -> None:
    words = iter(arguments)
    for word in words:
        if word == "-m":
            for marker in next(words).split():
                if marker not in ("and", "or", "not") and f"{marker}:" not in markers:
                    raise CommandError(f"pytest has no marker {marker!r}")
        elif word in ("-n", "-k"):
            next(words)
        elif word not in ("-q", "-s", "-x") and not _is_test(word):
            raise CommandError(f"there is no {word}")


def _is_test(word: str) -> bool:
    path, _, name = word.partition("::")
    return (ROOT / path).exists() and (not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"))


def _pip(arguments: list[str], markers: str) -> None:
    extras = metadata("instep").get_all("Provides-Extra") or []
    words = iter(arguments)
    if next(words) != "install":
        raise CommandError("only pip install is known")
    for word in words:
        if word == "-c":
            if not (ROOT / next(words)).is_file():
                raise CommandError("there is no such file of constraints")
        elif match := re.fullmatch(r"(?:\.|instep)(?:\[([\w,]+)\])?", word):
            for extra in match[1].split(",") if match[1] else ():
                if extra not in extras:
                    raise CommandError(f"instep has no extra {extra!r}")
        elif word not in ("-e", "-q"):
            raise CommandError(f"{word!r} is not this project")


def _accelerate(arguments: list[str], markers: str) -> None:
    if arguments[0] != "launch":
        raise CommandError("only accelerate launch is known")
    chosen = _parsed(import_module("accelerate.commands.launch").launch_command_parser().parse_args, arguments[1:])
    _script([chosen.training_script, *chosen.training_script_args])


def _tool(arguments: list[str], markers: str) -> None:
    """Of ours only by name: what each does is in CONTRIBUTING.md."""


def _bash(arguments: list[str], markers: str) -> None:
    """A script of commands, each of which is checked."""
    (script,) = arguments
    if not (ROOT / script).exists():
        raise CommandError(f"there is no {script}")
    text = (ROOT / script).read_text(encoding="utf-8").replace("\\\n", " ")
    for command in re.findall(r"^run (.*)", text, re.MULTILINE):
        check_command(command, markers)


_CHECKS: Mapping[str, Callable[[list[str], str], None]] = {
    "bash": _bash,
    "python": _python,
    "torchrun": _torchrun,
    "instep": _click(_instep),
    "mkdocs": _click(lambda: import_module("mkdocs.__main__").cli),
    "pytest": _pytest,
    "pip": _pip,
    "accelerate": _accelerate,
    "ruff": _tool,
    "mypy": _tool,
}
