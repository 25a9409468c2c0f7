"""Operations known to keep rows apart, by the name of their node without its version number.

Every handler gets a step and gives one state per input of the node.
"""

from collections.abc import Callable

from multiback.independence.layouts import SHARED, Mixed, State, Step, place, signed

Handler = Callable[[Step], list[State]]


def _elementwise(step: Step) -> list[State]:
    found = step.located()
    if found is None:
        return step.mixed
    return [step.broadcast(number, *found) for number in range(len(step.inputs))]


def _unreduced(step: Step) -> list[State]:
    """A loss with `reduction="none"` over elements."""
    return _elementwise(step) if step.node._saved_reduction == 0 else step.mixed


def _view(step: Step) -> list[State]:
    layout = step.arriving.get(0)
    return [layout] if layout is not None else step.mixed


def _permuted(step: Step, order: list[int]) -> list[State]:
    """`order[i]` is the input's axis that became axis i."""
    found = step.located()
    if found is None:
        return step.mixed
    axis, within = found
    return [place(step.inputs[0], order[axis], within)]


def _transpose(step: Step) -> list[State]:
    order = list(range(len(step.outputs[0])))
    first, second = (_axis(dim, len(order)) for dim in (step.node._saved_dim0, step.node._saved_dim1))
    order[first], order[second] = order[second], order[first]
    return _permuted(step, order)


def _t(step: Step) -> list[State]:
    return _permuted(step, [1, 0] if len(step.outputs[0]) == 2 else [0])


def _permute(step: Step) -> list[State]:
    ndim = len(step.outputs[0])
    return _permuted(step, [_axis(dim, ndim) for dim in step.node._saved_dims])


def _axis(dim: int, ndim: int) -> int:
    """A saved dimension, counted from the first."""
    return signed(dim) % ndim if ndim else 0


def _along(step: Step) -> list[State]:
    """Softmax, cumulative sums and their like: rows stay apart along another axis than theirs."""
    found = step.located()
    if found is None or found[0] == _axis(step.node._saved_dim, len(step.outputs[0])):
        return step.mixed
    return [step.same_axis(0, *found), *(SHARED for _ in step.inputs[1:])]


def _reduction(step: Step) -> list[State]:
    """Reductions over some dimensions: the rows' axis is one of those that are left."""
    found = step.located()
    shape = step.inputs[0]
    saved = getattr(step.node, "_saved_dim", None)
    if found is None or saved is None:
        return step.mixed
    dims = saved if isinstance(saved, (tuple, list)) else (saved,)
    reduced = {_axis(dim, len(shape)) for dim in dims} or set(range(len(shape)))
    axis, within = found
    if len(step.outputs[0]) != len(shape):
        left = [dim for dim in range(len(shape)) if dim not in reduced]
        if axis >= len(left):
            return step.mixed
        axis = left[axis]
    return [Mixed(step.name) if axis in reduced else place(shape, axis, within)]


def _select(step: Step) -> list[State]:
    """One index of a dimension, or all of them as outputs."""
    dim = _axis(step.node._saved_dim, len(step.inputs[0]))
    return _agreeing(step, lambda axis: axis + (axis >= dim))


def _sliced(step: Step) -> list[State]:
    """A part of a dimension, or all parts as outputs."""
    dim = _axis(step.node._saved_dim, len(step.inputs[0]))
    return _agreeing(step, lambda axis: None if axis == dim else axis)


def _agreeing(step: Step, input_axis: Callable[[int], int | None]) -> list[State]:
    """The input's layout, where all outputs that matter say the same."""
    found: set[State] = set()
    for number in step.arriving:
        located = step.located(number)
        own = None if located is None else input_axis(located[0])
        if located is None or own is None:
            return step.mixed
        found.add(place(step.inputs[0], own, located[1]))
    return list(found) if len(found) == 1 else step.mixed


def _cat(step: Step) -> list[State]:
    found = step.located()
    if found is None or found[0] == _axis(step.node._saved_dim, len(step.outputs[0])):
        return step.mixed
    return [step.same_axis(number, *found) for number in range(len(step.inputs))]


def _stack(step: Step) -> list[State]:
    found = step.located()
    dim = _axis(step.node._saved_dim, len(step.outputs[0]))
    if found is None or found[0] == dim:
        return step.mixed
    axis, within = found
    return [place(shape, axis - (axis > dim), within) for shape in step.inputs]


def _product(step: Step, first: int) -> list[State]:
    """Matrix products, batched or not: `first` is the number of the left factor."""
    found = step.located()
    if found is None:
        return step.mixed
    axis, within = found
    left, right = step.inputs[first], step.inputs[first + 1]
    output = step.outputs[0]
    states: list[State] = [step.broadcast(number, axis, within) for number in range(first)]
    if axis < len(output) - 2:  # the dimension of the batch of products
        return [*states, place(left, axis, within), place(right, axis, within)]
    if axis == len(output) - 2:
        return [*states, place(left, axis, within), SHARED]
    return [*states, SHARED, place(right, len(right) - 1, within)]


def _normalised(step: Step) -> list[State]:
    """Layer norm: what is normalised together is one row's."""
    found = step.located()
    if found is None or found[0] >= len(step.outputs[0]) - len(step.node._saved_normalized_shape):
        return step.mixed
    return [step.same_axis(0, *found), SHARED, SHARED]


def _batch_norm(step: Step) -> list[State]:
    """With running statistics elementwise; with the batch's own, channels alone stay apart."""
    found = step.located()
    if found is None or (step.node._saved_training and found[0] != 1):
        return step.mixed
    return [step.same_axis(0, *found), SHARED, SHARED]


