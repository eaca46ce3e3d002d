"""Rows of published figures, for `tools/plan_claims.py`."""
