"""Every error that multiback raises on purpose.

::

    MultibackError
    ├── InputError            bad use or bad input: exit code 2
    │   ├── OptionError       an option or argument breaks its rule
    │   ├── RequestError      losses, weights, wrt or method of a gradient request break a rule
    │   │   ├── FreedGraphError     the losses' graph has been freed; also a RuntimeError, as autograd's own
    │   │   ├── StaleForwardError   parameters or data have changed since the forward; also a RuntimeError
    │   │   └── RecomputationError  a forward that is run again gives another output; also a RuntimeError
    │   ├── TargetError       the target cannot be found, loaded or trusted
    │   ├── ProblemError      the target loads, but its model, data or losses break a rule
    │   ├── OutputError       an output file cannot be written
    │   └── RecordError       a record cannot be read
    ├── ExplainedError        autograd's own error with cause, place and remedy; also a RuntimeError
    └── WorkerError           a measuring process ended without an answer

    UserWarning
    ├── CoupledRowsWarning          a loss depends on other rows than its own
    └── ForgottenBackwardWarning    a cut ends with gradient that never reached the model

Messages are one sentence: which argument, the rule, what was got, the remedy.
"""


class MultibackError(Exception):
    """Base of all errors; `details` holds the traceback of the process where it happened, if any."""

    exit_code = 2

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class InputError(MultibackError, ValueError):
    """Something that the caller gave breaks a rule."""


class OptionError(InputError):
    """An option or an argument of a function breaks its rule."""


class RequestError(InputError):
    """The losses, weights, wrt or method of a gradient request break a rule."""


class FreedGraphError(RequestError, RuntimeError):
    """The losses' graph has been freed by an earlier traversal."""


class StaleForwardError(RequestError, RuntimeError):
    """Parameters, buffers or data have changed since the forward whose gradient is asked for."""


class RecomputationError(RequestError, RuntimeError):
    """A forward that is run again for its gradient gives another output than at first."""


class ForgottenBackwardWarning(UserWarning):
    """A cut ends with gradient on its value that never reached the model."""


class CoupledRowsWarning(UserWarning):
    """A loss depends on other rows than its own, so that its gradient is no per-sample gradient."""


class TargetError(InputError):
    """The target cannot be found, loaded or trusted."""


class ProblemError(InputError):
    """The model, the data or the losses of a problem break a rule."""


class OutputError(InputError):
    """An output file cannot be written."""


class RecordError(InputError):
    """A record cannot be read."""


class ExplainedError(MultibackError, RuntimeError):
    """An error of autograd's, with its cause, its place and the remedy."""


class WorkerError(MultibackError):
    """A measuring process ended without an answer."""


BY_NAME: dict[str, type[MultibackError]] = {
    kind.__name__: kind for kind in (OptionError, TargetError, ProblemError, OutputError, RecordError, WorkerError)
}
