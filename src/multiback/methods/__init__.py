"""Ways to answer a request; each refuses with a reason what it cannot answer exactly."""

from multiback.errors import RequestError
from multiback.methods.base import Method
from multiback.methods.contracted import Contract, ContractBatched
from multiback.methods.partition import Partition
from multiback.methods.plain import Batched, Loop

SUM_METHODS = ("summed", "contract")

METHODS: dict[str, Method] = {
    method.name: method for method in (Partition(), ContractBatched(), Contract(), Batched(), Loop())
}


def check_method(method: str, valid: tuple[str, ...]) -> None:
    """RequestError, listing what is valid, where `method` is neither `auto` nor one of `valid`."""
    if method not in ("auto", *valid):
        raise RequestError(f"method: must be one of auto, {', '.join(valid)}; got {method!r}. Choose one of these.")
