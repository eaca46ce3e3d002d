"""DeepSpeed's names and documented meanings over forebay's engine."""
