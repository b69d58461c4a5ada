"""Converts the graph of a custom loss to a CustomLoss. The SDK traces the graph with torch.fx and sends it as JSON.

Everything in the graph is data: a call is a name from app/domain/losses.py; an argument is a constant from a
closed set, or the result of an earlier call. This module refuses any graph that is not provably so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.domain import losses, ops
from app.domain.losses import BUDGET, FUNCTION, METHOD, CustomLoss, LossCall, LossInput
from app.errors import BadRequest

MAX_NODES = 512
"""Most nodes of a graph: calls, inputs and the output together. A DPO loss has about 20."""
MAX_BYTES = 128 * 1024
"""Most bytes of a loss in the journal. The journal stores the loss again with every forward_backward."""
MAX_INPUTS = 16
DOCS = "docs/custom-losses.md"

_MAX_DEPTH = 8
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_CONSTANTS: Mapping[str, frozenset[str]] = {
    "float": frozenset({"inf", "-inf", "nan"}),
    "dtype": losses.DTYPES,
    "device": frozenset({"cpu"}),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}


def parse(name: str, inputs: Sequence[Any], graph: Mapping[str, Any]) -> CustomLoss:
    """Parses the graph. Raises BadRequest naming the node at fault."""
    nodes = _nodes(graph)
    given = _inputs(inputs, nodes)
    reader = _Reader({entry.node for entry in given}, {given[0].node})
    calls = tuple(reader.call(node) for node in nodes[len(given) : -1])
    loss, metrics = reader.output(nodes[-1])
    custom = CustomLoss(name, given, calls, loss, metrics, BUDGET)
    size = len(ops.encode(custom))
    if size > MAX_BYTES:
        raise BadRequest(f"the graph takes {size} bytes; at most {MAX_BYTES} are allowed")
    return custom


def _nodes(graph: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The nodes, each with its five fields. Raises BadRequest."""
    if graph.get("format") != 1:
        raise BadRequest(f"graph.format {_shown(graph.get('format'))} is not supported; send 1")
    nodes = graph.get("nodes")
    if not isinstance(nodes, list) or not 2 <= len(nodes) <= MAX_NODES:
        got = f"{len(nodes)} of them" if isinstance(nodes, list) else type(nodes).__name__
        raise BadRequest(f"graph.nodes must be a list of 2 to {MAX_NODES} nodes (got {got})")
    for i, node in enumerate(nodes):
        if not isinstance(node, dict) or not all(isinstance(node.get(key), str) for key in ("op", "name", "target")):
            raise BadRequest(f"graph.nodes[{i}] must have the texts op, name and target")
        if not _NODE.fullmatch(node["name"]):
            raise BadRequest(f"graph.nodes[{i}]: name {_shown(node['name'])} is not an identifier")
        if not isinstance(node.get("args", []), list) or not isinstance(node.get("kwargs", {}), dict):
            raise _fault(node, "args must be a list and kwargs an object")
    names = [node["name"] for node in nodes]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise BadRequest(f"two nodes of the graph are named {twice!r}")
    return nodes


