"""What users call inside a program: trace and explained."""

from collections.abc import Generator
from contextlib import contextmanager

from multiback.errors import ExplainedError
from multiback.report import trace as report
from multiback.states import random_kept
from multiback.traces import Finding, Site, TraceRecord
from multiback.tracing.recorder import BLOCK_LEFT, Recording, start

_EXPLAINED = ("freed-graph", "changed-in-place")


class Trace:
    """A recording in this process; complete once its block has ended.

    Attributes
    ----------
    findings : what is wrong, or may be, the gravest and dearest first.
    sites : every place from which gradients were asked for.
    record : all of it.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._record: TraceRecord | None = None

    @property
    def record(self) -> TraceRecord:
        """What was recorded; asking for it ends the recording."""
        if self._record is None:
            self._record = self._recording.finish(BLOCK_LEFT)
        return self._record

    @property
    def findings(self) -> list[Finding]:
        """Of the record."""
        return self.record.findings

    @property
    def sites(self) -> list[Site]:
        """Of the record."""
        return self.record.sites

    def __repr__(self) -> str:
        """The report, as a notebook shows it."""
        return str(self)

    def __str__(self) -> str:
        with random_kept():  # importing rich draws from Python's generator
            from multiback.report import console
        return console.text_of(report.build(self.record))


@contextmanager
def trace(*, sample_locals: bool = False) -> Generator[Trace]:
    """Record every backward, `autograd.grad` and optimiser step of this process inside the block.

    Parameters
    ----------
    sample_locals : look at what the program's names hold as well, at calls and now and then between them:
        for graphs that grow without any backward through them, as of a running total of losses.

    Yields
    ------
    Trace : `findings`, `sites`, `record`; printing it shows the report.

    Notes
    -----
    No graph is kept alive. A walk of the graph for the first three calls of each place, and as long as
    a kept graph lives; else as one hundredth of the time allows. Nothing stays patched afterwards.
    What a compiled function does inside its backward is not seen. `sample_locals` takes another fiftieth of
    the time, a thread, and the handler of a real-time signal that the program does not use; in a block
    outside the main thread, and where there is none, it looks at calls alone.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> layer = torch.nn.Linear(3, 2)
    >>> with mb.trace() as traced:
    ...     layer(torch.rand(4, 3)).sum().backward(retain_graph=True)
    >>> [finding.code for finding in traced.findings]
    ['needless-retain']
    """
    recording = start(sample_locals=sample_locals)
    made = Trace(recording)
    try:
        yield made
    except BaseException as error:
        recording.finish(type(error).__name__)
        raise
    finally:
        _ = made.record


@contextmanager
def explained() -> Generator[None]:
    """Raise autograd's errors from the block again with their cause, its place and the remedy.

    Raises
    ------
    ExplainedError : a RuntimeError, in the place of "backward through the graph a second time" and "modified
        by an inplace operation"; the original is its cause.

    Notes
    -----
    Costs what `trace` costs.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> loss = torch.rand(3, requires_grad=True).exp().sum()
    >>> try:
    ...     with mb.explained():
    ...         loss.backward()
    ...         loss.backward()
    ... except RuntimeError as error:
    ...     print(type(error).__name__)
    ExplainedError
    """
    recording = start()
    try:
        yield
    except RuntimeError as error:
        record = recording.finish(type(error).__name__)
        where = recording.place_of(error)
        found = [one for one in record.findings if one.code in _EXPLAINED and one.place == where]
        if not found or isinstance(error, ExplainedError):
            raise
        first = str(error).splitlines()[0].partition(". ")[0]
        raise ExplainedError(f"{first}. {found[0].said} {found[0].remedy}") from error
    finally:
        recording.finish(BLOCK_LEFT)
