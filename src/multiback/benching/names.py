"""The names that a user may type: presets, questions and ways, with one line on each; no torch."""

from multiback.errors import OptionError

PRESETS: dict[str, str] = {
    "mlp": "1024-4096-4096-1024 ReLU net, batch 1, two losses (the published answer's net)",
    "two-layer": "40-40-40 net, batch 1, two losses, input gradient (the published question's net)",
    "slices": "the CIFAR-10 tutorial's conv net, 128 images, one loss per image",
    "heads": "a trunk of four layers with five heads, batch 32",
    "transformer": "a two-layer encoder, batch 8 of 32 tokens, two losses",
    "recurrent": "a GRU that carries its hidden state from step to step",
}

KINDS: dict[str, str] = {
    "each": "the gradients of K losses, each its own: by which way?",
    "rows": "the gradient of every row's own loss (per-sample gradients): by which way?",
    "gram": "the inner products of K losses' gradients: by which way?",
    "norms": "the norms of K losses' gradients: by which way?",
}

QUESTIONS: dict[str, str] = {
    "successive": "is the 2nd, 3rd, 4th backward on one graph cheaper than the first?",
    "cold": "what does the first forward and backward of a process cost, and why?",
    "retain": "what does retain_graph=True cost in time, in peak bytes, in bytes still held?",
    "combine": "separate backwards, a summed loss, or one traversal?",
    "slices": "one backward per slice, or all at once?",
    "growth": "does a step get slower or bigger as steps go by?",
    **KINDS,
}

DEFAULT_QUESTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("successive", "cold", "retain", "combine"),
    "two-layer": ("successive", "cold", "retain", "combine"),
    "slices": ("slices", "retain"),
    "heads": ("combine", "retain"),
    "transformer": ("combine", "retain"),
    "recurrent": ("growth",),
}
USER_TARGET_QUESTIONS = ("successive", "cold", "retain", "combine")

CARRIED_DETACHED = "carried tensors detached"

_GRADIENTS = {
    "loop": "one forward; per loss: torch.autograd.grad(loss, parameters, retain_graph=True)",
    "batched": "one forward; torch.autograd.grad(losses, parameters, eye(K), is_grads_batched=True)",
    "torch.func": "vmap(grad(...)) of functional_call where there is one loss per row, else jacrev",
}

WAYS: dict[str, dict[str, str]] = {
    "successive": {
        "backward": "loss.backward(retain_graph=True), called four times on one graph",
        "autograd.grad": "torch.autograd.grad(loss, ..., retain_graph=True), four times on one graph",
    },
    "cold": {
        "forward": "the model and its losses",
        "backward": "one traversal of the summed losses",
    },
    "retain": {
        "retain_graph=False": "one backward that frees the graph",
        "retain_graph=True": "the same backward, graph kept",
    },
    "combine": {
        "func1": "forward, loss 1, backward; forward again, loss 2, backward; ...",
        "func2": "one forward per loss, the losses summed, one backward",
        "func3": "func1 with retain_graph=True",
        "func4": "func2 with retain_graph=True",
        "one-forward retained": "one forward, one backward per loss, graph kept until the last",
        "one-forward summed": "one forward, losses summed, one backward",
        "multiback": "one forward, one traversal from all losses: multiback.backward(losses)",
    },
    "slices": {
        "retained loop": "one forward; per row: its loss, backward(retain_graph=True)",
        "loss summed in the loop": "one forward; per row: its loss added up; one backward",
        "reduction=sum": "one forward, all losses at once, their sum, one backward",
        "reduction=mean": "the same with the mean",
        "forward per slice": "per row: a forward of that row alone, its loss, backward",
        "multiback cut": "one forward, cut; per row: its loss on cut.value, backward(); one traversal at the end",
        "multiback": "one forward, one traversal from all losses: multiback.backward(losses)",
    },
    "growth": {
        "one graph, retained": "one forward, then one backward(retain_graph=True) per step",
        "a forward per step": "forward and backward(retain_graph=True) in every step, as the model stands",
        CARRIED_DETACHED: "the same, with what the model carries detached between steps",
    },
    "each": {
        **_GRADIENTS,
        "multiback": "one forward; multiback.jac(losses, parameters)",
        "TorchJD": "one forward; torchjd.autojac.jac(losses, parameters)",
    },
    "rows": {
        **_GRADIENTS,
        "multiback": "one forward; multiback.rows(losses, parameters)",
        "TorchJD": "one forward; torchjd.autojac.jac(losses, parameters)",
        "Opacus": "a copy of the model in opacus.GradSampleModule; forward, backward of the sum",
        "BackPACK": "a copy of the model extended by BackPACK; forward, backward of the sum under BatchGrad",
    },
    "gram": {
        **_GRADIENTS,
        "multiback": "one forward; multiback.gram(losses, parameters)",
        "TorchJD": "a forward of a copy of the model; torchjd.autogram.Engine.compute_gramian(losses)",
    },
    "norms": {
        **_GRADIENTS,
        "multiback": "one forward; multiback.norms(losses, parameters)",
        "TorchJD": "the square root of the diagonal that torchjd.autogram.Engine gives",
    },
}


def check_names(option: str, given: list[str] | None, valid: list[str]) -> None:
    """OptionError, listing what is valid, where a name is none of it."""
    for name in given or []:
        if name not in valid:
            raise OptionError(f"{option}: must be one of {', '.join(valid)}; got {name!r}. Choose one of these.")
