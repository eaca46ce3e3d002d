"""What scripts import from `deepspeed.runtime.zero`: the memory estimators of stages 2 and 3."""
