"""The environment record holds what a reader needs, on machines that hide some of it too."""

from pathlib import Path

import multiback
from multiback.measure import environment


def test_the_environment_names_versions_processor_and_threads():
    found = environment.describe(threads=2, device="cpu")
    assert found.versions["multiback"] == multiback.__version__
    assert found.versions["torch"].startswith("2.")
    assert found.cpu
    assert found.cores >= 1
    assert found.threads == 2
    assert len(found.load_before) == 3


def test_allocator_settings_of_the_environment_are_recorded(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "123")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    found = environment.describe(threads=1, device="cpu")
    assert found.allocator_settings["MALLOC_TRIM_THRESHOLD_"] == "123"
    assert found.allocator == "jemalloc"


def test_a_system_without_proc_or_sys_still_gets_a_record(monkeypatch):
    read = Path.read_text

    def refuse(path, *args, **kwargs):
        if path.parts[1] in ("proc", "sys"):
            raise OSError
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    found = environment.describe(threads=1, device="cpu")
    assert found.transparent_huge_pages == "unknown"
    assert found.cores >= 1


def test_a_package_that_is_not_installed_has_an_unknown_version():
    assert environment._version("no-such-package") == "unknown"
