"""What the user named: a function of theirs, an optimizer, its options."""

import ast
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from instep.planning.errors import PlanError


def function_named(option: str, name: str) -> Callable[..., Any]:
    """The function ``module:function``; modules are looked for in the working directory, too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PlanError(f"{option} {name}: name a function as module:function, as in mymodel:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlanError(
            f"{option} {name}: there is no module {error.name!r} here or among the installed ones"
        ) from error
    except Exception as error:
        raise PlanError(f"{option} {name}: importing {module_name} raised {_said(error)}") from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise PlanError(f"{option} {name}: there is no {part!r} in {module_name}")
        found = getattr(found, part)
    if not callable(found):
        raise PlanError(f"{option} {name}: it is a {type(found).__name__}, and cannot be called")
    return found  # type: ignore[no-any-return]


def called(option: str, name: str, *args: Any) -> Any:
    """What the function returns; an error of its own becomes one line."""
    function = function_named(option, name)
    try:
        return function(*args)
    except Exception as error:
        raise PlanError(
            f"{option} {name} raised {_said(error)}. It is run without any data, on tensors that have shapes and no "
            "values: build from a configuration, not from files, and on no device"
        ) from error


def optimizer_named(name: str) -> Callable[..., torch.optim.Optimizer]:
    if ":" in name:
        return function_named("--optimizer", name)
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [
            one for one in dir(torch.optim) if one[0].isupper() and isinstance(getattr(torch.optim, one), type)
        ]  # a few more than optimizers, were there any
        raise PlanError(
            f"--optimizer {name}: torch.optim has none of that name. It has "
            f"{', '.join(one for one in known if one != 'Optimizer')}; others are named module:Class"
        )
    return found


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` as keywords. Values are Python's literals, or plain text."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise PlanError(f"--option {pair}: write it as name=value, as in lr=0.1")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
        except (RecursionError, MemoryError) as error:  # of Python's parser
            raise PlanError(f"--option {name}: its value is nested too deeply") from error
    return found


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
