"""Writes tiny networks that encode a voice.

They have the inputs and outputs of the released networks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from duplane.worker.models.minicpm_o.vocoder.voice import SPEAKER_FILE, TOKENIZER_FILE

CODES = 64
CODE_STEP = 100
SPEAKER_WIDTH = 192
OPSET, IR_VERSION = 17, 9


def write_voice_networks(folder: Path, seed: int = 0, code_step: int = CODE_STEP) -> None:
    """Write both networks with random weights. All speech tokens are multiples of `code_step`."""
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=(CODES, 128, 4)).astype(np.float32)
    _save(_tokenizer(weight, code_step), folder / TOKENIZER_FILE)
    matrix = draw.normal(size=(80, SPEAKER_WIDTH)).astype(np.float32)
    _save(_speaker(matrix), folder / SPEAKER_FILE)


def _tokenizer(weight: np.ndarray, code_step: int) -> onnx.GraphProto:
    """Build a convolution over four frames. The index of its strongest channel gives the token.

    Tokens of padding are cut off.
    """
    values = {
        "weight": weight,
        "three": np.array([3], np.int32),
        "four": np.array([4], np.int32),
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "step": np.array([code_step], np.int64),
    }
    nodes = [
        helper.make_node("Conv", ["feats", "weight"], ["scores"], strides=[4], pads=[0, 3]),
        helper.make_node("ArgMax", ["scores"], ["codes"], axis=1, keepdims=0),
        helper.make_node("Mul", ["codes", "step"], ["all"]),
        helper.make_node("Add", ["feats_length", "three"], ["padded"]),
        helper.make_node("Div", ["padded", "four"], ["short"]),
        helper.make_node("Cast", ["short"], ["count"], to=TensorProto.INT64),
        helper.make_node("Slice", ["all", "zero", "count", "one"], ["cut"]),
        helper.make_node("Cast", ["cut"], ["indices"], to=TensorProto.INT32),
    ]
    return helper.make_graph(
        nodes,
        "speech_tokenizer",
        [
            helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, 128, "frames"]),
            helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
        ],
        [helper.make_tensor_value_info("indices", TensorProto.INT32, [1, "tokens"])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )


def _speaker(matrix: np.ndarray) -> onnx.GraphProto:
    """Build a network that multiplies magnitudes by a matrix and averages over the frames."""
    nodes = [
        helper.make_node("Abs", ["input"], ["magnitude"]),
        helper.make_node("MatMul", ["magnitude", "matrix"], ["framewise"]),
        helper.make_node("ReduceMean", ["framewise"], ["output"], axes=[1], keepdims=0),
    ]
    return helper.make_graph(
        nodes,
        "campplus",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, "frames", 80])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, SPEAKER_WIDTH])],
        [numpy_helper.from_array(matrix, "matrix")],
    )


def _save(graph: onnx.GraphProto, path: Path) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
