"""A net's modules as TensorBoard's graph, without running the net."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from fitkit.random_states import random_state, set_random_state


def graph_of(net: nn.Module) -> tuple[Any, Any]:
    """TensorBoard's graph and (empty) measurements of a run.

    With arrows where torch.fx can follow the net's forward; else the modules alone.
    """
    from tensorboard.compat.proto.config_pb2 import RunMetadata
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.versions_pb2 import VersionDef

    # A forward may do anything while it is followed: whatever fails in it isn't our caller's.
    try:
        nodes = _followed(net)
    except Exception:
        nodes = _listed(net)
    return GraphDef(node=nodes, versions=VersionDef(producer=22)), RunMetadata()


def _node(name: str, operation: str, inputs: list[str]) -> Any:
    from tensorboard.compat.proto.node_def_pb2 import NodeDef

    return NodeDef(name=name, op=operation, input=inputs)


def _followed(net: nn.Module) -> list[Any]:
    """A node for each call, with arrows from what it takes."""
    state = random_state()
    try:
        graph = fx.Tracer().trace(_copied(net))
    finally:
        set_random_state(state)
    modules = dict(net.named_modules())
    names: dict[fx.Node, str] = {}
    used: set[str] = set()
    nodes = []
    for node in graph.nodes:
        if node.op == "call_module":
            name = str(node.target).replace(".", "/")
            operation = type(modules[str(node.target)]).__name__
        elif node.op == "get_attr":
            name, operation = str(node.target).replace(".", "/"), "Parameter"
        else:
            name = node.name
            target = node.target
            operation = target if isinstance(target, str) else getattr(target, "__name__", "call")
        if name in used:
            name = f"{name}_{node.name}"  # a module that is called again
        used.add(name)
        names[node] = name
        inputs = [names[one] for one in node.all_input_nodes]
        nodes.append(_node(name, str(operation), inputs))
    return nodes


def _copied(net: nn.Module) -> nn.Module:
    """The net without hooks, with the same parameters.

    To follow a forward calls it with stand-ins for tensors: what it stores or counts, and what
    hooks do with them, must not come to the net.
    """
    copied = copy.deepcopy(net, {id(parameter): parameter for parameter in net.parameters()})
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


def _listed(net: nn.Module) -> list[Any]:
    """A node for each module that has no others inside."""
    return [
        _node(name.replace(".", "/") or type(net).__name__, type(module).__name__, [])
        for name, module in net.named_modules()
        if not any(module.children())
    ]
