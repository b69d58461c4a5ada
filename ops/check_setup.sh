#!/bin/sh
# `ops/check_setup.sh PYTHON version` ends with the remedy where Tinsmith cannot use this Python.
# `ops/check_setup.sh PYTHON torch` does so where its build of torch is not the one that the tests need on a CPU.
# Both do so on a system that is not Linux.
set -eu
python=$1

fail() {
    echo "$*" >&2
    exit 1
}

system=$(uname -s)
[ "$system" = Linux ] ||
    fail "The server of Tinsmith runs on Linux, and this is $system. Run it in containers (docs/containers.md) or on" \
        "another machine. Clients run here: \`pip install tinker\`"

case $2 in
version)
    found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python $found is too old: Tinsmith needs 3.11 or newer. Run \`make clean\`, and then the first command with" \
            "a newer one, such as \`make setup PYTHON=python3.11\`"
    ;;
torch)
    found=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
    case $found in
    *+cpu) ;;
    *)
        fail "The tests install vLLM's CPU build, which needs a CPU build of torch, and this environment has torch" \
            "$found. Run \`make test TORCH_ARGS=\"--index-url URL\"\` in another clone, or after \`make clean\`. URL is an" \
            "index of such builds, as in ops/install_torch.sh. To test a GPU itself, run \`make gpu-check\`"
        ;;
    esac
    ;;
esac
