"""The checks behind `kdskills.testing.executors`, by what they are about."""
