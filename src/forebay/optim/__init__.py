"""Update rules, the one arithmetic behind them, and what decides the scale of a gradient.

[Note: one arithmetic] The torch code here (`reference`, `squares`, `master`) defines every bit
of an update. The native core and the Triton kernels are faster ways to the same bits, and the
tests compare them bit for bit. So each operation is a separately rounded IEEE binary32 or
binary64 operation in a stated order: no fused multiply-add, no reciprocal in place of a division,
no flushed subnormals. NaN payloads are outside the promise.
"""
