"""Where bytes live: the ledger that counts them and the memories that hold them.

Not the transfers between tiers (`forebay.links`) and not the decision what goes where
(`forebay.plan`).
"""
