"""``instep env``: what a report of a bug needs, whatever is broken."""

import platform
import sys
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

from instep._version import __version__
from instep_tools import environment
from instep_tools.cli import app


def facts() -> dict[str, str]:
    found = (line.partition(":") for line in environment.report().splitlines())
    return {name: value.strip() for name, _, value in found}


def test_the_command_prints_the_report() -> None:
    result = CliRunner().invoke(app, ["env"], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == environment.report() + "\n"
    assert "\x1b" not in result.stdout


def test_it_is_in_the_help() -> None:
    shown = CliRunner().invoke(app, ["--help"], catch_exceptions=False).stdout
    assert any(line.split()[1:2] == ["env"] and "Print the versions" in line for line in shown.splitlines())


def test_versions_devices_and_backends() -> None:
    found = facts()
    assert found["instep"] == __version__
    assert found["torch"].startswith(f"{torch.__version__}, built for ")
    assert found["Python"].startswith(platform.python_version())
    assert found["numpy"] == version("numpy")
    assert f"{torch.get_num_threads()} threads in torch" in found["CPU"]
    assert (found["accelerators"] == "none") == (not torch.accelerator.is_available())
    assert ("gloo" in found["distributed backends"].split(", ")) == torch.distributed.is_gloo_available()


def test_settings_are_shown_and_no_other_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert facts()["environment"] == "nothing is set"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    assert facts()["environment"] == "INSTEP_DISABLE=1, OMP_NUM_THREADS=3"
    assert "secret" not in environment.report()


def test_accelerators_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def get_device_name(index: int) -> str:
            return f"Model {index}"

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert facts()["accelerators"] == "cuda:0 Model 0, cuda:1 Model 1"
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert facts()["accelerators"] == "cuda:0, cuda:1"


def test_what_is_broken_says_so_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("no driver\nand more lines")

    monkeypatch.setattr(torch.accelerator, "is_available", broken)
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    monkeypatch.delattr(torch, "distributed")
    found = facts()
    assert found["accelerators"] == "unknown: RuntimeError: no driver"
    assert found["distributed backends"].startswith("unknown: ModuleNotFoundError: ")
    assert found["no-such-package"] == "not installed"
    assert found["torch"].startswith(torch.__version__)
    assert "cores" in found["CPU"]


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = facts()
    assert found["torch"].startswith("unknown: ModuleNotFoundError: ")
    assert found["platform"] == platform.platform()
