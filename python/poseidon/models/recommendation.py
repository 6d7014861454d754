"""DLRM: nearly all parameters lie in embeddings, of which one iteration touches few rows."""

from __future__ import annotations

from itertools import pairwise

from poseidon.models.table import ModelTable, TableBuilder

_TABLES, _ROWS, _WIDTH = 4, 1_000_000, 16
_CLICKS = 1024
_BOTTOM, _TOP = (13, 512, 256, 64, _WIDTH), (512, 256, 1)
# How often the values of a categorical feature occur: few very often, most hardly ever. Assumed.
_CLICK_EXPONENT = 1.05
# Naumov et al., Deep Learning Recommendation Model, §5.2: 1,000 batches of 2,048 take 62 s on one V100 with Caffe2.
_SECONDS_PER_SAMPLE = 62 / (1000 * 2048)
_SOURCE = (
    "DLRM §5.2: 62 s for 1,000 batches of 2,048 samples on one V100, by samples; "
    "that model has 8 tables of 10⁶ × 64 and wider layers"
)


def dlrm() -> ModelTable:
    """DLRM with 4 tables of 10⁶ × 16, on 1,024 clicks: 64.30 M parameters, 99.5 % of them in the tables.

    The multilayer perceptrons are those of the authors' benchmark on Criteo's Kaggle data
    (`bench/dlrm_s_criteo_kaggle.sh` of facebookresearch/dlrm): 13-512-256-64-16 below, 512-256-1 above. A click looks
    up one row of each table, by a Zipf law with exponent 1.05.
    """
    builder = TableBuilder()
    for index, (inputs, outputs) in enumerate(pairwise(_BOTTOM)):
        builder.fc(f"bottom.{index}", inputs, outputs)
    for index in range(_TABLES):
        builder.embedding(f"tables.{index}", _ROWS, _WIDTH, 1, _CLICK_EXPONENT)
    # The products of each pair of the tables' rows and the bottom's output go on with that output.
    pair_count = _TABLES * (_TABLES + 1) // 2
    builder.work(2 * _WIDTH * pair_count)
    for index, (inputs, outputs) in enumerate(pairwise((_WIDTH + pair_count, *_TOP))):
        builder.fc(f"top.{index}", inputs, outputs)
    return ModelTable("DLRM", tuple(builder.layers), _CLICKS, _CLICKS * _SECONDS_PER_SAMPLE, _SOURCE, sample="click")
