"""Each example, run as a user would run it, but small."""

import functools
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import multiback as mb

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECORD = 3073
FIGURES = 12  # six published and six of today
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@functools.cache
def run(name, *arguments):
    """What an example prints as a program of its own, run once per worker.

    It gets one thread, since tests run beside one another.
    """
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run an example as the main program inside this process, which spares the import of torch."""

    def start(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return start


@pytest.fixture
def refused(run_here):
    """The one sentence with which an example refuses bad use, and code 2."""

    def start(name, *arguments):
        code, out, error = run_here(name, *arguments)
        assert (code, out) == (2, "")
        (line,) = error.splitlines()
        assert line.startswith(f"{name}: ")
        assert line.endswith(".")
        return line

    return start


def figures(pattern, text):
    """The numbers of the bracket that ends the first line which the pattern begins."""
    found = re.search(rf"^ *{pattern} *.*?\[([^]]*)\]$", text, flags=re.MULTILINE)
    assert found, (pattern, text)
    return [float(figure) for figure in found[1].split()]


def write_cifar(path, labels):
    pixels = bytes(index * 7 % 256 for index in range(RECORD - 1))
    path.write_bytes(b"".join(bytes([label]) + pixels[label:] + pixels[:label] for label in labels))
    return path


def tables(text):
    """Every row of the published and today's figures, by function."""
    rows = re.findall(r"^(func\d)(.*)$", text, flags=re.MULTILINE)
    return [(name, [float(figure) for figure in figures.replace("|", " ").split()]) for name, figures in rows]


@pytest.mark.parametrize("name", NAMES)
def test_the_help_shows_examples(name, run_here):
    code, out, _ = run_here(name, "--help")
    assert code == 0
    assert f"python examples/{name}" in out


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_in_one_sentence(name, refused):
    assert "--no-such-option" in refused(name, "--no-such-option")


def test_the_two_losses_tables_have_four_functions_with_and_without_warm_up():
    text = run("two_losses.py", "--small", "--no-bench")
    rows = tables(text)
    assert [name for name, _ in rows] == ["func1", "func2", "func3", "func4"] * 2
    assert "With one warm-up" in text
    assert "Without a warm-up" in text
    for _, figures in rows:
        assert len(figures) == FIGURES
        for mean, least, most in zip(figures[::3], figures[1::3], figures[2::3], strict=True):
            assert 0 < least <= mean <= most
    assert rows[0][1][:6] == [116.5, 113.8, 129.7, 383.5, 365.7, 384.4]


def test_the_two_losses_tables_fit_into_110_columns():
    assert max(map(len, run("two_losses.py", "--small", "--no-bench").splitlines())) <= 110


def test_the_two_losses_example_says_why_the_published_design_cannot_answer():
    text = " ".join(run("two_losses.py", "--small", "--no-bench").split())
    assert "Why this design cannot answer: each function runs as one block" in text
    assert "What `multiback bench` does instead: it runs the ways interleaved" in text


def test_the_two_losses_process_hands_back_every_repetition():
    found = json.loads(run("two_losses.py", "--small", "--measure", "without", "--repetitions", 3))
    assert list(found) == ["func1", "func2", "func3", "func4"]
    assert all(len(columns["seconds"]) == len(columns["rss"]) == 3 for columns in found.values())


def test_the_two_losses_example_benches_both_saved_nets(tmp_path):
    text = run("two_losses.py", "--small", "--folder", tmp_path)
    assert (tmp_path / "two-layer" / "model.pytorch").is_file()
    assert (tmp_path / "mlp" / "model.pytorch").is_file()
    _, two_layer, mlp = re.split(r"^=+\n", text, flags=re.MULTILINE)
    assert "--input 1x40 --trust-pickle" in two_layer
    assert "P = 3,280 parameters" in two_layer
    assert "--input 1x64 --trust-pickle" in mlp
    assert "P = 98,880 parameters" in mlp
    for report in (two_layer, mlp):
        assert "one-forward summed" in report
        assert "published losses" in " ".join(report.split())


