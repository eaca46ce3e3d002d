"""Ranks: who they are, what they exchange, in which order, and how one that is gone is noticed.

`torch.distributed` carries every byte; nothing here opens a socket.
"""
