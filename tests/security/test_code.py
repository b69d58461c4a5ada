"""No code of ours unpickles, evaluates or unpacks input, or passes a command string to a shell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.domain.checkpoints import CheckpointPrefix

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("app", "workers", "ops") for path in (ROOT / folder).rglob("*.py"))

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
"""Reading these formats runs code."""
METHODS = {"extract", "extractall", "unpack_archive"}
"""They write files where an archive says. Making one is fine."""
CALLS = {
    "tarfile.open",
    "tarfile.TarFile",
    "zipfile.ZipFile",
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
}
CALLS |= {"tarfile.open", "tarfile.TarFile", "zipfile.ZipFile"}
CALLS |= {"torch.load", "torch.save", "torch.jit.load", "yaml.load", "yaml.unsafe_load"}
ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code", "weights_only"}
"""Given with anything but False they run what they are given; weights_only belongs to torch.load."""


def findings(source: str) -> Iterator[str]:
    """Forbidden constructs in the code, each with its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"{node.lineno}: {name.name}" for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"{node.lineno}: {module}"
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{node.lineno}: {name.name}" for name in names if f"{module}.{name.name}" in CALLS)
            case ast.Call(func=func, keywords=keywords):
                if (called := ast.unparse(func)) in CALLS or called.rpartition(".")[2] in METHODS:
                    yield f"{node.lineno}: {called}"
                for keyword in keywords:
                    if keyword.arg in ARGUMENTS and ast.unparse(keyword.value) != "False":
                        yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


@pytest.mark.parametrize("folder", ["app", "workers", "ops"])
def test_no_file_of_ours_can_be_made_to_run_data(folder: str) -> None:
    files = [path for path in SOURCES if path.is_relative_to(ROOT / folder)]
    assert files
    found = {str(path.relative_to(ROOT)): bad for path in files if (bad := list(findings(path.read_text())))}
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import shelve",
        "from tarfile import open",
        "archive.extractall(folder)",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=settings.trust)",
        "subprocess.run(text, shell=True)",
        "eval(text)",
    ],
)
def test_the_check_sees_what_it_is_for(line: str) -> None:
    assert list(findings(line))


def test_a_base_model_is_read_from_safetensors_alone() -> None:
    """transformers falls back to pickled weights unless a flag forbids it."""
    loaders = [path for path in SOURCES if "workers" in path.parts and "from_pretrained(" in path.read_text()]
    for path in loaders:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                named = ast.unparse(node.func).removesuffix(".from_pretrained")
                weightless = named.startswith(("AutoConfig", "AutoTokenizer", "AutoImageProcessor", "GenerationConfig"))
                arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                safe = weightless or arguments.get("use_safetensors") == "True" or "gguf_file" in arguments
                assert safe, (path.name, node.lineno)
    assert loaders


def test_no_pattern_takes_digits_of_other_scripts() -> None:
    r"""In Python \d also matches an Arabic or a fullwidth digit, which int() reads as well: one id in two spellings."""
    assert [path for path in SOURCES if re.search(r"\\d(?![a-z])", path.read_text())] == []
    assert CheckpointPrefix.parse("models/m/weights/a/1-2") is not None
    assert CheckpointPrefix.parse("models/m/weights/a/1-\u0662") is None
