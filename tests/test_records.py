"""Records go to disk and come back whole, or are refused in one sentence."""

import json
import os
import stat

import msgspec
import pytest

from multiback import records
from multiback.errors import OutputError, RecordError


def test_a_record_comes_back_from_json_as_it_was(full_record):
    assert records.decode(records.encode(full_record), "memory") == full_record


def test_the_json_names_the_problem_by_k_p_and_b_and_keeps_samples_as_columns(full_record):
    data = json.loads(records.encode(full_record))
    assert data["schema"] == "multiback.bench/1"
    assert {"K", "P", "B", "target", "shapes", "dtypes", "seed"} <= data["problem"].keys()
    columns = data["samples"]
    assert {"question", "way", "phase", "grads", "call_index", "process", "round", "order", "seconds"} <= columns.keys()
    assert {"cpu_seconds", "minor_faults", "involuntary_switches", "rss_bytes"} <= columns.keys()
    assert len({len(column) for column in columns.values()}) == 1


def test_a_written_record_has_the_permissions_of_an_ordinary_file(tmp_path, full_record):
    path = tmp_path / "run.json"
    records.write_atomically(path, records.encode(full_record))
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert records.load(path) == full_record
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("old")

    def refuse(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
        records.write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json", "a record must be JSON"),
        (b"[1, 2]", "the record's schema must be 'multiback.bench/1'; got None"),
        (b'{"schema": "multiback.bench/9"}', "got 'multiback.bench/9'"),
        (b'{"schema": "multiback.bench/1"}', "the record is damaged"),
        (b"\xff\xfe", "a record must be JSON"),
    ],
)
def test_what_is_no_record_is_refused_by_name(data, message):
    with pytest.raises(RecordError, match=r"run\.json") as caught:
        records.decode(data, "run.json")
    assert message in str(caught.value)


def test_columns_of_unequal_length_are_refused(full_record):
    data = json.loads(records.encode(full_record))
    data["samples"]["seconds"].pop()
    with pytest.raises(RecordError, match="equally long"):
        records.decode(json.dumps(data).encode(), "run.json")


def test_a_missing_record_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"cannot be read \(No such file or directory\)"):
        records.load(tmp_path / "none.json")


def test_an_existing_output_is_kept_unless_forced(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("precious")
    with pytest.raises(OutputError, match=r"exists already and is kept\. Add --force"):
        records.check_writable(path, force=False)
    records.check_writable(path, force=True)
    assert path.read_text() == "precious"


def test_a_folder_as_output_is_refused(tmp_path):
    with pytest.raises(OutputError, match="this is a folder"):
        records.check_writable(tmp_path, force=True)


def test_a_device_or_pipe_as_output_is_refused_and_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="must be a regular file"):
        records.check_writable(tmp_path / "pipe", force=True)


def test_a_symbolic_link_stays_one_and_its_file_is_written(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    records.check_writable(tmp_path / "link.json", force=False)
    records.write_atomically(tmp_path / "link.json", b"data")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"data"


def test_an_output_in_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        records.check_writable(tmp_path / "no" / "run.json", force=False)


def test_an_output_where_nothing_can_be_written_is_refused_before_the_work():
    with pytest.raises(OutputError, match="nothing can be written in /proc"):
        records.check_writable(records.Path("/proc/run.json"), force=False)


def test_a_partial_record_says_so(full_record):
    run = msgspec.structs.replace(full_record.run, partial=True)
    partial = msgspec.structs.replace(full_record, run=run)
    assert json.loads(records.encode(partial))["run"]["partial"] is True
