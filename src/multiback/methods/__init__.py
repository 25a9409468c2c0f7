"""Ways to answer a request; each refuses with a reason what it cannot answer exactly."""

from multiback.errors import RequestError
from multiback.methods.returned import METHODS, Method

SUM_METHODS = ("summed", "contract")


def check_method(method: str, valid: tuple[str, ...]) -> None:
    """RequestError, listing what is valid, where `method` is neither `auto` nor one of `valid`."""
    if method not in ("auto", *valid):
        raise RequestError(f"method: must be one of auto, {', '.join(valid)}; got {method!r}. Choose one of these.")


__all__ = ["METHODS", "SUM_METHODS", "Method", "check_method"]
