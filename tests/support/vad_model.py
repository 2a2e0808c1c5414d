"""Writes a voice activity model with the interface of Silero's, to test how it is used."""

from __future__ import annotations

from pathlib import Path


def write_model(path: Path, *, state_name: str = "state") -> Path:
    """Write a model with the interface of Silero's.

    Its probability is the first sample that it gets, plus the number of windows before.
    """
    from onnx import TensorProto, ValueInfoProto, helper, save

    def value(name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def integers(name: str, values: list[int]) -> TensorProto:
        return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)

    graph = helper.make_graph(
        [
            helper.make_node("Slice", ["input", "from", "to", "second"], ["first"]),
            helper.make_node("ReduceMax", [state_name], ["number"], axes=[0, 2], keepdims=0),
            helper.make_node("Unsqueeze", ["number", "second"], ["column"]),
            helper.make_node("Add", ["first", "column"], ["output"]),
            helper.make_node("Cast", ["sr"], ["rate"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["rate", "rate"], ["one"]),
            helper.make_node("Add", [state_name, "one"], ["stateN"]),
        ],
        "vad",
        [
            value("input", [1, "samples"]),
            value(state_name, [2, 1, 128]),
            value("sr", [], TensorProto.INT64),
        ],
        [value("output", [1, 1]), value("stateN", [2, 1, 128])],
        [integers("from", [0]), integers("to", [1]), integers("second", [1])],
    )
    opset = helper.make_opsetid("", 13)
    save(helper.make_model(graph, opset_imports=[opset], ir_version=8), str(path))
    return path
