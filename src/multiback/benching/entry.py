"""`bench` in Python: the same run as on the command line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from multiback.benching import options as checked
from multiback.benching import runner
from multiback.benching.options import Mode
from multiback.benching.problems import Problem
from multiback.benching.protocol import Source
from multiback.errors import OptionError, ProblemError
from multiback.measure import verdicts
from multiback.records import BenchRecord, check_writable, encode, load, write_atomically
from multiback.report import console
from multiback.report.progress import showing


class Result:
    """A finished run: `record` holds everything, `str()` gives the report."""

    def __init__(self, record: BenchRecord) -> None:
        self.record = record

    def __str__(self) -> str:
        return console.to_text(self.record)

    __repr__ = __str__  # what a notebook shows of it

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the record as JSON, atomically; `OutputError` where the file exists and `force` is not set."""
        check_writable(Path(path), force=force)
        write_atomically(Path(path), encode(self.record))

    @staticmethod
    def load(path: str | Path) -> "Result":
        """Read a record that `save` or `multiback bench --json` wrote, and judge it again."""
        return Result(verdicts.judge_again(load(Path(path))))


def bench(
    problem: Problem | str,
    *,
    questions: Sequence[str] | None = None,
    kind: str | None = None,
    ways: Sequence[str] | None = None,
    grads: str | None = None,
    mode: Mode = "default",
    threads: int | None = None,
    processes: int | None = None,
    rounds: int | None = None,
    budget: float | None = None,
    margin_percent: float = 5.0,
    seed: int = 0,
    device: object = "cpu",
    dtype: object = None,
    json: str | Path | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Result:
    """Measure what each way to back-propagate the problem's losses costs.

    Parameters
    ----------
    problem : a `Problem`, or a target as on the command line (`"mlp"`, `"file.py:function"`).
        A `Problem` is copied into fresh processes with cloudpickle, so lambdas and classes defined
        in a script or notebook are fine; yours is not touched.
    questions : names out of `successive`, `cold`, `retain`, `combine`, `slices`, `growth`.
    kind : `each`, `rows`, `gram` or `norms`: compare ways to obtain that answer for the model's
        parameters, by itself unless `questions` are named too.
    ways : only these ways. grads : the `.grad` policy, `none`, `accumulate` or `prealloc`.
    mode : `quick` (35 s), `default` (110 s) or `rigorous` (as long as it takes).
    threads, processes, rounds, budget (seconds), margin_percent : override the mode.
    device, dtype : where and in which floating dtype to run it, as torch objects or their names.
    json : also save the record there, after every process; `force` overwrites it.
    progress : show a progress line; by default where standard error is a terminal.

    Returns
    -------
    Result : print it, read `result.record`, or `result.save(path)`.

    Raises
    ------
    InputError : an option, the target, the problem or the output breaks a rule; nothing is written.
    WorkerError : a measuring process died.
    KeyboardInterrupt : on Ctrl-C; with `json` the partial record is kept and marked.

    Cost: the seconds of its mode, and in each process one copy of the problem and what its
    dearest way takes. Figures are obtained as `docs/measuring.md` says.
    """
    if mode not in checked.MODES:
        raise OptionError(f"mode: must be one of {', '.join(checked.MODES)}; got {mode!r}.")
    pickled = None if isinstance(problem, str) else _pickle(problem)
    source = Source(
        target=problem if isinstance(problem, str) else "Problem given in Python",
        device=str(device),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        seed=seed,
        search_path=[entry or "." for entry in sys.path],
    )
    options = checked.make(
        source,
        questions=_names(questions),
        kind=kind,
        ways=_names(ways),
        grads=grads,
        threads=threads,
        processes=processes,
        rounds=rounds,
        budget=budget,
        margin_percent=margin_percent,
        mode=mode,
        argv=["multiback.bench"],
    )
    path = None if json is None else Path(json)
    if path is not None:
        check_writable(path, force=force)

    def save(record: BenchRecord) -> None:
        if path is not None:
            write_atomically(path, encode(record))

    with showing(progress) as status:
        record = runner.run(options, runner.Hooks(status=status, save=save), pickled=pickled)
    save(record)
    if record.run.partial:
        raise KeyboardInterrupt
    return Result(record)


def _names(given: Sequence[str] | None) -> list[str] | None:
    """A list, also of a single name."""
    return None if given is None else [given] if isinstance(given, str) else list(given)


def _pickle(problem: Any) -> bytes:
    if not isinstance(problem, Problem):
        raise ProblemError(
            f"problem: must be a multiback.Problem or a target's name; got {type(problem).__name__}. "
            "Give multiback.Problem(model, data, losses)."
        )
    try:
        return cloudpickle.dumps(problem)
    except Exception as error:
        raise ProblemError(
            f"problem: must be picklable, since it is measured in fresh processes; {type(error).__name__}: {error}. "
            "Give a function in a file instead: file.py:function."
        ) from error
