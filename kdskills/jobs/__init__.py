"""Durable tasks, jobs and services (spec work)."""
