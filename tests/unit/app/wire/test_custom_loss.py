"""Graphs of custom losses: the valid and the invalid ones.

tests/unit/workers/backends/training/losses/test_custom.py runs the valid ones.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain import losses, ops
from app.domain.losses import CustomLoss
from app.errors import BadRequest
from app.wire import custom_loss
from app.wire.custom_loss import MAX_NODES
from tests.custom_losses import DPO_RANKS, SDFT_RANKS, body, dpo, parsed, sdft

Graph = dict[str, Any]
OUTPUT = {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "loss"}, {"dict": {}}]}]}


def node(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> Graph:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def graph(*calls: Graph, output: Graph = OUTPUT) -> Graph:
    """A graph: logprobs, the calls, `loss` = logprobs.sum(), the output."""
    start = node("logprobs", "logprobs", op="placeholder")
    last = node("loss", "sum", {"ref": "logprobs"}, op="call_method")
    return {"format": 1, "nodes": [start, *calls, last, output]}


def parse(sent: Graph, inputs: list[Any] | None = None) -> CustomLoss:
    return custom_loss.parse("loss", inputs or [{"name": "logprobs", "rank": 1}], sent)


@pytest.mark.parametrize(("fn", "ranks"), [(dpo, DPO_RANKS), (sdft, SDFT_RANKS)])
def test_what_the_sdk_sends_is_read_and_comes_back_from_the_journal_as_it_was(fn: Any, ranks: dict[str, int]) -> None:
    loss = parsed(fn, ranks)
    assert {given.name: given.rank for given in loss.inputs} == ranks
    assert ops.decode(ops.encode(loss)) == loss


def every_argument(logprobs: Tensor, input: Tensor) -> Any:
    rows = torch.zeros_like(input, dtype=torch.float64, device=torch.device("cpu"), layout=torch.strided)
    part = logprobs[..., 1:, None].clamp(-math.inf, math.inf) + torch.stack([input, input], -1)[1:]
    whole = part.contiguous(memory_format=torch.contiguous_format).sum(dim=(0, 1)) + rows.sum()
    return whole, {"custom/a.b/c-d_0:mean": whole}


def test_every_kind_of_argument_the_sdk_encodes_is_read() -> None:
    sent = json.dumps(body(every_argument, {"logprobs": 1, "input": 1}))
    kinds = ("ref", "tuple", "dict", "slice", "ellipsis", "float", "dtype", "device", "layout", "memory_format")
    assert [kind for kind in kinds if f'{{"{kind}": ' not in sent] == []
    loss = parsed(every_argument, {"logprobs": 1, "input": 1})
    assert [given.node for given in loss.inputs] == ["logprobs", "input_1"]


def test_the_page_a_refusal_points_to_lists_every_name() -> None:
    listed = set(re.findall(r"[\w.]+", (Path(__file__).parents[4] / custom_loss.DOCS).read_text()))
    short = {name.rpartition(".")[2].removeprefix("special_") for name in losses.FUNCTIONS - {"getattr"}}
    operators = {name for name in losses.OPERATORS if name != "abs"}
    written = (short - operators) | losses.METHODS | losses.ATTRIBUTES | losses.DTYPES | losses.TEXTS
    assert {name.replace("log_sigmoid", "logsigmoid") for name in written} - listed == set()


BAD_CALLS: dict[str, tuple[Graph, str]] = {
    "os.system": (node("a", "os.system", "ls"), "'os.system' is not a function.*docs/custom-losses.md"),
    "eval": (node("a", "builtins.eval", "1"), "'builtins.eval' is not a function"),
    "torch.load": (node("a", "torch.load", "x"), "'torch.load' is not a function"),
    "uninitialised memory": (node("a", "torch.empty", 5), "'torch.empty' is not a function"),
    "randomness": (node("a", "torch.rand", 5), "'torch.rand' is not a function"),
    "dunder": (node("a", "__class__", {"ref": "logprobs"}, op="call_method"), "'__class__' is not a tensor method"),
    "backward": (node("a", "backward", {"ref": "logprobs"}, op="call_method"), "'backward' is not a tensor method"),
    "item": (node("a", "item", {"ref": "logprobs"}, op="call_method"), "'item' is not a tensor method"),
    "in place": (node("a", "add_", {"ref": "logprobs"}, 1, op="call_method"), "'add_' is not a tensor method"),
    "a method as function": (node("a", "sum", {"ref": "logprobs"}), "'sum' is not a function"),
    "module": (node("a", "linear", {"ref": "logprobs"}, op="call_module"), "op 'call_module'"),
    "captured tensor": (node("a", "_tensor_constant0", op="get_attr"), "op 'get_attr'"),
    "late input": (node("a", "weights", op="placeholder"), "op 'placeholder'"),
    "two outputs": (OUTPUT | {"name": "a"}, "op 'output'"),
    "getattr of a text": (node("a", "getattr", {"ref": "logprobs"}, "__class__"), "getattr takes .* shape"),
    "getattr of a list": (node("a", "getattr", {"ref": "logprobs"}, ["shape"]), "getattr takes"),
    "getattr default": (node("a", "getattr", {"ref": "logprobs"}, "shape", 1), "getattr takes"),
    "getattr keyword": (
        node("a", "getattr", {"ref": "logprobs"}, "shape", default="data"),
        "keyword argument .default.|data",
    ),
    "ref forward": (node("a", "torch.exp", {"ref": "loss"}), "ref 'loss' does not name an earlier node"),
    "ref to itself": (node("a", "torch.exp", {"ref": "a"}), "ref 'a' does not name an earlier node"),
    "ref to nothing": (node("a", "torch.exp", {"ref": "gone"}), "ref 'gone'"),
    "ref of a number": (node("a", "torch.exp", {"ref": 1}), "ref 1"),
    "ref in a keyword": (node("a", "torch.sum", {"ref": "logprobs"}, dim={"ref": "b"}), "ref 'b'"),
    "two keys": (node("a", "torch.exp", {"ref": "logprobs", "x": 1}), "is not allowed"),
    "unknown object": (node("a", "torch.exp", {"pickle": "gASV"}), "'pickle'"),
    "unknown dtype": (node("a", "torch.exp", {"dtype": "complex128"}), "complex128"),
    "quantised dtype": (node("a", "torch.zeros", 2, dtype={"dtype": "qint8"}), "qint8"),
    "another device": (node("a", "to", {"ref": "logprobs"}, {"device": "cuda:0"}, op="call_method"), "cuda:0"),
    "device as text": (node("a", "to", {"ref": "logprobs"}, "cuda", op="call_method"), "'cuda'"),
    "meta device": (node("a", "torch.zeros", 2, device={"device": "meta"}), "meta"),
    "sparse layout": (node("a", "torch.zeros", 2, layout={"layout": "sparse_coo"}), "sparse_coo"),
    "memory format": (node("a", "torch.clone", {"memory_format": "channels_last"}), "channels_last|torch.clone"),
    "a long text": (node("a", "torch.exp", "x" * 10_000), "xxx"),
    "nan as it is": (node("a", "torch.full", 2, math.nan), "nan"),
    "float of a text": (node("a", "torch.exp", {"float": "1e400"}), "1e400"),
    "an integer of 65 bits": (node("a", "torch.zeros", 2**64), str(2**64)),
    "a short slice": (node("a", "operator.getitem", {"ref": "logprobs"}, {"slice": [1]}), "slice"),
    "out": (node("a", "torch.exp", {"ref": "logprobs"}, out={"ref": "logprobs"}), "keyword argument 'out'"),
    "odd keyword": (node("a", "torch.exp", **{"a-b": 1}), "keyword argument 'a-b'"),
    "no identifier": (node("a b", "torch.exp", {"ref": "logprobs"}), "'a b' is not an identifier"),
    "a name twice": (node("logprobs", "torch.exp", {"ref": "logprobs"}), "two nodes.*'logprobs'"),
    "args no list": (node("a", "torch.exp") | {"args": "x"}, "args must be a list"),
    "no target": ({"op": "call_function", "name": "a"}, "target"),
    "no object": (7, "op, name and target"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_call_that_is_not_allowed_is_refused_by_its_node(case: str) -> None:
    call, why = BAD_CALLS[case]
    with pytest.raises(BadRequest, match=why):
        parse(graph(call))


def test_nesting_is_bounded_without_recursing_far() -> None:
    deep: Any = {"ref": "logprobs"}
    for _ in range(500):
        deep = [{"tuple": [deep]}]
    with pytest.raises(BadRequest, match="nested more than"):
        parse(graph(node("a", "torch.stack", deep)))


def test_a_million_nodes_are_refused_before_they_are_read() -> None:
    with pytest.raises(BadRequest, match="1000000"):
        parse({"format": 1, "nodes": [None] * 1_000_000})
    most = [node(f"n{i}", "torch.exp", {"ref": "logprobs"}) for i in range(custom_loss.MAX_NODES - 3)]
    assert len(parse(graph(*most)).calls) == custom_loss.MAX_NODES - 2
    with pytest.raises(BadRequest, match=str(custom_loss.MAX_NODES)):
        parse(graph(*most, node("more", "torch.exp", {"ref": "logprobs"})))


def test_what_the_journal_holds_of_a_loss_is_bounded() -> None:
    with pytest.raises(BadRequest, match="bytes; at most"):
        parse(graph(node("a", "torch.zeros", list(range(10**5, 10**5 + 40_000)))))


def returning(*args: Any) -> Graph:
    return graph(output=OUTPUT | {"args": list(args)})


def metrics(**given: Any) -> Graph:
    return returning({"tuple": [{"ref": "loss"}, {"dict": {key.replace("__", ":"): v for key, v in given.items()}}]})


BAD_GRAPHS: dict[str, tuple[Graph, str]] = {
    "format": (graph() | {"format": 2}, "format 2"),
    "no nodes": ({"format": 1, "nodes": []}, "nodes must be a list"),
    "nodes an object": ({"format": 1, "nodes": {}}, "nodes must be a list"),
    "no text": (graph(output={"op": "output"}), r"nodes\[2\] must have the texts op, name and target"),
    "too many nodes": (
        {"format": 1, "nodes": [{}] * (MAX_NODES + 1)},
        f"of 2 to {MAX_NODES} nodes .got {MAX_NODES + 1}",
    ),
    "no output": (graph(output=node("a", "torch.exp", {"ref": "loss"})), "last node must be the output"),
    "returns nothing": (returning(), "tuple \\(loss, metrics\\)"),
    "returns the loss alone": (returning({"ref": "loss"}), "tuple \\(loss, metrics\\)"),
    "returns a number": (returning({"tuple": [1.0, {"dict": {}}]}), "tuple \\(loss, metrics\\)"),
    "returns what is not there": (returning({"tuple": [{"ref": "x"}, {"dict": {}}]}), "'x' is not an earlier node"),
    "metric without reduction": (metrics(custom={"ref": "loss"}), "metric 'custom' must be"),
    "metric of the trainer": (metrics(loss__sum={"ref": "loss"}), "metric 'loss:sum' must be"),
    "two colons": (metrics(**{"custom/a__b__sum": {"ref": "loss"}}), "custom/a:b:sum"),
    "metric a number": (metrics(**{"custom/a__sum": 1.0}), "custom/a:sum must be a ref"),
    "metric of nothing": (metrics(**{"custom/a__sum": {"ref": "x"}}), "custom/a:sum must be a ref"),
    "metric by max": (metrics(**{"custom/a__max": {"ref": "loss"}}), "custom/a:max"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_graph_of_another_shape_is_refused(case: str) -> None:
    sent, why = BAD_GRAPHS[case]
    with pytest.raises(BadRequest, match=why):
        parse(sent)


def test_a_loss_that_logprobs_do_not_go_into_is_refused() -> None:
    constant = node("c", "torch.zeros", 2)
    with pytest.raises(BadRequest, match="'c' is not an earlier node that depends on logprobs"):
        parse(graph(constant, output=OUTPUT | {"args": [{"tuple": [{"ref": "c"}, {"dict": {}}]}]}))


LOGPROBS = {"name": "logprobs", "rank": 1}
BAD_INPUTS: dict[str, tuple[list[Any], str]] = {
    "none": ([7], "inputs\\[0\\]"),
    "rank 0 logprobs": ([{"name": "logprobs", "rank": 0}], "rank 0"),
    "rank 3": ([{"name": "logprobs", "rank": 3}], "rank 3"),
    "rank true": ([{"name": "logprobs", "rank": True}], "rank True"),
    "another first": ([{"name": "weights", "rank": 1}], "placeholder of inputs\\[0\\]"),
    "one not in the graph": ([LOGPROBS, {"name": "weights", "rank": 1}], "placeholder of inputs\\[1\\], weights"),
    "capitals": ([{"name": "Logprobs", "rank": 1}], "lowercase"),
    "too many": ([LOGPROBS] * 17, "17 are declared"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_inputs_that_do_not_fit_the_graph_are_refused(case: str) -> None:
    inputs, why = BAD_INPUTS[case]
    with pytest.raises(BadRequest, match=why):
        parse(graph(), inputs)


def test_nothing_a_request_can_hold_gives_another_error_than_a_bad_request() -> None:
    """Every part of a good graph is replaced in turn by every kind of JSON."""
    good = body(dpo, DPO_RANKS)
    for path in paths(good["graph"]):
        for value in (None, True, -1, 2**70, 1.5, "", "x", [], [[]], {}, {"ref": []}, {"tuple": {}}, {"slice": [1, 2]}):
            spoiled = json.loads(json.dumps(good))
            put(spoiled["graph"], path, value)
            try:
                custom_loss.parse(spoiled["name"], spoiled["inputs"], spoiled["graph"])
            except BadRequest:
                continue


def paths(value: Any) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(key, *rest) for key, inner in entries for rest in [(), *paths(inner)]]


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new
