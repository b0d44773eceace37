"""Durable tasks, jobs and services."""