def test_the_two_losses_example_keeps_a_model_that_is_there(tmp_path, refused):
    kept = tmp_path / "mlp" / "model.pytorch"
    kept.parent.mkdir()
    kept.write_text("mine")
    assert "exists already and is kept" in refused("two_losses.py", "--small", "--folder", tmp_path)
    assert kept.read_text() == "mine"


def test_the_two_losses_folder_must_not_be_a_file(tmp_path, refused):
    (tmp_path / "file").touch()
    assert "--folder: must be a folder" in refused("two_losses.py", "--folder", tmp_path / "file")


def test_the_two_losses_repetitions_must_be_one_or_more(refused):
    assert "--repetitions: must be 1 or more; got 0" in refused("two_losses.py", "--repetitions", 0)


def test_the_equivalence_of_all_three_ways_is_stated():
    text = run("equivalence.py", "--dtype", "float32")
    for way in ("separate", "accumulated", "summed"):
        assert f"holds: {way}: every input's gradient is the weight, to the last bit" in text
        assert f"holds: {way}: the weight's gradient is the inputs' column sum" in text
        assert re.search(rf"{way}: weight \[1\.3757 1\.442[45] 1\.780[01] 2\.0434\]", text)
    assert "the weight's gradient is the published [1.3757 1.4424 1.7801 2.0434]" in text


def test_the_equivalence_holds_in_float64_too(run_here):
    code, out, _ = run_here("equivalence.py", "--dtype", "float64")
    assert code == 0
    assert "So `mean` differs from `sum` by the factor B and by nothing else" in out


@pytest.mark.parametrize("rows", [3, 4])
def test_the_equivalence_of_mean_and_sum_is_the_factor_b(rows):
    text = run("equivalence.py", "--dtype", "float32")
    assert f"sum is {rows}.000000 times mean" in text
    assert f"holds: inputs: the gradient of `sum` is {rows} times that of `mean`" in text
    assert f"holds: weight: the gradient of `sum` is {rows} times that of `mean`" in text


