"""Operators under the names of `deepspeed.ops`."""
