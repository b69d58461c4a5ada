#!/bin/sh
# Installs torch alone with the pip of an environment: `ops/install_torch.sh PYTHON [PIP OPTIONS]`. The packages that
# torch depends on are installed later: PyTorch's indexes do not have them in our versions.
#
# A machine without an NVIDIA driver (no nvidia-smi) gets PyTorch's CPU build, which saves gigabytes of CUDA libraries.
# If PyTorch's index cannot be reached, or if the caller gives pip options, pip uses its default index.
set -eu
python=$1
shift
constraints=${0%/*}/../constraints.txt

install() {
    "$python" -m pip --disable-pip-version-check --no-input install --quiet --no-deps -c "$constraints" "$@" torch
}

if [ $# -eq 0 ] && ! command -v nvidia-smi >/dev/null; then
    install --retries 2 --timeout 15 --index-url https://download.pytorch.org/whl/cpu && exit
    echo "PyTorch's CPU index cannot be used: taking pip's default build of torch" >&2
fi
install "$@"