def load(name):
    """An example as a module, whose functions can be called."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_the_equivalence_example_raises_where_a_statement_does_not_hold():
    example = load("equivalence")
    example.INPUTS[0][0] += 1e-2
    with pytest.raises(ArithmeticError, match=r"does not hold: the weight's gradient is the published"):
        example.show_linear(example.DTYPES["float32"])


SMALL_SLICES = ("--batch", 8, "--repetitions", 1, "--no-bench")


def test_the_slices_loop_gives_the_same_numbers_as_one_traversal():
    text = run("slices.py", *SMALL_SLICES)
    assert "8 images of scikit-learn's digits" in text
    images = re.search(r"largest difference (\S+) in the images' gradients", text)
    parameters = re.search(r"(\S+) of the norm in the parameters'", text)
    assert images
    assert parameters
    assert float(images[1]) < 1e-6
    assert float(parameters[1]) < 1e-5


def test_the_cut_gives_the_slices_loop_its_image_gradients():
    text = run("slices.py", *SMALL_SLICES)
    assert float(re.search(r"(\S+) between the cut and the loop", text)[1]) < 1e-6
    assert "holds: the cut gives the loop's image gradients" in text
    assert re.search(r"cut\.grad_of per slice, rows run again +\S+ ms, ratio \S+$", text, flags=re.MULTILINE)
    assert re.search(
        r"^Slice \d alone after the forward.*\n.*retained graph +\S+ ms\n  cut\.grad_of +\S+ ms", text, flags=re.M
    )


def test_the_slices_example_shows_the_second_time_error():
    assert "RuntimeError: Trying to backward through the graph a second time" in run("slices.py", *SMALL_SLICES)


def test_a_repeated_slice_is_read_twice_as_large():
    text = run("slices.py", *SMALL_SLICES)
    assert re.search(r"first backward: factor 1\.0000; the same slice again: factor 2\.0000", text)
    assert "reads each slice alone: factor 1.0000" in text
    assert "cut.grad_of: first factor 1.0000; the same slice again: factor 1.0000" in text
    assert "holds: cut.grad_of of a slice is the same both times" in text


def test_the_slices_example_reads_a_file_of_cifar(tmp_path, run_here):
    path = write_cifar(tmp_path / "data_batch_1.bin", range(10))
    code, out, _ = run_here("slices.py", *SMALL_SLICES, "--cifar", path)
    assert code == 0
    assert f"8 images of CIFAR-10 from {path}" in out


def test_the_slices_example_reads_a_folder_of_cifar(tmp_path, run_here):
    for index in (1, 2):
        write_cifar(tmp_path / f"data_batch_{index}.bin", range(5))
    code, out, _ = run_here("slices.py", *SMALL_SLICES, "--cifar", tmp_path)
    assert code == 0
    assert f"8 images of CIFAR-10 from {tmp_path}" in out


def test_the_slices_example_ends_with_the_bench(tmp_path):
    path = write_cifar(tmp_path / "data_batch_1.bin", range(4))
    text = run("slices.py", "--batch", 4, "--repetitions", 1, "--budget", 5, "--cifar", path)
    assert "slices: one backward per slice, or all at once?" in text
    assert "retained loop" in text


def test_a_missing_cifar_file_ends_the_program_with_code_2_and_one_sentence(tmp_path):
    command = [sys.executable, str(EXAMPLES / "slices.py"), "--cifar", str(tmp_path / "none.bin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("slices.py: --cifar: ")
    assert "none.bin cannot be read (No such file or directory)" in line


def test_a_cifar_file_of_another_size_is_refused(tmp_path, refused):
    path = write_cifar(tmp_path / "short.bin", [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    assert "whole records of 3073 bytes" in refused("slices.py", "--cifar", path)


def test_a_cifar_folder_without_files_is_refused(tmp_path, refused):
    assert "must hold .bin files" in refused("slices.py", "--cifar", tmp_path)


def test_a_cifar_label_above_nine_is_refused(tmp_path, refused):
    path = write_cifar(tmp_path / "labels.bin", [1, 10])
    assert "labels must be 0 to 9" in refused("slices.py", "--cifar", path)


def test_a_batch_larger_than_the_file_is_refused(tmp_path, refused):
    path = write_cifar(tmp_path / "two.bin", [1, 2])
    assert "must be at most the 2 images" in refused("slices.py", "--cifar", path, "--batch", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1"], "--batch: must be 2 or more"),
        (["--repetitions", "0"], "--repetitions: must be 1 or more"),
        (["--budget", "0"], "--budget: must be a positive number of seconds"),
        (["--seed", "-1"], "--seed: must be a whole number"),
        (["--batch", "many"], "argument --batch: invalid int value: 'many'"),
    ],
)
def test_a_bad_value_of_slices_is_refused(arguments, message, refused):
    assert message in refused("slices.py", *arguments)


def test_surgery_lowers_every_loss_where_the_plain_sum_raises_one(run_here):
    _, out, _ = run_here("gradient_surgery.py")
    assert float(re.search(r"Cosine between gradients 1 and 2: (\S+)", out)[1]) < -0.5
    assert min(figures("sum:", out)) < 0
    assert min(figures("PCGrad:", out)) > 0
    assert min(figures("UPGrad:", out)) > 0
    _, training = out.split("The losses before and after 10 steps")
    before = {name: re.search(rf"{name}: \[(.*?)\] ->", training)[1] for name in ("sum", "PCGrad", "UPGrad")}
    assert len(set(before.values())) == 1
    first, second = map(float, before["sum"].split())
    after = {name: figures(f"{name}: .*->", training) for name in before}
    assert after["sum"][0] > first
    for name in ("PCGrad", "UPGrad"):
        assert after[name][0] < first
        assert after[name][1] < second


def test_pcgrad_is_the_hand_computed_projection(run_here):
    code, out, _ = run_here("gradient_surgery.py", "--steps", 1)
    assert code == 0
    assert "holds: PCGrad is the sum of the two gradients, each without what points against the other" in out
    assert "holds: UPGrad's weights made of mb.gram give the same direction" in out
    example = load("gradient_surgery")
    tasks = example.Tasks(2, seed=2)
    matrix = example.jacobian(tasks.losses(), tasks.trunk)
    by_hand, (ways, _) = example.projected(*matrix), example.aggregators(2)
    assert (matrix @ by_hand > 0).all()
    torch.testing.assert_close(ways["PCGrad"](matrix), by_hand, rtol=1e-4, atol=1e-5)


def test_the_surgery_jacobian_holds_each_losss_own_gradient():
    example = load("gradient_surgery")
    tasks = example.Tasks(3, seed=0)
    losses = tasks.losses()
    matrix = example.jacobian(losses, tasks.trunk)
    for row, loss in zip(matrix, losses, strict=True):
        parts = torch.autograd.grad(loss, list(tasks.trunk.parameters()), retain_graph=True)
        torch.testing.assert_close(row, torch.cat([part.reshape(-1) for part in parts]))
    example.write(matrix.sum(0), tasks.trunk)
    written = [parameter.grad.clone() for parameter in tasks.trunk.parameters()]
    tasks.trunk.zero_grad()
    sum(losses).backward()
    for parameter, own in zip(tasks.trunk.parameters(), written, strict=True):
        torch.testing.assert_close(own, parameter.grad)


def test_three_losses_tell_pcgrad_from_upgrad(run_here):
    _, out, _ = run_here("gradient_surgery.py", "--losses", 3, "--seed", 0, "--steps", 1)
    assert figures("PCGrad:", out) != figures("UPGrad:", out)


def test_surgery_without_torchjd_ends_with_code_2_and_one_sentence(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    assert 'pip install "torchjd[quadprog_projector]"' in refused("gradient_surgery.py")


def test_weighting_reads_clean_norms_unlike_an_accumulating_grad():
    example = load("loss_weighting")
    tasks = example.Tasks(seed=0)
    clean = mb.norms(tasks.losses(), tasks.shared)
    torch.testing.assert_close(clean, example.separate(tasks))
    wrong = example.accumulating(tasks)
    torch.testing.assert_close(wrong[0], clean[0])
    assert wrong[2] > 100 * clean[2]


def test_weights_make_every_norm_the_same_where_alpha_is_zero():
    example = load("loss_weighting")
    norms = torch.tensor([2.0, 50.0, 0.1])
    weights = example.weights_for(norms, torch.tensor([1.0, 0.2, 0.7]), alpha=0.0)
    torch.testing.assert_close(weights * norms, (weights * norms).mean().expand(3))
    torch.testing.assert_close(weights.sum(), torch.tensor(3.0))


def test_a_slower_loss_gets_a_larger_weighted_norm():
    example = load("loss_weighting")
    norms, progress = torch.tensor([2.0, 50.0]), torch.tensor([0.9, 0.3])
    weighted = norms * example.weights_for(norms, progress, alpha=1.0)
    torch.testing.assert_close(weighted[0] / weighted[1], torch.tensor(3.0))


def test_weighted_losses_fall_at_more_equal_pace_than_a_plain_sum(run_here):
    code, out, _ = run_here("loss_weighting.py")
    assert code == 0
    assert out.count("holds:") == 3
    weighted, plain = figures("weighted:", out), figures("plain sum:", out)
    assert max(weighted) / min(weighted) < 2 < max(plain) / min(plain)


def test_per_sample_gradients_equal_a_loop_and_every_image_alone():
    text = run("per_sample.py", "--batch", 8)
    assert "method partition, rows proven" in text
    assert "holds: rows equal a loop over the losses of the batch" in text
    assert "holds: rows equal every image on its own" in text
    assert "holds: mb.norms gives the same norms" in text


def test_the_square_of_the_mean_gradient_is_no_fisher():
    text = run("per_sample.py", "--batch", 8)
    assert "holds: it equals squares taken image by image" in text
    off, trace = re.search(r"is off by (\S+)% of its norm: its trace is (\S+)% of the exact", text).groups()
    assert float(off) > 80
    assert float(trace) < 20


def test_the_fisher_of_the_models_own_labels_is_the_expectation_over_classes():
    example = load("per_sample")
    torch.manual_seed(0)
    net, images = example.conv_net(), torch.randn(3, 1, example.SIDE, example.SIDE)
    found = example.true_fisher(net(images), net)
    expected = torch.zeros_like(found)
    for image in images.split(1):
        likelihoods = net(image).softmax(dim=1)[0]
        rows = example.looped(likelihoods.log(), net)
        expected += (likelihoods.detach()[:, None] * rows.square()).sum(0) / len(images)
    torch.testing.assert_close(found, expected)


def test_batch_norm_in_train_mode_is_warned_of_and_answered_in_full():
    text = " ".join(run("per_sample.py", "--batch", 8).split())
    _, section = text.split("Batch norm in train mode")
    assert section.count("warning: ") == 1
    assert "a batch norm in train mode, so a loss depends on other rows than its own" in section
    assert "holds: a row is still its loss's full gradient" in section
    assert "holds: in eval mode rows equal every image on its own" in section
    assert float(re.search(r"images, (\S+)% \(of the norm\) lies in images of other losses", section)[1]) > 1


SMALL_CONTRAST = ("--batch", 256, "--chunk", 16, "--steps", 3)


def test_the_contrastive_cut_gives_the_gradient_of_ordinary_passes():
    text = " ".join(run("contrastive.py", *SMALL_CONTRAST).split())
    assert text.count("holds: ") == 3
    assert "holds: without dropout the cut gives the gradient of one big batch" in text
    assert "holds: and so it does with the logits in chunks" in text
    assert "holds: with dropout it gives that of chunks whose graphs are all kept, from the same random state" in text
    cut, hand = re.search(r"The cut is off by (\S+) of the norm\..* is off by (\S+)%\.", text).groups()
    assert float(cut) < 1e-5
    assert float(hand) > 10


def test_the_contrastive_cut_holds_less_than_the_whole_graph():
    text = run("contrastive.py", *SMALL_CONTRAST)
    whole, cut, rows = (float(peak) for peak in re.findall(r"(\S+) MiB", text))
    assert rows <= cut < whole / 5


def test_contrastive_training_lowers_the_loss_below_a_guess():
    text = run("contrastive.py", *SMALL_CONTRAST)
    guess = float(re.search(r"a guess has loss (\S+)", text)[1])
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", text)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert losses[-1] < guess


def test_a_gradient_cache_by_hand_is_wrong_by_dropout_alone():
    example = load("contrastive")
    torch.manual_seed(0)
    encoder, images = example.Encoder().eval(), example.digits(12)
    views = example.view(images), example.view(images)
    right = example.gradient(encoder, lambda: example.by_whole(encoder, views), 0)
    for way in (example.by_hand, example.by_kept_chunks, example.by_cut, example.by_cut_and_rows):
        found = example.gradient(encoder, lambda way=way: way(encoder, views, 5), 0)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
    encoder.train()
    right = example.gradient(encoder, lambda: example.by_kept_chunks(encoder, views, 5), 0)
    cut = example.gradient(encoder, lambda: example.by_cut(encoder, views, 5), 0)
    torch.testing.assert_close(cut, right, rtol=1e-4, atol=1e-6)
    assert example.distance(example.gradient(encoder, lambda: example.by_hand(encoder, views, 5), 0), right) > 0.05


def test_the_contrastive_loss_by_rows_is_the_whole_one():
    example = load("contrastive")
    vectors = tuple(torch.nn.functional.normalize(torch.randn(2, 7, 3), dim=2).unbind())
    whole = [part.clone().requires_grad_() for part in vectors]
    example.info_nce(whole).backward()
    parts = [part.clone().requires_grad_() for part in vectors]
    torch.testing.assert_close(example.by_rows(parts, 3), example.info_nce(vectors))
    for part, right in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, right.grad)


def test_contrastive_digits_begin_again_past_their_end():
    images = load("contrastive").digits(1800)
    assert images.shape == (1800, 1, 16, 16)
    assert torch.equal(images[1797:], images[:3])


def test_contrastive_without_scikit_learn_ends_with_code_2_and_one_sentence(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "the digits come with scikit-learn; pip install scikit-learn" in refused("contrastive.py")


SMALL_CHUNKS = ("--tokens", 128, "--width", 16, "--vocabulary", 4000, "--chunks", 8, "--repetitions", 1)


def chunked_ways(text):
    """By way: its peak in MiB and its gradient's relative error."""
    rows = re.findall(r"^  (\S.*?) +(\S+) MiB +\S+ ms +(\S+)$", text, flags=re.MULTILINE)
    return {name: (float(peak), float(error)) for name, peak, error in rows}


