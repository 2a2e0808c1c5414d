"""Writes the vocoder's flow.yaml: the layout of the released file, with other dimensions."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class FlowDims:
    """The dimensions that differ between flow models: the encoder's and the estimator's."""

    width: int
    heads: int
    inner: int
    blocks: int
    up_blocks: int
    estimator_width: int
    estimator_heads: int
    estimator_head_width: int
    estimator_depth: int


# The tags are the class names of the released model.
_LAYOUT = """\
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
  input_size: {width}
  output_size: 80
  spk_embed_dim: 192
  output_type: 'mel'
  vocab_size: 6561
  encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
    input_size: {width}
    output_size: {width}
    input_layer: 'linear'
    pre_lookahead_len: 3
    num_blocks: {blocks}
    num_up_blocks: {up_blocks}
    up_stride: 2
    up_scale_factor: 2
    attention_heads: {heads}
    pos_enc_layer_type: 'rel_pos_espnet'
    selfattention_layer_type: 'rel_selfattn'
    key_bias: true
    linear_units: {inner}
    dropout_rate: 0.1
    positional_dropout_rate: 0.1
    attention_dropout_rate: 0.1
    normalize_before: True
  decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
    inference_cfg_rate: 0.7
    estimator: !new:cosyvoice2.flow.decoder_dit.DiT
      in_channels: 320
      out_channels: 80
      mlp_ratio: 4.0
      depth: {estimator_depth}
      num_heads: {estimator_heads}
      head_dim: {estimator_head_width}
      hidden_size: {estimator_width}
"""


def flow_yaml(dims: FlowDims) -> str:
    """Write the file for these dimensions."""
    return _LAYOUT.format(**asdict(dims))
