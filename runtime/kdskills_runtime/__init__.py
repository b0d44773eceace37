"""The far side of the isolation wall. Stage 0 is standard library only."""