def test_chunks_by_the_cut_give_the_whole_losss_gradient():
    text = run("chunked_loss.py", *SMALL_CHUNKS)
    ways = chunked_ways(text)
    assert list(ways) == ["the whole loss", "chunks, graph retained", "chunks by mb.cut", "mean of chunk means"]
    assert ways["the whole loss"][1] == 0
    assert ways["chunks, graph retained"][1] < 1e-5
    assert ways["chunks by mb.cut"][1] < 1e-5
    assert "holds: chunks through the retained graph give the whole loss's gradient" in text
    assert "holds: chunks by mb.cut give the whole loss's gradient" in text
    assert "the trunk is traversed 8 times, not once" in text


def test_chunks_by_the_cut_hold_less_than_the_whole_loss():
    ways = chunked_ways(run("chunked_loss.py", *SMALL_CHUNKS))
    assert ways["chunks by mb.cut"][0] < ways["the whole loss"][0] / 2
    assert ways["chunks by mb.cut"][0] <= ways["chunks, graph retained"][0]


def test_the_mean_of_chunk_means_is_another_loss():
    text = run("chunked_loss.py", *SMALL_CHUNKS)
    assert chunked_ways(text)["mean of chunk means"][1] > 0.1
    assert float(re.search(r"The mean of chunk means is off by (\S+)%", text)[1]) > 10


