"""Training data: from files to micro-batches with labels.

    sources   files -> rows                  samples   rows -> what they say
    render    samples -> text                tokenize  text -> ids
    tokens    all ids of a data set          rows      which ids stand together, and held-out rows
    batches   tensors by position            entropy   how predictable a text is

It knows no engine and no configuration.
"""

from __future__ import annotations

from forebay.data.batches import Batches, BatchShape, MicroBatch, Position, Window
from forebay.data.entropy import ByteEntropy, byte_entropy
from forebay.data.rows import Layout, Overlong, Rows, plan_rows, split_rows
from forebay.data.samples import Schema
from forebay.data.sources import DataFiles, open_files
from forebay.data.tokenize import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from forebay.data.tokens import TokenStore, build_store

__all__ = [
    "BatchShape",
    "Batches",
    "ByteEntropy",
    "ByteTokenizer",
    "DataFiles",
    "Layout",
    "MicroBatch",
    "Overlong",
    "Position",
    "Rows",
    "Schema",
    "TokenStore",
    "Tokenizer",
    "Window",
    "build_store",
    "byte_entropy",
    "check_vocabulary",
    "load_tokenizer",
    "open_files",
    "plan_rows",
    "split_rows",
]
