"""Small models, one quirk each, over which tests of gradient methods are parametrised.

pytest puts `tests/` on the path (`pythonpath` in pyproject.toml), so a test module anywhere below it says::

    from zoo import ZOO

    @pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
    def test_a_claim_holds(entry):
        case = entry.build()

and `select("conv", without={"backward only"})` gives the entries with some trait. Do not import it as `tests.zoo`: that
would be a second copy. Such a module runs under `one_thread()`, best in a module-wide fixture, to take seconds.

Traits that say what a method has to be careful of:

- "backward only": the graph refuses `torch.autograd.grad`; call `backward()` and read `.grad`.
- "permuted": loss k is touched by one row of the batch alone, though not by row k.
- "sparse": gradients of parameters come as sparse tensors.
- "hook": a tensor or module hook changes or watches gradients on their way.
- "regulariser": the loss of a row also depends on a parameter directly.
- "unused": some parameter gets no gradient.
- "vanishing": the gradient of some parameter is zero but for rounding, as that of the bias of attention keys or of a
  bias before a batch norm: no two methods agree on it relative to its own norm.
"""

from zoo import architectures, convolutions, layers, mechanisms, mixing, norms, products, sequences, structures
from zoo.cases import Case, Entry, one_thread

ZOO: tuple[Entry, ...] = (
    *layers.PEN,
    *structures.PEN,
    *products.PEN,
    *convolutions.PEN,
    *norms.PEN,
    *sequences.PEN,
    *mechanisms.PEN,
    *mixing.PEN,
    *architectures.PEN,
)


def select(*traits: str, without: frozenset[str] | set[str] = frozenset()) -> tuple[Entry, ...]:
    """The entries that have every one of `traits` and none of `without`."""
    return tuple(entry for entry in ZOO if entry.traits.issuperset(traits) and entry.traits.isdisjoint(without))


__all__ = ["ZOO", "Case", "Entry", "one_thread", "select"]