def test_every_chunk_of_the_loss_has_a_label():
    labels = load("chunked_loss").some_labels(64, 10, 4)
    kept = labels != -100
    assert kept.reshape(16, 4).any(1).all()
    assert not kept.all()


def test_the_gradient_examples_raise_where_a_statement_does_not_hold():
    for name in ("contrastive", "chunked_loss", "slices"):
        with pytest.raises(ArithmeticError, match="does not hold: one is two"):
            load(name).require("one is two", holds=False)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gradient_surgery.py", ["--losses", "1"], "--losses: must be 2 or more"),
        ("gradient_surgery.py", ["--steps", "0"], "--steps: must be 1 or more"),
        ("loss_weighting.py", ["--steps", "0"], "--steps: must be 1 or more"),
        ("loss_weighting.py", ["--alpha", "-1"], "--alpha: must be 0 or a positive number"),
        ("per_sample.py", ["--batch", "1"], "--batch: must be 2 or more"),
        ("contrastive.py", ["--batch", "1"], "--batch: must be 2 or more"),
        ("contrastive.py", ["--batch", "8", "--chunk", "9"], "--chunk: must be from 1 to the 8 rows"),
        ("contrastive.py", ["--chunk", "0"], "--chunk: must be from 1 to the 4096 rows"),
        ("contrastive.py", ["--steps", "0"], "--steps: must be 1 or more"),
        ("contrastive.py", ["--seed", "-1"], "--seed: must be a whole number"),
        ("chunked_loss.py", ["--chunks", "1"], "--chunks: must be 2 or more"),
        ("chunked_loss.py", ["--tokens", "15"], "--tokens: must be at least the 16 chunks; got 15"),
        ("chunked_loss.py", ["--width", "6"], "--width: must be a positive multiple of 4"),
        ("chunked_loss.py", ["--width", "0"], "--width: must be a positive multiple of 4"),
        ("chunked_loss.py", ["--vocabulary", "1"], "--vocabulary: must be 2 or more"),
        ("chunked_loss.py", ["--repetitions", "0"], "--repetitions: must be 1 or more"),
        ("chunked_loss.py", ["--seed", "-1"], "--seed: must be a whole number"),
    ],
)
def test_a_bad_value_of_the_gradient_examples_is_refused(name, arguments, message, refused):
    assert message in refused(name, *arguments)
