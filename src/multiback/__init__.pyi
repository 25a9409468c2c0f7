from ._version import __version__ as __version__
from .benching.entry import Result as Result
from .benching.entry import bench as bench
from .benching.problems import Problem as Problem
from .errors import InputError as InputError
from .errors import MultibackError as MultibackError
from .errors import WorkerError as WorkerError
