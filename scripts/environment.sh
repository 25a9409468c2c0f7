#!/bin/sh
# Brings an environment up to date for one purpose, and does nothing when it is so already:
#
#   scripts/environment.sh runtime    .venv: multiback and what it needs to run
#   scripts/environment.sh setup      .venv: that, the test group and every extra
#   scripts/environment.sh docs       .venv: what builds the documentation, without torch
#   scripts/environment.sh peers      .venv-peers: multiback, and the libraries that benchmarks/ compares it with
#
# PYTHON is the interpreter that makes them; TORCH, a requirement on torch, replaces the pinned one.
# POSIX sh rather than Python, because the first thing it finds out is whether there is a Python.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-}
purpose=${1:-}
# The peers have requirements of their own, which must not decide what development runs on.
venv=.venv
[ "$purpose" != peers ] || venv=.venv-peers
python=$venv/bin/python
unfinished=$venv/unfinished
place=$venv/made-in
constraints=constraints.txt

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

say() {
    printf '%s\n' "$*"
}

# A stamp holds all that an install depends on, so that a checkout that touches files without
# changing them installs nothing, and a changed TORCH does.
wanted() {
    printf '%s\n' "$TORCH"
    cat pyproject.toml constraints.txt src/multiback/_version.py scripts/environment.sh
}

current() {
    [ -f "$venv/stamp-$1" ] && wanted | cmp -s - "$venv/stamp-$1"
}

finished() {
    wanted >"$venv/stamp-$1.new"
    mv "$venv/stamp-$1.new" "$venv/stamp-$1"
}

recent_enough='import sys; sys.exit(sys.version_info < (3, 10))'

# The commands in an environment name its path, so that one that was moved would run those of another.
runs() {
    [ ! -e "$unfinished" ] &&
        { [ ! -e "$place" ] || [ "$(cat "$place")" = "$root" ]; } &&
        "$python" -c "$recent_enough" >/dev/null 2>&1
}

check_python() {
    command -v "$PYTHON" >/dev/null 2>&1 ||
        die "multiback needs Python 3.10 or newer, but there is no $PYTHON:" \
            "install one (on Debian or Ubuntu: sudo apt install python3 python3-venv), or name it," \
            "as in: make PYTHON=/path/to/python3 setup"
    version=$("$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>&1) || version=
    version=${version#Python }
    case $version in
        [12].* | 3.[0-9].*)
            die "multiback needs Python 3.10 or newer, but $PYTHON is Python $version:" \
                "install a newer one and name it, as in: make PYTHON=/path/to/python3 setup"
            ;;
        [3-9].*) ;;
        *)
            die "multiback needs Python 3.10 or newer, but $PYTHON does not answer as one:" \
                "name another, as in: make PYTHON=/path/to/python3 setup"
            ;;
    esac
    # Debian ships venv without ensurepip, and then leaves a half-made environment behind.
    "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$PYTHON cannot make virtual environments, because its venv or ensurepip module is missing:" \
            "sudo apt install python3-venv"
}

make_venv() {
    check_python
    if [ -e "$venv" ] || [ -L "$venv" ]; then
        say "$venv is incomplete, was moved, or lacks a Python that runs; making it again."
        rm -rf "$venv"
    fi
    say "Making $venv."
    mkdir "$venv"
    : >"$unfinished"
    # On failure Python's own words come first: it may also be a full disk.
    "$PYTHON" -m venv "$venv" ||
        die "$PYTHON could not make the virtual environment $venv; if its venv module is what is missing:" \
            "sudo apt install python3-venv"
}

# pip replaces its own files here, so an interruption leaves an environment to make again.
pin_pip() {
    pinned=$(sed -n 's/^pip==\([^ ;]*\).*/\1/p' constraints.txt)
    case $("$python" -m pip --version) in
        "pip $pinned "*) ;;
        *)
            : >"$unfinished"
            "$python" -m pip install --quiet --disable-pip-version-check "pip==$pinned"
            ;;
    esac
    printf '%s\n' "$root" >"$place"
    rm -f "$unfinished"
}

prepare_venv() {
    if ! runs || ! "$python" -m pip --version >/dev/null 2>&1; then
        make_venv
    fi
    pin_pip
}

pip_install() {
    "$python" -m pip install --disable-pip-version-check --constraint "$constraints" \
        --build-constraint constraints.txt "$@"
}

check_torch() {
    case $TORCH in
        '' | torch | torch[!A-Za-z0-9_.-]* | *torch-*.whl) ;;
        *) die "TORCH must be a requirement on torch, such as torch==2.14.1, or a wheel of it, but it is '$TORCH'." ;;
    esac
}

choose_constraints() {
    if [ -n "$TORCH" ]; then
        constraints=$venv/constraints-without-torch.txt
        sed '/^# torch, /,/^$/d' constraints.txt >"$constraints"
    fi
}

install_runtime() {
    # Whatever is installed next may change what the other stamps stand for.
    rm -f "$venv"/stamp-*
    "$python" scripts/torch_build.py "${TORCH:-torch}" "$constraints"
    say "Installing multiback and what it needs to run."
    pip_install --editable . ${TORCH:+"$TORCH"}
    finished runtime
}

install_setup() {
    # Asked of the installed package, since Python 3.10 has no reader for pyproject.toml.
    extras=$("$python" -c '
from importlib.metadata import metadata
print(",".join(metadata("multiback").get_all("Provides-Extra") or []))')
    say "Installing the test group${extras:+ and the extras $extras}."
    pip_install --quiet --group test --editable ".${extras:+[$extras]}" ${TORCH:+"$TORCH"}
    finished setup
}

install_peers() {
    say "Installing the libraries that the benchmarks compare with."
    pip_install --quiet --group peers --editable . ${TORCH:+"$TORCH"}
    # BackPACK asks for torchvision, which only its example data sets import, and whose builds fit one
    # build of torch each: beside a CPU build of torch the usual torchvision cannot be imported.
    pip_install --quiet --no-deps --group peers-alone
    finished peers
}

install_docs() {
    say "Installing what builds the documentation."
    pip_install --quiet --group docs
    finished docs
}

case $purpose in
    runtime | docs) steps=$purpose ;;
    setup | peers) steps="runtime $purpose" ;;
    *) die "usage: scripts/environment.sh runtime|setup|docs|peers" ;;
esac

pending=
for step in $steps; do
    if ! runs || ! current "$step"; then
        pending="$pending $step"
    fi
done
[ -n "$pending" ] || exit 0

check_torch
prepare_venv
choose_constraints
for step in $pending; do
    "install_$step"
done
