"""`mb.backward` against the usual ways, on large, small and convolutional nets."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import multiback as mb
from harness import Calls, Claim, Experiment, main
from multiback.benching.problems import tutorial_net


def published_net() -> nn.Sequential:
    """The 1024-4096-4096-1024 ReLU net."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))


def losses_of(output: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
    """The two published losses, for any output."""
    scale = data.flatten(1)[:, :1]
    return (output * (0.5 - scale)).sum(), (output * (1 - scale)).sum()


def ways(make: Callable[[], nn.Module], data: Tensor, policy: str) -> Callable[[], Calls]:
    """The ways on one net: a whole step for `func1`, and the backward alone for the others."""

    def build() -> Calls:
        model = make()
        parameters = list(model.parameters())

        def prepare(grad: bool) -> None:
            for parameter in parameters:
                if not grad:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

        def func1() -> Callable[[], object]:
            prepare(policy == "existing")

            def step() -> None:
                losses_of(model(data), data)[0].backward()
                losses_of(model(data), data)[1].backward()

            return step

        def whole_step() -> Callable[[], object]:
            prepare(policy == "existing")
            return lambda: mb.backward(losses_of(model(data), data))

        def plain() -> Callable[[], object]:
            prepare(policy == "existing")
            losses = losses_of(model(data), data)
            return lambda: torch.autograd.backward(losses)

        def ours() -> Callable[[], object]:
            prepare(policy == "existing")
            losses = losses_of(model(data), data)
            return lambda: mb.backward(losses)

        def reset_and_plain() -> Callable[[], object]:
            prepare(True)
            losses = losses_of(model(data), data)

            def step() -> None:
                for parameter in parameters:
                    parameter.grad = None
                torch.autograd.backward(losses)

            return step

        def overwrite() -> Callable[[], object]:
            prepare(True)
            losses = losses_of(model(data), data)
            return lambda: mb.backward(losses, overwrite=True)

        found: Calls = {"autograd.backward": plain, "mb.backward": ours}
        if policy == "existing":
            found |= {"func1": func1, "forward + mb.backward": whole_step}
        if policy == "overwrite":
            found = {"reset to None + autograd.backward": reset_and_plain, "mb.backward(overwrite=True)": overwrite}
        return found

    return build


PLAIN = ("autograd.backward", "mb.backward")
STEP = ("func1", "forward + mb.backward")
OVERWRITE = ("reset to None + autograd.backward", "mb.backward(overwrite=True)")


def tiny() -> nn.Sequential:
    """A net whose backward takes a tenth of a millisecond."""
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


EXPERIMENTS = [
    Experiment(
        "published net, batch 1, .grad exists",
        ways(published_net, torch.rand(1, 1024), "existing"),
        [Claim(*STEP, 7.0), Claim(*PLAIN, 3.5)],
    ),
    Experiment(
        "published net, batch 1, overwrite",
        ways(published_net, torch.rand(1, 1024), "overwrite"),
        [Claim(*OVERWRITE, 3.5)],
    ),
    Experiment(
        "published net, batch 1, .grad None",
        ways(published_net, torch.rand(1, 1024), "none"),
        [Claim(*PLAIN, 1.0)],
    ),
    Experiment(
        "published net, batch 64, .grad exists",
        ways(published_net, torch.rand(64, 1024), "existing"),
        [Claim(*STEP, 2.6), Claim(*PLAIN, 1.35)],
    ),
    Experiment("tiny net, .grad exists", ways(tiny, torch.rand(4, 10), "existing"), [Claim(*PLAIN, 0.95)]),
    Experiment(
        "tutorial conv net, .grad exists",
        ways(tutorial_net, torch.rand(16, 3, 32, 32), "existing"),
        [Claim(*PLAIN, 0.95)],
    ),
]

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", EXPERIMENTS))
