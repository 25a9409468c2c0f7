"""A traced program runs as it would without, and each of its processes is recorded."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiback import traces
from multiback.errors import OptionError, OutputError, TargetError
from multiback.tracing import launcher

PROGRAMS = Path(__file__).parent / "launcher_programs"
BACKWARD = "import torch; torch.backward()"


@dataclass
class Traced:
    """What a traced run gave."""

    code: int
    out: str
    err: str
    record: traces.TraceRecord | None


class Workplace:
    """A folder with a program, the stand-ins of torch and of the recorder on PYTHONPATH, and nothing else."""

    def __init__(self, folder, temporary):
        self.folder, self.program, self.temporary = folder, folder / "program", temporary
        self.program.mkdir()
        self.path = [str(PROGRAMS / "standins")]
        self.environment = {}

    def write(self, text, name="script.py"):
        path = self.program / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def _options(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COV_CORE")}
        environment |= {"PYTHONPATH": os.pathsep.join(self.path), "OMP_NUM_THREADS": "1"}
        environment |= {"TMPDIR": str(self.temporary), **self.environment}
        return {"cwd": self.program, "env": environment, "text": True}

    def start(self, *program, module=False, output=None, max_steps=None, flags=(), **options):
        given = {"program": program, "module": module, "output": output, "max_steps": max_steps, "force": False}
        given["shown"] = str(self.folder / "shown.json")
        command = [sys.executable, *flags, str(PROGRAMS / "drive.py"), json.dumps(given)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE} | options
        return subprocess.Popen(command, **self._options(), **options)

    def end(self, process, stdin=None):
        if stdin is None:
            process.wait(timeout=60)
        out, err = process.communicate(stdin, timeout=60)
        assert not list(self.temporary.glob("multiback*")), "parts are left behind"
        shown = self.folder / "shown.json"
        return Traced(process.returncode, out, err, traces.load(shown) if shown.exists() else None)

    def trace(self, *program, stdin="", **options):
        return self.end(self.start(*program, **options), stdin)

    def plain(self, *arguments, stdin=""):
        done = subprocess.run(
            [sys.executable, *arguments], check=False, input=stdin, capture_output=True, **self._options()
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def place(tmp_path):
    with tempfile.TemporaryDirectory() as temporary:  # short enough for the address of a socket
        yield Workplace(tmp_path, Path(temporary))


SAME = {
    "argv": "import sys; print(sys.argv)",
    "folder": "import os; print(os.getcwd())",
    "path": "import sys; print(sys.path)",
    "main": "import sys; print(__name__, __file__, __spec__, __package__, vars(sys.modules['__main__']) is globals())",
    "guard": "if __name__ == '__main__': print('main')",
    "streams": "import sys; print(sys.stdin.read(), sys.stdin.isatty()); print('said', file=sys.stderr)",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit with a text": "import sys; sys.exit('a text')",
    "exception": "def fails():\n    raise ValueError('of the program')\nfails()",
    "syntax error": "print(",
    "os._exit": "import os; os._exit(4)",
    "torch's loader": "import torch; print(torch.__loader__.__class__, torch.__spec__.loader.__class__)",
    "finders": "import torch, sys; print([type(finder).__name__ for finder in sys.meta_path])",
    "local modules": "import random, types; print(random.local, types.__name__)",
    "signals": "import signal; print([signal.getsignal(n) for n in (2, 15, 1)])",
}


@pytest.mark.parametrize("name", SAME)
def test_a_script_gives_the_same_with_and_without_tracing(place, name):
    script = place.write(SAME[name])
    if name == "local modules":
        place.write("local = True", "random.py")
    traced = place.trace(script, "--flag", "a b", stdin="some input")
    err = "".join(line for line in traced.err.splitlines(True) if not line.startswith("multiback: nothing"))
    assert (traced.code, traced.out, err) == place.plain(script, "--flag", "a b", stdin="some input")


def test_a_module_of_a_package_runs_as_by_python_m(place):
    place.write("", "package/__init__.py")
    place.write("word = 'relative'", "package/other.py")
    place.write("import sys; from .other import word; print(word, sys.argv, __name__, sys.path)", "package/module.py")
    traced = place.trace("package.module", "-x", module=True)
    assert (traced.code, traced.out) == place.plain("-m", "package.module", "-x")[:2]
    assert "relative" in traced.out


def test_nothing_is_imported_before_the_first_line_but_the_watcher(place):
    script = place.write("import sys; print(*sys.modules)")
    more = set(place.trace(script).out.split()) - set(place.plain(script)[1].split())
    assert more <= {"multiback.tracing.entering", "__future__", "atexit"}


def test_a_variable_set_before_the_import_of_torch_counts(place):
    script = place.write("""
        import os, sys
        assert "torch" not in sys.modules
        os.environ["SET_BEFORE_IMPORT"] = "yes"
        import torch
        torch.backward()
        print(torch.seen)
    """)
    traced = place.trace(script)
    assert (traced.out, traced.err) == ("yes\n", "")
    assert traced.record.sites[0].calls == 1


@pytest.mark.parametrize("rest", ["print('mine', file=sys.stderr)", "raise ValueError('mine')"])
def test_a_sitecustomize_that_was_there_still_runs(place, rest):
    place.write(f"import sys; sys.kept = 1; {rest}", "mine/sitecustomize.py")
    place.path.insert(0, str(place.program / "mine"))
    script = place.write("import sys; print(sys.kept, sys.path)")
    traced = place.trace(script)
    code, out, err = place.plain(script)
    assert (traced.code, traced.out) == (code, out)
    assert err
    assert traced.err.startswith(err)


def test_without_a_sitecustomize_none_is_missed(place):
    place.path = []
    traced = place.trace(place.write("print('fine')"))
    assert traced.out == "fine\n"
    assert traced.err.startswith("multiback: nothing was recorded: no process of the program imported torch")


def test_flags_of_the_interpreter_are_passed_on(place):
    script = place.write("import sys; print(sys.flags, sys.warnoptions, sys._xoptions, sys.stdout.write_through)")
    flags = ["-O", "-u", "-W", "ignore::DeprecationWarning", "-X", "faulthandler"]
    assert place.trace(script, flags=flags).out == place.plain(*flags, script)[1]


ENDINGS = [
    ("sys.exit(0)", 0, "exit 0"),
    ("sys.exit(3)", 3, "exit 3"),
    ("raise KeyError(1)", 1, "KeyError"),
    ("sys.last_type = KeyError", 0, "exit 0"),
]


@pytest.mark.parametrize(("ending", "code", "ended"), ENDINGS)
def test_the_record_says_how_the_program_ended(place, ending, code, ended):
    output = place.folder / "record.json"
    traced = place.trace(place.write(f"{BACKWARD}\nimport sys\n{ending}"), "x", output=str(output))
    assert traced.code == code
    assert traced.record.ended == ended
    assert traced.record.program == ["script.py", "x"]
    assert traced.record.processes == 1
    assert traces.load(output) == traced.record
    assert sorted(path.name for path in place.folder.iterdir()) == ["program", "record.json", "shown.json"]


def test_a_program_that_imports_torch_and_does_nothing_has_a_record(place):
    assert place.trace(place.write("import torch")).record.sites == []


def test_a_killed_program_gives_128_and_its_signal(place):
    traced = place.trace(place.write(f"{BACKWARD}\nimport os; os.kill(os.getpid(), 9)"))
    assert traced.code == 137
    assert traced.record is None
    assert "signal 9 ended the program before it could write" in traced.err


def test_children_of_a_killed_program_are_recorded(place):
    script = place.write(f"""
        import os, subprocess, sys
        {BACKWARD}
        subprocess.run([sys.executable, "-c", {BACKWARD!r}], check=True)
        os.kill(os.getpid(), 9)
    """)
    record = place.trace(script).record
    assert (record.processes, record.ended, record.program) == (1, "signal 9", ["script.py"])


@pytest.mark.parametrize(
    ("end", "ended", "lost"),
    [("os.kill(os.getpid(), 15)", "signal 15", True), ("os._exit(3)", "exit 3", True), ("pass", "exit 0", False)],
)
def test_what_was_kept_on_the_way_is_there_when_a_signal_ends_the_program(place, monkeypatch, end, ended, lost):
    monkeypatch.setenv("STAND_IN_KEEPS", "1")
    record = place.trace(place.write(f"import os; {BACKWARD}; torch.backward(); {end}")).record
    assert (record.sites[0].calls, record.ended) == (2, ended)
    assert (["ended without a word" in text for text in record.unobserved] == [True]) == lost


CHILDREN = {
    "subprocess": f"subprocess.run([sys.executable, '-c', {BACKWARD!r}], check=True)",
    "fork": "started('fork')",
    "spawn": "started('spawn')",
    "forkserver": "started('forkserver')",
    "pool": "pooled('fork')",
    "spawned pool": "pooled('spawn')",
    "executor": "concurrent.futures.ProcessPoolExecutor(1).submit(work).result()",
    "os.fork": "forked()",
    "torch in the child alone": "del sys.modules['torch']; started('spawn')",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_counts_as_a_process(place, name):
    script = place.write(f"""
        import concurrent.futures, multiprocessing, os, subprocess, sys
        import torch
        def work(): torch.backward()
        def started(method):
            child = multiprocessing.get_context(method).Process(target=work)
            child.start(); child.join(); assert child.exitcode == 0
        def pooled(method):
            with multiprocessing.get_context(method).Pool(1) as pool: pool.apply(work)
        def forked():
            child = os.fork()
            if not child: work(); sys.exit()
            os.waitpid(child, 0)
        if __name__ == "__main__":
            torch.backward()
            {CHILDREN[name]}
    """)
    traced = place.trace(script)
    assert (traced.code, traced.err) == (0, "")
    assert traced.record.processes == 2
    assert [site.calls for site in traced.record.sites] == [2]


def test_a_child_that_asks_for_no_gradients_counts_as_none(place):
    script = place.write("""
        import multiprocessing, torch
        torch.backward()
        child = multiprocessing.get_context("fork").Process(target=print, args=("loads data",), daemon=True)
        child.start(); child.join()
    """)
    record = place.trace(script).record
    assert (record.processes, [site.calls for site in record.sites]) == (1, [1])


def test_a_child_that_outlives_the_program_is_waited_for(place):
    child = f"{BACKWARD}; print('ready', flush=True); import sys; sys.stdin.read()"
    script = place.write(f"""
        import subprocess, sys, torch
        child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        child.returncode = 0  # left alone; its input ends with this process
    """)
    assert place.trace(script).record.sites


def test_the_most_steps_reach_the_recorder(place):
    assert place.trace(place.write(BACKWARD), max_steps=7).record.versions["max_steps"] == "7"
    assert place.trace(place.write(BACKWARD)).record.versions["max_steps"] == "None"


IMPORTS = {
    "after an import that failed": """
        import os
        os.environ["STAND_IN_FAILS"] = "1"
        try: import torch
        except ImportError: del os.environ["STAND_IN_FAILS"]
        import torch
    """,
    "in a thread": """
        import threading
        def load(): global torch; import torch
        thread = threading.Thread(target=load); thread.start(); thread.join()
    """,
    "in two threads": """
        import threading
        def load(): global torch; import torch
        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """,
    "after a look at its spec": """
        import importlib.util
        assert importlib.util.find_spec("torch").loader.is_package("torch")
        import torch
    """,
    "through a finder that asks the others": """
        import importlib.util, sys
        class Finder:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if self.busy: return None
                self.busy = True
                try: return importlib.util.find_spec(name)
                finally: self.busy = False
        sys.meta_path.append(Finder()); sys.meta_path.insert(0, Finder())
        import torch
    """,
    "lazily": """
        import importlib.util, sys
        spec = importlib.util.find_spec("torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        torch = sys.modules["torch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(torch)
        torch.seen
    """,
    "and reloaded": """
        import importlib, torch
        kept = torch.watchers
        importlib.reload(torch)
        assert torch.watchers == []
        torch.watchers = kept
    """,
}


@pytest.mark.parametrize("name", IMPORTS)
def test_torch_is_noticed_once_when_imported(place, name):
    text = textwrap.dedent(IMPORTS[name]) + "\ntorch.backward(); torch.backward(); assert len(torch.watchers) == 1"
    traced = place.trace(place.write(text))
    assert (traced.code, traced.err) == (0, "")
    assert traced.record.sites[0].calls == 2


def test_a_fault_of_the_recorder_is_one_line_and_the_program_goes_on(place):
    place.environment["STAND_IN_BREAKS"] = "1"
    traced = place.trace(place.write(f"{BACKWARD}\nprint('goes on')"))
    assert (traced.code, traced.out) == (0, "goes on\n")
    first, second = traced.err.splitlines()
    assert first == "multiback: this process is not recorded (RuntimeError: the stand-in breaks)."
    assert second.startswith("multiback: nothing was recorded")


def test_ctrl_c_ends_the_program_and_not_the_report(place):
    script = place.write(f"{BACKWARD}\nprint('ready', flush=True)\nwhile True: pass")
    process = place.start(script, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    traced = place.end(process)
    assert traced.code == 130
    assert traced.record.ended == "KeyboardInterrupt"
    assert traced.record.sites[0].calls == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_are_passed_on(place, number):
    script = place.write(f"""
        import signal, sys
        signal.signal({int(number)}, lambda number, frame: sys.exit(number))
        {BACKWARD}
        print("ready", flush=True)
        while True: pass
    """)
    process = place.start(script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    traced = place.end(process)
    assert traced.code == number
    assert traced.record.ended == f"exit {int(number)}"


def test_a_signal_that_is_ignored_stays_so(place):
    script = place.write("import signal; print(signal.getsignal(signal.SIGHUP))")
    process = place.start(script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert place.end(process).out == "1\n"


def test_an_isolated_interpreter_is_named_as_the_reason(place):
    traced = place.trace(place.write("print('runs')"), flags=["-I"])
    assert (traced.code, traced.out) == (0, "runs\n")
    assert (
        traced.err
        == "multiback: nothing was recorded: python ran with -I, which keeps the recorder out; leave it away.\n"
    )


def arguments(**given):
    standard = {"program": ["script.py"], "module": True, "output": None, "max_steps": None, "force": False}
    return launcher.TraceArguments(**standard | given)


BAD = [
    ({"program": []}, TargetError, "trace: takes a script or -m and a module; got nothing"),
    ({"program": ["no.py"], "module": False}, TargetError, "no.py: a program must be a script that exists"),
    ({"program": ["-c"], "module": False}, TargetError, "-c: a program must be a script"),
    ({"max_steps": 0}, OptionError, "--max-steps: must be 1 or more; got 0"),
    ({"output": Path(__file__)}, OutputError, "exists already and is kept"),
]


@pytest.mark.parametrize(("given", "error", "text"), BAD)
def test_bad_arguments_are_refused_before_anything_runs(given, error, text):
    with pytest.raises(error, match=text):
        launcher.run(arguments(**given), lambda _record: pytest.fail("nothing was to run"))


def test_a_trace_inside_a_trace_records_its_own_program(place):
    place.write(BACKWARD, "inner.py")
    given = arguments(program=["inner.py"], module=False).__dict__
    given |= {"shown": str(place.folder / "inner.json")}
    script = place.write(f"""
        import subprocess, sys
        {BACKWARD}
        subprocess.run([sys.executable, {str(PROGRAMS / "drive.py")!r}, {json.dumps(given)!r}], check=True)
    """)
    assert place.trace(script).record.processes == 1
    assert traces.load(place.folder / "inner.json").program == ["inner.py"]


def test_with_torch_itself_calls_and_children_are_recorded(place):
    place.path = []
    script = place.write("""
        import multiprocessing, sys
        assert "torch" not in sys.modules
        import torch
        def work():
            weight = torch.ones(2, requires_grad=True)
            (weight * weight).sum().backward()
        work()
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start(); child.join()
        sys.exit(3)
    """)
    traced = place.trace(script)
    assert (traced.code, traced.err) == (3, "")
    assert (traced.record.processes, traced.record.ended) == (2, "exit 3")
    assert [site.calls for site in traced.record.sites] == [2]
    assert traced.record.sites[0].place.line == 7
    assert traced.record.faults == []