def _inputs(inputs: Sequence[Any], nodes: Sequence[Mapping[str, Any]]) -> tuple[LossInput, ...]:
    """The declared inputs. They must be the graph's first nodes, in order. Raises BadRequest."""
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise BadRequest(f"inputs: {len(inputs)} are declared; a loss takes 1 to {MAX_INPUTS}")
    found = []
    for i, entry in enumerate(inputs):
        name, rank = (entry.get("name"), entry.get("rank")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not _INPUT.fullmatch(name):
            raise BadRequest(f"inputs[{i}]: name {_shown(name)} is not a lowercase name")
        if type(rank) is not int or not (0 if i else 1) <= rank <= 2:
            raise BadRequest(f"inputs[{i}]: {name} has rank {_shown(rank)}; it must be {0 if i else 1} to 2")
        node = nodes[i] if i < len(nodes) else {}
        if (node.get("op"), node.get("target")) != ("placeholder", name) or node.get("args") or node.get("kwargs"):
            raise BadRequest(f"graph.nodes[{i}] must be the placeholder of inputs[{i}], {name}, without arguments")
        found.append(LossInput(name, rank, node["name"]))
    if found[0].name != "logprobs" or len({entry.name for entry in found}) < len(found):
        raise BadRequest("inputs must start with logprobs and name each input once")
    return tuple(found)


@dataclass(slots=True)
class _Reader:
    """Reads nodes in order. `known` holds the nodes read so far; `live` holds those of them that depend on logprobs."""

    known: set[str]
    live: set[str]
    refs: set[str] = field(default_factory=set)

    def call(self, node: Mapping[str, Any]) -> LossCall:
        op, target = node["op"], node["target"]
        if op not in (FUNCTION, METHOD):
            raise _fault(node, f"op {_shown(op)} is not allowed; a loss has only placeholders, calls and one output")
        if target not in (losses.FUNCTIONS if op == FUNCTION else losses.METHODS):
            what = "a function" if op == FUNCTION else "a tensor method"
            raise _fault(node, f"{_shown(target)} is not {what} that a custom loss may call; {DOCS} lists them")
        self.refs = set()
        args = node.get("args", [])
        if target == "getattr" and op == FUNCTION:
            encoded = self._attribute(node, args)
        else:
            encoded = tuple(self._value(node, value) for value in args)
        kwargs = {key: self._value(node, value) for key, value in node.get("kwargs", {}).items()}
        if bad := [key for key in kwargs if not _INPUT.fullmatch(key) or key == "out" or target == "getattr"]:
            raise _fault(node, f"the keyword argument {_shown(bad[0])} is not allowed")
        self.known.add(node["name"])
        if self.refs & self.live:
            self.live.add(node["name"])
        return LossCall(node["name"], op, target, encoded, kwargs)

    def output(self, node: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """(the node of the loss, the node of each metric)."""
        if node["op"] != "output":
            raise _fault(node, "the last node must be the output")
        match node.get("args"):
            case [
                {"tuple": [{"ref": str(loss)}, {"dict": dict(metrics)}]} | [{"ref": str(loss)}, {"dict": dict(metrics)}]
            ]:
                pass
            case _:
                raise _fault(node, "it must return the tuple (loss, metrics): a ref and a dict of refs")
        if loss not in self.live:
            raise _fault(node, f"the loss {_shown(loss)} is not an earlier node that depends on logprobs")
        return loss, {key: self._metric(node, key, value) for key, value in metrics.items()}

    def _metric(self, node: Mapping[str, Any], key: str, value: Any) -> str:
        if not _METRIC.fullmatch(key):
            raise _fault(node, f"metric {_shown(key)} must be custom/<name>:sum or custom/<name>:mean, in lowercase")
        match value:
            case {"ref": str(name)} if len(value) == 1 and name in self.known:
                return name
        raise _fault(node, f"metric {key} must be a ref to an earlier node")

    def _attribute(self, node: Mapping[str, Any], args: Sequence[Any]) -> tuple[Any, ...]:
        if len(args) != 2 or args[1] not in tuple(losses.ATTRIBUTES):
            allowed = ", ".join(sorted(losses.ATTRIBUTES))
            raise _fault(node, f"getattr takes a node and one of {allowed} (got {_shown(args[1:])})")
        return self._value(node, args[0]), args[1]

    def _value(self, node: Mapping[str, Any], value: Any, depth: int = 1) -> Any:
        """An argument with its lists as tuples, because the journal returns tuples. Raises BadRequest."""
        if depth > _MAX_DEPTH:
            raise _fault(node, f"an argument is nested more than {_MAX_DEPTH} deep")
        match value:
            case None | bool():
                return value
            case int() if -(2**63) <= value < 2**63:
                return value
            case float() if math.isfinite(value):
                return value
            case str() if value in losses.TEXTS:
                return value
            case list():
                return tuple(self._value(node, inner, depth + 1) for inner in value)
            case dict() if len(value) == 1:
                return self._object(node, value, depth)
        raise _fault(node, f"the argument {_shown(value)} is not allowed; {DOCS} lists the allowed texts and objects")

    def _object(self, node: Mapping[str, Any], value: Mapping[str, Any], depth: int) -> dict[str, Any]:
        ((kind, inner),) = value.items()
        match kind, inner:
            case "ref", str() if inner in self.known:
                self.refs.add(inner)
                return {kind: inner}
            case "ref", _:
                raise _fault(node, f"ref {_shown(inner)} does not name an earlier node")
            case "tuple", list():
                return {kind: self._value(node, inner, depth)}
            case "slice", list() if len(inner) == 3:
                return {kind: self._value(node, inner, depth)}
            case "dict", dict():
                return {kind: {key: self._value(node, part, depth + 1) for key, part in inner.items()}}
            case "ellipsis", True:
                return {kind: True}
            case _, str() if inner in _CONSTANTS.get(kind, ()):
                return {kind: inner}
        raise _fault(node, f"the argument {_shown(value)} is not allowed; {DOCS} lists the allowed ones")


def _fault(node: Mapping[str, Any], what: str) -> BadRequest:
    return BadRequest(f"graph node {node['name'][:80]!r}: {what}")


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
