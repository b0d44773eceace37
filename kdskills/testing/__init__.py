"""Fakes and conformance suites for plugin and bundle authors."""