def _samples(step: Step) -> list[State]:
    """Rows must be samples in dimension 0: convolutions, group norm."""
    found = step.located()
    if found is None or found[0] != 0:
        return step.mixed
    return [step.same_axis(0, *found), *(SHARED for _ in step.inputs[1:])]


def _spatial(step: Step) -> list[State]:
    """Pooling, padding and resizing act on the last dimensions."""
    dimensions = next((int(digit) for digit in "123" if f"{digit}D" in step.name or f"{digit}d" in step.name), 3)
    found = step.located()
    if found is None or found[0] >= len(step.outputs[0]) - dimensions:
        return step.mixed
    return [step.same_axis(0, *found)]


def _padded(step: Step) -> list[State]:
    found = step.located()
    return step.mixed if found is None else [step.same_axis(0, *found)]


def _looked_up(step: Step) -> list[State]:
    """Indexing along one dimension by something that needs no gradient."""
    found = step.located()
    if found is None or found[0] == _axis(step.node._saved_dim, len(step.outputs[0])):
        return step.mixed
    return [step.same_axis(0, *found)]


def _attention(step: Step) -> list[State]:
    """Queries, keys and values [B, heads, length, width]: rows in the first two dimensions."""
    found = step.located()
    if found is None or found[0] > len(step.outputs[0]) - 3:
        return step.mixed
    axis, within = found
    states: list[State] = [step.same_axis(number, axis, within) for number in range(3)]
    return [*states, *(SHARED for _ in step.inputs[3:])]


def _class_loss(step: Step) -> list[State]:
    """Negative log-likelihood [N, C, ...] -> [N, ...] without reduction."""
    found = step.located()
    if step.node._saved_reduction != 0 or found is None or found[0] != 0:
        return step.mixed
    return [step.same_axis(0, *found)]


def _recurrent_layer(step: Step) -> list[State]:
    """A whole layer [T, B, width]; its last states are [B, width]."""
    rows: set[int] = set()
    for number, axis in ((0, 1), (1, 0), (2, 0)):
        if number in step.arriving:
            located = step.located(number)
            if located is None or located[0] != axis:
                return step.mixed
            rows.add(located[1])
    if len(rows) != 1:
        return step.mixed
    (within,) = rows
    states: list[State] = [SHARED] * len(step.inputs)
    for number in (0, 5, 6):
        shape = step.inputs[number]
        if shape:
            states[number] = place(shape, len(shape) - 2, within)
    return states


def _leaf_of_lookup(_step: Step) -> list[State]:
    return [SHARED]


def _fixed_left(step: Step) -> list[State]:
    return _product(step, 0)


def _fixed_bias(step: Step) -> list[State]:
    return _product(step, 1)


def _vector_product(step: Step) -> list[State]:
    found = step.located()
    return step.mixed if found is None else [step.same_axis(0, *found), SHARED]


_ELEMENTWISE = """Abs Acos Acosh Add Addcdiv Addcmul Alias Asin Asinh Atan Atan2 Atanh Ceil Celu Clamp ClampMax
ClampMin Clone Cos Cosh Detach Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expm1 Expand Floor Fmax Fmin Gelu Hardshrink
Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid Logaddexp Logit MaskedFill
Maximum Minimum Mish Mul NativeDropout Neg Pow PreluKernel Reciprocal Relu Relu6 Round Rsqrt Rsub Sgn Sigmoid Sign
Silu Sin Sinh Softplus Softshrink Sqrt Square Sub Tan Tanh Threshold ToCopy Trunc Where Xlogy"""

_UNREDUCED = """BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss L1Loss MseLoss SmoothL1Loss
SoftMarginLoss"""

_BY_HANDLER: dict[Handler, str] = {
    _elementwise: _ELEMENTWISE,
    _unreduced: _UNREDUCED,
    _view: "View UnsafeView ReshapeAlias Unsqueeze Squeeze",
    _transpose: "Transpose",
    _t: "T",
    _permute: "Permute",
    _along: "Softmax SafeSoftmax LogSoftmax Cumsum Cumprod Logcumsumexp",
    _reduction: "Sum Mean Amax Amin Max Min Logsumexp Var Std Norm LinalgVectorNorm Prod Median Sort Topk",
    _select: "Select Unbind",
    _sliced: "Slice Split UnsafeSplit SplitWithSizes Narrow",
    _cat: "Cat",
    _stack: "Stack",
    _fixed_left: "Mm Bmm",
    _fixed_bias: "Addmm Baddbmm",
    _vector_product: "Mv",
    _normalised: "NativeLayerNorm",
    _batch_norm: "NativeBatchNorm CudnnBatchNorm",
    _samples: "Convolution NativeGroupNorm",
    _spatial: """MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D
AdaptiveMaxPool2D AdaptiveMaxPool3D ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D
ReplicationPad2D ReplicationPad3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleBilinear2D
UpsampleLinear1D UpsampleBicubic2D UpsampleTrilinear3D MkldnnMaxPool2D""",
    _padded: "ConstantPadNd",
    _looked_up: "Gather IndexSelect",
    _attention: """ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention
ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention""",
    _class_loss: "NllLoss NllLoss2D",
    _recurrent_layer: "MkldnnRnnLayer",
    _leaf_of_lookup: "Embedding",
}

HANDLERS: dict[str, Handler] = {
    f"{name}Backward": handler for handler, names in _BY_HANDLER.items() for name in names.split()
}
