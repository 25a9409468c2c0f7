"""Turns a target as typed (preset, function, saved model) into a `Problem`, in the process that runs it."""

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multiback.benching import problems
from multiback.benching.names import PRESETS
from multiback.benching.problems import Problem
from multiback.benching.protocol import Source
from multiback.errors import OptionError, ProblemError, TargetError

DEFAULT_RANDOM_LOSSES = 2
_LONGEST_LINE = 300


@dataclass(frozen=True)
class Built:
    """A problem, a line on where its losses come from, and which losses a saved model was given."""

    problem: Problem
    losses: str
    saved_losses: Literal["published", "random"] | None = None


def build(source: Source) -> Built:
    """The problem that `source` names, built afresh from its seed.

    Raises `TargetError` where it cannot be found, loaded or trusted, `OptionError` where an option
    does not fit it, `ProblemError` where it returns something else.
    """
    torch.manual_seed(source.seed)
    built = _find(source)
    if not source.losses:
        return built
    losses = [_function(name) for name in source.losses]
    problem = Problem(built.problem.model, built.problem.data, losses, built.problem.targets)
    return Built(problem, ", ".join(source.losses))


def dtype_of(name: str | None) -> torch.dtype | None:
    """The floating dtype of that name."""
    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(f"--dtype: must be a floating dtype such as float32 or bfloat16; got {name!r}.")
    return found


def check_device(device: str) -> None:
    """OptionError where torch does not know the device or has none of it."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"--device: must be a device that torch can use here; got {device!r} ({reason}).") from error


def _find(source: Source) -> Built:
    if source.pickled is not None:
        return Built(_unpickled(Path(source.pickled)), "given in Python")
    name = source.target
    if name in PRESETS:
        _refuse_input_shape(source)
        problem = problems.build_preset(name, batch=source.batch, num_losses=source.num_losses)
        return Built(problem, "the preset's own")
    _, colon, attribute = name.rpartition(":")
    if colon and attribute.isidentifier():
        _refuse_input_shape(source)
        return Built(_called(source, _function(name)), "the target's own")
    path = Path(name)
    if path.suffix == ".py" and path.exists():
        raise TargetError(f"{name}: a file target must name its function; write {name}:function.")
    if path.is_file():
        return _saved(source, path)
    raise TargetError(
        f"{name}: the target must be a preset ({', '.join(PRESETS)}), file.py:function, "
        "package.module:function, or a saved model's file; there is no such preset or file."
    )


def _refuse_input_shape(source: Source) -> None:
    if source.input_shape is not None:
        raise OptionError(
            f"--input: goes with a saved model's file; {source.target} brings its own data. Leave it out."
        )


def _unpickled(path: Path) -> Problem:
    try:
        problem = pickle.loads(path.read_bytes())  # noqa: S301 -- written by this run's own parent process
    except (AttributeError, ImportError, TypeError) as error:
        raise TargetError(
            f"problem: must be buildable in a fresh process; {error}. Give importable classes."
        ) from error
    if not isinstance(problem, Problem):
        raise ProblemError(f"problem: must be a multiback.Problem; got {type(problem).__name__}.")
    return problem


def _called(source: Source, function: Callable[..., Any]) -> Problem:
    problem = problems.call_builder(function, source.target, batch=source.batch, num_losses=source.num_losses)
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"{source.target}: must return multiback.Problem(model, data, losses); "
            f"got {type(problem).__name__}. Return a Problem."
        )
    return problem


def _function(name: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise TargetError(f"{name}: must name a function as file.py:function or package.module:function.")
    module = _module_from_file(Path(place)) if place.endswith(".py") else _module_by_name(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "has no" if found is None else "holds something not callable under"
        raise TargetError(f"{name}: the target must be a function; {place} {what} {attribute!r}. Check the name.")
    return found


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"{path}: the target's file must exist; there is none. Check the path.")
    name = f"_multiback_target_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{path}: cannot be loaded as a Python file. Check the path.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` would
    _run_import(str(path), lambda: spec.loader.exec_module(module) if spec.loader else None)
    return module


def _module_by_name(name: str) -> ModuleType:
    _import_from_working_folder()
    found: list[ModuleType] = []
    _run_import(name, lambda: found.append(importlib.import_module(name)))
    return found[0]


def _import_from_working_folder() -> None:
    """Look for the user's modules there, as `python -m` would."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _run_import(name: str, load: Callable[[], object]) -> None:
    """Run the user's module; whatever it raises becomes one sentence, with the traceback behind it."""
    try:
        load()
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{name}: the target must import; importing it raised {type(error).__name__}: {first_line(error)}. "
            "Make it import first."
        ) from error


def first_line(error: BaseException) -> str:
    """An error's text on one line of bounded length, without its final stop, for use inside a sentence."""
    line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..."


def _saved(source: Source, path: Path) -> Built:
    if source.input_shape is None:
        raise OptionError(
            f"--input: a saved model needs the shape of its input, such as --input 1x40; {path} has none."
        )
    model = _load_model(path, trust=source.trust_pickle)
    shape = list(source.input_shape)
    if source.batch is not None:
        shape[0] = source.batch
    data = torch.rand(shape).requires_grad_()
    if source.losses:
        return Built(Problem(model, data, []), "")
    # decided once, by one forward; later processes are told, since their first call is timed
    kind = source.saved_losses or _losses_that_fit(model, data)
    count = source.num_losses or DEFAULT_RANDOM_LOSSES
    if kind == "published":
        note = f"{count} published losses, (y * (c - x.clamp(0, 1))).sum(), since output and input shapes match"
        return Built(Problem(model, data, problems.published_losses(count)), note, kind)
    note = f"{count} randomly weighted sums of the outputs, since no --loss was given"
    losses = [problems.WeightedSum(source.seed + index) for index in range(count)]
    return Built(Problem(model, data, losses), note, kind)


def _load_model(path: Path, *, trust: bool) -> nn.Module:
    _import_from_working_folder()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if trust:
            raise TargetError(f"{path}: must be a file that torch.save wrote; {first_line(error)}.") from error
        raise TargetError(
            f"{path}: a pickled model runs code of its author's choice when loaded, so it is refused. "
            "Add --trust-pickle if you trust where it comes from."
        ) from error
    except (AttributeError, ImportError) as error:
        raise TargetError(
            f"{path}: the model's class must be importable here; {first_line(error)}. "
            "Save from a module, or give file.py:function."
        ) from error
    except Exception as error:
        raise TargetError(f"{path}: must be a file that torch.save wrote; {first_line(error)}.") from error
    if isinstance(loaded, nn.Module):
        return loaded
    if isinstance(loaded, dict):
        raise TargetError(
            f"{path}: must hold a whole model; it holds a dict (a state dict has no forward). "
            "Save the model itself, or give file.py:function that loads the state dict."
        )
    raise TargetError(f"{path}: must hold a whole model; it holds {type(loaded).__name__}. Save the model itself.")


def _losses_that_fit(model: nn.Module, data: Tensor) -> Literal["published", "random"]:
    """The published losses multiply output and input, so they need equal shapes."""
    with torch.no_grad():
        try:
            output = model(data)
        except Exception as error:
            shape = "x".join(map(str, data.shape))
            raise ProblemError(
                f"--input {shape}: the model must take this input; it raised {type(error).__name__}: "
                f"{first_line(error)}. Give the shape that the model takes."
            ) from error
    return "published" if isinstance(output, Tensor) and output.shape == data.shape else "random"
