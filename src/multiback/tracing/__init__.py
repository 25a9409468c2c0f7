"""Watches the backward calls of a running program: recorder, findings, launcher."""
