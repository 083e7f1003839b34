"""Run a `Program`: micro-batches, a schedule, one worker for each stage and replica."""
